"""Draw the plots of a report as SVG."""

from __future__ import annotations

import functools
import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..planning.split_planner import Planner
from ..split import even_share, split_batch
from ..tuning.measurement import Measurement
from ..tuning.report_types import Report
from ..units import byte_scale, format_bytes
from .tables import bottleneck, candidates, fullest_device, speed, speed_name

_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "balanced-dp",  # the same plot gives the same file
    "font.family": "sans-serif",
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

PAGE_COLOURS = {
    "#000000": ("#1c2024", "#e8eaed"),
    "#d55e00": ("#c75300", "#f0803c"),
    "#0072b2": ("#00639c", "#4b9fe0"),
    "#009e73": ("#008a64", "#1fb98d"),
    "#cc79a7": ("#b8578d", "#d98bb6"),
    "#e69f00": ("#bd7e00", "#e6a817"),
    "#56b4e9": ("#2f95d0", "#86cdf5"),
    "#f0e442": ("#8f8400", "#f0e442"),
    _OTHERS: ("#767676", "#9a9a9a"),
}
"""What a page draws for each colour, on a light and on a dark ground, with a contrast of 3 to 1."""

_PAGE_SIZE = (4.8, 4.2)
_PAGE_FONT_SIZE = 11.5
"""On a phone a plot is 360 pixels wide, 1.04 for each unit of the drawing."""

_MARKERS = "os^DvPX*"
"""The others' marks are told apart without colours, too."""


@dataclass(frozen=True, slots=True)
class Plot:
    """Hold a plot of the page.

    Attributes:
        heading: its heading.
        description: what it shows, with its main numbers, for those who do not see it.
        svg: the drawing, with colours that are those of the page's scheme.
    """

    heading: str
    description: str
    svg: str


def report_plots(report: Report) -> list[Plot]:
    """Return the plots of a report."""
    plots = (
        ("The peak of each device, for each gpu0_bsz", _about_peaks, draw_peaks),
        ("What fills each device", _about_uses, draw_uses),
        ("Batch size and speed", _about_batches, draw_batches),
        ("Predicted and measured", _about_predictions, draw_predictions),
    )
    return [Plot(name, about(report), _page_svg(draw, report)) for name, about, draw in plots]


def _page_svg(draw: Callable[[Axes, Report], None], report: Report) -> str:
    """Return the drawing of a function with the colours and the size of text for a page."""
    text = svg(lambda figure: draw(figure.subplots(), report), _PAGE_SIZE, _PAGE_FONT_SIZE)
    return re.sub("|".join(PAGE_COLOURS), lambda found: f"var(--plot-{found[0][1:]})", text)


def draw_peaks(axes: Axes, report: Report) -> None:
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
    for device in range(num_devices):
        label, style = f"device {device}", device
        if num_devices > len(_COLOURS) and device > 0:  # there are not enough colours
            label, style = f"devices 1 to {num_devices - 1}" if device == 1 else "_", 1
        colour = _COLOURS[style]
        width, size = (2.5, 6) if device == 0 else (1.2, 4)
        lines = [needs[device] / scale for needs in predicted]
        axes.plot(values, lines, color=colour, linewidth=width)
        points = [m.peak_bytes[device] / scale for m in ran]
        measured = [m.chunk_sizes[0] for m in ran]
        axes.plot(measured, points, _MARKERS[style], color=colour, markersize=size, label=label)
    highest = max(max(needs) for needs in predicted)
    for capacity in sorted(set(plan.capacity_bytes)):
        if capacity < 3 * highest:
            axes.axhline(capacity / scale, color="black", linestyle="--", linewidth=1)
            whose = [str(i) for i, c in enumerate(plan.capacity_bytes) if c == capacity]
            axes.annotate(
                "capacity" if len(whose) == num_devices else f"capacity of {', '.join(whose)}",
                (0.01, capacity / scale),
                (0, 2),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="bottom",
            )
    axes.axvline(plan.gpu0_bsz, color="black", linewidth=1, linestyle=":")
    axes.plot(
        plan.gpu0_bsz,
        report.chosen.peak_bytes[fullest_device(report.chosen, plan.budgets)] / scale,
        "*",
        color="black",
        markersize=15,
        label=f"least full: gpu0_bsz={plan.gpu0_bsz}",
    )
    axes.set(xlabel="gpu0_bsz", ylabel=f"peak, {unit}")
    _from_zero(axes)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _legend_below(axes)


def draw_uses(axes: Axes, report: Report) -> None:
    """Draw the breakdown of each device's peak, with the even split and the least full one."""
    pairs = list(zip(report.even.breakdown, report.chosen.breakdown, strict=True))
    positions = [device + offset for device in range(len(pairs)) for offset in (-0.2, 0.2)]
    bars = [uses for pair in pairs for uses in pair]
    scale, unit = byte_scale(max(sum(uses.values()) for uses in bars))
    stacked_bars(axes, positions, bars, 0.36, scale)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set(xlabel="device (left: even, right: least full)", ylabel=f"held at the peak, {unit}")
    axes.grid(visible=False, axis="x")
    _legend_below(axes, ncols=2)


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


def draw_batches(axes: Axes, report: Report) -> None:
    """Draw the largest batch that fits and the speed against ``gpu0_bsz``."""
    plan = report.plan
    planner = Planner(report.model, plan.budgets)
    even = even_share(plan.batch_size, len(plan.chunk_sizes))
    highest = max(plan.max_batch_gpu0_bsz, even)
    step = max(1, highest // 60)
    values = sorted({*range(0, highest + 1, step), plan.max_batch_gpu0_bsz, plan.gpu0_bsz})
    largest = {value: planner.max_batch_size(functools.partial(min, value)) for value in values}
    largest[plan.max_batch_gpu0_bsz] = plan.max_batch_size  # the one that the page names
    label = "largest batch that fits, predicted (left)"
    axes.plot(values, [*largest.values()], color=_COLOURS[1], label=label)
    axes.plot(
        plan.max_batch_gpu0_bsz,
        plan.max_batch_size,
        "*",
        color=_COLOURS[1],
        markersize=13,
        label=f"the largest: {plan.max_batch_size}, with gpu0_bsz={plan.max_batch_gpu0_bsz}",
    )
    axes.axhline(
        plan.even_max_batch_size,
        color=_COLOURS[1],
        linestyle="--",
        linewidth=1,
        label=f"the largest with the even split: {plan.even_max_batch_size}",
    )
    axes.set(xlabel="gpu0_bsz", ylabel="samples in a batch")
    _from_zero(axes)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    right = axes.twinx()
    ran = [m for m in candidates(report) if m.status == "ok"]
    label = f"{speed_name(report)}, batches of {plan.batch_size} (right)"
    values = [m.chunk_sizes[0] for m in ran]
    right.plot(values, list(map(speed, ran)), "o", color=_COLOURS[0], label=label)
    right.set(ylabel=speed_name(report))
    _from_zero(right)
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
    right.figure.legend(loc="outside lower center")


def draw_predictions(axes: Axes, report: Report) -> None:
    """Draw predicted against measured peaks."""
    ran = [m for m in report.measurements if m.status == "ok"]
    scale, unit = byte_scale(max(max(m.peak_bytes) for m in ran))
    peaks = [[*zip(m.peak_bytes, report.model.predict(m.chunk_sizes), strict=True)] for m in ran]
    for name, style, devices in (("device 0", 0, slice(1)), ("other devices", 1, slice(1, None))):
        pairs = [pair for of_split in peaks for pair in of_split[devices] if pair[0]]
        held, predicted = ([size / scale for size in sizes] for sizes in zip(*pairs, strict=True))
        marker, colour = _MARKERS[style], _COLOURS[style]
        axes.plot(held, predicted, marker, color=colour, markersize=5, label=name)
    end = max(axes.get_xlim()[1], axes.get_ylim()[1])
    axes.plot((0, end), (0, end), color="black", linewidth=0.8, label="equal")
    axes.set(xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}")
    axes.set(xlim=(0, end), ylim=(0, end))
    _legend_below(axes)


def _about_peaks(report: Report) -> str:
    plan = report.plan
    even = even_share(plan.batch_size, len(plan.chunk_sizes))
    is_ok = report.even.status == "ok"
    with_even = f"it is {bottleneck(report.even, plan.budgets)}" if is_ok else "memory runs out"
    return (
        f"Lines for the predicted peaks of {len(plan.chunk_sizes)} devices with gpu0_bsz from 0 to "
        f"{even}, points for the measured ones. With gpu0_bsz={plan.gpu0_bsz} the bottleneck "
        f"is the least full: {bottleneck(report.chosen, plan.budgets)}; with the even split "
        f"{with_even}."
    )


def _about_uses(report: Report) -> str:
    def held(measured: Measurement, name: str) -> str:
        uses = Counter(measured.breakdown[0]).most_common(3)
        parts = ", ".join(f"{use} {format_bytes(size)}" for use, size in uses)
        return f"{format_bytes(measured.peak_bytes[0])} with {name} ({parts})"

    even = held(report.even, "the even split")
    chosen = held(report.chosen, f"gpu0_bsz={report.plan.gpu0_bsz}")
    return f"Two bars for each device, stacked by use. Device 0 holds {even} and {chosen}."


def _about_batches(report: Report) -> str:
    plan = report.plan
    return (
        "A line for the largest batch that fits with each gpu0_bsz, points for the speed. The "
        f"largest batch is {plan.max_batch_size}, with gpu0_bsz={plan.max_batch_gpu0_bsz}; with "
        f"the even split it is {plan.even_max_batch_size}. With batches of {plan.batch_size}, "
        f"{speed_name(report)} is {speed(report.chosen):.2f} with gpu0_bsz={plan.gpu0_bsz} and "
        f"{speed(report.even):.2f} with the even split."
    )


def _about_predictions(report: Report) -> str:
    return (
        f"Points for the peaks of {report.model.num_points} measured splits, predicted against "
        f"measured. The largest error is {report.model.residual:.2%}, and "
        f"{report.prediction_error:.2%} for gpu0_bsz={report.plan.gpu0_bsz}."
    )


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(0, axes.get_ylim()[1] * 1.04)


def _legend_below(axes: Axes, ncols: int = 3) -> None:
    axes.figure.legend(loc="outside lower center", ncols=ncols, columnspacing=1, handlelength=1.5)


def svg(
    draw: Callable[[Figure], None], size: tuple[float, float] = (6.4, 4.8), font_size: float = 10
) -> str:
    """Return a figure in the style of the reports; the size is in inches."""
    with mpl.rc_context({**_STYLE, "font.size": font_size}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]  # without the declarations of a file of its own
