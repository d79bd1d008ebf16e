"""Read and write reports as JSON, and read those of pytest-benchmark."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..errors import ArgumentError, ReportError
from ..tuning.measurement import Measurement
from ..tuning.report_types import SCHEMA, Provenance, Report
from ..tuning.reports import report_of_measurements

_REPORT = TypeAdapter(Report)
_MEASUREMENT = TypeAdapter(Measurement)

BENCHMARK_KEY = "balanced_dp"
"""The key of a benchmark's ``extra_info`` under which the content of a report is stored."""


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
        try:
            return _of_benchmarks(path, content)
        except (AttributeError, KeyError, TypeError) as error:
            raise ReportError(
                f"{path} is no sweep of this version: {type(error).__name__} {error}"
            ) from None
    if not {"schema", "plan", "measurements"} <= keys:
        raise ReportError(
            f"{path} is JSON, but neither a report of balanced-dp nor one of pytest-benchmark"
        )
    if content["schema"] != SCHEMA:
        raise ReportError(
            f"{path} has version {content['schema']!r} of a report's fields, but this balanced-dp "
            f"reads version {SCHEMA}; read it with the balanced-dp that wrote it, or tune again"
        )
    report: Report = _validated(_REPORT, content, path)
    _check_consistent(report, path)
    return (report,)


def _check_consistent(report: Report, path: str | Path) -> None:
    """Raise ReportError if figures on which tables and plots rely contradict each other."""
    plan, num_devices = report.plan, len(report.plan.chunk_sizes)
    measured = [report.chosen, report.even, *report.measurements]
    options = [*report.options, *(o for other in report.alternatives for o in other.options)]
    measured += [option.measured for option in options if option.measured is not None]
    lists = [plan.predicted_bytes, plan.capacity_bytes]
    lists += [split for o in options for split in (o.chunk_sizes, o.predicted_bytes)]
    for m in measured:
        lists += [m.chunk_sizes, *m.phase_peak_bytes]
    terms = (*report.model.first_terms, *report.model.idle_terms, *report.model.other_terms)
    coefficients = [number for term in terms for number in dataclasses.astuple(term)]
    problem = None
    if any(len(entries) != num_devices for entries in lists):
        problem = f"not every list has {num_devices} entries, one for each device"
    elif not all(0 <= number < math.inf for number in coefficients):
        problem = "a linear term is negative or not finite"
    elif not (report.model.other_terms and (report.model.first_terms or report.model.idle_terms)):
        problem = "it has no linear terms"
    elif min(plan.budgets) <= 0 or plan.batch_size < 1 or not max(report.chosen.peak_bytes):
        problem = "it has no capacity, no batch or no peak"
    elif not any(option.chunk_sizes == plan.chunk_sizes for option in report.options):
        problem = "its plan is not among its options"
    elif not any(m.batch_size == plan.batch_size for m in report.measurements):
        problem = "it has no measurement of its batch"
    elif any(m.mode == "real" and m.seconds <= 0 for m in measured):
        problem = "a step took no time"
    if problem is not None:
        raise ReportError(f"{path} is no report: {problem}")


def _validated(adapter: TypeAdapter[Any], content: Any, path: str | Path) -> Any:
    try:
        return adapter.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ReportError(f"{path} is no report: {where}: {first['msg']}") from None


def _of_benchmarks(path: str | Path, content: dict[str, Any]) -> tuple[Report, ...]:
    """Return a report for each workload among pytest-benchmark's results."""
    sweeps: dict[str, list[dict[str, Any]]] = {}
    for benchmark in content["benchmarks"]:
        record = benchmark.get("extra_info", {}).get(BENCHMARK_KEY)
        if record is not None:
            sweeps.setdefault(record["measurement"]["workload"], []).append(record)
    if not sweeps:
        raise ReportError(
            f"{path} holds {len(content['benchmarks'])} benchmarks and none of them a sweep over "
            "gpu0_bsz; run pytest benchmarks/test_sweep.py --benchmark-json=bench.json"
        )
    machine = content["machine_info"]
    reports = []
    for records in sweeps.values():
        provenance = Provenance(
            created=content["datetime"],
            command=records[0]["command"],
            versions=records[0]["versions"],
            machine={
                "platform": f"{machine['system']} {machine['release']} {machine['machine']}",
                "num_cpus": str(machine["cpu"].get("count", "?")),
                "devices": records[0]["devices"],
            },
        )
        reports.append(
            report_of_measurements(
                [_validated(_MEASUREMENT, record["measurement"], path) for record in records],
                provenance,
                records[0]["capacities"],
                num_parameters=records[0]["num_parameters"],
                precision=records[0]["precision"],
            )
        )
    return tuple(reports)
