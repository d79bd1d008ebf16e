"""Find out whether tensors of the replicas have entries of samples, or are the same everywhere.

With unequal chunks, shapes tell. With equal chunks, earlier calls with unequal ones do; or else it
is supposed from the graph and from values, and a doubt is noted where either may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import SymbolicValueError
from .numbers import Fact, Numbers, Place, UnclearError
from .origins import Origin, origin_of
from .step import Reduction, Step

_JOINED = "it reduces a tensor that has no entry for each sample"


@dataclass(frozen=True, slots=True)
class Samples:
    """The entries of samples in one call.

    Attributes:
        numbers: the chunk sizes, what earlier calls have shown, and doubts. It is updated.
        compares_again: whether tensors are compared again that an earlier call has compared, which
            waits for their devices.
    """

    numbers: Numbers
    compares_again: bool

    def keeps_samples(self, group: Sequence[Step], place: Place) -> bool:
        """Return whether a reduction of some dimensions has left that of the samples."""
        first, size = group[0], self.numbers.chunk_sizes[0]
        if not first.shape or not self.numbers.are_chunks_equal:
            return any(step.shape != first.shape for step in group)
        # The number of entries that were reduced to one is a multiple, if these were samples.
        assert first.reduction is not None
        if first.reduction.shape.numel() // max(1, first.shape.numel()) % size:
            return True
        fact = self.numbers.facts.get(place_of(first.reduction, place))
        if size in first.shape and fact is not Fact.SAMPLES:
            self.numbers.doubts.append(
                f"it reduces a tensor of shape {tuple(first.reduction.shape)}, which may have its "
                "samples along another dimension"
            )
        return False

    def check_classes(self, reductions: Sequence[Reduction], place: Place) -> None:
        """Check that the classes of a cross entropy are not the samples of each chunk."""
        numbers = [reduction.num_classes for reduction in reductions]
        if any(number != numbers[0] for number in numbers):
            raise UnclearError("the classes of its cross entropy are the samples of each chunk")
        place = (*place, "classes")
        if not self.numbers.are_chunks_equal:
            self.numbers.facts[place] = Fact.SAME
        elif numbers[0] == self.numbers.chunk_sizes[0] > 2 and place not in self.numbers.facts:
            self.numbers.doubts.append(
                f"it has as many classes as each chunk has samples, {numbers[0]}; these may be the "
                "samples"
            )

    def are_over_samples(
        self, reduction: Reduction, values: Sequence[torch.Tensor | None], place: Place
    ) -> bool:
        """Return whether tensors of one shape on all replicas had entries of samples.

        Raises:
            UnclearError: they were computed from samples, but have no entries of them.
        """
        place = place_of(reduction, place)
        fact = self.numbers.facts.get(place)
        if fact is Fact.SAMPLES or reduction.num_classes is not None:
            return True
        if fact is None or self.compares_again:
            fact = self.numbers.facts[place] = self._supposed(reduction, values, fact)
        if fact is Fact.UNCLEAR:
            raise UnclearError(_JOINED)
        return fact is Fact.SUPPOSED_SAMPLES

    def compare(self, values: Sequence[torch.Tensor]) -> Fact:
        """Compare tensors of one shape between the replicas; 0-dim integers may be counts."""
        are_equal, value = _are_equal(values), values[0]
        is_same = are_equal is not False
        if value.dim():
            may_be = self._may_have_samples(value.shape)
            return Fact.SAME if is_same else Fact.SAMPLES if may_be else Fact.UNCLEAR
        if value.dtype is torch.bool or value.is_floating_point() or value.is_complex():
            return Fact.SAME if is_same else Fact.UNCLEAR
        if are_equal is None:
            return Fact.SAME
        numbers = [int(value) for value in values]
        size = self.numbers.chunk_sizes[0]
        if is_same and not (self.numbers.are_chunks_equal and numbers[0] and not numbers[0] % size):
            return Fact.SAME
        self.numbers.doubt_count(numbers)
        return Fact.COUNT

    def _may_have_samples(self, shape: torch.Size) -> bool:
        """Return whether a tensor of one shape on all replicas may have entries of samples."""
        size = self.numbers.chunk_sizes[0]
        return self.numbers.are_chunks_equal and math.prod(shape) % size == 0

    def _supposed(self, reduction: Reduction, values: Sequence[Any], known: Fact | None) -> Fact:
        """Suppose whether a tensor had entries of samples, by its graph and its values."""
        may_be, origin = self._may_have_samples(reduction.shape), origin_of(reduction.source)
        are_equal = False if values[0] is None else _are_equal(values)
        if are_equal is None:
            return Fact.SAME if origin is Origin.UNKNOWN else Fact.SUPPOSED_SAMPLES
        if not are_equal:
            are_samples = may_be or origin is Origin.SELECTED or known is Fact.SUPPOSED_SAMPLES
            return Fact.SUPPOSED_SAMPLES if are_samples else Fact.UNCLEAR
        if not may_be or known is Fact.SAME:
            return Fact.SAME
        if reduction.name != "sum":  # it makes no difference
            return Fact.SUPPOSED_SAMPLES if origin is Origin.SAMPLES else Fact.SAME
        if reduction.source is None and _is_whole(values[0]):
            return Fact.SUPPOSED_SAMPLES  # counts may be equal by chance
        if reduction.source is None or origin is Origin.SAMPLES:
            self.numbers.doubts.append(
                "it has a sum that is the same on all replicas, which may be over samples or over "
                "parameters only"
            )
        return Fact.SUPPOSED_SAMPLES if origin is Origin.SAMPLES else Fact.SAME


def place_of(reduction: Reduction, place: Place) -> Place:
    """Return the place of a reduction; one of the same form may also be over parameters."""
    return (*place, reduction.shape[1:])


def _are_equal(values: Sequence[torch.Tensor]) -> bool | None:
    """Return whether tensors have equal values, or only NaN; this waits for their devices.

    Of emulated devices that keep shapes only, nobody knows: None.
    """
    try:
        first, *others = (value.detach().cpu() for value in values)
        return all(
            other.equal(first) or bool((other.isnan() & first.isnan()).all()) for other in others
        )
    except SymbolicValueError:
        return None


def _is_whole(value: torch.Tensor) -> bool:
    """Return whether a tensor has whole numbers only."""
    return not value.is_complex() and bool((value.detach().double() % 1 == 0).all())
