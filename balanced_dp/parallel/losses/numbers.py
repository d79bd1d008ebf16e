"""Find out what a number that the replicas compute with is for the batch.

A number is the same on all replicas, or a count of each chunk, such as the number of its samples,
which adds up. If all chunks have one size, such counts do not differ; then earlier calls may have
shown which it is. If not, a sum over samples is taken to be divided by a count if the number is a
multiple of the chunk size.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DIVISIONS = ("div", "divide", "itruediv", "true_divide", "truediv")
MULTIPLICATIONS = ("imul", "mul", "multiply", "rmul")
_ADDITIONS = ("add", "iadd", "isub", "radd", "sub", "subtract")
"""Functions of torch by their names, without underscores at either end."""


class UnclearError(Exception):
    """The value for the batch is not known; the message says why."""


class Fact(enum.Enum):
    """What a number, a tensor or a reduction has shown in earlier calls."""

    SAME = "the same on all replicas"
    COUNT = "a count of each chunk"
    SUPPOSED_COUNT = "a count of each chunk, or else the same on all replicas"
    SAMPLES = "over the samples of each chunk"
    UNCLEAR = "none of these"


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers in the computation of one output.

    Attributes:
        chunk_sizes: how many samples each replica had.
        given: the numbers among the arguments of the call: they are the same on all replicas.
        facts: what earlier calls have shown, by place. It is updated.
        doubts: why numbers of the batch may be others. It is updated.
    """

    chunk_sizes: Sequence[int]
    given: Sequence[Any]
    facts: dict[Any, Fact]
    doubts: list[str]

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
        if all(number % 1 == 0 for number in numbers):
            if entries is not None and list(numbers) != list(entries):
                self._doubt_count(numbers, entries)
            return sum(numbers)
        inverses = [1 / number if number else math.nan for number in numbers]
        if function in MULTIPLICATIONS and all(
            n == n and math.isclose(n, round(n)) for n in inverses
        ):
            return 1 / sum(map(round, inverses))
        raise UnclearError(
            f"it is computed with a number, such as {numbers[0]:g}, that differs between the "
            "replicas and is no count; use a tensor, such as weights.sum()"
        )

    @property
    def _are_chunks_equal(self) -> bool:
        return all(size == self.chunk_sizes[0] for size in self.chunk_sizes)

    def _fact(
        self, numbers: Sequence[Any], function: str, entries: Sequence[Any] | None, place: Any
    ) -> Fact | None:
        """Return what a number is that all replicas have in common; None if that is not sure."""
        fact, number = self.facts.get(place), numbers[0]
        if fact is Fact.SUPPOSED_COUNT and not self._are_chunks_equal:
            self.doubts.append(
                f"it is divided by {number:g} in each chunk, but was by a count in another call"
            )
            return Fact.SAME
        if fact is not None or self._is_given(number):
            return fact
        if entries is not None and function in DIVISIONS and list(numbers) == list(entries):
            return Fact.COUNT
        return self._supposed(number, function, entries is not None)

    def _supposed(self, number: Any, function: str, of_sum: bool) -> Fact | None:
        size, batch_size = self.chunk_sizes[0], sum(self.chunk_sizes)
        if not self._are_chunks_equal or not number:
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

    def _doubt_count(self, numbers: Sequence[Any], entries: Sequence[Any]) -> None:
        """Note a doubt if numbers need not be counts that add up."""
        sizes = self.chunk_sizes
        surplus = {n - s for n, s in zip(numbers, entries, strict=True)}
        if len(surplus) == 1 and not self._are_chunks_equal:
            self.doubts.append(
                f"it is computed with its number of entries plus {surplus.pop():g} in each chunk"
            )
        elif 1 in numbers and any(
            n * sizes[0] != numbers[0] * s for n, s in zip(numbers, sizes, strict=True)
        ):
            self.doubts.append(
                "it is divided by 1 in a chunk, which may stand for a count of 0; divide by the "
                "tensor mask.sum().clamp(min=1)"
            )

    def _is_given(self, number: float) -> bool:
        """Return whether a number is among the arguments of the call."""
        if number in (1, *self.chunk_sizes):  # then it may also be a count
            return False
        return number in self.given
