"""Find out what a number that the replicas compute with is for the batch.

A number is the same on all replicas, or a count of each chunk, such as the number of its samples,
which adds up. With equal chunks, such counts are equal, too. An earlier call with unequal chunks
may have shown which it is; otherwise the divisor of a sum is taken for a count if it is a multiple
of the chunk size.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

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
    UNCLEAR = "none of these"


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers in the computation of one output.

    Attributes:
        chunk_sizes: how many samples each replica had.
        given: the numbers and 0-dim tensors among the arguments of the call, which every replica
            has got. Tensors are not read: that would wait for their devices.
        facts: what earlier calls have shown, by place. It is updated.
        doubts: why numbers of the batch may be others. It is updated.
    """

    chunk_sizes: Sequence[int]
    given: Sequence[Any]
    facts: dict[Place, Fact]
    doubts: list[str] = field(default_factory=list)

    def of_batch(
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
            fact = self._fact(numbers, function, entries, place)
            if fact is not None:
                self.facts[place] = fact
            if fact not in (Fact.COUNT, Fact.SUPPOSED_COUNT):
                return numbers[0]
        else:
            self.facts[place] = Fact.COUNT
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

    @property
    def are_chunks_equal(self) -> bool:
        """Whether all chunks have one size, so that counts of them do not differ."""
        return all(size == self.chunk_sizes[0] for size in self.chunk_sizes)

    def _fact(
        self, numbers: Sequence[Any], function: str, entries: Sequence[Any] | None, place: Any
    ) -> Fact | None:
        """Return what a number is that all replicas have in common; None if that is not sure."""
        fact, number = self.facts.get(place), numbers[0]
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
        return self._supposed(number, function, entries is not None)

    def _supposed(self, number: Any, function: str, of_sum: bool) -> Fact | None:
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
            is_multiple = inverse >= 1 and math.isclose(inverse % size, 0)
            if is_multiple and inverse != batch_size and size > 2:  # 1/2 is a factor
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
