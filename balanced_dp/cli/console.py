"""Print reports as sentences and tables on the terminal, and write them to files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from ..memory.records import DeviceMemory
from ..memory.units import format_bytes
from ..report import report_html, report_json
from ..report.json_file import write_text
from ..report.tables import Code, Part, TextTable, answer, title
from ..tuning.report import Report
from .arguments import STDOUT


def open_console(*, stderr: bool = False) -> Console:
    """Return a console that prints on stdout, or on stderr if ``stderr`` is True."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if is_terminal else 160  # in files, tables are not wrapped to a terminal's width
    return Console(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def print_text(console: Console, text: str) -> None:
    """Print sentences, wrapped between words on a terminal, and unwrapped elsewhere."""
    console.print(text, soft_wrap=not console.is_terminal)


def say(text: str) -> None:
    """Print ``text`` on stderr, after the name of the command, ``balanced-dp``."""
    print_text(open_console(stderr=True), f"balanced-dp: {text}")


def rich_table(content: TextTable) -> Table:
    """Return ``content`` as a table of rich, laid out for a width of 80 characters.

    The first column is left-aligned, and the other columns are right-aligned.
    """
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


def print_parts(console: Console, parts: Iterable[Part]) -> None:
    """Print sentences, lines of code, and tables, each followed by an empty line."""
    for part in parts:
        if isinstance(part, TextTable):
            console.print(part.title, style="bold", soft_wrap=True)
            console.print(rich_table(part))
            if part.caption:
                print_text(console, f"{part.caption}\n")
        elif isinstance(part, Code):
            console.print(f"{part.text}\n", soft_wrap=True)
        else:
            print_text(console, f"{part}\n")


def write(path: Path | None, as_text: Callable[..., str], *content: Any) -> None:
    """Write the text that ``as_text(*content)`` returns.

    Args:
        path: the file to write, or ``STDOUT``. If it is None, nothing is written.
        as_text: a function that returns the text. It is called only if the text is written.
        *content: the arguments of ``as_text``.
    """
    if path == STDOUT:
        sys.stdout.write(as_text(*content))
        sys.stdout.flush()
    elif path is not None:
        write_text(path, as_text(*content))
        print_text(open_console(stderr=True), f"wrote {path}")


def as_json(record: Any, indent: int | None = 2) -> str:
    """Return ``record`` as JSON text that ends with a newline."""
    return json.dumps(record, indent=indent) + "\n"


def show(report: Report, json_file: Path | None, html: Path | None, stderr: bool = False) -> None:
    """Write a report to files, and print it as text and tables.

    If the JSON or the HTML goes to stdout, the text and the tables are not printed, even if
    ``stderr`` is True.

    Args:
        report: the report.
        json_file: the JSON file, or ``STDOUT``, or None for no JSON.
        html: the HTML file, or ``STDOUT``, or None for no HTML.
        stderr: whether to print the text and the tables on stderr.
    """
    write(json_file, report_json, report)
    write(html, report_html, report)
    if STDOUT not in (json_file, html):
        console = open_console(stderr=stderr)
        console.print(title(report), style="bold", soft_wrap=True)
        print_parts(console, answer(report))


def memory_of_gpus(memories: Sequence[DeviceMemory]) -> Iterator[Part]:
    """Yield a table of the memory of each GPU, and a list of the GPUs' names and UUIDs."""
    note = "Used includes tensors, torch's cache, contexts and other processes."
    if any(memory.device is None for memory in memories):
        note += "\nDevices without a torch number are not visible to torch."
    rows = []
    for m in memories:
        held = m.total_bytes, m.used_bytes, m.free_bytes
        rows.append((m.label, *("?" if size is None else format_bytes(size) for size in held)))
    yield TextTable("What each GPU holds", ("device", "total", "used", "free"), rows, caption=note)
    lines = ((f"{m.label}: {m.name or '?'}", m.uuid or "?", m.error) for m in memories)
    yield "\n".join("\n    ".join(filter(None, of_gpu)) for of_gpu in lines)
