"""Render a report as Markdown."""

from __future__ import annotations

from ..tuning.report_types import Report
from . import tables


def report_markdown(report: Report) -> str:
    """Return the text and tables of the report as Markdown."""
    parts = [
        f"# {_escaped(tables.title(report))}",
        _escaped(tables.verdict(report)),
        _table(tables.option_table(report)),
        _escaped(tables.SPEED),
        f"```python\n{tables.lines(report)}\n```",
        "\n".join(f"- {_escaped(sentence)}" for sentence in tables.summary(report)),
        "## What each device holds with option 1",
        _table(tables.device_table(report)),
        _escaped(tables.how_measured(report)),
        f"## {_escaped(tables.candidates_title(report))}",
        _table(tables.candidate_table(report)),
        "## Where this comes from",
        _table(tables.provenance_table(report)),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _table(table: tables.TextTable) -> str:
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
