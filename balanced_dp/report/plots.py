"""Draw the plots of a report as SVG."""

from __future__ import annotations

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

from ..tuning.options import Option
from ..tuning.report import Report, bottleneck
from ..units import byte_scale, format_bytes
from .tables import candidates, speed, speed_name

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
    """Return the plots of a report, which are about the best option."""
    plots = (
        ("The peak of each device, for each gpu0_bsz", _about_peaks, draw_peaks),
        ("What fills each device", _about_uses, draw_uses),
        ("What a smaller gpu0_bsz costs", _about_speed, draw_speed),
    )
    return [Plot(name, about(report), _page_svg(draw, report)) for name, about, draw in plots]


def _page_svg(draw: Callable[[Axes, Report], None], report: Report) -> str:
    """Return the drawing of a function with the colours and the size of text for a page."""
    text = svg(lambda figure: draw(figure.subplots(), report), _PAGE_SIZE, _PAGE_FONT_SIZE)
    return re.sub("|".join(PAGE_COLOURS), lambda found: f"var(--plot-{found[0][1:]})", text)


def _ran(report: Report) -> list[Option]:
    return [option for option in candidates(report) if not option.out_of_memory]


def draw_peaks(axes: Axes, report: Report) -> None:
    """Draw the measured peak of each device against ``gpu0_bsz``."""
    ran, best = _ran(report), report.best
    num_devices = len(report.capacity_bytes)
    highest = max((max(option.peak_bytes) for option in ran), default=1)
    scale, unit = byte_scale(highest)
    for device in range(num_devices):
        label, style = f"device {device}", device
        if num_devices > len(_COLOURS) and device > 0:  # there are not enough colours
            label, style = f"devices 1 to {num_devices - 1}" if device == 1 else "_", 1
        width, size = (2.5, 6) if device == 0 else (1.2, 4)
        axes.plot(
            [option.chunk_sizes[0] for option in ran],
            [option.peak_bytes[device] / scale for option in ran],
            marker=_MARKERS[style],
            color=_COLOURS[style],
            linewidth=width,
            markersize=size,
            label=label,
        )
    for capacity in sorted(set(report.capacity_bytes)):
        if capacity < 3 * highest:
            axes.axhline(capacity / scale, color="black", linestyle="--", linewidth=1)
            whose = [str(i) for i, c in enumerate(report.capacity_bytes) if c == capacity]
            axes.annotate(
                "capacity" if len(whose) == num_devices else f"capacity of {', '.join(whose)}",
                (0.01, capacity / scale),
                (0, 2),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="bottom",
            )
    if best in ran:
        highest_of_best = best.peak_bytes[bottleneck(best, report.budgets)] / scale
        at = best.chunk_sizes[0]
        axes.axvline(at, color="black", linewidth=1, linestyle=":")
        label = f"the best option: {at}"
        axes.plot(at, highest_of_best, "*", color="black", markersize=15, label=label)
    axes.set(xlabel="samples of device 0 (gpu0_bsz)", ylabel=f"peak, {unit}")
    _from_zero(axes)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _legend_below(axes)


def _compared(report: Report) -> tuple[Option, Option]:
    """Return what the best option is compared with, nn.DataParallel if it was measured."""
    best = report.best
    even = report.even
    has_ran = even is not None and not even.out_of_memory
    same_batch = even is not None and even.batch_size == best.batch_size
    return (even if even and has_ran and same_batch else best), best


def draw_uses(axes: Axes, report: Report) -> None:
    """Draw the breakdown of each device's peak, with the even split and the best option."""
    even, best = _compared(report)
    pairs = list(zip(even.uses, best.uses, strict=True))
    positions = [device + offset for device in range(len(pairs)) for offset in (-0.2, 0.2)]
    bars = [uses for pair in pairs for uses in pair]
    scale, unit = byte_scale(max(sum(uses.values()) for uses in bars))
    stacked_bars(axes, positions, bars, 0.36, scale)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    names = f"left: {even.line}, right: option 1"
    axes.set(xlabel=f"device ({names})", ylabel=f"held at the peak, {unit}")
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


def draw_speed(axes: Axes, report: Report) -> None:
    """Draw the speed and how full the fullest device is against ``gpu0_bsz``."""
    ran = _ran(report)
    values = [option.chunk_sizes[0] for option in ran]
    label = f"{speed_name(report)} (left)"
    speeds = [speed(option, report) for option in ran]
    axes.plot(values, speeds, "o-", color=_COLOURS[0], label=label)
    axes.set(xlabel="samples of device 0 (gpu0_bsz)", ylabel=speed_name(report))
    _from_zero(axes)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    right = axes.twinx()
    full = [100 * option.utilization(report.budgets) for option in ran]
    label = "the fullest device, percent full (right)"
    right.plot(values, full, "s--", color=_COLOURS[1], label=label)
    right.set(ylabel="percent full")
    _from_zero(right)
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
    right.figure.legend(loc="outside lower center")


def _about_peaks(report: Report) -> str:
    parts = []
    for option in _ran(report):
        index = bottleneck(option, report.budgets)
        held = format_bytes(option.peak_bytes[index])
        parts.append(f"gpu0_bsz={option.chunk_sizes[0]}: device {index} with {held}")
    return (
        f"Points for the measured peaks of {len(report.capacity_bytes)} devices. The fullest "
        f"device with {'; '.join(parts)}. The best option is {report.best.line}."
    )


def _about_uses(report: Report) -> str:
    def held(option: Option) -> str:
        uses = Counter(option.uses[0]).most_common(3)
        parts = ", ".join(f"{use} {format_bytes(size)}" for use, size in uses)
        return f"{format_bytes(option.peak_bytes[0])} with {option.line} ({parts})"

    even, best = _compared(report)
    holds = f"Device 0 holds {held(even)} and {held(best)}."
    return f"Two bars for each device, stacked by use. {holds}"


def _about_speed(report: Report) -> str:
    parts = [f"gpu0_bsz={o.chunk_sizes[0]}: {speed(o, report):.2f}" for o in _ran(report)]
    return f"Points for the speed, {speed_name(report)}: {'; '.join(parts)}."


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(0, axes.get_ylim()[1] * 1.04)


def _legend_below(axes: Axes, ncols: int = 3) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.figure.legend(
            loc="outside lower center", ncols=ncols, columnspacing=1, handlelength=1.5
        )


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
