"""Add up the terms of chunks to those of the batch.

A term is a mean or a sum over samples, multiplied and divided by scales. The mean over the batch is
the sum of the means over chunks, each multiplied by the fraction of the entries that its chunk has;
for sums, all fractions are 1. A loss has the fractions of one of its terms. If another term is a
mean over other entries, ``join_terms`` adds the difference, which takes the values of that term on
each replica; these are known if it is a counted cross entropy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...torch_versions import run_at_once

Value = Any
"""A number or a tensor."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A multiplication or division of a term.

    Attributes:
        values: the factor or denominator on each replica.
        divides: whether it is a division.
        nodes: the autograd nodes of the operation; none if it is implied by others.
        is_constant: whether the factor depends on parameters only, not on samples.
    """

    values: Sequence[Value]
    divides: bool = False
    nodes: Sequence[Any] = ()
    is_constant: bool = False


@dataclass(frozen=True, slots=True)
class Denominator:
    """The denominator of the batch, where those of chunks do not add up to it.

    Attributes:
        counts: a number of each chunk that adds up.
        of_batch: computes the denominator of the batch from their sum.
        added: a number that is added to each denominator, as in ``mask.sum() + 1``.
        may_be_empty: whether a chunk whose count is 0 contributes 0, whatever its fraction.
    """

    counts: Sequence[Value]
    of_batch: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    added: float = 0.0
    may_be_empty: bool = False


@dataclass(slots=True, eq=False)
class Term:
    """A term of a loss, on all replicas.

    Attributes:
        weights: the denominator of its mean on each replica; None for a sum.
        scales: the scales that lead from it to the loss.
        losses: its value on each replica, if that is known.
        is_constant: whether it does not depend on samples, like a penalty on weights.
        denominator: the denominator of the batch, if the weights do not add up to it.
    """

    weights: Sequence[Value] | None = None
    scales: Sequence[Scale] = ()
    losses: Sequence[torch.Tensor] | None = None
    is_constant: bool = False
    denominator: Denominator | None = None

    def scaled_losses(self, device: torch.device) -> torch.Tensor:
        """Return the contribution of the term to the loss of each replica, on ``device``."""
        values = torch.stack([loss.to(device) for loss in self.losses or ()])
        for scale in self.scales:
            by: Any = scale.values
            if not are_numbers(by):
                by = torch.stack([value.to(device) for value in by])
            elif not are_equal(by):
                by = values.new_tensor(by)
            else:
                by = by[0]
            values = values / by if scale.divides else values * by
            if scale.divides and not are_numbers(scale.values):
                values = values.masked_fill(by == 0, 0)  # 0 / 0, if nothing counts in a chunk
        return values


def are_numbers(values: Sequence[Value]) -> bool:
    """Return whether none of the values is a tensor."""
    return not any(isinstance(value, torch.Tensor) for value in values)


def are_equal(values: Sequence[Any]) -> bool:
    """Return whether all numbers are equal."""
    return all(value == values[0] for value in values)


def are_close(values: Sequence[Value]) -> bool:
    """Return whether all tensors have the same shape and nearly the same values."""
    # In a type that holds any other, as they may be of several types, and bools do not compare.
    first, *others = (
        torch.as_tensor(value).detach().to("cpu", torch.complex128) for value in values
    )
    return all(other.shape == first.shape and other.allclose(first) for other in others)


def are_proportional(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two sequences of numbers differ by a factor only.

    Tensors are not read: they are proportional if they are the same objects.
    """
    if not are_numbers(ones) or not are_numbers(others):
        return all(one is other for one, other in zip(ones, others, strict=True))
    total, other_total = sum(ones), sum(others)
    return all(
        math.isclose(one * other_total, other * total, rel_tol=1e-12, abs_tol=0.0)
        for one, other in zip(ones, others, strict=True)
    )


def weighted_mean(
    outputs: Sequence[torch.Tensor], weights: Sequence[Value] | None, device: torch.device
) -> torch.Tensor:
    """Return the weighted mean of 0-dim outputs on ``device``, or their sum without weights.

    A NaN with a weight of 0 is ignored. If all weights are the number 0, they count as equal.
    """
    return weighted_sum(outputs, fractions_of(Term(weights), device, len(outputs)), device)


def fractions_of(term: Term, device: torch.device, count: int) -> torch.Tensor | list[float]:
    """Return the factors with which the values of ``count`` replicas add up to that of the batch.

    They are numbers, or a tensor on ``device`` if the weights are tensors.
    """
    weights = term.weights
    if weights is None:
        return [1.0] * count
    if are_numbers(weights):
        numbers = [float(weight) for weight in weights]
        whole = sum(numbers)
        return [number / whole for number in numbers] if whole else [1 / count] * count
    tensors = _stacked(weights, device)
    if term.denominator is None:
        return tensors / tensors.sum()
    counts = _stacked(term.denominator.counts, device)
    fractions = tensors / term.denominator.of_batch(counts.sum()).to(device)
    if not term.denominator.may_be_empty:
        return fractions
    # They have to add up to 1 for what is the same on every replica, such as a penalty.
    is_empty = counts == 0
    rest = 1 - fractions.masked_fill(is_empty, 0).sum()
    return torch.where(is_empty, rest / is_empty.sum().clamp(min=1), fractions)


def _stacked(weights: Iterable[Any], device: torch.device) -> torch.Tensor:
    # In float64, where a count of tokens is exact.
    tensors = [torch.as_tensor(weight, device=device) for weight in weights]
    return torch.stack(tensors).detach().double()


def weighted_sum(
    outputs: Sequence[torch.Tensor],
    fractions: torch.Tensor | list[float],
    device: torch.device,
    may_be_nan: bool = True,
) -> torch.Tensor:
    """Return the sum on ``device`` of 0-dim outputs multiplied by their fractions.

    Args:
        outputs: the outputs.
        fractions: a factor for each.
        device: the device of the sum.
        may_be_nan: whether an output may be NaN and is ignored if its fraction is 0.
    """
    moved = [output.to(device) for output in outputs]
    for output, there in zip(outputs, moved, strict=True):
        if there is not output and there.grad_fn is not None:
            run_at_once(there.grad_fn)  # or other replicas would wait for the first
    if isinstance(fractions, torch.Tensor):
        values = torch.stack(moved)
        if may_be_nan:  # 0 / 0, if nothing counts in a chunk
            values = values.masked_fill((fractions == 0) & values.isnan(), 0)
        return _dot(values, fractions)
    parts = [
        output if fraction == 1 else output * fraction  # integers stay integers in a sum
        for output, fraction in zip(moved, fractions, strict=True)
        if fraction
    ]
    return functools.reduce(torch.add, parts)


def _dot(values: torch.Tensor, fractions: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(values.dtype, torch.float32)
    return torch.dot(values.to(dtype), fractions.to(dtype)).to(values.dtype)


def join_terms(
    outputs: Sequence[torch.Tensor], terms: Sequence[Term], base: Term, device: torch.device
) -> torch.Tensor:
    """Return the loss of the batch on ``device``, with the fractions of ``base``.

    For other terms whose losses are known, the difference to their own fractions is added.
    """
    fractions = fractions_of(base, device, len(outputs))
    may_be_nan = not base.losses or not all(are_numbers(scale.values) for scale in base.scales)
    joined = weighted_sum(outputs, fractions, device, may_be_nan)
    for term in terms:
        if not term.losses or term is base:
            continue
        own = fractions_of(term, device, len(outputs))
        own, given = (
            torch.as_tensor(f, dtype=torch.double, device=device) for f in (own, fractions)
        )
        joined = joined + _dot(term.scaled_losses(device), own - given)
    return joined
