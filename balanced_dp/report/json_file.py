"""Read and write reports as JSON, and read those of pytest-benchmark."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..errors import ArgumentError, ReportError
from ..tuning.measurement import Measurement
from ..tuning.report_types import SCHEMA, Provenance, Report
from ..tuning.reports import report_of_measurements


@dataclass(frozen=True, slots=True)
class SweptStep:
    """Record a measured split of a sweep; a benchmark has it in ``extra_info["balanced_dp"]``.

    Attributes:
        measurement: what was measured.
        provenance: where and how.
        capacities: capacity of each device in bytes.
        num_parameters: number of trained parameters.
        precision: the dtype of autocast, or None.
    """

    measurement: Measurement
    provenance: Provenance
    capacities: tuple[int, ...]
    num_parameters: int
    precision: str | None


@dataclass(frozen=True, slots=True)
class _ExtraInfo:
    balanced_dp: SweptStep | None = None


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
    return _REPORT.dump_json(report, indent=2, by_alias=True).decode() + "\n"


def save_report(report: Report, path: str | Path) -> None:
    """Write the report as JSON, atomically."""
    write_atomically(Path(path), report_json(report))


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers see either the old content or the new one.

    Raises:
        ArgumentError: If there is no such folder, or it is not writable.
    """
    path = path.resolve()  # a link stays a link
    beside = path.with_name(f".balanced-dp.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file():  # a pipe or a terminal
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
    keys = content.keys() if isinstance(content, dict) else set()
    if {"benchmarks", "machine_info"} <= keys:
        return _of_benchmarks(path, _validated(_BENCHMARKS, content, path))
    if not {"schema", "plan", "measurements"} <= keys:
        raise ReportError(
            f"{path} is JSON, but neither a report of balanced-dp nor one of pytest-benchmark"
        )
    if content["schema"] != SCHEMA:
        raise ReportError(
            f"{path} has version {content['schema']!r} of a report's fields, but this balanced-dp "
            f"reads version {SCHEMA}; read it with the balanced-dp that wrote it, or tune again"
        )
    return (_validated(_REPORT, content, path),)


def _validated(adapter: TypeAdapter[Any], content: Any, path: str | Path) -> Any:
    try:
        return adapter.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ReportError(f"{path} is no report: {where}: {first['msg']}") from None


def _of_benchmarks(path: str | Path, content: _BenchmarkFile) -> tuple[Report, ...]:
    """Return a report for each workload among pytest-benchmark's results."""
    sweeps: dict[str, list[SweptStep]] = {}
    for benchmark in content.benchmarks:
        step = benchmark.extra_info.balanced_dp
        if step is not None:
            sweeps.setdefault(step.measurement.workload, []).append(step)
    if not sweeps:
        raise ReportError(
            f"{path} holds {len(content.benchmarks)} benchmarks and none of them a sweep over "
            "gpu0_bsz; run pytest benchmarks/test_sweep.py --benchmark-json=bench.json"
        )
    return tuple(
        report_of_measurements(
            [step.measurement for step in steps],
            steps[0].provenance,
            steps[0].capacities,
            num_parameters=steps[0].num_parameters,
            precision=steps[0].precision,
        )
        for steps in sweeps.values()
    )
