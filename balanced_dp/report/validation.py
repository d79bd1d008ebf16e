"""Compose the text of a validation, and write it as Markdown and JSON."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import TypeAdapter

from ..units import format_bytes
from ..validation.check import PARTS, Check, Part, ValidationReport
from ..validation.gradients import TOLERANCE
from .markdown import escaped, markdown_table
from .tables import TextTable

_REPORT = TypeAdapter(ValidationReport)


def validation_json(report: ValidationReport) -> str:
    """Return the report as JSON."""
    return _REPORT.dump_json(report, indent=2).decode() + "\n"


def validation_tables(report: ValidationReport) -> Iterator[tuple[str, TextTable]]:
    """Yield the title of each part and its checks."""
    for part in PARTS:
        checks = [check for check in report.checks if check.part == part]
        rows = tuple((c.what, c.outcome, _value(c), c.note) for c in checks)
        yield _title(report, part), TextTable(("check", "outcome", "number", "note"), rows)


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


def _title(report: ValidationReport, part: Part) -> str:
    what = f"{report.workload}, batch of {report.batch_size}"
    return {
        "gradients": f"Gradients in float64, next to one device's (allowed: {TOLERANCE:.0e})",
        "peaks": f"Predicted next to measured peaks, {what}",
        "seconds": f"Time of a step (forward, backward), ours / theirs, {what}",
        "communicators": "Free memory lost to communicators",
    }[part]


def _value(check: Check) -> str:
    if check.value is None:
        return ""
    if check.part == "gradients":
        return f"{check.value:.1e}"
    if check.part == "peaks":
        return f"{check.value:+.1f} %"
    return f"{check.value:.2f}" if check.part == "seconds" else format_bytes(round(check.value))
