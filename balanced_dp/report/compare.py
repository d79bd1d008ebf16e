"""Compare the best options of two reports."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import ArgumentError
from ..memory.units import format_bytes
from ..tuning.report import Report
from .tables import TextTable, speed

METRICS: dict[str, Callable[[Report], float]] = {
    "peak": lambda report: max(report.best.peak_bytes),
    "max_batch": lambda report: report.largest_batch(report.best).batch_size,
    "speed": lambda report: speed(report.best, report),
}
"""The metrics of a report's best option.

They are the highest peak of all devices in bytes, the largest batch that fits, and the speed in
samples per second (on emulated devices, the even chunk divided by the largest chunk).
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Hold one metric of two reports.

    Attributes:
        metric: one of ``METRICS``.
        before: the value of the first report.
        after: the value of the second report.
        worsened: how much worse the second is, as a fraction of the first; negative if better.
        limit: how much worse it may be, or None without a limit.
        failed: whether it is worse by more than the limit.
    """

    metric: str
    before: float
    after: float
    worsened: float
    limit: float | None
    failed: bool


def compare_reports(before: Report, after: Report, limits: str = "") -> tuple[Comparison, ...]:
    """Compare the best options of two reports, metric by metric.

    Args:
        before: the first report.
        after: the second report.
        limits: how much worse each metric may be, in percent, such as ``"peak:5%,speed:10%"``.

    Raises:
        ArgumentError: If the limits are malformed, or the reports differ in workload, batch size,
            number of devices, precision or kind of devices.
    """
    # A script chooses its own batches, so the largest one says nothing about memory.
    metrics = {n: f for n, f in METRICS.items() if n != "max_batch" or not after.is_script}
    allowed = {}
    for part in filter(None, limits.split(",")):
        found = re.fullmatch(rf" *({'|'.join(metrics)}) *: *(\d+(?:\.\d+)?) *% *", part)
        if found is None:
            raise ArgumentError(
                f"--fail takes METRIC:NUMBER% of {', '.join(metrics)}, as peak:5%, got {part!r}"
            )
        allowed[found[1]] = float(found[2]) / 100
    for name in ("workload", "batch_size", "num_devices", "precision", "mode"):
        first, second = getattr(before, name), getattr(after, name)
        if first != second:
            fact = f"the reports cannot be compared: {name} was {first} and is {second}"
            raise ArgumentError(f"{fact}; measure both with the same {name}")
    comparisons = []
    for metric, value_of in metrics.items():
        old, new = float(value_of(before)), float(value_of(after))
        worsened = (new - old if metric == "peak" else old - new) / (old or 1.0)
        limit = allowed.get(metric)
        failed = limit is not None and worsened > limit
        comparisons.append(Comparison(metric, old, new, worsened, limit, failed))
    return tuple(comparisons)


def comparison_table(before: Report, after: Report, compared: Iterable[Comparison]) -> TextTable:
    """Return the comparison as a table."""
    rows = []
    for one in compared:
        as_text = format_bytes if one.metric == "peak" else "{:.2f}".format
        limit = "" if one.limit is None else f"{one.limit:.1%} {'FAILED' if one.failed else 'ok'}"
        values = as_text(one.before), as_text(one.after), f"{one.worsened:.1%}"
        rows.append((one.metric, *values, limit))
    headers = ("metric", "before", "after", "worse by", "allowed")
    caption = f"before: {before.best.line}\nafter: {after.best.line}"
    return TextTable(after.workload, headers, rows, caption=caption)
