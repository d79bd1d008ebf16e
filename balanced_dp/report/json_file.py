"""Read and write reports as JSON, and read those of pytest-benchmark."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..errors import ArgumentError, ReportError
from ..tuning.report import SCHEMA, Report


@dataclass(frozen=True, slots=True)
class _ExtraInfo:
    balanced_dp: Report | None = None


@dataclass(frozen=True, slots=True)
class _Benchmark:
    extra_info: _ExtraInfo


@dataclass(frozen=True, slots=True)
class _BenchmarkFile:
    benchmarks: tuple[_Benchmark, ...]


_REPORT = TypeAdapter(Report)
_BENCHMARKS = TypeAdapter(_BenchmarkFile)


def report_json(report: Report) -> str:
    """Return the report as JSON; sizes are integers in bytes, lists in the order of devices."""
    return _REPORT.dump_json(report, indent=2).decode() + "\n"


def save_report(report: Report, path: str | Path) -> None:
    """Write the report as JSON, atomically."""
    write_atomically(Path(path), report_json(report))


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers see either the old content or the new one.

    Raises:
        ArgumentError: If there is no such folder, or it is not writable.
    """
    is_special = path.exists() and not path.is_file()  # a pipe or a terminal, as /dev/stdout is
    path = path if is_special else path.resolve()  # a link stays a link
    beside = path.with_name(f".balanced-dp.{os.getpid()}.tmp")
    try:
        if is_special:
            path.write_text(text, encoding="utf-8")
            return
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ArgumentError(f"{path} cannot be written: {error.strerror}") from None


def load_reports(path: str | Path) -> tuple[Report, ...]:
    """Return the reports of a file, from pytest-benchmark's JSON one for each workload.

    Args:
        path: a file written by ``save_report`` or ``pytest --benchmark-json``.

    Raises:
        ReportError: If the file cannot be read, is truncated, or is of another kind or version.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} is no report, or a truncated one: {error}") from None
    content = _printable(content)
    keys = content.keys() if isinstance(content, dict) else set()
    if {"benchmarks", "machine_info"} <= keys:
        return _of_benchmarks(path, _validated(_BENCHMARKS, content, path))
    if "schema" not in keys or not {"workload", "plan"} & keys:
        raise ReportError(
            f"{path} is JSON, but neither a report of balanced-dp nor one of pytest-benchmark"
        )
    if content["schema"] != SCHEMA:
        raise ReportError(
            f"{path} has version {content['schema']!r} of a report's fields, but this balanced-dp "
            f"reads version {SCHEMA}; read it with the balanced-dp that wrote it, or tune again"
        )
    report: Report = _validated(_REPORT, content, path)
    if not any(option.batch_size == report.batch_size for option in report.options):
        raise ReportError(f"{path} is no report: nothing was measured for its batch")
    return (report,)


def _printable(value: Any) -> Any:
    """Return JSON without characters that a terminal takes for commands, or no file can hold."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value


def _validated(adapter: TypeAdapter[Any], content: Any, path: str | Path) -> Any:
    try:
        return adapter.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ReportError(f"{path} is no report: {where}: {first['msg']}") from None


def _of_benchmarks(path: str | Path, content: _BenchmarkFile) -> tuple[Report, ...]:
    """Return a report for each workload; each benchmark has one of a single option."""
    reports: dict[str, Report] = {}
    for benchmark in content.benchmarks:
        if (found := benchmark.extra_info.balanced_dp) is not None:
            known = reports.setdefault(found.workload, replace(found, options=()))
            options = (*known.options, *found.options)
            reports[found.workload] = replace(known, options=options)
    if not reports:
        raise ReportError(
            f"{path} holds {len(content.benchmarks)} benchmarks and none of them a sweep over "
            "gpu0_bsz; run pytest benchmarks/test_sweep.py --benchmark-json=bench.json"
        )
    return tuple(reports.values())
