"""What other options would take, estimated from the memory model of one. Pure arithmetic."""

from __future__ import annotations

from dataclasses import replace

from .memory_model import LinearTerm, MemoryModel


def with_loss_on_each_device(
    model: MemoryModel,
    gathered_bytes_per_sample: float = 0.0,
    input_bytes_per_sample: float = 0.0,
) -> MemoryModel:
    """Return the model of the same training with ``gather=False`` and ``BalancedCriterion``.

    What device 0 held for each sample of the batch, each device holds for its own samples, except
    for the copies of gathered outputs. Inputs that the script moves to device 0 stay there.
    """
    gone_bytes = gathered_bytes_per_sample + input_bytes_per_sample

    def moved(term: LinearTerm, own_bytes: float) -> LinearTerm:
        own = term.own_bytes_per_sample + max(0.0, own_bytes - gone_bytes)
        whole = min(term.whole_bytes_per_sample, input_bytes_per_sample)
        return LinearTerm(term.fixed_bytes, own, whole)

    whole_bytes = model.whole_bytes_per_sample
    return replace(
        model,
        first_terms=tuple(moved(term, term.whole_bytes_per_sample) for term in model.first_terms),
        idle_terms=tuple(moved(term, 0.0) for term in model.idle_terms),
        other_terms=tuple(moved(term, whole_bytes) for term in model.other_terms),
    )


def with_spread(model: MemoryModel, num_devices: int) -> MemoryModel:
    """Return the model of the same training with ``spread=True``.

    What device 0 holds beyond the copies of parameters and gradients that the others hold is
    divided among all devices.
    """
    first, others = (
        max((term.fixed_bytes for term in terms), default=0.0)
        for terms in ((*model.first_terms, *model.idle_terms), model.other_terms)
    )
    excess = max(0.0, first - others)

    def changed(terms: tuple[LinearTerm, ...], by: float) -> tuple[LinearTerm, ...]:
        return tuple(replace(term, fixed_bytes=max(0.0, term.fixed_bytes + by)) for term in terms)

    share = excess / num_devices
    return replace(
        model,
        first_terms=changed(model.first_terms, share - excess),
        idle_terms=changed(model.idle_terms, share - excess),
        other_terms=changed(model.other_terms, share),
    )
