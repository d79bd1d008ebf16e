"""Show tables, sentences and progress on the terminal."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Column, Table

from ..memory.device_memory import DeviceMemory
from ..report import tables
from ..report.compare import Comparison
from ..report.validation import validation_summary, validation_tables
from ..tuning.measurement import Measurement
from ..tuning.report_types import Report
from ..units import format_bytes, format_mib
from ..validation import ValidationReport
from . import demo as demos
from . import run as runs


def stdout_console() -> Console:
    """Return the console for results."""
    # Without a terminal, tables are not wrapped to the width of one.
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def stderr_console() -> Console:
    """Return the console for results where stdout belongs to a script."""
    return Console(width=None if sys.stderr.isatty() else 160, highlight=False, stderr=True)


def table_of(left: Sequence[str], right: Sequence[str], **options: Any) -> Table:
    """Return a table with left-aligned columns of text and right-aligned columns of numbers."""
    columns = [Column(header, overflow="fold") for header in left]
    columns += [Column(header, justify="right") for header in right]
    return Table(*columns, **options)


@contextmanager
def progress_bar(description: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr, and yield the function that updates it."""
    progress = Progress(
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with progress:
        yield functools.partial(progress.update, progress.add_task(description, total=total))


@contextmanager
def measuring_progress() -> Iterator[Callable[[Measurement, int], None]]:
    """Show a progress bar, and yield the function to call with each measurement."""
    with progress_bar("measuring training steps") as update:
        num_done = 0

        def show(measurement: Measurement, num_left: int) -> None:
            nonlocal num_done
            num_done += 1
            update(
                completed=num_done,
                total=num_done + num_left,
                description=f"measured a batch of {measurement.batch_size} with "
                f"gpu0_bsz={measurement.gpu0_bsz}",
            )

        yield show


def print_report(report: Report, candidates: bool) -> None:
    """Print the options, and with ``candidates`` all measured values for its batch."""
    console = stdout_console()
    console.print(tables.verdict(report), markup=False)
    console.print(_rich_table(tables.option_table(report), tables.title(report), tables.SPEED))
    console.print(tables.lines(report), end="\n\n", markup=False, soft_wrap=True)
    title, caption = "What each device holds with option 1", tables.how_measured(report)
    console.print(_rich_table(tables.device_table(report), title, caption))
    if candidates:
        console.print(_rich_table(tables.candidate_table(report), tables.candidates_title(report)))
    for sentence in tables.summary(report):
        console.print(sentence, markup=False)


def print_run(result: runs.RunResult) -> None:
    """Print what the training steps of a script took of each device, on stderr."""
    console = stderr_console()
    if result.measured is not None:
        content = tables.use_table(result.measured, result.budgets, result.even)
        first, *devices = content.headers
        table = table_of((first,), devices, title=escape(result.title), **_NARROW)
        for index, row in enumerate(content.rows):
            table.add_row(*row, style="bold" if index == content.marked else None)
        console.print(table)
    for note in result.notes:  # sentences are wrapped, code is not
        console.print(note, markup=False, soft_wrap="\n" in note)


def print_comparison(before: Report, after: Report, comparisons: Sequence[Comparison]) -> None:
    """Print the metrics of two reports, and which of them are worse than allowed."""
    values = f"gpu0_bsz {before.plan.gpu0_bsz} and {after.plan.gpu0_bsz}"
    table = table_of(
        ("metric",),
        ("before", "after", "worse by", "allowed", "outcome"),
        title=escape(f"{tables.title(after)}, {values}"),
    )
    for found in comparisons:
        as_text = format_bytes if found.metric == "peak" else "{:.4g}".format
        unit = "{:.1%}".format if found.is_relative else "{:.4g}".format
        allowed = "" if found.limit is None else unit(found.limit)
        outcome = "" if found.limit is None else "FAILED" if found.failed else "ok"
        table.add_row(
            found.metric,
            as_text(found.before),
            as_text(found.after),
            unit(found.worsened),
            allowed,
            outcome,
        )
    stdout_console().print(table)


def _rich_table(content: tables.TextTable, title: str, caption: str | None = None) -> Table:
    headers = (header.replace(" ", "\n") for header in content.headers)
    columns = (Column(header, justify="right", overflow="fold") for header in headers)
    table = Table(*columns, title=escape(title), caption=caption and escape(caption), **_NARROW)
    for index, row in enumerate(content.rows):
        table.add_row(*map(escape, row), style="bold" if index == content.marked else None)
    return table


def memory_table(memories: Sequence[DeviceMemory]) -> Table:
    """Return a table of what each GPU holds."""
    versions = {memory.memory_info_version for memory in memories}
    caption = "Used includes tensors, torch's cache, contexts and other processes."
    if 1 in versions:
        caption += " This driver counts its own reserve as used."
    if any(memory.device is None for memory in memories):
        caption += " Devices without a torch number are not visible to torch."
    table = table_of(
        ("device", "name", "UUID"),
        ("total", "used", "free", "ours", "other processes"),
        caption=caption,
    )
    for memory in memories:
        sizes = (
            memory.total_bytes,
            memory.used_bytes,
            memory.free_bytes,
            memory.process_bytes,
            memory.other_process_bytes,
        )
        name = memory.name or "?"
        table.add_row(
            memory.label,
            name if memory.error is None else f"{name}: {memory.error}",
            memory.uuid or "?",
            *("?" if size is None else format_bytes(size) for size in sizes),
        )
    return table


def print_description(description: str, on_stderr: bool) -> None:
    """Print what a validation runs on."""
    console = stderr_console() if on_stderr else stdout_console()
    console.print(f"Validating on {description}", markup=False)


def print_validation(report: ValidationReport) -> None:
    """Print the checks of each part, and whether the gradients are right."""
    console = stdout_console()
    for title, content in validation_tables(report):
        columns = (
            Column(width=30),
            Column(width=6),
            Column(width=10, justify="right"),
            Column(overflow="fold"),
        )
        table = Table(*columns, box=None, show_header=False, pad_edge=False)
        for row in content.rows:
            table.add_row(*map(escape, row), style="bold" if row[1] == "not ok" else None)
        console.print(f"\n{escape(title)}", style="bold")
        console.print(Padding.indent(table, 2))
    console.print(f"\n{validation_summary(report)}")


def print_demo(settings: demos.DemoSettings, runs: Sequence[demos.DemoRun]) -> None:
    """Print the demo's runs and compare them."""
    console = stdout_console()
    kind = "emulated devices, on the CPU" if settings.emulated else "devices"
    table = table_of(
        ("run", "split", "peak of each device"),
        ("imbalance", "samples/s", "last loss"),
        title=f"A character transformer, batches of {settings.batch_size}, "
        f"{settings.num_devices} {kind}",
        caption="Memory in MiB. Device 0 is the first one."
        + " The speed is that of this CPU." * settings.emulated,
        **_NARROW,
    )
    for run in runs:
        table.add_row(run.name, " ".join(map(str, run.measured.chunk_sizes)), *_results(run))
    console.print(table)
    ran = [run for run in runs if run.measured.status == "ok"]
    if ran and settings.emulated:
        console.print(_breakdown_table({run.name: run.measured.breakdown[0] for run in ran}))
    for run in runs:
        if run not in ran:
            console.print(f"{run.name}: {run.measured.out_of_memory}", markup=False)
    difference = demos.loss_difference(runs)
    allowed = f"(allowed: {demos.LOSS_TOLERANCE:.0e})."
    if difference is None:
        console.print(
            "Fewer than two runs fit, so there are no loss curves to compare. Try more --memory or "
            "--devices, or a smaller --batch-size."
        )
    elif difference <= demos.LOSS_TOLERANCE:
        console.print(f"The loss curves agree: they differ by {difference:.1e} at most {allowed}")
    else:
        console.print(f"FAILED: the loss curves differ by {difference:.1e} {allowed}")
    _, even, balanced = runs
    if even.measured.chunk_sizes == balanced.measured.chunk_sizes:
        console.print(
            f"gpu0_bsz={settings.gpu0_bsz} is the even split, since device 0 gets at most an equal "
            f"part: {even.measured.chunk_sizes[0]} of {settings.batch_size} samples."
        )
    elif even in ran and balanced in ran:
        peaks = [format_bytes(max(run.measured.peak_bytes)) for run in (even, balanced)]
        console.print(
            f"The bottleneck device needs {peaks[0]} with the even split and {peaks[1]} with "
            f"BalancedDataParallel({balanced.measured.chunk_sizes[0]}, model)."
        )


def _results(run: demos.DemoRun) -> list[str]:
    measured = run.measured
    if measured.status == "oom":
        return ["out of memory"]
    return [
        "  ".join(map(format_mib, measured.peak_bytes)),
        f"{measured.imbalance:.0%}" if len(measured.chunk_sizes) > 1 else "",
        f"{measured.samples_per_s:.1f}",
        f"{run.losses[-1]:.4f}",
    ]


def _breakdown_table(breakdowns: dict[str, dict[str, int]]) -> Table:
    largest = Counter[str]()
    for sizes in breakdowns.values():
        largest |= Counter(sizes)
    uses = [use for use, size in largest.most_common() if size >= 2**20 // 10]
    table = table_of(("run",), uses, title="Device 0 at its peak", **_NARROW)
    for name, sizes in breakdowns.items():
        table.add_row(name, *(format_mib(sizes.get(use, 0)) for use in uses))
    return table


_NARROW: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
