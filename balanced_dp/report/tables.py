"""The words and tables of a report, the same on the terminal, in Markdown and in HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..measurement import Measurement
from ..split import even_share
from ..tuner import Report
from ..units import format_bytes

_MODES = {
    "symbolic": "emulated devices, shapes only",
    "emulated": "emulated devices, with numbers",
    "real": "accelerators",
}


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of text; all columns but the first ``num_left`` are figures.

    Attributes:
        headers: one for each column.
        rows: a cell for each column.
        marked: the index of the row to point out, or None.
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None


def title(report: Report) -> str:
    """Returns what the report is about."""
    plan = report.plan
    return f"{report.workload}, batches of {plan.batch_size}, {len(plan.chunk_sizes)} devices"


def how_measured(report: Report) -> str:
    """Returns what the figures rest on."""
    reserve = report.plan.reserve_bytes
    precision = f"autocast to {report.precision}" if report.precision else "no autocast"
    sentence = (
        f"From {len(report.measurements)} splits measured on {_MODES[report.chosen.mode]}; "
        f"{precision}."
    )
    if reserve:
        sentence += f" {format_bytes(reserve)} of each device are left for contexts and workspaces."
    return sentence


def summary(report: Report) -> tuple[str, ...]:
    """Returns what the plan comes to, in sentences."""
    plan = report.plan
    sentences = [
        f"Device {plan.limiting_device} is the fullest: "
        f"{format_bytes(max(report.chosen.peak_bytes))}, "
        + (
            f"and {format_bytes(max(report.even.peak_bytes))} with the even split."
            if report.even.status == "ok"
            else "and with the even split memory runs out."
        ),
        f"The largest batch that fits is {plan.max_batch_size}, with "
        f"gpu0_bsz={plan.max_batch_gpu0_bsz}; with the even split it is "
        f"{plan.even_max_batch_size}.",
        f"The largest chunk is {plan.time_cost:.2f} times the even one.",
    ]
    if plan.weighted is not None and report.weighted is not None:
        sentences.append(
            f"With a share for each device the fullest holds "
            f"{format_bytes(max(report.weighted.peak_bytes))}, and the largest batch that fits is "
            f"{plan.weighted.max_batch_size}: {report.weighted_line}"
        )
    return (*sentences, *(f"{text[0].upper()}{text[1:]}." for text in report.advice))


def device_table(report: Report) -> TextTable:
    """Returns what each device gets, holds and has left."""
    plan = report.plan
    columns = (
        plan.capacity_bytes,
        plan.predicted_bytes,
        report.chosen.peak_bytes,
        plan.headroom_bytes,
        report.even.peak_bytes,
    )
    return TextTable(
        headers=(
            "device",
            "samples",
            "capacity",
            "predicted",
            "measured",
            "headroom",
            "even split",
        ),
        rows=tuple(
            (str(index), str(size), *map(format_bytes, amounts))
            for index, (size, *amounts) in enumerate(zip(plan.chunk_sizes, *columns, strict=True))
        ),
        marked=plan.limiting_device,
    )


def candidate_table(report: Report) -> TextTable:
    """Returns the measured values of ``gpu0_bsz`` for the planned batch."""
    swept = candidates(report)
    budgets = [c - report.plan.reserve_bytes for c in report.plan.capacity_bytes]
    is_real = report.chosen.mode == "real"
    rows = []
    for measured in swept:
        fullest = max(p / b for p, b in zip(measured.peak_bytes, budgets, strict=True))
        speed = f"{even_share(measured.batch_size, len(budgets)) / max(measured.chunk_sizes):.2f}"
        if is_real:
            speed = f"{measured.batch_size / measured.seconds:.1f}"
        ran = measured.status == "ok"
        rows.append(
            (
                str(measured.gpu0_bsz),
                " ".join(map(str, measured.chunk_sizes)),
                " ".join(map(format_bytes, measured.peak_bytes)) if ran else "out of memory",
                f"{fullest:.1%}" if ran else "",
                f"{imbalance(measured):.1%}" if ran else "",
                speed if ran else "",
            )
        )
    return TextTable(
        headers=(
            "gpu0_bsz",
            "split",
            "peak of each device",
            "fullest",
            "imbalance",
            "samples/s" if is_real else "speed, even = 1",
        ),
        rows=tuple(rows),
        marked=next(
            (i for i, m in enumerate(swept) if m.chunk_sizes == report.plan.chunk_sizes), None
        ),
    )


def candidates(report: Report) -> Sequence[Measurement]:
    """Returns the measurements of the planned batch, by ``gpu0_bsz``."""
    swept = {m.gpu0_bsz: m for m in report.measurements if m.batch_size == report.plan.batch_size}
    return [swept[value] for value in sorted(swept, key=lambda value: value or 0)]


def imbalance(measured: Measurement) -> float:
    """Returns (max - min) / max of the peaks."""
    return 1 - min(measured.peak_bytes) / max(measured.peak_bytes)


def origin_table(report: Report) -> TextTable:
    """Returns where the figures come from."""
    origin = report.origin
    rows = (
        ("created", origin.created),
        ("command", origin.command),
        *((f"version of {name}", version) for name, version in origin.versions.items()),
        *origin.machine.items(),
        ("parameters of the model", f"{report.num_parameters:,}"),
        ("points that the laws are fitted to", str(report.model.num_points)),
        ("farthest of them from the laws", f"{report.model.residual:.2%}"),
        ("farthest prediction of the chosen split", f"{report.prediction_error:.2%}"),
    )
    return TextTable(headers=("", ""), rows=rows)
