"""Show answers, tables and progress on the terminal."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.progress import Progress
from rich.table import Column, Table
from rich.text import Text

from ..memory.records import DeviceMemory
from ..report import report_html, report_json
from ..report.json_file import write_text
from ..report.tables import Code, TextTable, answer, title
from ..tuning.report import Report
from ..units import format_bytes
from . import terminal
from .arguments import STDOUT


def write(path: Path | None, as_text: Callable[..., str], *content: Any) -> None:
    """Write the result of ``as_text`` if the user asked for a file or stdout."""
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


def print_parts(console: Console, parts: Iterable[str | Code | TextTable]) -> None:
    """Print sentences, lines to paste, and tables."""
    before: object = None
    for part in parts:
        if isinstance(part, TextTable):
            if isinstance(before, str):
                console.print()
            print_table(console, part)
        elif isinstance(part, Code):
            console.print(part.text, end="\n\n", soft_wrap=True)
        else:
            terminal.print_text(console, part)
        before = part


def print_report(report: Report, *, stderr: bool = False) -> None:
    """Print the answer of a report."""
    console = terminal.open_console(stderr=stderr)
    console.print(title(report), style="bold", soft_wrap=True)
    print_parts(console, answer(report))


def show(
    report: Report, json_file: Path | None, html: Path | None, *, stderr: bool = False
) -> None:
    """Write the files of a report, and print its answer unless stdout is one of them."""
    write(json_file, report_json, report)
    write(html, report_html, report)
    if STDOUT not in (json_file, html):
        print_report(report, stderr=stderr)


@contextmanager
def progress_bar(description: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr, and yield the function that updates it."""
    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with bar:
        yield functools.partial(bar.update, bar.add_task(description, total=total))


def memory_table(memories: Sequence[DeviceMemory]) -> Group:
    """Return a table of the memory of each GPU, with names and UUIDs below it."""
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
