"""Show tables, sentences and progress on the terminal."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from ..memory.records import DeviceMemory
from ..report import tables
from ..report.json_file import write_atomically
from ..report.tables import TextTable
from ..tuning.options import Option
from ..tuning.report import Report
from ..units import format_bytes
from . import terminal
from .arguments import STDOUT
from .run import RunResult


def write(path: Path | None, as_text: Callable[..., str], *content: Any) -> None:
    """Write what ``as_text`` makes of the content, if the user asked for a file or stdout."""
    if path == STDOUT:
        sys.stdout.write(as_text(*content))
        sys.stdout.flush()
    elif path is not None:
        write_atomically(path, as_text(*content))
        terminal.open_console(stderr=True).print(f"wrote {path}", soft_wrap=True)


def as_json(record: Any, indent: int | None = 2) -> str:
    """Return a record as a JSON text that ends its line."""
    return json.dumps(record, indent=indent) + "\n"


def rich_table(content: TextTable, title: str | None = None, caption: str | None = None) -> Table:
    """Return a table for 80 columns; its names are left-aligned and its numbers right-aligned."""
    name, *headers = content.headers
    # A header that is longer than "device 0" has two lines.
    numbers = ("\n".join(text.rsplit(" ", len(text) > 8)) for text in headers)
    table = Table(
        Column(name, overflow="fold"),
        *(Column(text, justify="right", overflow="fold") for text in numbers),
        title=title,
        caption=caption,
        min_width=min(len(title or ""), 78),  # else a title of a narrow table is wrapped
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, row in enumerate(content.rows):
        table.add_row(*row, style="bold" if index == content.marked else None)
    return table


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
def measuring_progress() -> Iterator[Callable[[Option], None]]:
    """Show a progress bar, and yield the function to call with each measurement."""
    with progress_bar("measuring training steps") as update:
        yield lambda option: update(
            advance=1,
            description=f"measured a batch of {option.batch_size} with {option.line}",
        )


def print_report(report: Report, *, candidates: bool = False, stderr: bool = False) -> None:
    """Print the answer, what fills each device, and with ``candidates`` all measured values."""
    console = terminal.open_console(stderr=stderr)
    terminal.print_text(console, tables.verdict(report))
    if report.ranked_options:
        console.print(rich_table(tables.option_table(report), tables.title(report), tables.SPEED))
        console.print(tables.lines(report), end="\n\n", soft_wrap=True)
    title, caption = tables.devices_title(report), tables.how_measured(report)
    console.print(_use_tables(console, tables.device_table(report), title, caption))
    if candidates:
        console.print(rich_table(tables.candidate_table(report), tables.candidates_title(report)))
    for sentence in tables.summary(report):
        terminal.print_text(console, sentence)


def print_run(result: RunResult, name: str) -> None:
    """Print what the training steps of a script took of each device, on stderr."""
    if result.report is not None:
        print_report(result.report, stderr=True)
        return
    console = terminal.open_console(stderr=True)
    if result.measured is not None:
        content = tables.use_table(result.measured, result.budgets)
        console.print(_use_tables(console, content, name))
    for note in result.notes:
        terminal.print_text(console, note)


def _use_tables(
    console: Console, content: TextTable, title: str, caption: str | None = None
) -> Group:
    """Return the table, in parts of fewer devices if it is too wide."""
    devices, num = content.headers[1:], len(content.headers) - 1

    def part(start: int, stop: int) -> Table:
        headers, *rows = (
            (name, *cells[start:stop]) for name, *cells in (content.headers, *content.rows)
        )
        text = TextTable(headers, tuple(rows), content.marked)
        return rich_table(text, None if start else title, caption if stop >= num else None)

    unlimited = console.options.update(width=10_000)
    for num_parts in range(1, len(devices) + 1):
        size = -(-len(devices) // num_parts)
        parts = [part(start, start + size) for start in range(0, len(devices), size)]
        widths = [console.measure(part, options=unlimited).maximum for part in parts]
        if max(widths) <= min(80, console.width):  # no cell is wrapped
            break
    return Group(*parts)


def print_comparison(compared: Sequence[Mapping[str, Any]]) -> None:
    """Print the metrics of each workload's reports, and which are worse than allowed."""
    console = terminal.open_console()
    for workload, found in itertools.groupby(compared, key=lambda metric: metric["workload"]):
        metrics, rows = [*found], []
        for metric in metrics:
            as_text, difference_as_text = _METRICS[metric["metric"]]
            by = "{:.1%}".format if metric["is_relative"] else difference_as_text
            values = as_text(metric["before"]), as_text(metric["after"]), by(metric["worsened"])
            limit = ("", "")
            if metric["limit"] is not None:
                limit = by(metric["limit"]), "FAILED" if metric["failed"] else "ok"
            rows.append((metric["metric"], *values, *limit))
        headers = ("metric", "before", "after", "worse by", "allowed", "outcome")
        console.print(rich_table(TextTable(headers, tuple(rows)), workload))
        for name in ("before", "after"):
            terminal.print_text(console, f"{name}: {metrics[0][f'{name}_line']}")


_METRICS: dict[str, tuple[Callable[[float], str], Callable[[float], str]]] = {
    "peak": (format_bytes, format_bytes),
    "imbalance": ("{:.1%}".format, lambda difference: f"{100 * difference:.1f} points"),
    "max_batch": ("{:.0f}".format,) * 2,
    "speed": ("{:.2f}".format,) * 2,
}
"""Metrics and differences of them as text."""


def memory_table(memories: Sequence[DeviceMemory]) -> Group:
    """Return a table of what each GPU holds, with the names and UUIDs below it."""
    note = "Used includes tensors, torch's cache, contexts and other processes."
    if any(memory.device is None for memory in memories):
        note += "\nDevices without a torch number are not visible to torch."
    rows = []
    for m in memories:
        held = m.total_bytes, m.used_bytes, m.free_bytes
        rows.append((m.label, *("?" if size is None else format_bytes(size) for size in held)))
    headers = ("device", "total", "used", "free")
    table = rich_table(TextTable(headers, tuple(rows)))
    names = [f"{m.label}: {m.name or '?'}\n    {m.uuid or '?'}" for m in memories]
    errors = [f"{m.label}: {m.error}" for m in memories if m.error is not None]
    return Group(table, *map(Text, (note, *names, *errors)))
