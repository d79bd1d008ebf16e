"""Show answers, tables and progress on the terminal."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from ..memory.records import DeviceMemory
from ..report import Comparison, report_html, report_json
from ..report.json_file import write_text
from ..report.tables import Code, TextTable, answer, title, use_table
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
        write_text(path, as_text(*content))
        terminal.open_console(stderr=True).print(f"wrote {path}", soft_wrap=True)


def as_json(record: Any, indent: int | None = 2) -> str:
    """Return a record as a JSON text that ends its line."""
    return json.dumps(record, indent=indent) + "\n"


def rich_table(content: TextTable) -> Table:
    """Return a table for 80 columns; its names are left-aligned and its numbers right-aligned."""
    name, *headers = content.headers
    # A header that is longer than "device 0" has two lines.
    numbers = ("\n".join(text.rsplit(" ", len(text) > 8)) for text in headers)
    table = Table(
        Column(name, overflow="fold"),
        *(Column(text, justify="right", overflow="fold") for text in numbers),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, row in enumerate(content.rows):
        table.add_row(*row, style="bold" if index == content.marked else None)
    return table


def print_table(console: Console, content: TextTable) -> None:
    """Print a table below its title, and above its caption."""
    console.print(content.title, style="bold", soft_wrap=True)
    console.print(rich_table(content), end="")
    terminal.print_text(console, f"{content.caption}\n" if content.caption else "")


def print_report(report: Report, *, stderr: bool = False) -> None:
    """Print the answer of a report."""
    console = terminal.open_console(stderr=stderr)
    console.print(title(report), style="bold", soft_wrap=True)
    for part in answer(report):
        if isinstance(part, TextTable):
            print_table(console, part)
        elif isinstance(part, Code):
            console.print(part.text, end="\n\n", soft_wrap=True)
        else:
            terminal.print_text(console, part)


def show(
    report: Report, json_file: Path | None, html: Path | None, *, stderr: bool = False
) -> None:
    """Write the files of a report, and print its answer unless stdout is one of them."""
    write(json_file, report_json, report)
    write(html, report_html, [report])
    if STDOUT not in (json_file, html):
        print_report(report, stderr=stderr)


def print_run(result: RunResult, name: str) -> None:
    """Print what the training steps of a script took of each device, if there is no report."""
    console = terminal.open_console(stderr=True)
    if result.measured is not None:
        print_table(console, use_table(result.measured, name, result.budgets))
    for note in result.notes:
        terminal.print_text(console, note)


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


def print_comparison(workload: str, lines: Sequence[str], compared: Sequence[Comparison]) -> None:
    """Print the metrics of a workload's reports, and which are worse than allowed."""
    console, rows = terminal.open_console(), []
    for found in compared:
        as_text = format_bytes if found.metric == "peak" else "{:.2f}".format
        limit = (
            ("", "")
            if found.limit is None
            else (f"{found.limit:.1%}", "FAILED" if found.failed else "ok")
        )
        values = as_text(found.before), as_text(found.after), f"{found.worsened:.1%}"
        rows.append((found.metric, *values, *limit))
    headers = ("metric", "before", "after", "worse by", "allowed", "outcome")
    print_table(console, TextTable(workload, headers, tuple(rows)))
    for name, line in zip(("before", "after"), lines, strict=True):
        terminal.print_text(console, f"{name}: {line}")


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
    table = rich_table(TextTable("", headers, tuple(rows)))
    names = [f"{m.label}: {m.name or '?'}\n    {m.uuid or '?'}" for m in memories]
    errors = [f"{m.label}: {m.error}" for m in memories if m.error is not None]
    return Group(table, *map(Text, (note, *names, *errors)))
