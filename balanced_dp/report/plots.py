"""Draw the plots of a report as SVG."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ..memory.units import byte_scale
from ..search import utilizations
from ..tuning.report import Report
from .tables import candidates, largest_uses, speed, speed_name

# Okabe and Ito's colours, which most colour-blind people can tell apart. The brighter colours are
# made darker here, so that all have a contrast of at least 3 to 1 on white, and on the background
# of the page in dark mode.
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
"""The colour of each use of memory, which is the same in all reports.

A use that is not listed has the colour ``OTHER``.
"""

_PAGE = (4.8, 4.2), 11.5
"""The width and height of a plot in inches, and the size of its text in points.

On a phone, a plot is 360 pixels wide. There, text of this size is 12 pixels high.
"""


def report_plots(report: Report) -> dict[str, str]:
    """Return the plots of a report as SVG, in a dict whose keys are the headings.

    Black parts of the plots get the colour of the page's text.
    """

    def drawn(draw: Callable[[Axes, Report], None]) -> str:
        return svg(lambda f: draw(f.subplots(), report), *_PAGE).replace("#000000", "currentColor")

    return {
        "How full the devices are, and the speed": drawn(draw_peaks),
        "What fills each device": drawn(draw_uses),
    }


def draw_peaks(axes: Axes, report: Report) -> None:
    """Plot three curves over ``gpu0_bsz``.

    Two curves show how full device 0 and the fullest other device are. The third shows the speed.
    """
    ran = [option for option in candidates(report) if not option.out_of_memory]
    values = [option.chunk_sizes[0] for option in ran]
    full = [utilizations(option.peak_bytes, report.budgets) for option in ran]
    speeds, name = [speed(option, report) for option in ran], speed_name(report)
    axes.plot(values, [own[0] for own in full], "o-", color=FIRST, label="device 0")
    axes.plot(values, [max(own[1:]) for own in full], "s-", color=SECOND, label="the fullest other")
    axes.axhline(1, color="black", linestyle="--", linewidth=1)
    if report.best in ran:
        at = report.best.chunk_sizes[0]
        axes.axvline(at, color="black", linestyle=":", linewidth=1, label=f"the best: {at}")
    percent = "percent full" if report.has_capacity else "percent of the even split's peak"
    label = f"gpu0_bsz, with batches of {report.batch_size}"
    axes.set(xlabel=label, ylabel=percent, ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=None))
    right = axes.twinx()
    right.plot(values, speeds, "^:", color=THIRD, label=f"{name} (right)", clip_on=False)
    right.set(ylabel=name, ylim=(0, None))
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
    axes.figure.legend(loc="outside lower center", ncols=2)


def draw_uses(axes: Axes, report: Report) -> None:
    """Draw what fills each device at its peak, for the best option and for another option.

    An option is a way to train a batch, with its measurements. The other option must have the same
    batch size as the best option. It is the first such option in this list:

    1. ``report.even``, which has the even split, if it did not run out of memory.
    2. The other ranked options, the better ones first.

    If there is no such option, only the best option is drawn.
    """
    best, even = report.best, report.even
    ran = {"even split": even} if even is not None and not even.out_of_memory else {}
    ran |= {f"option {number}": o for number, o in enumerate(report.ranked_options, 1)}
    others = [n for n, o in ran.items() if o is not best and o.batch_size == best.batch_size][:1]
    sides = f"left: option 1, right: {others[0]}" if others else "option 1"
    bars = [uses for option in (best, *map(ran.__getitem__, others)) for uses in option.uses]
    offsets = (-0.2, 0.2) if others else (0.0,)
    positions = [device + offset for offset in offsets for device in range(report.num_devices)]
    scale, unit = byte_scale(max(sum(uses.values()) for uses in bars))
    stacked_bars(axes, positions, bars, 0.36, scale)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.set(xlabel=f"device ({sides})", ylabel=f"held at the peak, {unit}")
    axes.grid(visible=False, axis="x")
    axes.figure.legend(loc="outside lower center", ncols=2)


def stacked_bars(
    axes: Axes, x: Sequence[float], bars: Sequence[dict[str, int]], width: float, scale: float
) -> None:
    """Draw a stacked bar for each element of ``bars``, with a part for each use of memory.

    Uses that are too small to see are left out.

    Args:
        axes: the axes to draw on.
        x: the position of each bar.
        bars: for each bar, the bytes of each use.
        width: the width of a bar.
        scale: the number of bytes in a unit of the y axis.
    """
    bottom = [0.0] * len(bars)
    for name in largest_uses(bars, 0.005 * max(sum(uses.values()) for uses in bars)):
        heights = [uses.get(name, 0) / scale for uses in bars]
        axes.bar(x, heights, width, bottom, color=USES.get(name, OTHER), label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]


def svg(
    draw: Callable[[Figure], None], size: tuple[float, float] = (6.4, 4.8), font_size: float = 10
) -> str:
    """Return a figure in the style of the reports, as SVG.

    Args:
        draw: a function that draws on an empty figure.
        size: the width and the height of the figure in inches.
        font_size: the size of the text in points.
    """
    style = Path(__file__).with_name("report.mplstyle")
    with mpl.rc_context({"font.size": font_size}, style):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]  # without the declarations that only a file needs
