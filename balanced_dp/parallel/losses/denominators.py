"""Find out what the denominators of chunks add up to, from the noted calls that computed them.

``mask.sum()`` of the chunks adds up to that of the batch. ``mask.sum() + 1e-8`` and
``mask.sum().clamp(min=1)`` do not, but the denominator of the batch can be computed from what does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from .calls import Call
from .nodes import VIEWS
from .samples import Samples
from .terms import Denominator, Value, are_close, are_equal, are_numbers, are_proportional

OF_NUMBERS = ("tensor", "as_tensor", "scalar_tensor", "full")
"""Functions that make a tensor of a number."""


class UnclearError(Exception):
    """A term is not known to be a mean or a sum over samples; the message says why."""


def is_of_number(call: Call | None) -> bool:
    """Return whether a tensor was made of a number."""
    return call is not None and _origin(call)[0].operator in OF_NUMBERS


def find_denominator(
    calls: Sequence[Call],
    values: Sequence[torch.Tensor],
    weights: Sequence[Value] | None,
    samples: Samples,
) -> tuple[Denominator | None, float]:
    """Return the denominator of the batch, and the number that was added to those of the chunks.

    It is None if those of the chunks add up.

    Args:
        calls: the call that computed the denominator of each replica.
        values: the denominators.
        weights: the weights of the means that they divide; None for sums.
        samples: the entries of samples.

    Raises:
        UnclearError: it cannot be computed from them.
    """
    origins = [_origin(call) for call in calls]
    finishing = [call for call, _ in origins if call.finish is not None and call.operand]
    counted = [_origin(call.operand) for call in finishing if call.operand] or origins
    kinds = [
        (call.operator, added, outer)
        for (call, added), (_, outer) in zip(counted, origins, strict=False)
    ]
    if len(kinds) < len(values) or not are_equal(kinds) or not _have_equal_limits(finishing):
        raise UnclearError("it is divided by tensors that replicas computed differently")
    operator, added, outer = kinds[0]
    operands = [call.operand for call, _ in counted if call.operand]
    adds_up = operator in OF_NUMBERS and not finishing and weights is None
    if operator in (("Sum", "count_nonzero") if weights is None else ("Mean",)):
        adds_up = len(operands) == len(calls)
        adds_up = adds_up and samples.are_selected_in([(operand, 0) for operand in operands])
    if not adds_up or added < 0:
        raise UnclearError(f"it is divided by a {operator}, which need not add up")
    if weights is not None and not (
        are_numbers(weights)
        and are_proportional(weights, [math.prod(call.shape) for call in operands])
    ):
        raise UnclearError("it is a mean divided by a mean over other entries")
    if not finishing:
        return with_added(values, added) if weights is None else None, added
    finish, counts = finishing[0].finish, [call.count for call in finishing]
    assert finish is not None
    if weights is not None:
        counts = [count * weight for count, weight in zip(counts, weights, strict=True)]
    return _finished(counts, finish, added, outer, weights), added


def with_added(values: Sequence[torch.Tensor], added: float) -> Denominator | None:
    """Return the denominator of the batch from those of chunks that have a number added."""
    surplus = added * (len(values) - 1)
    return Denominator(values, lambda whole: whole - surplus, added) if added else None


def _finished(
    counts: Sequence[torch.Tensor],
    finish: Callable[[torch.Tensor], torch.Tensor],
    added: float,
    outer: float,
    weights: Sequence[float] | None,
) -> Denominator:
    """Return the denominator of the batch from counts that ``finish`` has made denominators.

    Args:
        counts: they have ``added`` added already; of means, multiplied by the weights.
        finish: the function.
        added: see ``counts``.
        outer: the number that is added to the result.
        weights: the weights of means.
    """
    surplus = added * (len(counts) - 1)
    total = 1 if weights is None else sum(weights)

    def of_batch(whole: torch.Tensor) -> torch.Tensor:
        whole = whole - surplus if weights is None else whole / total
        return (finish(whole) + outer) * total

    return Denominator(counts, of_batch, outer, may_be_empty=not added)


def _have_equal_limits(calls: Sequence[Call]) -> bool:
    """Return whether the functions that finish counts have equal other arguments."""
    columns = zip(*(call.limits for call in calls), strict=False)
    return all(
        are_equal(column) if are_numbers(column) else are_close(column) for column in columns
    )


def _origin(call: Call) -> tuple[Call, float]:
    """Skip views, casts and additions, and return the call before them and the number added."""
    added = 0.0
    while call.operand and (call.added is not None or call.operator in VIEWS):
        added += call.added or 0.0
        call = call.operand
    return call, added
