"""Read and write reports as JSON, and read those of pytest-benchmark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..errors import ArgumentError, ReportError
from ..tuning.report import SCHEMA, Report

_REPORT = TypeAdapter(Report)


def report_json(report: Report) -> str:
    """Return the report as JSON; sizes are integers in bytes, lists in the order of devices."""
    return _REPORT.dump_json(report, indent=2).decode() + "\n"


def save_report(report: Report, path: str | Path) -> None:
    """Write the report as JSON."""
    write_text(Path(path), report_json(report))


def write_text(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        ArgumentError: If it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error.strerror}") from None


def load_reports(path: str | Path) -> tuple[Report, ...]:
    """Return the reports of a file, from pytest-benchmark's JSON one for each workload.

    Args:
        path: a file written by ``save_report`` or ``pytest --benchmark-json``.

    Raises:
        ReportError: If the file cannot be read, is truncated, or is of another kind or version.
    """
    try:
        content = _printable(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} is no report, or a truncated one: {error}") from None
    reports: dict[str, Report] = {}
    for record in _records(content):
        if not isinstance(record, dict) or "schema" not in record:
            raise ReportError(
                f"{path} is JSON, but neither a report of balanced-dp nor one of pytest-benchmark "
                "with a sweep over gpu0_bsz"
            )
        if record["schema"] != SCHEMA:
            raise ReportError(
                f"{path} has version {record['schema']!r} of a report's fields, but this "
                f"balanced-dp reads version {SCHEMA}; read it with the balanced-dp that wrote it, "
                "or tune again"
            )
        try:
            report: Report = _REPORT.validate_python(record)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ReportError(f"{path} is no report: {where}: {first['msg']}") from None
        known = reports.get(report.workload, replace(report, options=()))
        options = (*known.options, *report.options)
        reports[report.workload] = replace(known, options=options)
    for report in reports.values():
        if not any(option.batch_size == report.batch_size for option in report.options):
            raise ReportError(f"{path} is no report: nothing was measured for its batch")
    return tuple(reports.values())


def _records(content: Any) -> list[Any]:
    """Return the report of a file, or the one of each benchmark, which has a single option."""
    if not isinstance(content, dict) or not isinstance(content.get("benchmarks"), list):
        return [content]
    benchmarks = (item for item in content["benchmarks"] if isinstance(item, dict))
    extras = (item.get("extra_info") for item in benchmarks)
    has_report = (item for item in extras if isinstance(item, dict) and "balanced_dp" in item)
    return [item["balanced_dp"] for item in has_report] or [None]


def _printable(value: Any) -> Any:
    """Return JSON without characters that a terminal takes for commands, or no file can hold."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value
