"""Find out which scales of a term count its entries.

A sum divided by the number of its entries is a mean, and a mean multiplied by it is a sum. Any
other scale should be the same on all replicas, and changes neither. A number counts entries if it
differs between replicas as their entries do. If chunks have the same size, such numbers do not
differ. Then earlier calls may have shown what is at the same place of the graph; if not, a multiple
of the chunk size is taken for a count. A tensor as a denominator is taken for a count, unless it is
the same for the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .calls import Call, Calls
from .counted import without_nan_gradients
from .denominators import UnclearError, find_denominator, is_of_number, with_added
from .samples import Samples
from .terms import Denominator, Scale, Term, Value, are_close, are_equal, are_proportional


@dataclass(slots=True, eq=False)
class Scaling:
    """The scales of the terms of one loss.

    Attributes:
        samples: finds the entries of samples.
        calls: the calls that were noted.
        given: the numbers and 0-dim tensors among the arguments, which every replica has got: a
            division by one of them is the same on all replicas.
        has_num_items: whether ``num_items_in_batch`` was among the arguments. Then other tensors,
            too, are taken to be the same on all replicas if their place is not in ``places``.
        places: for each place in the graph with a scale, whether earlier calls have shown that the
            scale is a count of entries, and not the same on all replicas. It is updated.
        added: for places of tensors that are a count plus a number, that number, and for those that
            are no count, why. It is updated.
        multipliers: the tensors by which terms are multiplied; if they are not equal on all
            replicas, the terms are not exact.
        doubts: why terms may not be exact.
        must_note: whether only noted calls show what the weights add up to.
    """

    samples: Samples
    calls: Calls
    given: Sequence[Any]
    has_num_items: bool
    places: dict[tuple[Any, ...], bool]
    added: dict[tuple[Any, ...], float | str]
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
        denominator = None
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
                denominator = self._denominator(values, weights, place)
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
        return Term(weights, scales, denominator=denominator)

    def _is_whole(self, values: Sequence[Value], place: tuple[Any, ...], is_mean: bool) -> bool:
        """Return whether a denominator is that of the whole batch, so the same on all replicas.

        In a call that is noted, values are compared, which waits for their devices.
        """
        if all(map(self._is_given, values)):
            return True
        if self.calls:  # if it was not computed from samples, it is the same everywhere
            known = [self.calls[id(value)] for value in values if id(value) in self.calls]
            is_count = len(known) == len(values) and self.samples.are_behind(
                [(call, 0) for call in known]
            )
            if not is_count:
                has_number = bool(known) and is_of_number(known[0])
                may_be_count = has_number and not is_mean and are_equal(self.samples.chunk_sizes)
                is_multiple = may_be_count and float(values[0]) % self.samples.chunk_sizes[0] == 0
                was_count = has_number and self.places.get(place, False)
                is_count = is_multiple or was_count or not are_close(values)
            self.places[place] = is_count
        return not self.places.get(place, not self.has_num_items)

    def _denominator(
        self, values: Sequence[Value], weights: Sequence[Value] | None, place: tuple[Any, ...]
    ) -> Denominator | None:
        """Return ``Term.denominator`` of a term that is divided by these tensors.

        Args:
            values: the denominator on each replica.
            weights: the weights of the means that they divide; None for sums.
            place: their place in the graph.

        Raises:
            UnclearError: it is not known how they add up to the denominator of the batch.
        """
        known = [self.calls[id(value)] for value in values if id(value) in self.calls]
        if not known:
            added = self.added.get(place, 0.0)
            if isinstance(added, str):
                raise UnclearError(added)
            return with_added(values, added) if weights is None else None
        try:
            denominator, added = find_denominator(known, values, weights, self.samples)
        except UnclearError as error:
            self.added[place] = str(error)
            raise
        if denominator is not None and denominator.counts is not values:
            self.must_note = True
        self.added[place] = added
        return denominator

    def _is_count(self, scale: Scale, sizes: Sequence[Value], place: tuple[Any, ...]) -> bool:
        """Return whether a sum is divided by the number of its entries in each chunk."""
        numbers = [v if scale.divides else 1 / v if v else 0.0 for v in scale.values]
        number, chunk_size = numbers[0], self.samples.chunk_sizes[0]
        if all(size == n for size, n in zip(sizes, numbers, strict=True)):
            self.places[place] = True
        elif not are_equal(numbers):
            surplus = {n - size for n, size in zip(numbers, sizes, strict=True)}
            if len(surplus) == 1:
                self.doubts.append(
                    f"it is divided by its number of entries plus {surplus.pop():g} in each chunk"
                )
            if 1 in numbers and not are_proportional(numbers, self.samples.chunk_sizes):
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
        elif not are_equal(self.samples.chunk_sizes):
            if self.places.setdefault(place, False):
                self.doubts.append(
                    f"it is divided by {number:g} in each chunk, but was by a count in another call"
                )
        elif place not in self.places:
            # Neither a factor of 1/2 in chunks of two samples nor the batch size is a count.
            if number == sum(self.samples.chunk_sizes) and scale.divides:
                self.doubts.append(
                    f"it is divided by {number:g}, which is the size of the batch, but may be a "
                    "multiple of that of each chunk"
                )
            is_multiple = number % chunk_size == 0 and number != sum(self.samples.chunk_sizes)
            return number >= 1 and is_multiple and (scale.divides or chunk_size > 2)
        return self.places[place]

    def _is_given(self, value: Value) -> bool:
        """Return whether a number or tensor is among the arguments of the call."""
        if isinstance(value, torch.Tensor):
            return any(item is value for item in self.given)
        if value in (1, *self.samples.chunk_sizes):  # then it may also be a count
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
            are_equal(self.samples.chunk_sizes)
            and place not in self.places
            and values[0] == self.samples.chunk_sizes[0] > 1
        ):
            self.doubts.append(
                f"it is multiplied by {values[0]:g}, which is also the number of samples in each "
                "chunk, and is taken for a constant"
            )
        return self.places.get(place, False)
