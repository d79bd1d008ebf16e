"""Compose the text and tables of a report, for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby

from ..planning.split_planner import LARGEST_BATCH, utilizations
from ..tuning.measurement import Measurement, by_gpu0_bsz
from ..tuning.options import Option, fits, relative_speed
from ..tuning.report_types import Report
from ..units import byte_scale, format_bytes

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
    batches = "largest batches" if report.goal == "batch" else f"batches of {plan.batch_size}"
    return f"{report.workload}, {batches}, {len(plan.chunk_sizes)} devices"


def how_measured(report: Report) -> str:
    """Return a sentence on how the figures were measured."""
    precision = f"autocast to {report.precision}" if report.precision else "no autocast"
    text = f"Measured on {_MODES[report.chosen.mode]}; {precision}."
    if reserve := report.plan.reserve_bytes:
        text += f" {format_bytes(reserve)} of each are kept free for contexts and workspaces."
    return text


def candidates_title(report: Report) -> str:
    """Return the title of the table of measured values."""
    loss = "outputs gathered" if report.gather else "loss on each device"
    unit = _unit(candidates(report))[1]
    spread = ", parameters spread" * report.spread
    return f"Measured values of gpu0_bsz, {loss}{spread}, peaks in {unit}"


def lines(report: Report) -> str:
    """Return the lines for a training script, of each option."""
    texts = []
    for number, option in enumerate(report.ranked_options, 1):
        criterion = "" if option.gather else "\ncriterion = BalancedCriterion(criterion)"
        texts.append(f"# option {number}\nmodel = {option.line}{criterion}")
    return "\n".join(texts)


def verdict(report: Report) -> str:
    """Return a sentence on whether the even split fits, and what the best option is like."""
    plan, best = report.plan, report.best
    if not report.ranked_options:
        return (
            f"No split fits: with gpu0_bsz={plan.gpu0_bsz}, the best, the bottleneck is "
            f"{bottleneck(report.chosen, plan.budgets)}."
        )
    if report.goal == "batch":
        return f"The largest batch that fits is {_batch(best.batch_size)}, with option 1."
    peak = bottleneck(best, plan.budgets)
    if best.is_data_parallel:
        return f"It fits as it is: with nn.DataParallel the bottleneck is {peak}."
    even = bottleneck(report.even, plan.budgets)
    if not report.gather or report.spread:
        return f"With option 1 the bottleneck is {peak}; with the even split it is {even}."
    if report.even.status == "oom":
        as_it_is = "With nn.DataParallel memory runs out"
    elif not fits(report.even, plan.budgets):
        as_it_is = f"With nn.DataParallel it does not fit: the bottleneck is {even}"
    else:
        as_it_is = f"It fits as it is: with nn.DataParallel the bottleneck is {even}"
    return f"{as_it_is}. With option 1 the bottleneck is {peak}."


def summary(report: Report) -> tuple[str, ...]:
    """Return the sentences that explain the options."""
    sentences = [
        f"{'Parameters on all devices' if other.spread else 'The loss on each device'} cannot be "
        f"measured: {other.reason}."
        for other in report.alternatives
        if other.reason is not None
    ]
    if report.best.measured is None:
        sentences.append("A batch of this size was not measured: its peaks are predicted.")
    largest = max(measured.batch_size for measured in report.measurements)
    if report.plan.max_batch_size > largest:
        sentences.append(f"Batches above {largest} were not measured: what fits is predicted.")
    if not all(option.gather for option in report.ranked_options):
        sentences.append(
            "BalancedCriterion wraps the loss function, including what the script does to the "
            "outputs before it: docs/loss.md."
        )
    return (*sentences, *map(sentence, report.advice))


def sentence(text: str) -> str:
    """Return text, such as an error's, with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:]}."


def bottleneck(measured: Measurement | Option, budgets: Sequence[int] | None) -> str:
    """Return which device is the fullest, with its peak; ``budgets`` tell how full it is."""
    if isinstance(measured, Measurement) and measured.status == "oom":
        return "out of memory"
    index = fullest_device(measured, budgets)
    held = measured.peak_bytes[index]
    part = "" if budgets is None else f", {held / budgets[index]:.0%} full"
    return f"device {index} with {format_bytes(held)}{part}"


def option_table(report: Report) -> TextTable:
    """Return the options that fit, of which there is one at least, the best first."""
    budgets = report.plan.budgets
    rows = [
        {
            "option": str(number),
            "split": short_split(option.chunk_sizes),
            "bottleneck": f"device {fullest_device(option, budgets)} "
            f"{option.utilization(budgets):.0%}",
            "largest batch": _batch(
                option.batch_size if report.goal == "batch" else option.max_batch_size
            ),
            "speed": f"{option.speed:.2f}",
            "loss on": "device 0" if option.gather else "each",
            "parameters on": "all" if option.spread else "device 0",
        }
        for number, option in enumerate(report.ranked_options, 1)
    ]
    return TextTable(tuple(rows[0]), tuple(tuple(row.values()) for row in rows), marked=0)


SPEED = "Speed is the even chunk over the largest one, for which the other devices wait."


def _batch(size: int) -> str:
    return f"{size} or more" if size == LARGEST_BATCH else str(size)


def short_split(chunk_sizes: Sequence[int]) -> str:
    """Return the chunk sizes, of many devices in a short form."""
    text = " ".join(map(str, chunk_sizes))
    if len(text) <= 14:
        return text
    runs = [(size, len(list(run))) for size, run in groupby(chunk_sizes)]
    return ", ".join(f"{count} x {size}" if count > 1 else f"{size}" for size, count in runs)


def devices_title(report: Report) -> str:
    """Return the title of ``device_table``."""
    best = "option 1" if report.ranked_options else f"gpu0_bsz={report.plan.gpu0_bsz}"
    return f"What each device holds with {best}"


def device_table(report: Report) -> TextTable:
    """Return the chunk size, the capacity and the peaks of each device with the best option."""
    plan, best = report.plan, report.best
    full = utilizations(best.peak_bytes, plan.budgets)
    columns: dict[str, Iterable[str]] = {
        "device": map(str, range(len(full))),
        "samples": map(str, best.chunk_sizes),
        "capacity": map(format_bytes, plan.capacity_bytes),
        "predicted": map(format_bytes, best.predicted_bytes),
    }
    if best.measured is not None:
        columns["measured"] = map(format_bytes, best.peak_bytes)
    columns["full"] = map("{:.0%}".format, full)
    if best.batch_size == plan.batch_size and report.even.status == "ok":
        columns["even split"] = map(format_bytes, report.even.peak_bytes)
    rows = tuple(zip(*columns.values(), strict=True))
    return TextTable(tuple(columns), rows, marked=fullest_device(best, plan.budgets))


def fullest_device(measured: Measurement | Option, budgets: Sequence[int] | None) -> int:
    """Return the index of the bottleneck device, as it was measured."""
    full = utilizations(measured.peak_bytes, budgets or [1] * len(measured.peak_bytes))
    return full.index(max(full))


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
    rows: dict[str, Iterable[str]] = {}
    if measured.batch_size:
        rows["samples"] = map(str, measured.chunk_sizes)
    for use in largest_uses(measured.breakdown, scale / 100):
        rows[use] = [f"{sizes.get(use, 0) / scale:.2f}" for sizes in measured.breakdown]
    rows["peak"] = (f"{peak / scale:.2f}" for peak in measured.peak_bytes)
    if budgets is not None:
        rows["full"] = map("{:.0%}".format, utilizations(measured.peak_bytes, budgets))
    if even is not None and even is not measured:
        rows["peak, even split"] = (f"{peak / scale:.2f}" for peak in even.peak_bytes)
    is_used = [peak > 0 for peak in measured.peak_bytes]
    if sum(is_used) != 1:  # otherwise the script uses one device
        is_used = [True] * len(is_used)
    devices = compress((f"device {index}" for index in range(len(is_used))), is_used)
    table = tuple((name, *compress(cells, is_used)) for name, cells in rows.items())
    return TextTable((f"memory in {unit}", *devices), table, list(rows).index("peak"))


def largest_uses(breakdowns: Iterable[Mapping[str, int]], least_bytes: float) -> list[str]:
    """Return what at least ``least_bytes`` are used for in a breakdown, the largest use first."""
    largest = Counter[str]()
    for sizes in breakdowns:
        largest |= Counter(sizes)
    return [use for use, size in largest.most_common() if size >= least_bytes]


def candidate_table(report: Report) -> TextTable:
    """Return the table of measured values of ``gpu0_bsz`` for the planned batch."""
    swept = candidates(report)
    scale, _ = _unit(swept)
    name = "samples/s" if report.chosen.mode == "real" else "speed"
    headers = ("gpu0_bsz", "split", "device 0", "highest other", "bottleneck", "imbalance", name)
    rows, marked = [], None
    for index, measured in enumerate(swept):
        peaks = measured.peak_bytes
        cells: tuple[str, ...] = ("out of memory", "", "", "", "")
        if measured.status == "ok":
            cells = (
                f"{peaks[0] / scale:.2f}",
                f"{max(peaks[1:]) / scale:.2f}",
                f"{max(utilizations(peaks, report.plan.budgets)):.1%}",
                f"{measured.imbalance:.1%}",
                f"{speed(measured):.2f}",
            )
        rows.append((str(measured.chunk_sizes[0]), short_split(measured.chunk_sizes), *cells))
        if measured.chunk_sizes == report.plan.chunk_sizes:
            marked = index
    return TextTable(headers, tuple(rows), marked)


def _unit(measurements: Iterable[Measurement]) -> tuple[int, str]:
    return byte_scale(max(max(m.peak_bytes) for m in measurements))


def candidates(report: Report) -> Sequence[Measurement]:
    """Return the measurements of the planned batch, in order of ``gpu0_bsz``."""
    return list(by_gpu0_bsz(report.measurements, report.plan.batch_size).values())


def speed(measured: Measurement) -> float:
    """Return samples per second, or on emulated devices the even chunk over the largest one."""
    if measured.mode == "real":
        return measured.samples_per_s
    return relative_speed(measured.chunk_sizes)


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
        (f"largest error for gpu0_bsz={report.plan.gpu0_bsz}", f"{report.prediction_error:.2%}"),
    )
    return TextTable(headers=("what", "value"), rows=rows)
