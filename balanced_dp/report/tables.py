"""Turn a report into sentences, code and tables, to show on a terminal, in Markdown or in HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from ..memory.units import byte_scale, format_bytes
from ..search import utilizations
from ..tuning.options import Option
from ..tuning.report import Report, bottleneck


@dataclass(frozen=True, slots=True)
class TextTable:
    """Hold a table whose cells are text.

    Attributes:
        title: the heading of the table.
        headers: the headers of the columns.
        rows: the cells of each row.
        marked: the index of the row that is highlighted, or None.
        caption: the text below the table.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: int | None = None
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Code:
    """Hold lines of code to paste into a training script."""

    text: str


Part: TypeAlias = str | Code | TextTable
"""A part of the text of a report: sentences, lines of code, or a table."""

_FIRST = {"speed": "fastest first", "headroom": "least full first", "batch": "largest batch first"}
"""For each goal of a report, words for the order in which the report lists its options."""


def answer(report: Report) -> Iterator[Part]:
    """Yield the parts of the text of a report: sentences, lines of code, and tables."""
    yield from report.notes  # first, because a note may say that the peaks vary
    yield verdict(report)
    if report.ranked_options:
        yield option_table(report)
        yield Code(lines(report))
    yield from summary(report)
    yield device_table(report)
    yield candidate_table(report)


def title(report: Report) -> str:
    """Return the title of the report."""
    batches = "largest batches" if report.goal == "batch" else f"batches of {report.batch_size}"
    return f"{report.workload}, {batches}, {report.num_devices} devices"


def verdict(report: Report) -> str:
    """Return sentences that say which batch fits, and how full the fullest device is."""
    best, even = report.best, report.even
    if not report.ranked_options:
        text = report.what_lacks()
        return f"{text[:1].upper()}{text[1:]}."
    if report.goal == "batch":
        return f"The largest batch that fits is {best.batch_size}, with option 1."
    sentences = []
    if even is not None:
        fits = f" the batch {'fits' if even.fits(report.budgets) else 'does not fit'}:"
        fits *= report.has_capacity
        name = even.line if even.features else "nn.DataParallel"
        sentences.append(f"With the even split of {name},{fits} {_fullest(even, report)}.")
    if best is not even:
        sentences.append(f"With option 1, {_fullest(best, report)}.")
    if not report.has_capacity:
        where = " before the script" * report.is_script
        sentences.append(f"To see what fits, add --memory{where}, such as --memory 11GiB.")
    return " ".join(sentences)


def _fullest(option: Option, report: Report) -> str:
    """Return a clause that says which device is the fullest with ``option``, and how full."""
    if option.out_of_memory:
        return f"device {option.ran_out} runs out of memory"
    index, held = bottleneck(option, report.budgets)
    percent = f" ({held / report.budgets[index]:.0%})" if report.has_capacity else ""
    return f"device {index} is the fullest, with {format_bytes(held)}{percent}"


def option_table(report: Report) -> TextTable:
    """Return a table of the ranked options of a report, the best option first.

    An option is a way to train a batch, with its measurements. The report must have at least one
    ranked option.
    """
    rows = []
    for number, option in enumerate(report.ranked_options, 1):
        index, held = bottleneck(option, report.budgets)
        full = f"{held / report.budgets[index]:.0%}" if report.has_capacity else format_bytes(held)
        row = {"option": str(number), "split": short_split(option.chunk_sizes)}
        row |= {"fullest": f"device {index} {full}", "speed": f"{option.speed:.2f}"}
        if report.mode == "real":
            row["samples /s"] = f"{option.samples_per_s:.1f}"
        if any(o.batch_size != report.batch_size for o in report.options):
            row["largest batch"] = str(report.largest_batch(option).batch_size)
        if not report.is_script:  # the options of a script differ only in the split
            row["loss on"] = "device 0" if option.gather else "each"
            row["weights on"] = "all" if option.spread else "device 0"
        rows.append(row)
    batches = report.ranked_options if "largest batch" in rows[0] else ()
    others = [o for o in batches if report.largest_batch(o).gpu0_bsz != o.gpu0_bsz]
    caption = "Speed is an estimate: the most samples on any device with the even split, divided"
    caption += " by the most with the option. A smaller gpu0_bsz costs speed."
    caption += " A largest batch may need another gpu0_bsz: see --for batch." * bool(others)
    title = f"Options{' that fit' * report.has_capacity}, {_FIRST[report.goal]}"
    return TextTable(title, [*rows[0]], [[*row.values()] for row in rows], 0, caption)


def lines(report: Report) -> str:
    """Return the code that a training script needs for each ranked option (way to train)."""
    texts = [f"# {place}" for place in report.wrapped_at]
    names = "BalancedCriterion, BalancedDataParallel"
    texts += [f"from balanced_dp import {names}"] * (not report.is_script)
    is_new = bool(report.wrapped_at) and "BalancedDataParallel(" not in "".join(report.wrapped_at)
    for number, option in enumerate(report.ranked_options, 1):
        texts.append(f"# option {number}")
        if report.is_trainer and not option.is_even:
            texts.append("from balanced_dp.integrations.transformers import BalancedTrainer")
            arguments = f"gpu0_bsz={option.gpu0_bsz}{option.arguments}"
            texts.append(f"trainer = BalancedTrainer({arguments}, ...)")
            continue
        texts += ["from balanced_dp import BalancedDataParallel"] * bool(is_new and option.features)
        texts += report.assignments(option)
        if not option.gather and not report.is_script:  # a script with gather=False has this line
            texts.append("criterion = BalancedCriterion(criterion)  # metrics: outputs.gather()")
    return "\n".join(texts)


def summary(report: Report) -> Iterator[str]:
    """Yield sentences about how to use the options, and about what was not measured."""
    largest = max(option.batch_size for option in report.options)
    fits = any(o.fits(report.budgets) for o in report.options if o.batch_size == largest)
    if fits and largest > report.batch_size:
        yield f"Batches above {largest} were not measured; they may fit, too."
    for name, reason in report.failures.items():
        yield f"{name} cannot be measured: {reason}."
    if report.is_trainer:
        yield "For your own MyTrainer, define class Balanced(BalancedTrainer, MyTrainer)."
    if report.is_script and report.not_tried:
        others = " and ".join(report.not_tried)
        yield f"Not measured: {others}. To try, change the script and run it again."
    names = report.not_tried if report.is_script else [o.arguments for o in report.ranked_options]
    if "gather=False" in " ".join(names):
        yield "BalancedCriterion needs all steps from outputs to loss, also reshapes."


# Tables of what was measured.


def short_split(chunk_sizes: Sequence[int]) -> str:
    """Return the chunk size of each device as text, such as ``"5 9 9 9"``.

    If the text is long, equal neighbours are joined. For example, ``"2, 7x10"`` means 2 samples on
    device 0 and 10 samples on each of the 7 other devices.
    """
    text = " ".join(map(str, chunk_sizes))
    if len(text) <= 14:
        return text
    runs = [(size, len(list(run))) for size, run in groupby(chunk_sizes)]
    return ", ".join(f"{count}x{size}" if count > 1 else f"{size}" for size, count in runs)


def device_table(report: Report) -> TextTable:
    """Return a table of the memory that each device holds with the best option of a report.

    For comparison, a row has the peak of each device with the even split. The row is left out if
    the even split is the best option, ran out of memory or was not measured.
    """
    best, even = report.best, report.even_like(report.best)
    precision = f"autocast to {report.precision}" if report.precision else "no autocast"
    where = "accelerators" if report.mode == "real" else "emulated devices"
    where += ", shapes only" * (report.mode == "symbolic") + ", training only" * report.is_script
    caption = f"Measured on {where}; {precision}."
    caption += " Activation of device 0 is that of the loss." * (not best.chunk_sizes[0])
    if report.reserve_bytes:
        caption += f" {format_bytes(report.reserve_bytes)} of each is kept free for CUDA's context."
        # Without expandable segments, fragmentation in torch's allocator can take as much memory as
        # the reserve.
        caption += " Against fragmentation, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    return use_table(best, report.budgets if report.has_capacity else None, even, caption)


def use_table(
    option: Option, budgets: Sequence[int] | None, even: Option | None = None, caption: str = ""
) -> TextTable:
    """Return a table of what each device holds at its peak, by use of memory.

    Adjacent devices with equal values share a column.

    Args:
        option: the option (a way to train a batch, with its measurements) whose memory is shown.
        budgets: the bytes that each device may hold. None means not to show how full devices are.
        even: the option with the even split, whose peaks are shown for comparison. They are left
            out if the even split ran out of memory, or if it is the split of ``option``.
        caption: the text below the table.
    """
    scale, unit = byte_scale(max(option.peak_bytes))

    def sizes(held: Iterable[int]) -> list[str]:
        return [f"{num_bytes / scale:.2f}" for num_bytes in held]

    rows = {"samples": [*map(str, option.chunk_sizes)]} if option.batch_size else {}
    for use in largest_uses(option.uses, scale / 100):
        rows[use] = sizes(uses.get(use, 0) for uses in option.uses)
    rows["peak"] = sizes(option.peak_bytes)
    if budgets is not None:
        rows["full"] = [f"{full:.0%}" for full in utilizations(option.peak_bytes, budgets)]
    if even and even.chunk_sizes != option.chunk_sizes and not even.out_of_memory:
        rows[f"peak, even split{even.arguments}"] = sizes(even.peak_bytes)
    columns, first = {f"memory in {unit}": tuple(rows)}, 0
    for column, same in groupby(zip(*rows.values(), strict=True)):
        last = first + len(list(same)) - 1
        columns[f"device {first}" if first == last else f"devices {first}-{last}"] = column
        first = last + 1
    cells = [*zip(*columns.values(), strict=True)]
    title = "What each device holds" + f" with {option.line}" * bool(option.batch_size)
    return TextTable(title, [*columns], cells, list(rows).index("peak"), caption)


def largest_uses(breakdowns: Iterable[Mapping[str, int]], least_bytes: float) -> list[str]:
    """Return the uses of memory with at least ``least_bytes`` in any breakdown, the largest first.

    Args:
        breakdowns: mappings from the use of memory, such as ``"activation"``, to bytes.
        least_bytes: the bytes that a use must have in at least one of the breakdowns.
    """
    largest = Counter[str]()
    for sizes in breakdowns:
        largest |= Counter(sizes)
    return [use for use, size in largest.most_common() if size >= least_bytes]


def candidates(report: Report) -> list[Option]:
    """Return the options that have the same ``gather`` and ``spread`` as the best option.

    Only options for ``report.batch_size`` samples and without ``device_weights`` are returned. So
    the returned options differ only in ``gpu0_bsz``. They are sorted by their chunk sizes.
    """
    same = (o for o in report.options if o.kind == report.best.kind and not o.device_weights)
    of_batch = (option for option in same if option.batch_size == report.batch_size)
    return sorted(of_batch, key=lambda option: option.chunk_sizes)


def candidate_table(report: Report) -> TextTable:
    """Return a table of the measured values of ``gpu0_bsz``, with their peaks and their speed."""
    best, found = report.best, candidates(report)
    scale, unit = byte_scale(max((max(option.peak_bytes) for option in found), default=1))
    rows = []
    for option in found:
        held = option.peak_bytes[0] / scale, max(option.peak_bytes[1:]) / scale
        cells = [f"{number:.2f}" for number in (*held, speed(option, report))]
        split = [str(option.chunk_sizes[0]), short_split(option.chunk_sizes)]
        rows.append([*split, *(["out of memory", "", ""] if option.out_of_memory else cells)])
    loss = "outputs gathered" if best.gather else "loss on each device"
    loss += ", parameters spread" * best.spread
    return TextTable(
        f"Measured values of gpu0_bsz for batches of {report.batch_size}, {loss}, peaks in {unit}",
        ("gpu0_bsz", "split", "device 0", "highest other", speed_name(report)),
        rows,
        marked=found.index(best) if best in found else None,
    )


def speed(option: Option, report: Report) -> float:
    """Return the speed of an option in samples per second.

    On emulated devices, return ``Option.speed`` instead: the largest chunk of the even split,
    divided by the largest chunk of the option (both in samples).
    """
    return option.samples_per_s if report.mode == "real" else option.speed


def speed_name(report: Report) -> str:
    """Return the name of the quantity that ``speed`` returns for the options of a report."""
    return "samples/s" if report.mode == "real" else "speed"


def provenance_table(report: Report) -> TextTable:
    """Return a table that says when, where and how the measurements of a report were made."""
    provenance = report.provenance
    rows = {
        "created": provenance.created,
        "command": provenance.command,
        **{f"version of {name}": version for name, version in provenance.versions.items()},
        **provenance.machine,
        "parameters of the model": f"{report.num_parameters:,}",
    }
    return TextTable("Where this comes from", ("what", "value"), [*rows.items()])
