"""Find out what numbers and tensors of the replicas are for the batch.

A number is the same on all replicas, or a count of each chunk, such as the number of its samples,
which adds up. A tensor is the same, or has entries of samples. With unequal chunks, values and
shapes tell. With equal ones, an earlier call with unequal chunks may have shown it; otherwise it is
supposed from values, chunk sizes and the graph, and a doubt is noted where it may be either.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from ...errors import SymbolicValueError
from .origins import Origin, origin_of
from .step import Reduction, Step

Place = tuple[Any, ...]
"""The output, the position of a step, and that of an operand: where the history has a fact."""

DIVISIONS = ("div", "divide", "itruediv", "true_divide", "truediv")
MULTIPLICATIONS = ("imul", "mul", "multiply", "rmul")
_ADDITIONS = ("add", "iadd", "isub", "radd", "rsub", "sub", "subtract")
"""Functions of torch by their names, without underscores at either end."""


class UnclearError(Exception):
    """The value for the batch is not known; the message says why."""


class Fact(enum.Enum):
    """What a number, a tensor or a reduction has shown in earlier calls."""

    SAME = "the same on all replicas"
    COUNT = "a count of each chunk"
    SUPPOSED_COUNT = "a count of each chunk, or else the same on all replicas"
    SAMPLES = "over the samples of each chunk"
    SUPPOSED_SAMPLES = "over the samples of each chunk, or else the same on all replicas"
    ONE = "over a single sample"
    ZERO = "zero on all replicas, which tells nothing; taken for one over samples"
    UNCLEAR = "none of these"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of numbers and tensors in one call.

    Attributes:
        chunk_sizes: how many samples each replica had.
        given: the numbers and 0-dim tensors among the arguments of the call, which every replica
            has got. Tensors are not read: that would wait for their devices.
        known: what earlier calls have shown, by place. It is updated.
        compares_again: whether tensors are compared again that an earlier call has compared, which
            waits for their devices.
        doubts: why values of the batch may be others. It is updated.
    """

    chunk_sizes: Sequence[int]
    given: Sequence[Any]
    known: dict[Place, Fact]
    compares_again: bool
    doubts: list[str] = field(default_factory=list)

    @property
    def are_chunks_equal(self) -> bool:
        """Whether all chunks have one size, so that counts of them do not differ."""
        return all(size == self.chunk_sizes[0] for size in self.chunk_sizes)

    def number(
        self, numbers: Sequence[Any], function: str, entries: Sequence[Any] | None, place: Any
    ) -> Any:
        """Return the number of the batch.

        Args:
            numbers: the number of each replica.
            function: the name of the function that was called with it.
            entries: if it was called on a sum, over how many entries that is on each replica.
            place: where this is.

        Raises:
            UnclearError: the numbers differ and are no counts.
        """
        if all(number == numbers[0] for number in numbers):
            fact = self._fact_of_number(numbers, function, entries, place)
            if fact is not None:
                self.known[place] = fact
            if fact not in (Fact.COUNT, Fact.SUPPOSED_COUNT):
                return numbers[0]
        else:
            self.known[place] = Fact.COUNT
        is_arithmetic = function in (*DIVISIONS, *MULTIPLICATIONS, *_ADDITIONS)
        if is_arithmetic and all(number % 1 == 0 for number in numbers):
            self.doubt_count(numbers, entries)
            return sum(numbers)
        inverses = [1 / number if number else math.nan for number in numbers]
        if function in MULTIPLICATIONS and all(
            math.isfinite(n) and math.isclose(n, round(n)) for n in inverses
        ):
            return 1 / sum(map(round, inverses))
        raise UnclearError(
            f"it is computed with a number, such as {numbers[0]:g}, that differs between the "
            "replicas and is no count; use a tensor, such as weights.sum()"
        )

    def _fact_of_number(
        self, numbers: Sequence[Any], function: str, entries: Sequence[Any] | None, place: Any
    ) -> Fact | None:
        """Return what a number is that all replicas have in common; None if that is not sure."""
        fact, number = self.known.get(place), numbers[0]
        if fact is Fact.SUPPOSED_COUNT and not self.are_chunks_equal:
            self.doubts.append(
                f"it is divided by {number:g} in each chunk, but was by a count in another call"
            )
            return Fact.SAME
        if fact is not None or self._is_given(number):
            return fact
        if not self.are_chunks_equal and list(numbers) != list(entries or ()):
            return Fact.SAME
        if entries is not None and function in DIVISIONS and list(numbers) == list(entries):
            return Fact.COUNT
        return self._supposed_count(number, function, entries is not None)

    def _supposed_count(self, number: Any, function: str, of_sum: bool) -> Fact | None:
        size, batch_size = self.chunk_sizes[0], sum(self.chunk_sizes)
        if not self.are_chunks_equal or not number:
            return None
        if of_sum and function in DIVISIONS:
            if number == batch_size:  # which is no count of a chunk
                self.doubts.append(
                    f"it is divided by {number:g}, which is the size of the batch, but may be a "
                    "multiple of that of each chunk"
                )
            elif number >= 1 and number % size == 0:
                return Fact.SUPPOSED_COUNT
        elif of_sum and function in MULTIPLICATIONS:
            inverse = 1 / number
            if 1 <= inverse != batch_size and inverse % size == 0 and size > 2:  # 1/2 is a factor
                return Fact.SUPPOSED_COUNT
        elif number == size > 1 and (
            function in MULTIPLICATIONS or (of_sum and function in _ADDITIONS)
        ):
            self.doubts.append(
                f"it is computed with {number:g}, which is also the number of samples in each "
                "chunk, and is taken for a constant"
            )
        return None

    def doubt_count(self, numbers: Sequence[Any], entries: Sequence[Any] | None = None) -> None:
        """Note a doubt if numbers need not be counts that add up."""
        pairs = list(zip(numbers, self.chunk_sizes, strict=True))
        is_multiple = all(n * self.chunk_sizes[0] == numbers[0] * size for n, size in pairs)
        if is_multiple or (entries is not None and list(numbers) == list(entries)):
            return
        surplus = {n - s for n, s in zip(numbers, entries or self.chunk_sizes, strict=True)}
        if len(surplus) == 1:
            self.doubts.append(
                f"it is computed with its number of entries plus {surplus.pop():g} in each chunk"
            )
            return
        self.doubts.append(
            f"it is computed with numbers, such as {numbers[0]:g}, that differ between the "
            "replicas and are taken for counts that add up; use a tensor, such as mask.sum()"
        )

    def _is_given(self, number: float) -> bool:
        """Return whether a number is among the arguments of the call."""
        if number in (1, *self.chunk_sizes):  # then it may also be a count
            return False
        return any(isinstance(item, Real) and item == number for item in self.given)

    def keeps_samples(self, group: Sequence[Step], place: Place) -> bool:
        """Return whether a reduction of some dimensions has left that of the samples."""
        first, size = group[0], self.chunk_sizes[0]
        if not first.shape or not self.are_chunks_equal:
            return any(step.shape != first.shape for step in group)
        # The number of entries that were reduced to one is a multiple, if these were samples.
        assert first.reduction is not None
        if first.reduction.shape.numel() // max(1, first.shape.numel()) % size:
            return True
        fact = self.known.get(place_of(first.reduction, place))
        if size in first.shape and fact is not Fact.SAMPLES:
            self.doubts.append(
                f"it reduces a tensor of shape {tuple(first.reduction.shape)}, which may have its "
                "samples along another dimension"
            )
        return False

    def check_classes(self, reductions: Sequence[Reduction], place: Place) -> None:
        """Check that the classes of a cross entropy are not the samples of each chunk."""
        numbers = [reduction.num_classes for reduction in reductions]
        if any(number != numbers[0] for number in numbers):
            raise UnclearError("the classes of its cross entropy are the samples of each chunk")
        number, num_rows, place = numbers[0], reductions[0].shape.numel(), (*place, "classes")
        if number is None:
            return  # no cross entropy
        may_be = number > 2 and number in (self.chunk_sizes[0], num_rows, num_rows - 1)
        if not self.are_chunks_equal or _differ_in_corners(reductions):
            self.known[place] = Fact.SAME
        elif may_be and place not in self.known:
            self.doubts.append(f"it has {number} classes, which may be the samples of each chunk")

    def are_over_samples(
        self, reductions: Sequence[Reduction], values: Sequence[Any], place: Place
    ) -> bool:
        """Return whether the tensors that were reduced on the replicas had entries of samples.

        Raises:
            UnclearError: they were computed from samples, but have no entries of them.
        """
        first, place = reductions[0], place_of(reductions[0], place)
        if first.num_classes is not None:
            return True
        differ = any(reduction.shape != first.shape for reduction in reductions)
        fact = self.known.get(place)
        is_sure = fact is Fact.SAMPLES or (fact is not None and not differ)
        if not is_sure or self.compares_again:
            fact = self._supposed_samples(reductions, values, fact, differ)
            if fact is not Fact.ZERO:
                self.known[place] = fact
        if fact is Fact.ONE:
            raise UnclearError(
                "it is computed from each sample by itself, in a loop or by an index"
            )
        if fact is Fact.UNCLEAR:
            raise UnclearError("it reduces a tensor that has no entry for each sample")
        return fact is not Fact.SAME

    def compare(self, values: Sequence[torch.Tensor]) -> Fact:
        """Compare tensors of one shape between the replicas; 0-dim integers may be counts."""
        are_equal, value = _are_equal(values), values[0]
        if are_equal is None:
            return Fact.SAME
        if value.dim():
            may_be = self._may_have_samples(value.shape)
            return Fact.SAME if are_equal else Fact.SAMPLES if may_be else Fact.UNCLEAR
        if value.dtype is torch.bool or value.is_floating_point() or value.is_complex():
            return Fact.SAME if are_equal else Fact.UNCLEAR
        numbers = [int(value) for value in values]
        may_be_count = self.are_chunks_equal and numbers[0] % self.chunk_sizes[0] == 0
        if are_equal and not (may_be_count and numbers[0]):
            return Fact.SAME
        self.doubt_count(numbers)
        return Fact.COUNT

    def _may_have_samples(self, shape: torch.Size) -> bool:
        """Return whether a tensor of one shape on all replicas may have entries of samples."""
        return self.are_chunks_equal and shape.numel() % self.chunk_sizes[0] == 0

    def _supposed_samples(
        self,
        reductions: Sequence[Reduction],
        values: Sequence[Any],
        known: Fact | None,
        differ: bool,
    ) -> Fact:
        """Suppose whether tensors had entries of samples, by their shapes, graphs and values."""
        reduction = reductions[0]
        may_be = self._may_have_samples(reduction.shape)
        origin = origin_of(reduction.source, self.chunk_sizes[0])
        if self.are_chunks_equal and (known is Fact.ONE or origin is Origin.ONE):
            return Fact.ONE
        if differ or known is Fact.SAMPLES:
            return Fact.SAMPLES
        has_differed = values[0] is None or _differ_in_corners(reductions)
        are_equal = False if has_differed else _are_equal(values)
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
        if not values[0].any():
            return Fact.ZERO
        if reduction.source is None or origin is Origin.SAMPLES:
            self.doubts.append(
                "it has a sum that is the same on all replicas, which may be over samples or over "
                "parameters only"
            )
        return Fact.SUPPOSED_SAMPLES if origin is Origin.SAMPLES else Fact.SAME


def place_of(reduction: Reduction, place: Place) -> Place:
    """Return the place of a reduction; one of the same form may also be over parameters."""
    return (*place, reduction.shape[1:])


def _are_equal(values: Sequence[torch.Tensor]) -> bool | None:
    """Return whether tensors have equal values; this waits for their devices.

    Of emulated devices that keep shapes only, nobody knows: None.
    """
    try:
        first, *others = (value.detach().cpu() for value in values)
        return all(first.allclose(other, rtol=0, atol=0, equal_nan=True) for other in others)
    except SymbolicValueError:
        return None


def _differ_in_corners(reductions: Sequence[Reduction]) -> bool:
    """Return whether tensors of one shape differ in the entries that were kept of each."""
    corners = [reduction.corner for reduction in reductions if reduction.corner is not None]
    return len(corners) == len(reductions) and _are_equal(corners) is False


def _is_whole(value: torch.Tensor) -> bool:
    """Return whether a tensor has whole numbers only."""
    return not value.is_complex() and bool((value.detach().double() % 1 == 0).all())
