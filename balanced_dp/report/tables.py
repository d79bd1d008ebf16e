"""Compose the text and tables of a report, for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

from ..planning.split_planner import utilizations
from ..split import even_share, is_better
from ..tuning.measurement import Measurement
from ..tuning.report_types import Alternative, Report
from ..units import format_bytes

_MODES = {
    "symbolic": "emulated devices, shapes only",
    "emulated": "emulated devices, with numbers",
    "real": "accelerators",
}


@dataclass(frozen=True, slots=True)
class TextTable:
    """Hold a table of text; ``marked`` is the index of the highlighted row, or None."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None


def title(report: Report) -> str:
    """Return the title of the report."""
    plan = report.plan
    return f"{report.workload}, batches of {plan.batch_size}, {len(plan.chunk_sizes)} devices"


def how_measured(report: Report) -> str:
    """Return a sentence on how the figures were measured."""
    reserve = report.plan.reserve_bytes
    precision = f"autocast to {report.precision}" if report.precision else "no autocast"
    loss = "outputs gathered" if report.gather else "loss on each device"
    loss += ", parameters spread" * report.spread
    sentence = (
        f"From {len(report.measurements)} splits measured on {_MODES[report.chosen.mode]}; "
        f"{precision}, {loss}."
    )
    if reserve:
        sentence += (
            f" {format_bytes(reserve)} of each device are kept free for contexts and workspaces."
        )
    return sentence


def lines(report: Report) -> str:
    """Return the lines for a training script."""
    criterion = "" if report.gather else "\ncriterion = BalancedCriterion(criterion)"
    return f"model = {report.line}{criterion}"


def summary(report: Report) -> tuple[str, ...]:
    """Return the sentences that summarize the plan."""
    plan = report.plan
    even = "memory runs out"
    if report.even.status == "ok":
        even = f"it is {bottleneck(report.even, plan.budgets)}"
    sentences = [
        f"The bottleneck is {bottleneck(report.chosen, plan.budgets)}; with the even split {even}.",
        f"The largest batch that fits is {plan.max_batch_size}, with "
        f"gpu0_bsz={plan.max_batch_gpu0_bsz}; with the even split it is "
        f"{plan.even_max_batch_size}.",
        f"The largest chunk is {plan.time_cost:.2f} times the even one.",
    ]
    if plan.weighted is not None and report.weighted is not None:
        weighted = bottleneck(report.weighted, plan.budgets)
        sentences.append(
            f"With device_weights the bottleneck is {weighted}, and the largest batch that fits is "
            f"{plan.weighted.max_batch_size}: {report.weighted_line}"
        )
    for other in report.alternatives:
        sentences += _alternative(report, other)
    return (*sentences, *(f"{text[0].upper()}{text[1:]}." for text in report.advice))


def _alternative(report: Report, other: Alternative) -> list[str]:
    """Return how other options compare, if they make a difference."""
    options = other.options(report.spread)
    if other.plan is None or other.chosen is None:
        return [f"With {options} it cannot be measured: {other.reason}"]
    ours, theirs = (
        max(utilizations(measured.peak_bytes, report.plan.budgets))
        for measured in (report.chosen, other.chosen)
    )
    if not is_better(ours, theirs) and not is_better(theirs, ours):
        return []
    return [
        f"With {options}, and gpu0_bsz={other.plan.gpu0_bsz}, the bottleneck is "
        f"{bottleneck(other.chosen, report.plan.budgets)}, and the largest batch that fits is "
        f"{other.plan.max_batch_size}."
    ]


def bottleneck(measured: Measurement, budgets: Sequence[int] | None) -> str:
    """Return which device is the fullest, with its peak; ``budgets`` tell how full it is."""
    full = utilizations(measured.peak_bytes, budgets or [1] * len(measured.peak_bytes))
    index = full.index(max(full))
    part = "" if budgets is None else f", {max(full):.0%} full"
    return f"device {index} with {format_bytes(measured.peak_bytes[index])}{part}"


def device_table(report: Report) -> TextTable:
    """Return the chunk size, the capacity and the peaks of each device."""
    plan = report.plan
    columns = (
        map(str, plan.chunk_sizes),
        map(format_bytes, plan.capacity_bytes),
        map(format_bytes, plan.predicted_bytes),
        map(format_bytes, report.chosen.peak_bytes),
        map("{:.0%}".format, utilizations(report.chosen.peak_bytes, plan.budgets)),
        map(format_bytes, report.even.peak_bytes),
    )
    return TextTable(
        headers=("device", "samples", "capacity", "predicted", "measured", "full", "even split"),
        rows=tuple((str(i), *cells) for i, cells in enumerate(zip(*columns, strict=True))),
        marked=plan.limiting_device,
    )


def use_table(
    measured: Measurement, budgets: Sequence[int] | None, even: Measurement | None = None
) -> TextTable:
    """Return what fills each device at its peak, and how full it is; a column for each device.

    Args:
        measured: what was measured.
        budgets: the bytes of each device that may be used, if they matter.
        even: the measurement of the even split, to compare with.
    """
    scale, unit = byte_scale(max(measured.peak_bytes))
    largest = Counter[str]()
    for sizes in measured.breakdown:
        largest |= Counter(sizes)
    rows: dict[str, Iterable[str]] = {}
    if measured.batch_size:
        rows["samples"] = map(str, measured.chunk_sizes)
    for use, size in largest.most_common():
        if size >= scale / 100:
            rows[use] = [f"{sizes.get(use, 0) / scale:.2f}" for sizes in measured.breakdown]
    rows["peak"] = (f"{peak / scale:.2f}" for peak in measured.peak_bytes)
    if budgets is not None:
        rows["full"] = map("{:.0%}".format, utilizations(measured.peak_bytes, budgets))
    if even is not None and even is not measured:
        rows["peak, even split"] = (f"{peak / scale:.2f}" for peak in even.peak_bytes)
    is_used = [True] * (1 + len(measured.peak_bytes))
    if sum(map(bool, measured.peak_bytes)) == 1:  # the script uses one device
        is_used[1:] = map(bool, measured.peak_bytes)
    devices = (f"device {index}" for index in range(len(measured.chunk_sizes)))
    headers = compress((f"memory in {unit}", *devices), is_used)
    table = tuple(tuple(compress((name, *cells), is_used)) for name, cells in rows.items())
    return TextTable(tuple(headers), table, list(rows).index("peak"))


def candidate_table(report: Report) -> TextTable:
    """Return the table of measured values of ``gpu0_bsz`` for the planned batch."""
    swept = candidates(report)
    scale, unit = byte_scale(max(max(m.peak_bytes) for m in swept))
    rows = []
    for measured in swept:
        first, *others = (f"{peak / scale:.2f}" for peak in measured.peak_bytes)
        cells: tuple[str, ...] = ("out of memory", "", "", "", "")
        if measured.status == "ok":
            cells = (
                first,
                others[0]
                if len(set(others)) == 1
                else f"{min(others, key=float)} to {max(others, key=float)}",
                f"{max(utilizations(measured.peak_bytes, report.plan.budgets)):.1%}",
                f"{measured.imbalance:.1%}",
                f"{speed(measured):.2f}",
            )
        rows.append(
            (str(measured.chunk_sizes[0]), " ".join(map(str, measured.chunk_sizes)), *cells)
        )
    return TextTable(
        headers=(
            "gpu0_bsz",
            "split",
            f"device 0, {unit}",
            f"others, {unit}",
            "bottleneck",
            "imbalance",
            speed_name(report),
        ),
        rows=tuple(rows),
        marked=next(
            (i for i, m in enumerate(swept) if m.chunk_sizes == report.plan.chunk_sizes), None
        ),
    )


def byte_scale(largest: float) -> tuple[int, str]:
    """Return the size and the name of the unit for an amount of bytes."""
    if largest < 2**20:
        return 2**10, "KiB"
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")


def candidates(report: Report) -> Sequence[Measurement]:
    """Return the measurements of the planned batch, in order of ``gpu0_bsz``."""
    swept = {
        m.chunk_sizes[0]: m for m in report.measurements if m.batch_size == report.plan.batch_size
    }
    return [swept[value] for value in sorted(swept)]


def speed(measured: Measurement) -> float:
    """Return samples per second, or on emulated devices the even chunk over the largest one."""
    if measured.mode == "real":
        return measured.samples_per_s
    even = even_share(measured.batch_size, len(measured.chunk_sizes))
    return even / max(measured.chunk_sizes)


def speed_name(report: Report) -> str:
    """Return the unit of ``speed``."""
    return "samples/s" if report.chosen.mode == "real" else "even / largest chunk"


def provenance_table(report: Report) -> TextTable:
    """Return the table of the provenance of the figures."""
    provenance = report.provenance
    rows = (
        ("created", provenance.created),
        ("command", provenance.command),
        *((f"version of {name}", version) for name, version in provenance.versions.items()),
        *provenance.machine.items(),
        ("parameters of the model", f"{report.num_parameters:,}"),
        ("measurements that predictions are fitted to", str(report.model.num_points)),
        ("largest error among these", f"{report.model.residual:.2%}"),
        ("largest error for the chosen split", f"{report.prediction_error:.2%}"),
    )
    return TextTable(headers=("what", "value"), rows=rows)
