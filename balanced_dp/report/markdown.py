"""Render a report as Markdown."""

from __future__ import annotations

from ..tuning.report_types import Report
from . import tables


def report_markdown(report: Report) -> str:
    """Return the text and tables of the report as Markdown."""
    options = (
        markdown_table(tables.option_table(report)),
        escaped(tables.SPEED),
        f"```python\n{tables.lines(report)}\n```",
    )
    parts = [
        f"# {escaped(tables.title(report))}",
        escaped(tables.verdict(report)),
        *(options if report.ranked_options else ()),
        "\n".join(f"- {escaped(sentence)}" for sentence in tables.summary(report)),
        f"## {escaped(tables.devices_title(report))}",
        markdown_table(tables.device_table(report)),
        escaped(tables.how_measured(report)),
        f"## {escaped(tables.candidates_title(report))}",
        markdown_table(tables.candidate_table(report)),
        "## Where this comes from",
        markdown_table(tables.provenance_table(report)),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def markdown_table(table: tables.TextTable) -> str:
    """Return a table as Markdown."""

    def line(cells: tuple[str, ...]) -> str:
        return f"| {' | '.join(cells)} |"

    rows = [
        line(tuple(f"**{escaped(c)}**" if c and i == table.marked else escaped(c) for c in row))
        for i, row in enumerate(table.rows)
    ]
    return "\n".join([line(table.headers), line(("---",) * len(table.headers)), *rows])


def escaped(text: str) -> str:
    """Return text that Markdown shows as it is, in one line."""
    for character in "\\`*_{}[]<>|#":
        text = text.replace(character, f"\\{character}")
    return text.replace("\n", " ")
