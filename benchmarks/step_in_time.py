"""Draw the timeline of a training step on four devices.

`python -m benchmarks.step_in_time` writes docs/step_in_time.svg. The upper timeline is that of
nn.DataParallel, the lower one that of BalancedDataParallel. The times are computed by the clock of
the stand-in for CUDA devices (``tests/cuda_stand_in``), which is a model of the hardware.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import nn

from balanced_dp import BalancedDataParallel
from balanced_dp.report.plots import svg
from tests import cuda_stand_in
from tests.cuda_stand_in.clock import Span, computing_s
from tests.step_on_clock import Layers, step_ratio

PATH = Path(__file__).parent.parent / "docs" / "step_in_time.svg"
EVEN, BALANCED = (16, 16, 16, 16), (8, 19, 19, 18)
TRANSFER_SHARE = 0.3
NUM_DEVICES = len(EVEN)
COLOURS = {"computing": "#7f7f7f", "weights": "#d55e00", "gradients": "#0072b2"}


def measured() -> dict[str, list[Span]]:
    """Return the title and the spans of work of a step of each class, nn.DataParallel first."""
    with cuda_stand_in.opened() as stand_in:
        module = Layers().to(stand_in.devices[0])
        stock, ours = nn.DataParallel(module), BalancedDataParallel(BALANCED[0], module)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Was asked to gather along")
            _, before = step_ratio(stand_in, stock, EVEN, TRANSFER_SHARE, has_forward=True)
        # Autograd's threads launch work in a random order, so the drawing shows the run with the
        # median time of nine runs.
        runs = [step_ratio(stand_in, ours, BALANCED, TRANSFER_SHARE, True) for _ in range(9)]
        _, after = sorted(runs, key=itemgetter(0))[4]
    return {
        f"nn.DataParallel, {EVEN}": before,
        f"BalancedDataParallel({BALANCED[0]}, model), {BALANCED}": after,
    }


def kind(span: Span) -> str | None:
    """Return the kind of work of a span, which is a key of ``COLOURS``.

    Return None for transfers of inputs and losses, which take almost no time.
    """
    if not span.targets:
        return "computing"
    if span.name == "broadcast":
        return "weights"
    returns = span.name == "reduce" or (span.name == "copy" and span.targets == (0,))
    return "gradients" if returns else None


def picture(records: dict[str, list[Span]]) -> str:
    """Return the drawing as SVG, with a timeline for each of ``records``.

    Each device has two rows. The upper row shows when it computes, the lower row its transfers.
    """

    def draw(figure: Figure) -> None:
        figure.patch.set(facecolor="white", alpha=1)
        all_axes = figure.subplots(len(records), 1, sharex=True)
        for axes, (title, spans) in zip(all_axes, records.items(), strict=True):
            draw_step(axes, title, spans)
        all_axes[-1].set_xlabel("time, in units of the largest chunk's own computing")
        handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))

    return svg(draw, size=(10, 6))


def bars(spans: Sequence[Span], device: int, what: str) -> list[tuple[float, float]]:
    """Return the start and end of each period in which ``device`` does ``what`` without a pause."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.device == device and kind(span) == what:
            if found and span.start_s <= found[-1][1] * (1 + 1e-9):
                found[-1] = found[-1][0], max(found[-1][1], span.end_s)
            else:
                found.append((span.start_s, span.end_s))
    return found


def draw_step(axes, title: str, spans: Sequence[Span]) -> None:
    unit = computing_s(spans)
    for device in range(NUM_DEVICES):
        for what, colour in COLOURS.items():
            row = device + (0.0 if what == "computing" else 0.34)
            found = [
                (start / unit, (end - start) / unit) for start, end in bars(spans, device, what)
            ]
            axes.broken_barh(found, (row - 0.16, 0.32), color=colour, linewidth=0)
    axes.set_title(f"{title}: {max(span.end_s for span in spans) / unit:.2f}", fontsize=10)
    places = [device + 0.17 for device in range(NUM_DEVICES)]
    axes.set_yticks(places, [f"GPU {device}" for device in range(NUM_DEVICES)])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


if __name__ == "__main__":
    PATH.write_text(picture(measured()))
