"""Draw the README's picture of the memory of each GPU, with the even split and with ours.

`python benchmarks/before_and_after.py` writes docs/before_and_after.svg. It measures GPT-2 small on
emulated devices, which keep only the shapes of tensors.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from balanced_dp import Option, Report, tune
from balanced_dp.memory.units import format_bytes
from balanced_dp.report.plots import stacked_bars, svg
from balanced_dp.tuning.workload import find_workload

PATH = Path(__file__).parent.parent / "docs" / "before_and_after.svg"


def measured(**options: bool) -> Report:
    """Return the report of ``tune`` for batches of 32 samples on four devices of 11 GiB.

    The options of the report are ranked by the memory that they leave free (headroom).
    """
    capacities = [11 * 2**30] * 4
    workload = find_workload("gpt2-small")
    asked = {"capacities": capacities, "emulate": True, "goal": "headroom"}
    return tune(workload, 32, with_alternatives=False, **asked, **options)


def picture(report: Report, other: Report) -> str:
    """Return the picture as SVG, with a panel for each of three ways to split the batch.

    The first panel is the even split, the second is the best split of ``report``, and the third is
    the best split of ``other``, where the loss is computed on each device.
    """
    panels = {
        "nn.DataParallel's split": report.even,
        report.best.line: report.best,
        f"{other.best.line.removeprefix('BalancedDataParallel')}\nand the loss on each device": (
            other.best
        ),
    }

    def draw(figure: Figure) -> None:
        figure.patch.set(facecolor="white", alpha=1)
        all_axes = figure.subplots(1, len(panels), sharey=True)
        for axes, (title, found) in zip(all_axes, panels.items(), strict=True):
            draw_devices(axes, title, found)
        shown = {}
        for axes in all_axes:
            handles, labels = axes.get_legend_handles_labels()
            shown |= dict(zip(labels, handles, strict=True))
        figure.legend(shown.values(), shown, loc="outside lower center", ncols=len(shown))

    return svg(draw, (10, 4.4))


def draw_devices(axes, title: str, found: Option) -> None:
    devices = range(len(found.chunk_sizes))
    bars = [dict(uses) for uses in found.uses]
    stacked_bars(axes, list(devices), bars, 0.7, 2**30)
    for device, peak in enumerate(found.peak_bytes):
        place = (device, peak / 2**30)
        axes.annotate(format_bytes(peak), place, ha="center", va="bottom", fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.set_xticks(
        list(devices),
        [f"GPU {device}\n{n} samples" for device, n in enumerate(found.chunk_sizes)],
        fontsize=8,
    )
    axes.set(ylabel="held at the peak, GiB" if axes.get_subplotspec().is_first_col() else "")
    axes.grid(visible=False, axis="x")


if __name__ == "__main__":
    PATH.write_text(picture(measured(), measured(gather=False)))
