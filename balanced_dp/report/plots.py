"""Draw the plots of a report as SVG."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..planning.split_planner import Planner
from ..split import even_share, split_batch
from ..tuning.report_types import Report
from .tables import byte_scale, candidates, speed, speed_name

_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "balanced-dp",  # the same plot gives the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
_OTHERS = "#7f7f7f"
# Okabe and Ito's colours, which most colour-blind people can tell apart.
_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", _OTHERS, "#000000")
_USES = {
    "parameter": "#d55e00",
    "gradient": "#0072b2",
    "optimizer state": "#009e73",
    "buffer": "#f0e442",
    "input": "#cc79a7",
    "activation": "#e69f00",
    "gathered output": "#56b4e9",
}
"""A colour for each use, the same in each report; the others have ``_OTHERS``."""


def _as_svg(draw: Callable[[Axes, Report], None]) -> Callable[[Report], str]:
    """Return a function that returns the drawing of the decorated one as SVG."""

    @functools.wraps(draw)
    def plot(report: Report) -> str:
        return svg(lambda figure: draw(figure.subplots(), report))

    return plot


@_as_svg
def peaks_plot(axes: Axes, report: Report) -> None:
    """Draw the peak of each device against ``gpu0_bsz``: lines predicted, points measured."""
    plan = report.plan
    ran = [m for m in candidates(report) if m.status == "ok"]
    scale, unit = byte_scale(max(report.even.peak_bytes + report.chosen.peak_bytes))
    num_devices = len(plan.chunk_sizes)
    even = even_share(plan.batch_size, num_devices)
    step = max(1, even // 200)
    values = [*range(0, even, step), even]
    predicted = [
        report.model.predict(split_batch(plan.batch_size, num_devices, value)) for value in values
    ]
    for device, colour in enumerate(_COLOURS[:num_devices]):
        axes.plot(
            values,
            [needs[device] / scale for needs in predicted],
            color=colour,
            label=f"device {device}",
            linewidth=2.5 if device == 0 else 1.2,
        )
        axes.plot(
            [m.chunk_sizes[0] for m in ran],
            [m.peak_bytes[device] / scale for m in ran],
            "o",
            color=colour,
            markersize=5 if device == 0 else 3.5,
        )
    highest = max(max(needs) for needs in predicted)
    for capacity in sorted(set(plan.capacity_bytes)):
        if capacity < 3 * highest:
            axes.axhline(capacity / scale, color="black", linestyle="--", linewidth=1)
            whose = [str(i) for i, c in enumerate(plan.capacity_bytes) if c == capacity]
            axes.annotate(
                "capacity" if len(whose) == num_devices else f"capacity of {', '.join(whose)}",
                (0.005, capacity / scale),
                xycoords=("axes fraction", "data"),
                va="bottom",
            )
    axes.axvline(plan.gpu0_bsz, color="black", linewidth=1, linestyle=":")
    axes.plot(
        plan.gpu0_bsz,
        max(report.chosen.peak_bytes) / scale,
        "*",
        color="black",
        markersize=15,
        label=f"least full: gpu0_bsz={plan.gpu0_bsz}",
    )
    axes.set(xlabel="gpu0_bsz", ylabel=f"peak, {unit}")
    _from_zero(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_below(axes)


@_as_svg
def breakdown_plot(axes: Axes, report: Report) -> None:
    """Draw the breakdown of each device's peak, with the even split and the least full one."""
    pairs = list(zip(report.even.breakdown, report.chosen.breakdown, strict=True))
    positions = [device + offset for device in range(len(pairs)) for offset in (-0.2, 0.2)]
    bars = [uses for pair in pairs for uses in pair]
    scale, unit = byte_scale(max(sum(uses.values()) for uses in bars))
    stacked_bars(axes, positions, bars, 0.36, scale)
    axes.set_xticks(
        positions,
        [f"{device}\n{split}" for device in range(len(pairs)) for split in ("even", "least\nfull")],
        fontsize=8 if len(pairs) <= 4 else 6,
    )
    axes.set(xlabel="device", ylabel=f"held at the peak, {unit}")
    axes.grid(visible=False, axis="x")
    _legend_below(axes)


def stacked_bars(
    axes: Axes,
    positions: Sequence[float],
    bars: Sequence[dict[str, int]],
    width: float,
    scale: float,
) -> None:
    """Draw bytes by use in units of ``scale``, without those too small to see."""
    highest = max(sum(uses.values()) for uses in bars)
    bottom = [0.0] * len(bars)
    for name in dict.fromkeys(name for uses in bars for name in uses):
        if max(uses.get(name, 0) for uses in bars) <= 0.005 * highest:
            continue
        heights = [uses.get(name, 0) / scale for uses in bars]
        axes.bar(positions, heights, width, bottom, color=_USES.get(name, _OTHERS), label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]


@_as_svg
def batch_plot(axes: Axes, report: Report) -> None:
    """Draw the largest batch that fits and the speed against ``gpu0_bsz``."""
    plan = report.plan
    planner = Planner(report.model, plan.budgets)
    num_devices = len(plan.chunk_sizes)
    even = even_share(plan.batch_size, num_devices)
    highest = max(plan.max_batch_gpu0_bsz, even)
    step = max(1, highest // 60)
    values = sorted({*range(0, highest + 1, step), plan.max_batch_gpu0_bsz, plan.gpu0_bsz})
    axes.plot(
        values,
        [planner.max_batch_size(functools.partial(min, value)) for value in values],
        color=_COLOURS[1],
        label="largest batch that fits with this gpu0_bsz (predicted)",
    )
    axes.plot(plan.max_batch_gpu0_bsz, plan.max_batch_size, "*", color=_COLOURS[1], markersize=13)
    axes.set(xlabel="gpu0_bsz", ylabel="samples in a batch")
    _from_zero(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    right = axes.twinx()
    ran = [m for m in candidates(report) if m.status == "ok"]
    label = f"{speed_name(report)}, batches of {plan.batch_size}"
    values = [m.chunk_sizes[0] for m in ran]
    right.plot(values, list(map(speed, ran)), "o", color=_COLOURS[0], label=label)
    right.set(ylabel=speed_name(report))
    _from_zero(right)
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
    handles = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1)


@_as_svg
def prediction_plot(axes: Axes, report: Report) -> None:
    """Draw predicted against measured peaks."""
    ran = [m for m in report.measurements if m.status == "ok"]
    scale, unit = byte_scale(max(max(m.peak_bytes) for m in ran))
    for name, colour, devices in (
        ("device 0", _COLOURS[0], slice(0, 1)),
        ("other devices", _COLOURS[1], slice(1, None)),
    ):
        pairs = [
            (held / scale, predicted / scale)
            for m in ran
            for held, predicted in zip(
                m.peak_bytes[devices],
                report.model.predict(m.chunk_sizes)[devices],
                strict=True,
            )
            if held
        ]
        axes.plot(*zip(*pairs, strict=True), "o", color=colour, markersize=4, label=name)
    end = max(axes.get_xlim()[1], axes.get_ylim()[1])
    axes.plot((0, end), (0, end), color="black", linewidth=0.8, label="equal")
    axes.set(xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}")
    axes.set(xlim=(0, end), ylim=(0, end))
    _legend_below(axes)


def report_plots(report: Report) -> dict[str, str]:
    """Return the plots of a report by heading."""
    return {
        "The peak of each device, for each gpu0_bsz": peaks_plot(report),
        "What fills each device": breakdown_plot(report),
        "Batch size and speed": batch_plot(report),
        "Predicted and measured": prediction_plot(report),
    }


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(0, axes.get_ylim()[1] * 1.04)


def _legend_below(axes: Axes) -> None:
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


def svg(draw: Callable[[Figure], None], size: tuple[float, float] = (6.4, 4.8)) -> str:
    """Return a figure in the style of the reports; the size is in inches."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]  # without the declarations of a file of its own
