"""Read and write reports as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..errors import ArgumentError, ReportError
from ..tuning.report import SCHEMA, Report

_REPORT = TypeAdapter(Report)


def report_json(report: Report) -> str:
    """Return the report as JSON text.

    Amounts of memory are in bytes. A list with a value for each device begins with device 0.
    """
    return _REPORT.dump_json(report, indent=2).decode() + "\n"


def save_report(report: Report, path: str | Path) -> None:
    """Write the report to the file ``path`` as JSON.

    Raises:
        ArgumentError: If the file cannot be written.
    """
    write_text(Path(path), report_json(report))


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to the file ``path``.

    Raises:
        ArgumentError: If the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error.strerror}") from None


def load_report(path: str | Path) -> Report:
    """Return the report in a JSON file that ``save_report`` or ``balanced-dp`` has written.

    Raises:
        ReportError: If the file cannot be read, is truncated, is not a report, or has another
            version of the report format than ``SCHEMA``.
    """
    try:
        record = _printable(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} is not a report, or is truncated: {error}") from None
    if not isinstance(record, dict) or "schema" not in record:
        raise ReportError(f"{path} is JSON, but not a report of balanced-dp")
    if record["schema"] != SCHEMA:
        raise ReportError(
            f"{path} has version {record['schema']!r} of the report format, but this balanced-dp "
            f"reads version {SCHEMA}; read it with the balanced-dp that wrote it, or measure again"
        )
    try:
        report: Report = _REPORT.validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        loc = ".".join(map(str, first["loc"]))
        raise ReportError(f"{path} is not a report: {loc}: {first['msg']}") from None
    if not any(option.batch_size == report.batch_size for option in report.options):
        raise ReportError(f"{path} is not a report: no option has batch_size {report.batch_size}")
    return report


def _printable(value: Any) -> Any:
    """Return parsed JSON with U+FFFD in place of each unprintable character of its strings.

    Newlines are kept. Other unprintable characters could control the terminal that prints them.
    """
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value
