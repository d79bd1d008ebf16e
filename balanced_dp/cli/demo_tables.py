"""Show the demo's runs on the terminal, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from ..report import tables
from ..units import format_mib
from . import console
from .demo import LOSS_TOLERANCE, DemoRun, DemoSettings, loss_difference


def print_demo(settings: DemoSettings, runs: Sequence[DemoRun]) -> None:
    """Print the demo's runs and compare them."""
    output = console.stdout_console()
    output.print(_demo_table(output, settings, runs))
    ran = [run for run in runs if run.measured.status == "ok"]
    if ran and settings.emulated:
        output.print(_breakdown_table({run.name: run.measured.breakdown[0] for run in ran}))
    for run in runs:
        if run not in ran:
            output.print(f"{run.name}: {run.measured.out_of_memory}")
    difference = loss_difference(runs)
    allowed = f"(allowed: {LOSS_TOLERANCE:.0e})."
    if difference is None:
        output.print(
            "Fewer than two runs fit, so there are no loss curves to compare. Try more --memory or "
            "--devices, or a smaller --batch-size."
        )
    elif difference <= LOSS_TOLERANCE:
        output.print(f"The loss curves agree: they differ by {difference:.1e} at most {allowed}")
    else:
        output.print(f"FAILED: the loss curves differ by {difference:.1e} {allowed}")
    _, even, balanced = runs
    if even.measured.chunk_sizes == balanced.measured.chunk_sizes:
        output.print(
            f"gpu0_bsz={settings.gpu0_bsz} is the even split, since device 0 gets at most an equal "
            f"part: {even.measured.chunk_sizes[0]} of {settings.batch_size} samples."
        )
    elif even in ran and balanced in ran:
        peaks = [format_mib(max(run.measured.peak_bytes)) for run in (even, balanced)]
        output.print(
            f"The bottleneck device needs {peaks[0]} MiB with the even split and "
            f"{peaks[1]} MiB with BalancedDataParallel({balanced.measured.chunk_sizes[0]}, model)."
        )


def _demo_table(output: Console, settings: DemoSettings, runs: Sequence[DemoRun]) -> Table:
    """Return the table with a row for each run, or with a column for each if that is too wide."""
    kind = "emulated devices, on the CPU" if settings.emulated else "devices"
    options = {
        "title": f"A character transformer, batches of {settings.batch_size}, "
        f"{settings.num_devices} {kind}",
        "caption": "Memory in MiB. Device 0 is the first one."
        + " The speed is that of this CPU." * settings.emulated,
        **console.NARROW,
    }
    results = ("imbalance", "samples/s", "last loss")
    wide = console.table_of(("run", "split", "peak of each device"), results, **options)
    columns = []
    for run in runs:
        sizes, peaks = run.measured.chunk_sizes, run.measured.peak_bytes
        first, others, figures = "out of memory", "", ["", "", ""]
        each = first
        if run.measured.status == "ok":
            first, others = format_mib(peaks[0]), _range(peaks[1:], format_mib)
            each = "  ".join(map(format_mib, peaks))
            figures = [
                f"{run.measured.imbalance:.0%}" if len(sizes) > 1 else "",
                f"{run.measured.samples_per_s:.1f}",
                f"{run.losses[-1]:.4f}",
            ]
        wide.add_row(run.name, " ".join(map(str, sizes)), each, *figures)
        columns.append([str(sizes[0]), _range(sizes[1:], str), first, others, *figures])
    if console.fits(output, wide):
        return wide
    narrow = console.table_of(("run",), [run.name for run in runs], **options)
    names = ("samples, device 0", "samples, others", "peak, device 0", "peak, others", *results)
    for name, *cells in zip(names, *columns, strict=True):
        narrow.add_row(name, *cells)
    return narrow


def _range(numbers: Sequence[int], as_text: Callable[[int], str]) -> str:
    """Return the lowest and the highest number, or the only one."""
    ends = dict.fromkeys(as_text(end(numbers)) for end in (min, max)) if numbers else ()
    return " to ".join(ends)


def _breakdown_table(breakdowns: dict[str, dict[str, int]]) -> Table:
    table = console.table_of(
        ("memory in MiB",), [*breakdowns], title="Device 0 at its peak", **console.NARROW
    )
    for use in tables.largest_uses(breakdowns.values(), 2**20 // 10):
        table.add_row(use, *(format_mib(sizes.get(use, 0)) for sizes in breakdowns.values()))
    return table
