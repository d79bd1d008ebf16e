"""Compare the best options of two reports."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ArgumentError
from ..tuning.report import Report
from ..units import parse_bytes
from .tables import imbalance, speed

METRICS: dict[str, Callable[[Report], float]] = {
    "peak": lambda report: max(report.best.peak_bytes),
    "imbalance": lambda report: imbalance(report.best),
    "max_batch": lambda report: report.largest_batch(report.best).batch_size,
    "speed": lambda report: speed(report.best, report),
}
"""Of the best option, the highest peak of all devices in bytes, (max - min) / max of the peaks, the
largest batch that fits, and samples per second (on emulated devices the even chunk over the largest
one)."""

_HIGHER_IS_BETTER = {"max_batch", "speed"}
_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Hold one metric of two reports.

    Attributes:
        metric: one of ``METRICS``.
        before: the value of the first report.
        after: the value of the second report.
        worsened: how much worse the second is, absolute or relative as the limit; negative if it
            is better.
        limit: how much worse it may be, or None without a limit.
        is_relative: whether the limit is a fraction of the first report's value.
    """

    metric: str
    before: float
    after: float
    worsened: float
    limit: float | None
    is_relative: bool

    @property
    def failed(self) -> bool:
        """Return whether the second is worse by more than the limit."""
        return self.limit is not None and self.worsened > self.limit


def compare_reports(before: Report, after: Report, limits: str = "") -> tuple[Comparison, ...]:
    """Compare the best options of two reports, metric by metric.

    Args:
        before: the first report.
        after: the second report.
        limits: how much worse metrics may be, such as ``"peak:5%,imbalance:0.1"``, relative to the
            first report with ``%``, otherwise absolute. That of ``peak`` has a unit: ``100MiB``.

    Raises:
        ArgumentError: If the limits are malformed, or the reports differ in workload, batch size,
            number of devices, precision or kind of devices.
    """
    allowed = _parse(limits)
    settings = _settings(after)
    for name, old in _settings(before).items():
        if old != (new := settings[name]):
            raise ArgumentError(
                f"the reports cannot be compared: {name} is {old} in the first and {new} in the "
                "second; tune both with the same"
            )
    comparisons = []
    for metric, figure in METRICS.items():
        old, new = float(figure(before)), float(figure(after))
        limit, is_relative = allowed.get(metric, (None, True))
        worsened = old - new if metric in _HIGHER_IS_BETTER else new - old
        if is_relative:
            worsened = worsened / old if old else float(worsened > 0)
        comparisons.append(Comparison(metric, old, new, worsened, limit, is_relative))
    return tuple(comparisons)


def _parse(limits: str) -> dict[str, tuple[float, bool]]:
    allowed: dict[str, tuple[float, bool]] = {}
    for part in filter(None, limits.split(",")):
        metric, _, limit = (text.strip() for text in part.partition(":"))
        number = limit.removesuffix("%").rstrip()
        is_relative = number != limit
        if metric == "peak" and _NUMBER.fullmatch(limit) and 0 < float(limit) < 1024:
            raise ArgumentError(f"peak:{limit} has no unit: peak:{limit}% or peak:{limit}MiB")
        if metric == "peak" and limit and not is_relative:
            allowed[metric] = (parse_bytes(limit, "the limit of peak"), False)
        elif metric in METRICS and _NUMBER.fullmatch(number):
            allowed[metric] = (float(number) / (100 if is_relative else 1), is_relative)
        else:
            raise ArgumentError(
                f"--fail takes METRIC:NUMBER or METRIC:NUMBER% of {', '.join(METRICS)}, separated "
                f"by commas, such as peak:5%,imbalance:0.1, got {part!r}"
            )
    return allowed


def _settings(report: Report) -> dict[str, object]:
    return {
        "the workload": report.workload,
        "the batch size": report.batch_size,
        "the number of devices": len(report.capacity_bytes),
        "the precision": report.precision,
        "measured on": report.mode,
    }
