"""Compare the best options (ways to train a batch, with measurements) of two reports."""

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
"""A dict from the name of each metric to the function that computes it for a report's best option.

- ``peak``: the highest peak of any device, in bytes.
- ``max_batch``: the number of samples in the largest batch that fits.
- ``speed``: the number of samples per second. On emulated devices, the speed is the largest chunk
  of the even split, divided by the largest chunk of the best option (both in samples).
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Hold the values of one metric in two reports.

    Attributes:
        metric: the name of the metric, which is a key of ``METRICS``.
        before: the value in the first report.
        after: the value in the second report.
        worsened: how much worse ``after`` is than ``before``, as a fraction of ``before``. It is
            negative if ``after`` is better.
        limit: the largest allowed value of ``worsened``; None means no limit.
        failed: whether ``worsened`` is above ``limit``.
    """

    metric: str
    before: float
    after: float
    worsened: float
    limit: float | None
    failed: bool


def compare_reports(before: Report, after: Report, limits: str = "") -> tuple[Comparison, ...]:
    """Compare the best options of two reports, metric by metric.

    An option is a way to train a batch, with its measurements. The metrics are the keys of
    ``METRICS``.

    Args:
        before: the first report.
        after: the second report.
        limits: how much worse a metric may be in ``after`` than in ``before``, in percent, such as
            ``"peak:5%,speed:10%"``. Metrics that are not named have no limit.

    Returns:
        A comparison for each metric. For reports of scripts, the metric ``max_batch`` is left out.

    Raises:
        ArgumentError: If the limits are malformed, or the reports differ in workload, batch size,
            number of devices, precision or kind of devices.
    """
    # A script chooses its own batches, so its largest batch says nothing about memory.
    metrics = {n: f for n, f in METRICS.items() if n != "max_batch" or not after.is_script}
    allowed = {}
    for part in filter(None, limits.split(",")):
        found = re.fullmatch(rf" *({'|'.join(metrics)}) *: *(\d+(?:\.\d+)?) *% *", part)
        if found is None:
            raise ArgumentError(
                f"--fail takes limits on {', '.join(metrics)}, such as peak:5%, got {part!r}"
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
    """Return a table with a row for each metric in ``compared``."""
    rows = []
    for one in compared:
        as_text = format_bytes if one.metric == "peak" else "{:.2f}".format
        limit = "" if one.limit is None else f"{one.limit:.1%} {'FAILED' if one.failed else 'ok'}"
        values = as_text(one.before), as_text(one.after), f"{one.worsened:.1%}"
        rows.append((one.metric, *values, limit))
    headers = ("metric", "before", "after", "worse by", "allowed")
    caption = f"before: {before.best.line}\nafter: {after.best.line}"
    return TextTable(after.workload, headers, rows, caption=caption)
