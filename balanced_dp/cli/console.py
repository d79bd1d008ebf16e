"""Show tables, sentences and progress on the terminal."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from ..memory.device_memory import DeviceMemory
from ..report import tables
from ..report.compare import Comparison
from ..report.json_file import write_atomically
from ..report.validation import validation_summary, validation_tables
from ..tuning.measurement import Measurement
from ..tuning.report_types import Report
from ..units import format_bytes, format_mib
from ..validation import ValidationReport
from . import demo as demos
from . import run as runs
from .arguments import STDOUT


def stdout_console() -> Console:
    """Return the console for results."""
    # Without a terminal, tables are not wrapped to the width of one.
    return _console(is_terminal=sys.stdout.isatty())


def stderr_console() -> Console:
    """Return the console for results where stdout belongs to a script."""
    return _console(is_terminal=sys.stderr.isatty(), stderr=True)


def _console(is_terminal: bool, **options: Any) -> Console:
    width = None if is_terminal else 160
    return Console(width=width, markup=False, highlight=False, emoji=False, **options)


def say(text: str) -> None:
    """Print a line on stderr, which a terminal wraps between words."""
    console = stderr_console()
    console.print(f"balanced-dp: {text}", soft_wrap=not console.is_terminal)


def write(path: Path, text: str) -> None:
    """Write a file that a user asked for, or stdout."""
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_atomically(path, text)
        stderr_console().print(f"wrote {path}", soft_wrap=True)


def _fits(console: Console, table: Table) -> bool:
    """Return whether no cell of the table is wrapped."""
    unlimited = console.options.update(width=10_000)
    return console.measure(table, options=unlimited).maximum <= console.width


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
        disable=not sys.stderr.isatty(),  # else it would print an empty line
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
    console.print(tables.verdict(report))
    if report.ranked_options:
        console.print(_rich_table(tables.option_table(report), tables.title(report), tables.SPEED))
        console.print(tables.lines(report), end="\n\n", soft_wrap=True)
    title, caption = tables.devices_title(report), tables.how_measured(report)
    console.print(_rich_table(tables.device_table(report), title, caption))
    if candidates:
        console.print(_rich_table(tables.candidate_table(report), tables.candidates_title(report)))
    for sentence in tables.summary(report):
        console.print(sentence)


def print_run(result: runs.RunResult) -> None:
    """Print what the training steps of a script took of each device, on stderr."""
    console = stderr_console()
    if result.measured is not None:
        content = tables.use_table(result.measured, result.budgets, result.even)
        console.print(_use_tables(console, content, result.title))
    for note in result.notes:
        sentence, *code = note.splitlines()
        console.print(sentence)
        for line in code:
            console.print(line, soft_wrap=True)


def _use_tables(console: Console, content: tables.TextTable, title: str) -> Group:
    """Return the table, in parts of fewer devices if it is too wide."""
    first, *devices = content.headers

    def part(start: int, stop: int) -> Table:
        table = table_of((first,), devices[start:stop], title=None if start else title, **_NARROW)
        for index, (name, *cells) in enumerate(content.rows):
            style = "bold" if index == content.marked else None
            table.add_row(name, *cells[start:stop], style=style)
        return table

    for num_parts in range(1, len(devices) + 1):
        size = -(-len(devices) // num_parts)
        parts = [part(start, start + size) for start in range(0, len(devices), size)]
        if all(_fits(console, part) for part in parts):
            break
    return Group(*parts)


def print_comparison(before: Report, after: Report, comparisons: Sequence[Comparison]) -> None:
    """Print the metrics of two reports, and which of them are worse than allowed."""
    table = table_of(
        ("metric",),
        ("before", "after", "worse by", "allowed", "outcome"),
        title=tables.title(after),
        caption=f"gpu0_bsz={before.plan.gpu0_bsz} before, {after.plan.gpu0_bsz} after",
    )
    for found in comparisons:
        as_text = _METRICS[found.metric]
        by = "{:.1%}".format if found.is_relative else _DIFFERENCES.get(found.metric, as_text)
        allowed = "" if found.limit is None else by(found.limit)
        outcome = "" if found.limit is None else "FAILED" if found.failed else "ok"
        table.add_row(
            found.metric,
            as_text(found.before),
            as_text(found.after),
            by(found.worsened),
            allowed,
            outcome,
        )
    stdout_console().print(table)


_METRICS: dict[str, Callable[[float], str]] = {
    "peak": format_bytes,
    "imbalance": "{:.1%}".format,
    "max_batch": "{:.0f}".format,
    "speed": "{:.2f}".format,
}
"""Metrics as in the tables of a report."""

_DIFFERENCES: dict[str, Callable[[float], str]] = {
    "imbalance": lambda difference: f"{100 * difference:.1f} points",
}
"""How a difference is written, if otherwise than the metric: that of percentages, in points."""


def _rich_table(content: tables.TextTable, title: str, caption: str | None = None) -> Table:
    headers = ("\n".join(header.rsplit(" ", 1)) for header in content.headers)
    columns = (Column(header, justify="right", overflow="fold") for header in headers)
    table = Table(*columns, title=title, caption=caption, **_NARROW)
    for index, row in enumerate(content.rows):
        table.add_row(*row, style="bold" if index == content.marked else None)
    return table


def memory_table(memories: Sequence[DeviceMemory], console: Console) -> RenderableType:
    """Return a table of what each GPU holds, with names below it if it is too wide."""
    versions = {memory.memory_info_version for memory in memories}
    caption = "Used includes tensors, torch's cache, contexts and other processes."
    if 1 in versions:
        caption += " This driver counts its own reserve as used."
    if any(memory.device is None for memory in memories):
        caption += " Devices without a torch number are not visible to torch."
    sizes = ("total", "used", "free", "ours")
    wide = table_of(("device", "name", "UUID"), (*sizes, "other processes"), caption=caption)
    narrow = table_of(("device",), (*sizes, "others"), caption=caption, **_NARROW)
    names, errors = [], []
    for memory in memories:
        name, uuid = memory.name or "?", memory.uuid or "?"
        cells = [
            "?" if size is None else format_bytes(size)
            for size in (
                memory.total_bytes,
                memory.used_bytes,
                memory.free_bytes,
                memory.process_bytes,
                memory.other_process_bytes,
            )
        ]
        wide.add_row(memory.label, name, uuid, *cells)
        narrow.add_row(memory.label, *cells)
        names.append(Text(f"{memory.label}: {name}\n    {uuid}"))
        if memory.error is not None:
            errors.append(Text(f"{memory.label}: {memory.error}"))
    return Group(wide, *errors) if _fits(console, wide) else Group(narrow, *names, *errors)


def print_workloads(listed: Sequence[dict[str, Any]]) -> None:
    """Print the built-in workloads, with what they are below the table if it is too wide."""
    console = stdout_console()
    wide = table_of(("workload", "what it is"), ("parameters", "batch size"))
    narrow = table_of(("workload",), ("parameters", "batch size"), **_NARROW)
    for workload in listed:
        numbers = (f"{workload['num_parameters'] / 1e6:.1f} M", str(workload["batch_size"]))
        wide.add_row(workload["name"], workload["about"], *numbers)
        narrow.add_row(workload["name"], *numbers)
    if _fits(console, wide):
        console.print(wide)
        return
    console.print(narrow)
    for workload in listed:
        console.print(f"{workload['name']}: {workload['about']}.")


def print_description(description: str, on_stderr: bool) -> None:
    """Print what a validation runs on."""
    console = stderr_console() if on_stderr else stdout_console()
    console.print(f"Validating on {description}")


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
            table.add_row(*row, style="bold" if row[1] == "not ok" else None)
        console.print(f"\n{title}", style="bold")
        console.print(Padding.indent(table, 2))
    console.print(f"\n{validation_summary(report)}")


def print_demo(settings: demos.DemoSettings, runs: Sequence[demos.DemoRun]) -> None:
    """Print the demo's runs and compare them."""
    console = stdout_console()
    console.print(_demo_table(console, settings, runs))
    ran = [run for run in runs if run.measured.status == "ok"]
    if ran and settings.emulated:
        console.print(_breakdown_table({run.name: run.measured.breakdown[0] for run in ran}))
    for run in runs:
        if run not in ran:
            console.print(f"{run.name}: {run.measured.out_of_memory}")
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
        peaks = [format_mib(max(run.measured.peak_bytes)) for run in (even, balanced)]
        console.print(
            f"The bottleneck device needs {peaks[0]} MiB with the even split and "
            f"{peaks[1]} MiB with BalancedDataParallel({balanced.measured.chunk_sizes[0]}, model)."
        )


def _demo_table(
    console: Console, settings: demos.DemoSettings, runs: Sequence[demos.DemoRun]
) -> Table:
    """Return the table with a row for each run, or with a column for each if that is too wide."""
    kind = "emulated devices, on the CPU" if settings.emulated else "devices"
    options = {
        "title": f"A character transformer, batches of {settings.batch_size}, "
        f"{settings.num_devices} {kind}",
        "caption": "Memory in MiB. Device 0 is the first one."
        + " The speed is that of this CPU." * settings.emulated,
        **_NARROW,
    }
    results = ("imbalance", "samples/s", "last loss")
    wide = table_of(("run", "split", "peak of each device"), results, **options)
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
    if _fits(console, wide):
        return wide
    narrow = table_of(("run",), [run.name for run in runs], **options)
    names = ("samples, device 0", "samples, others", "peak, device 0", "peak, others", *results)
    for name, *cells in zip(names, *columns, strict=True):
        narrow.add_row(name, *cells)
    return narrow


def _range(numbers: Sequence[int], as_text: Callable[[int], str]) -> str:
    """Return the lowest and the highest number, or the only one."""
    ends = dict.fromkeys(as_text(end(numbers)) for end in (min, max)) if numbers else ()
    return " to ".join(ends)


def _breakdown_table(breakdowns: dict[str, dict[str, int]]) -> Table:
    table = table_of(("memory in MiB",), [*breakdowns], title="Device 0 at its peak", **_NARROW)
    for use in tables.largest_uses(breakdowns.values(), 2**20 // 10):
        table.add_row(use, *(format_mib(sizes.get(use, 0)) for sizes in breakdowns.values()))
    return table


_NARROW: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
