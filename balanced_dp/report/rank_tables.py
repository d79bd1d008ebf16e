"""The words and the table of a plan for ranks."""

from __future__ import annotations

from ..plan import utilizations
from ..rank_tuner import RankReport
from ..tuning import Report
from ..units import format_bytes
from .tables import TextTable


def rank_title(report: RankReport) -> str:
    """Returns what the plan is about."""
    plan = report.plan
    return (
        f"{report.workload}, batches of {plan.batch_size}, {len(plan.chunk_sizes)} ranks of "
        "DistributedDataParallel"
    )


def rank_caption(report: RankReport) -> str:
    """Returns what the figures rest on."""
    precision = f"autocast to {report.precision}" if report.precision else "no autocast"
    sentence = (
        f"From {len(report.measurements)} shares of one rank, measured on an emulated device, "
        f"shapes only; {precision}."
    )
    reserve = report.plan.reserve_bytes
    if reserve:
        sentence += f" {format_bytes(reserve)} of each device are left for contexts and workspaces."
    return sentence


def rank_table(report: RankReport) -> TextTable:
    """Returns what each rank gets and holds."""
    plan = report.plan
    columns = (
        map(str, plan.chunk_sizes),
        map(format_bytes, plan.capacity_bytes),
        map(format_bytes, plan.predicted_bytes),
        map(format_bytes, report.measured_bytes),
        map("{:.0%}".format, utilizations(report.measured_bytes, plan.budgets)),
        map(format_bytes, plan.even_bytes),
    )
    return TextTable(
        headers=("rank", "samples", "capacity", "predicted", "measured", "full", "equal shares"),
        rows=tuple((str(i), *cells) for i, cells in enumerate(zip(*columns, strict=True))),
        marked=plan.limiting_rank,
    )


def rank_line(report: RankReport) -> str:
    """Returns what to write in a training script."""
    plan = report.plan
    return f"sampler = BalancedBatchSampler(dataset, {plan.batch_size}, {plan.chunk_sizes})"


def rank_summary(report: RankReport) -> tuple[str, ...]:
    """Returns what the plan comes to, and which engine holds the larger batch, in sentences."""
    plan = report.plan
    sentences = [
        f"The largest batch that fits is {plan.max_batch_size}, with shares "
        f"{plan.max_batch_chunk_sizes}; with equal shares it is {plan.even_max_batch_size}.",
        f"Each rank holds {format_bytes(plan.fixed_bytes)} whatever its share: parameters, "
        f"optimizer state, what its step takes, and {format_bytes(report.bucket_bytes)} of "
        "buckets, which the gradients are views of.",
    ]
    for found in report.balanced:
        line, size = _largest(found)
        sentences.append(
            f"On the same devices {line} holds batches of {size}: {_what_balanced_holds(found)}."
        )
    sentences += [f"BalancedDataParallel cannot: {reason}" for reason in report.no_balanced]
    if report.balanced:
        sentences.append(_verdict(report))
    return tuple(sentences)


def _largest(report: Report) -> tuple[str, int]:
    """Returns the line with which the largest batch fits, and that batch."""
    planned = report.plan
    arguments = f"gpu0_bsz={planned.max_batch_gpu0_bsz}, module=model"
    size, weighted = planned.max_batch_size, planned.weighted
    if weighted is not None and weighted.max_batch_size > size:
        weights = list(weighted.max_batch_chunk_sizes)
        arguments = f"gpu0_bsz=None, module=model, device_weights={weights}"
        size = weighted.max_batch_size
    gather = "" if report.gather else ", gather=False"
    return f"BalancedDataParallel({arguments}{gather})", size


def _what_balanced_holds(report: Report) -> str:
    model = report.model
    first, other = (
        format_bytes(round(max(law.fixed_bytes for law in laws)))
        for laws in (model.idle_laws or model.first_laws, model.other_laws)
    )
    text = f"device 0 needs {first} whatever its share, the others {other}"
    if report.gather:
        text += (
            f", and device 0 {format_bytes(model.whole_bytes_per_sample)} for each gathered sample"
        )
    return text


def _verdict(report: RankReport) -> str:
    ours = report.plan.max_batch_size
    best = max(report.balanced, key=lambda found: _largest(found)[1])
    line, size = _largest(best)
    if ours == size:
        return f"Both engines hold batches of {ours}."
    if ours > size:
        reason = ": no rank gathers for others" if best.gather else ""
        return f"DistributedDataParallel holds the larger batch, {ours} instead of {size}{reason}."
    return (
        f"{line} holds the larger batch, {size} instead of {ours}: only device 0 keeps optimizer "
        "state and all gradients."
    )
