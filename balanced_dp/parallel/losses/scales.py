"""Find out which scales of a term count its entries.

A sum divided by the number of its entries is a mean, and a mean multiplied by it is a sum. Any
other scale should be the same on all replicas, and changes neither. A number counts entries if it
differs between replicas as their entries do. If chunks have the same size, such numbers do not
differ. Then earlier calls may have shown what is at the same place of the graph; if not, a multiple
of the chunk size is taken for a count. A tensor as a denominator is taken for a count, unless it is
the same for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .calls import Call, Calls
from .counted import without_nan_gradients
from .nodes import VIEWS
from .terms import Scale, Term, Value, are_close, are_equal, are_numbers, are_proportional

_OF_NUMBERS = ("tensor", "as_tensor", "scalar_tensor", "full")
"""Functions that make a tensor of a number."""

_ADDING_UP = ("Sum", "count_nonzero", *_OF_NUMBERS)
"""Functions whose results for chunks add up to that for the batch, if they count entries."""


class UnclearError(Exception):
    """A term is not known to be a mean or a sum over samples; the message says why."""


@dataclass(slots=True, eq=False)
class Scaling:
    """The scales of the terms of one loss.

    Attributes:
        chunk_sizes: how many samples each replica had.
        calls: the calls that were noted.
        given: the numbers and 0-dim tensors among the arguments, which every replica has got: a
            division by one of them is the same on all replicas.
        has_num_items: whether ``num_items_in_batch`` was among the arguments. Then other tensors,
            too, are taken to be the same on all replicas if their place is not in ``places``.
        places: for each place in the graph with a scale, whether earlier calls have shown that the
            scale is a count of entries, and not the same on all replicas. It is updated.
        added: for places of tensors that are a count plus a number: that number. It is updated.
        multipliers: the tensors by which terms are multiplied; if they are not equal on all
            replicas, the terms are not exact.
        doubts: why terms may not be exact.
        must_note: whether only noted calls show what the weights add up to.
    """

    chunk_sizes: Sequence[int]
    calls: Calls
    given: Sequence[Any]
    has_num_items: bool
    places: dict[tuple[Any, ...], bool]
    added: dict[tuple[Any, ...], float]
    multipliers: list[Sequence[torch.Tensor]] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    must_note: bool = False

    def term(
        self,
        weights: Sequence[Value] | None,
        sizes: Sequence[Value],
        scales: Sequence[Scale],
        names: tuple[str, ...],
    ) -> Term:
        """Return a term after its scales, which may make a mean of a sum, or a sum of a mean.

        Args:
            weights: the denominators of a mean; None for a sum.
            sizes: the number of entries on each replica.
            scales: the scales from the term to the loss.
            names: the operators that the walk has met, which identify the term.

        Raises:
            UnclearError: the term is not known to be a mean or a sum.
        """
        counts = None
        for position, scale in enumerate(scales):
            values, place = scale.values, (torch.is_grad_enabled(), names, position)
            if any(isinstance(value, torch.Tensor) for value in values):
                if scale.is_constant or (
                    scale.divides and self._is_whole(values, place, weights is not None)
                ):
                    continue
                if not scale.divides:
                    self.multipliers.append([v for v in values if isinstance(v, torch.Tensor)])
                    continue
                if not all(isinstance(value, torch.Tensor) for value in values):
                    raise UnclearError("it is divided by a tensor in some chunks only")
                if any(value.dim() for value in values):
                    raise UnclearError("it is divided by a tensor with several entries")
                counts = self._counts(values, weights, place)
                for node, count in zip(scale.nodes, values, strict=True):
                    if not isinstance(node, Call):
                        without_nan_gradients(node, count)
                if weights is not None:
                    values = [weight * value for weight, value in zip(weights, values, strict=True)]
                weights = values
            elif weights is None and self._is_count(scale, sizes, place):
                weights = values if scale.divides else [1 / v if v else 0.0 for v in values]
            elif weights is not None and self._is_chunk_size(scale, weights, place):
                weights = None
            elif not are_equal(values):
                raise UnclearError("it is scaled by a number that differs between the replicas")
        return Term(weights, scales, counts=counts)

    def _is_whole(self, values: Sequence[Value], place: tuple[Any, ...], is_mean: bool) -> bool:
        """Return whether a denominator is that of the whole batch, so the same on all replicas.

        In a call that is noted, values are compared, which waits for their devices.
        """
        if all(map(self._is_given, values)):
            return True
        if self.calls:  # if it was not computed from samples, it is the same everywhere
            calls = [self.calls.get(id(value)) for value in values]
            is_count = all(calls) and any(call is not None and call.is_of_samples for call in calls)
            if not is_count:
                is_of_number = calls[0] and _origin(calls[0])[0].operator in _OF_NUMBERS
                may_be_count = is_of_number and not is_mean and are_equal(self.chunk_sizes)
                is_multiple = may_be_count and float(values[0]) % self.chunk_sizes[0] == 0
                is_count = is_multiple or not are_close(values)
            self.places[place] = bool(is_count)
        return not self.places.get(place, not self.has_num_items)

    def _counts(
        self, values: Sequence[Value], weights: Sequence[Value] | None, place: tuple[Any, ...]
    ) -> Any:
        """Return ``Term.counts`` of denominators, from the calls that computed them.

        Args:
            values: the denominator on each replica.
            weights: the weights of the means that they divide; None for sums.
            place: their place in the graph.

        Raises:
            UnclearError: they do not add up to the denominator of the batch.
        """
        calls = [self.calls.get(id(value)) for value in values]
        known = [_origin(call) for call in calls if call]
        finish = known[0][0].finish if known else None
        if finish is not None and all(call.finish is not None for call, _ in known):
            self.must_note = True
            values = [call.count for call, _ in known]
            known = [_origin(call.operand) for call, _ in known if call.operand]
        if known:
            operators = {call.operator for call, _ in known}
            if len(known) < len(calls) or len(operators) > 1:
                raise UnclearError("it is divided by tensors that replicas computed differently")
            [operator] = operators
            if operator not in (("Mean",) if weights else _ADDING_UP) or (
                finish is not None and operator in _OF_NUMBERS
            ):
                raise UnclearError(f"it is divided by a {operator}, which need not add up")
            self.added[place] = known[0][1]
        return _joined_count(values, finish, self.added.get(place, 0.0), weights)

    def _is_count(self, scale: Scale, sizes: Sequence[Value], place: tuple[Any, ...]) -> bool:
        """Return whether a sum is divided by the number of its entries in each chunk."""
        numbers = [v if scale.divides else 1 / v if v else 0.0 for v in scale.values]
        number, chunk_size = numbers[0], self.chunk_sizes[0]
        if all(size == n for size, n in zip(sizes, numbers, strict=True)):
            self.places[place] = True
        elif not are_equal(numbers):
            if 1 in numbers and not are_proportional(numbers, self.chunk_sizes):
                self.doubts.append(
                    "it is divided by 1 in a chunk, which may stand for a count of 0; divide by "
                    "the tensor mask.sum().clamp(min=1)"
                )
            if any(n % 1 for n in numbers):
                self.doubts.append(
                    "it is divided by numbers that differ between replicas and are not counts; "
                    "divide by a tensor, such as weights.sum()"
                )
            self.places[place] = True
        elif self._is_given(number):
            return False
        elif not are_equal(self.chunk_sizes):
            if self.places.setdefault(place, False):
                self.doubts.append(
                    f"it is divided by {number:g} in each chunk, but was by a count in another call"
                )
        elif place not in self.places:
            # Neither a factor of 1/2 in chunks of two samples nor the batch size is a count.
            if number == sum(self.chunk_sizes) and scale.divides:
                self.doubts.append(
                    f"it is divided by {number:g}, which is the size of the batch, but may be a "
                    "multiple of that of each chunk"
                )
            is_multiple = number % chunk_size == 0 and number != sum(self.chunk_sizes)
            return number >= 1 and is_multiple and (scale.divides or chunk_size > 2)
        return self.places[place]

    def _is_given(self, value: Value) -> bool:
        """Return whether a number or tensor is among the arguments of the call."""
        if isinstance(value, torch.Tensor):
            return any(item is value for item in self.given)
        if value in (1, *self.chunk_sizes):  # then it may also be a count
            return False
        return any(item == value for item in self.given if not isinstance(item, torch.Tensor))

    def _is_chunk_size(
        self, scale: Scale, weights: Sequence[Value], place: tuple[Any, ...]
    ) -> bool:
        """Return whether a mean is multiplied by the number of its entries in each chunk."""
        values = scale.values
        if scale.divides:
            return False
        if not are_equal(values):
            self.places[place] = are_proportional(values, weights)
            if self.places[place] and any(value % 1 for value in values):
                self.doubts.append("it is multiplied by fractions that differ between replicas")
        elif (
            are_equal(self.chunk_sizes)
            and place not in self.places
            and values[0] == self.chunk_sizes[0] > 1
        ):
            self.doubts.append(
                f"it is multiplied by {values[0]:g}, which is also the number of samples in each "
                "chunk, and is taken for a constant"
            )
        return self.places.get(place, False)


def _joined_count(
    counts: Sequence[Value],
    finish: Callable[[torch.Tensor], torch.Tensor] | None,
    added: float,
    weights: Sequence[Value] | None,
) -> Any:
    """Return ``Term.counts`` of counts that have a number added; of means with these weights."""
    if weights is None and (finish is not None or added):
        surplus, finish = added * (len(counts) - 1), finish or torch.clone
        return counts, lambda whole: finish(whole - surplus)
    if finish is None:  # means add up, each with the same number added
        return None
    if not are_numbers(weights or ()):
        raise UnclearError("it is a mean over counted targets, divided by another mean")
    total = sum(weights or ())
    sums = [count * weight for count, weight in zip(counts, weights or (), strict=True)]
    return sums, lambda whole: finish(whole / total) * total


def _origin(call: Call) -> tuple[Call, float]:
    """Skip views, casts and additions, and return the call before them and the number added."""
    added = 0.0
    while call.operand and (call.added is not None or call.operator in VIEWS):
        added += call.added or 0.0
        call = call.operand
    return call, added
