"""Render a report as Markdown."""

from __future__ import annotations

from ..tuning.report import Report
from . import tables


def report_markdown(report: Report) -> str:
    """Return the text and tables of the report as Markdown."""
    parts = [f"# {escaped(tables.title(report))}", escaped(tables.verdict(report))]
    if report.ranked_options:
        parts += [
            markdown_table(tables.option_table(report)),
            escaped(tables.SPEED),
            f"```python\n{tables.lines(report)}\n```",
        ]
    parts += [
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
    rows = [table.headers, ["---"] * len(table.headers)]
    for index, row in enumerate(table.rows):
        mark = "**" if index == table.marked else ""
        rows.append([f"{mark}{escaped(cell)}{mark}" if cell else "" for cell in row])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def escaped(text: str) -> str:
    """Return text that Markdown shows as it is, in one line."""
    for character in "\\`*_{}[]<>|#":
        text = text.replace(character, f"\\{character}")
    return text.replace("\n", " ")
