"""Compose the text of a validation, and write it as Markdown and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pydantic import TypeAdapter

from ..units import format_bytes
from ..validation.check import PARTS, Part, ValidationReport
from ..validation.gradients import TOLERANCE
from .markdown import escaped, markdown_table
from .tables import TextTable

_REPORT = TypeAdapter(ValidationReport)


def validation_json(report: ValidationReport) -> str:
    """Return the report as JSON."""
    return _REPORT.dump_json(report, indent=2).decode() + "\n"


def validation_tables(report: ValidationReport) -> Iterator[tuple[str, TextTable]]:
    """Yield the title of each part and its checks."""
    what = f"{report.workload}, batch of {report.batch_size}"
    for part in PARTS:
        title, as_text = _PARTS[part]
        checks = [check for check in report.checks if check.part == part]
        values = ["" if check.value is None else as_text(check.value) for check in checks]
        rows = ((c.what, c.outcome, v, c.note) for c, v in zip(checks, values, strict=True))
        table = TextTable(("check", "outcome", "number", "note"), tuple(rows))
        yield title.format(what=what), table


_PARTS: dict[Part, tuple[str, Callable[[float], str]]] = {
    "gradients": (
        f"Gradients in float64, next to one device's (allowed: {TOLERANCE:.0e})",
        "{:.1e}".format,
    ),
    "peaks": ("Predicted next to measured peaks, {what}", "{:+.1f} %".format),
    "seconds": ("Time of a step (forward, backward), ours / theirs, {what}", "{:.2f}".format),
    "communicators": ("Free memory lost to communicators", format_bytes),
}
"""The title of each part, and how its numbers are written."""


def validation_summary(report: ValidationReport) -> str:
    """Return a sentence on the gradients, which decide."""
    if report.gradients_are_right:
        return "All gradients and outputs are those of one device."
    return "FAILED: not all gradients and outputs are those of one device."


def validation_markdown(report: ValidationReport) -> str:
    """Return the report as Markdown, with the versions and the devices."""
    parts = [f"### balanced-dp validate: {escaped(report.description)}", validation_summary(report)]
    for title, table in validation_tables(report):
        parts += [f"**{escaped(title)}**", markdown_table(table)]
    origin = report.provenance
    known = [
        ", ".join(f"{name} {version}" for name, version in origin.versions.items()),
        f"{origin.machine['platform']}, {origin.machine['num_cpus']} CPUs",
        origin.machine["devices"],
        f"{origin.command}, {origin.created}",
    ]
    parts.append("\n".join(f"- {escaped(line)}" for line in known))
    return "\n\n".join(parts) + "\n"
