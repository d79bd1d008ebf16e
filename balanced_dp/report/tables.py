"""Compose the text and tables of a report, for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby

from ..search import utilizations
from ..tuning.options import Option
from ..tuning.report import Report, bottleneck
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
    batches = "largest batches" if report.goal == "batch" else f"batches of {report.batch_size}"
    return f"{report.workload}, {batches}, {len(report.capacity_bytes)} devices"


def how_measured(report: Report) -> str:
    """Return a sentence on how the figures were measured."""
    precision = f"autocast to {report.precision}" if report.precision else "no autocast"
    text = f"Measured on {_MODES[report.mode]}; {precision}."
    if report.reserve_bytes:
        kept = format_bytes(report.reserve_bytes)
        text += f" {kept} of each are kept free for contexts and workspaces."
    return text


# The answer: whether the batch fits as it is, the options that fit, and what they cost.


def verdict(report: Report) -> str:
    """Return whether the batch fits as it is, and what the best option is like."""
    best, even = report.best, report.even
    if not report.ranked_options:
        return f"{sentence(report.what_lacks())}"
    if report.goal == "batch" and all(o.batch_size == best.batch_size for o in report.options):
        return f"Only batches of {best.batch_size} were measured: change the script, and run again."
    if report.goal == "batch":
        return f"The largest batch that fits is {best.batch_size}, with option 1."
    if best is even:
        return f"It fits as it is: with {even.line} the bottleneck is {_fullest(even, report)}."
    found = f"With option 1 the bottleneck is {_fullest(best, report)}"
    if even is None:
        return f"{found}."
    if even.out_of_memory:
        as_it_is = f"With {even.line} memory runs out"
    elif not even.fits(report.budgets):
        as_it_is = f"With {even.line} it does not fit: the bottleneck is {_fullest(even, report)}"
    else:
        as_it_is = f"It fits as it is: with {even.line} the bottleneck is {_fullest(even, report)}"
    return f"{as_it_is}. {found}."


def _fullest(option: Option, report: Report) -> str:
    index = bottleneck(option, report.budgets)
    held = option.peak_bytes[index]
    return f"device {index} with {format_bytes(held)}, {held / report.budgets[index]:.0%} full"


def option_table(report: Report) -> TextTable:
    """Return the options that fit, of which there is one at least, the best first."""
    is_real = report.mode == "real"
    has_more = any(option.batch_size != report.batch_size for option in report.options)
    rows = [
        {
            "option": str(number),
            "split": short_split(option.chunk_sizes),
            "bottleneck": f"device {bottleneck(option, report.budgets)} "
            f"{option.utilization(report.budgets):.0%}",
            **({"largest batch": str(report.largest_batch(option).batch_size)} if has_more else {}),
            "speed": f"{option.speed:.2f}",
            **({"samples /s": f"{option.samples_per_s:.1f}"} if is_real else {}),
            "loss on": "device 0" if option.gather else "each",
            "weights on": "all" if option.spread else "device 0",
        }
        for number, option in enumerate(report.ranked_options, 1)
    ]
    return TextTable(tuple(rows[0]), tuple(tuple(row.values()) for row in rows), marked=0)


SPEED = "Speed is the even chunk over the largest one, for which the other devices wait."


def lines(report: Report) -> str:
    """Return the lines for a training script, of each option."""
    texts = [f"# {place}" for place in report.wrapped_at]
    if report.wrapped_at:
        is_apart = not all(option.gather for option in report.ranked_options)
        names = "BalancedCriterion, " * is_apart + "BalancedDataParallel"
        texts.append(f"from balanced_dp import {names}")
    for number, option in enumerate(report.ranked_options, 1):
        text = f"# option {number}\nmodel = {option.line}"
        if report.is_trainer and not option.is_even:
            spread = ", spread=True" * option.spread
            text = f"# option {number}\ntrainer = BalancedTrainer(gpu0_bsz={option.gpu0_bsz}"
            text += f"{spread}, ...)"
        texts.append(text + "\ncriterion = BalancedCriterion(criterion)" * (not option.gather))
    return "\n".join(texts)


def summary(report: Report) -> Iterator[str]:
    """Yield the sentences that explain the options."""
    for option in report.ranked_options:
        even = report.even_like(option)
        if option.is_even or even is None or report.goal == "batch":
            continue
        cost = f"its largest chunk is {max(option.chunk_sizes)} instead of {max(even.chunk_sizes)}"
        if report.mode == "real":
            cost += f", {option.samples_per_s:.1f} samples/s instead of {even.samples_per_s:.1f}"
        yield (
            f"A smaller gpu0_bsz costs speed: with {option.line} {cost}, so a step computes about "
            f"{option.speed:.2f} of the samples in the same time."
        )
        break
    largest = max(option.batch_size for option in report.options)
    at_limit = (option for option in report.options if option.batch_size == largest)
    if largest > report.batch_size and any(option.fits(report.budgets) for option in at_limit):
        yield f"Batches above {largest} were not measured; they may fit, too."
    for name, reason in report.failures.items():
        yield f"{name} cannot be measured: {reason}."
    if not all(option.gather for option in report.ranked_options):
        yield (
            "BalancedCriterion wraps the loss function, including what the script does to the "
            "outputs before it: docs/loss.md."
        )
    if report.is_trainer:
        yield (
            "BalancedTrainer is in balanced_dp.integrations.transformers; a Trainer of one's own "
            "becomes class Balanced(BalancedTrainerMixin, MyTrainer)."
        )
    if report.wrapped_at or report.is_trainer:
        yield (
            "Measured is what the script does. gather=False, which computes the loss on each "
            "device, and spread=True, which spreads parameters, may save more: change the script "
            "and run it again."
        )
    yield from report.notes


def sentence(text: str) -> str:
    """Return text, such as an error's, with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


# What was measured.


def short_split(chunk_sizes: Sequence[int]) -> str:
    """Return the chunk sizes, of many devices in a short form."""
    text = " ".join(map(str, chunk_sizes))
    if len(text) <= 14:
        return text
    runs = [(size, len(list(run))) for size, run in groupby(chunk_sizes)]
    return ", ".join(f"{count}x{size}" if count > 1 else f"{size}" for size, count in runs)


def devices_title(report: Report) -> str:
    """Return the title of the table of what each device holds."""
    return f"What each device holds with {report.best.line}"


def device_table(report: Report) -> TextTable:
    """Return what fills each device with the best option, next to the even split."""
    best = report.best
    return use_table(best, report.budgets, report.even_like(best))


def use_table(
    option: Option, budgets: Sequence[int] | None, even: Option | None = None
) -> TextTable:
    """Return what fills each device at its peak, and how full it is; a column for each device.

    Args:
        option: what was measured.
        budgets: the bytes of each device that may be used, if they matter.
        even: the even split, to compare with.
    """
    scale, unit = byte_scale(max(option.peak_bytes))
    rows: dict[str, Iterable[str]] = {}
    if option.batch_size:
        rows["samples"] = map(str, option.chunk_sizes)
    for use in largest_uses(option.uses, scale / 100):
        rows[use] = [f"{sizes.get(use, 0) / scale:.2f}" for sizes in option.uses]
    rows["peak"] = (f"{peak / scale:.2f}" for peak in option.peak_bytes)
    if budgets is not None:
        rows["full"] = map("{:.0%}".format, utilizations(option.peak_bytes, budgets))
    is_other = even is not None and even.chunk_sizes != option.chunk_sizes
    if even and is_other and even.batch_size == option.batch_size and not even.out_of_memory:
        rows["peak, even split"] = (f"{peak / scale:.2f}" for peak in even.peak_bytes)
    is_used = [peak > 0 for peak in option.peak_bytes]
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


def candidates(report: Report) -> list[Option]:
    """Return the measured values of ``gpu0_bsz`` for the batch, as the best option has them."""
    best = report.best
    found = (o for o in report.options if o.kind[:2] == best.kind[:2] and not o.device_weights)
    of_batch = (option for option in found if option.batch_size == report.batch_size)
    return sorted(of_batch, key=lambda option: option.chunk_sizes[0])


def candidates_title(report: Report) -> str:
    """Return the title of the table of measured values."""
    loss = "outputs gathered" if report.best.gather else "loss on each device"
    unit = _unit(candidates(report))[1]
    spread = ", parameters spread" * report.best.spread
    return f"Measured values of gpu0_bsz, {loss}{spread}, peaks in {unit}"


def candidate_table(report: Report) -> TextTable:
    """Return the table of measured values of ``gpu0_bsz``."""
    found = candidates(report)
    scale, _ = _unit(found)
    name = "samples/s" if report.mode == "real" else "speed"
    headers = ("gpu0_bsz", "split", "device 0", "highest other", "bottleneck", "imbalance", name)
    rows, least = [], report.best if report.best in found else None
    for option in found:
        peaks = option.peak_bytes
        cells: tuple[str, ...] = ("out of memory", "", "", "", "")
        if not option.out_of_memory:
            cells = (
                f"{peaks[0] / scale:.2f}",
                f"{max(peaks[1:]) / scale:.2f}",
                f"{option.utilization(report.budgets):.1%}",
                f"{imbalance(option):.1%}",
                f"{speed(option, report):.2f}",
            )
        rows.append((str(option.chunk_sizes[0]), short_split(option.chunk_sizes), *cells))
    marked = None if least is None else found.index(least)
    return TextTable(headers, tuple(rows), marked)


def imbalance(option: Option) -> float:
    """Return (max - min) / max of the peaks, 0 to 1."""
    highest = max(option.peak_bytes)
    return (highest - min(option.peak_bytes)) / highest if highest else 0.0


def _unit(options: Iterable[Option]) -> tuple[int, str]:
    return byte_scale(max((max(option.peak_bytes) for option in options), default=1))


def speed(option: Option, report: Report) -> float:
    """Return samples per second, or on emulated devices the even chunk over the largest one."""
    return option.samples_per_s if report.mode == "real" else option.speed


def speed_name(report: Report) -> str:
    """Return the unit of ``speed``."""
    return "samples/s" if report.mode == "real" else "even / largest chunk"


def provenance_table(report: Report) -> TextTable:
    """Return the table of the provenance of the figures."""
    provenance = report.provenance
    rows = (
        ("created", provenance.created),
        ("command", provenance.command),
        *((f"version of {name}", version) for name, version in provenance.versions.items()),
        *provenance.machine.items(),
        ("parameters of the model", f"{report.num_parameters:,}"),
        ("measured steps", str(len(report.options))),
    )
    return TextTable(headers=("what", "value"), rows=rows)
