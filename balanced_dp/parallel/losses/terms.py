"""The terms that a loss is made of, and how those of chunks add up to that of the batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Value = Any
"""A number or a tensor."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A multiplication by a number or a tensor for each replica, or a division."""

    values: Sequence[Value]
    divides: bool = False
    nodes: Sequence[Any] = ()
    is_constant: bool = False


@dataclass(slots=True, eq=False)
class Term:
    """A part of a loss, on all replicas.

    Attributes:
        weights: what its mean is over, one for each replica; None where it is a sum.
        scales: what it is multiplied and divided by in the loss.
        losses: its own value on each replica, where that is known.
        is_constant: whether it has nothing to do with the samples, like a penalty on weights.
        counts: what the weights were made of, if those are not sums over samples themselves, and
            what makes the denominator of the whole batch of their sum.
    """

    weights: Sequence[Value] | None = None
    scales: Sequence[Scale] = ()
    losses: Sequence[torch.Tensor] | None = None
    is_constant: bool = False
    counts: tuple[Sequence[Value], Callable[[Any], Any]] | None = None

    def scaled_losses(self, device: torch.device) -> torch.Tensor:
        """Return what each replica's own value adds to its loss, on ``device``."""
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
        return values


def are_numbers(values: Sequence[Value]) -> bool:
    """Return whether none of the values is a tensor."""
    return not any(isinstance(value, torch.Tensor) for value in values)


def are_equal(values: Sequence[Any]) -> bool:
    """Return whether all numbers are the same."""
    return all(value == values[0] for value in values)


def are_proportional(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two sequences of numbers are the same but for one factor."""
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
    """Return the mean of 0-dim outputs on ``device``, or their sum where there are no weights.

    A weight of 0 leaves out a NaN. If all numbers are 0, they count as equal.
    """
    shares = shares_of(Term(weights), device, len(outputs))
    return weighted_sum(outputs, shares, device)


def shares_of(term: Term, device: torch.device, count: int) -> torch.Tensor | list[float]:
    """Return what each replica's value is multiplied by to add up to that of the whole batch."""
    weights = term.weights
    if weights is None:
        return [1.0] * count
    if are_numbers(weights):
        numbers = [float(weight) for weight in weights]
        whole = sum(numbers)
        return [number / whole for number in numbers] if whole else [1 / count] * count
    tensors = _on(device, weights)
    if term.counts is None:
        return tensors / tensors.sum()
    counts, finish = term.counts
    divisor: torch.Tensor = finish(_on(device, counts).sum())
    return tensors / divisor


def _on(device: torch.device, weights: Iterable[Any]) -> torch.Tensor:
    # In float64, where a count of tokens is exact.
    tensors = [torch.as_tensor(weight, device=device) for weight in weights]
    return torch.stack(tensors).detach().double()


def weighted_sum(
    outputs: Sequence[torch.Tensor],
    shares: torch.Tensor | list[float],
    device: torch.device,
    may_be_nan: bool = True,
) -> torch.Tensor:
    """Return the sum on ``device`` of 0-dim outputs multiplied by shares.

    With ``may_be_nan``, a NaN whose share is 0 is left out.
    """
    moved = [output.to(device) for output in outputs]
    if isinstance(shares, torch.Tensor):
        values = torch.stack(moved)
        if may_be_nan:  # 0 / 0 where nothing counts
            values = values.masked_fill((shares == 0) & values.isnan(), 0)
        return _dot(values, shares)
    parts = [
        output if share == 1 else output * share  # a sum of integers is one
        for output, share in zip(moved, shares, strict=True)
        if share
    ]
    return functools.reduce(torch.add, parts)


def _dot(values: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(values.dtype, torch.float32)
    return torch.dot(values.to(dtype), shares.to(dtype)).to(values.dtype)


def correction(
    term: Term, shares: torch.Tensor | list[float], device: torch.device
) -> torch.Tensor:
    """Return what a counted term lacks where it is weighted by the shares of others."""
    values = term.scaled_losses(device)
    own = torch.as_tensor(shares_of(term, device, len(values)), dtype=torch.double, device=device)
    return _dot(values, own - torch.as_tensor(shares, dtype=torch.double, device=device))
