"""Draw the plots of a report as SVG."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..search import fullness
from ..tuning.options import Option
from ..tuning.report import Report
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
    "legend.columnspacing": 1,
    "legend.handlelength": 1.5,
}
# Okabe and Ito's colours, which most colour-blind people can tell apart; the brighter ones are
# darker here, so that all have a contrast of 3 to 1 on white and on the page's dark ground.
FIRST, SECOND, THIRD, OTHER = "#d55e00", "#0072b2", "#009e73", "#7f7f7f"
USES = {
    "parameter": FIRST,
    "gradient": SECOND,
    "optimizer state": THIRD,
    "buffer": "#8f8400",
    "input": "#b8578d",
    "activation": "#bd7e00",
    "gathered output": "#2f8fc8",
}
"""A colour for each use, the same in each report; the others have ``OTHER``."""

_PAGE = (4.8, 4.2), 11.5
"""The size of a plot and of its text. On a phone a plot is 360 pixels wide, 1.04 for each unit."""


def report_plots(report: Report) -> dict[str, tuple[str, str]]:
    """Return the plots of a report, drawn for the best option.

    Returns:
        By heading, a description with the main numbers, for screen readers, and the drawing, whose
        black parts get the colour of the page's text.
    """
    best, shown, parts = report.best, _shown(report), []
    for option in _ran(report):
        first, others = (f"{full:.0%}" for full in fullness(option.peak_bytes, report.budgets))
        value, found = option.chunk_sizes[0], f"{speed(option, report):.2f}"
        parts.append(f"gpu0_bsz={value}: device 0 {first}, others {others}, speed {found}")
    holds = [f"{format_bytes(option.peak_bytes[0])} with {option.line}" for option in shown]
    bars = ("One bar", "Two bars")[len(shown) - 1]
    return {
        "How full the devices are, and the speed": (
            f"{'; '.join(parts)}. The best option is {best.line}.",
            _drawn(draw_peaks, report),
        ),
        "What fills each device": (
            f"{bars} for each device, stacked by use. Device 0 holds {' and '.join(holds)}.",
            _drawn(draw_uses, report),
        ),
    }


def _drawn(draw: Callable[[Axes, Report], None], report: Report) -> str:
    text = svg(lambda figure: draw(figure.subplots(), report), *_PAGE)
    return text.replace("#000000", "currentColor")


def _ran(report: Report) -> list[Option]:
    return [option for option in candidates(report) if not option.out_of_memory]


def _shown(report: Report) -> list[Option]:
    """Return the best option, after the even split or else the next option if there is one."""
    best, even = report.best, report.even
    others = [*([even] if even and not even.out_of_memory else []), *report.ranked_options]
    same = [o for o in others if o is not best and o.batch_size == best.batch_size]
    return [*same[:1], best]


def draw_peaks(axes: Axes, report: Report) -> None:
    """Draw the utilization of device 0 and of the others, and the speed, over ``gpu0_bsz``."""
    ran = _ran(report)
    values = [option.chunk_sizes[0] for option in ran]
    full = [fullness(option.peak_bytes, report.budgets) for option in ran]
    labels = ("device 0", FIRST, "o-"), ("the fullest other", SECOND, "s-")
    for index, (label, colour, style) in enumerate(labels):
        axes.plot(values, [100 * pair[index] for pair in full], style, color=colour, label=label)
    axes.axhline(100, color="black", linestyle="--", linewidth=1)
    if report.best in ran:
        at = report.best.chunk_sizes[0]
        label = f"the best option: {at}"
        axes.axvline(at, color="black", linewidth=1, linestyle=":", label=label)
    percent = "percent full" if report.has_capacity else "percent of the even split's peak"
    axes.set(xlabel="samples of device 0 (gpu0_bsz)", ylabel=percent)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    right, name = axes.twinx(), speed_name(report)
    speeds = [speed(option, report) for option in ran]
    right.plot(values, speeds, "^:", color=THIRD, label=f"{name} (right)")
    right.set(ylabel=name)
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
    for each in (axes, right):
        each.set_ylim(0, each.get_ylim()[1] * 1.04)
    axes.figure.legend(loc="outside lower center", ncols=2)


def draw_uses(axes: Axes, report: Report) -> None:
    """Draw the breakdown of each device's peak, with the best option and another one."""
    shown = _shown(report)
    bars = [uses for of_device in zip(*(o.uses for o in shown), strict=True) for uses in of_device]
    offsets = (-0.2, 0.2) if len(shown) > 1 else (0.0,)
    positions = [device + offset for device in range(report.num_devices) for offset in offsets]
    scale, unit = byte_scale(max(sum(uses.values()) for uses in bars))
    stacked_bars(axes, positions, bars, 0.36, scale)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    names = ["option 1"]
    if len(shown) > 1:
        other = shown[0].line if shown[0] is report.even else "option 2"
        names = [f"left: {other}", "right: option 1"]
    axes.set(xlabel=f"device ({', '.join(names)})", ylabel=f"held at the peak, {unit}")
    axes.grid(visible=False, axis="x")
    axes.figure.legend(loc="outside lower center", ncols=2)


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
        axes.bar(positions, heights, width, bottom, color=USES.get(name, OTHER), label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]


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
