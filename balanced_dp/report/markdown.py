"""A report as Markdown."""

from __future__ import annotations

from ..tuning import Report
from .tables import (
    TextTable,
    candidate_table,
    device_table,
    how_measured,
    lines,
    origin_table,
    summary,
    title,
)


def report_markdown(report: Report) -> str:
    """Returns the report's words and tables as Markdown."""
    parts = [
        f"# {_escaped(title(report))}",
        f"```python\n{lines(report)}\n```",
        "\n".join(f"- {_escaped(sentence)}" for sentence in summary(report)),
        "## What each device holds",
        _table(device_table(report)),
        _escaped(how_measured(report)),
        "## Which gpu0_bsz",
        _table(candidate_table(report)),
        "## Where this comes from",
        _table(origin_table(report)),
    ]
    return "\n\n".join(parts) + "\n"


def _table(table: TextTable) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return f"| {' | '.join(cells)} |"

    rows = [
        line(tuple(f"**{_escaped(c)}**" if c and i == table.marked else _escaped(c) for c in row))
        for i, row in enumerate(table.rows)
    ]
    return "\n".join([line(table.headers), line(("---",) * len(table.headers)), *rows])


def _escaped(text: str) -> str:
    for character in "\\`*_{}[]<>|#":
        text = text.replace(character, f"\\{character}")
    return text.replace("\n", " ")
