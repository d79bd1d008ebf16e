"""Render a report as Markdown."""

from __future__ import annotations

from ..tuning.report import Report
from .tables import Code, TextTable, answer, provenance_table, title


def report_markdown(report: Report) -> str:
    """Return the answer of the report as Markdown."""
    parts = [f"# {escaped(title(report))}"]
    for part in (*answer(report), provenance_table(report)):
        if isinstance(part, TextTable):
            parts += [f"## {escaped(part.title)}", _table(part), escaped(part.caption)]
        elif isinstance(part, Code):
            parts.append(f"```python\n{part.text}\n```")
        else:
            parts.append(escaped(part))
    return "\n\n".join(filter(None, parts)) + "\n"


def _table(table: TextTable) -> str:
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
