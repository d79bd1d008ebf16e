"""Find out what numbers and tensors of the replicas are for the batch.

A number is the same on all replicas, or a count of each chunk, such as the number of its samples,
which adds up. A tensor is the same, or has entries of samples. Chunks of different sizes show which
it is: counts differ between them, and so do shapes. For others a trial shows it; see ``join``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import SymbolicValueError
from ...free_threading import looking_at_nodes
from .step import Reduction, Step, UnclearError, is_integer, operator_name

Place = tuple[Any, ...]
"""The kind of a computation, the position of a step and that of an operand, which a fact is of."""

DIVISIONS = ("div", "divide", "itruediv", "true_divide", "truediv")
MULTIPLICATIONS = ("imul", "mul", "multiply", "rmul")
_ADDITIONS = ("add", "iadd", "isub", "radd", "rsub", "sub", "subtract")
_ARITHMETIC = (*DIVISIONS, *MULTIPLICATIONS, *_ADDITIONS)
"""Functions of torch by their names, without underscores at either end."""

_SELECTIONS = ("Gather", "Index", "IndexSelect", "MaskedSelect", "Take")
"""Operators that select entries by an index."""

_MAX_NODES = 64
"""How many nodes of a graph are looked at for one."""


class Fact(enum.Enum):
    """What a number, a tensor or a reduction has shown."""

    SAME = "the same on all replicas"
    COUNT = "a count of each chunk"
    INVERSE = "the inverse of a count of each chunk"
    SAMPLES = "over the samples of each chunk"
    UNCLEAR = "none of these"


@dataclass(slots=True)
class Facts:
    """What is known of numbers and tensors in one call.

    Attributes:
        chunk_sizes: how many samples each replica had.
        known: what earlier calls have shown, by place. It is updated.
        compares_again: whether tensors are compared again that an earlier call has compared, which
            waits for their devices. May be set.
        is_trial: whether entries that have one shape and other values are taken for samples that an
            index selected; a graph would tell, which trials do not have.
        doubts: why values of the batch may be others. It is updated.
    """

    chunk_sizes: Sequence[int]
    known: dict[Place, Fact]
    compares_again: bool
    is_trial: bool = False
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
            UnknownKindError: it is not known whether they are.
        """
        fact, are_same = self.known.get(place), all(number == numbers[0] for number in numbers)
        are_entries = entries is not None and list(numbers) == list(entries)
        if fact is Fact.INVERSE:
            pass
        elif not are_same or (fact is None and are_entries and function in DIVISIONS):
            fact = self.known[place] = Fact.COUNT
        elif fact is None:
            self._check_that_known(place)
            fact = self.known[place] = Fact.SAME
        if fact is Fact.SAME:
            return numbers[0]
        may_be_count = fact is not Fact.INVERSE and function in _ARITHMETIC
        if may_be_count and all(number % 1 == 0 for number in numbers):
            if not are_entries:
                self.doubt_count(numbers)
            return sum(numbers)
        inverses = [1 / number if number else math.nan for number in numbers]
        if function in MULTIPLICATIONS and all(
            math.isfinite(n) and math.isclose(n, round(n)) for n in inverses
        ):
            self.known[place] = Fact.INVERSE
            counts = list(map(round, inverses))
            self.doubt_count(counts)
            return 1 / sum(counts)
        raise UnclearError(
            f"it is computed with a number, such as {numbers[0]:g}, that differs between the "
            "replicas and is no count; use a tensor, such as weights.sum()"
        )

    def is_plain(self, group: Sequence[Step], place: Place) -> bool:
        """Return whether a loss is a mean or sum over samples, even if all chunks have one size.

        A mean may be taken for one: if it is the same on all replicas, so is the mean of these.
        """
        reduction = group[0].reduction
        if reduction is None or group[0].shape:
            return False
        num_rows, size = reduction.shape.numel(), self.chunk_sizes[0]
        # With as many classes, these may be the samples.
        if num_rows % size or reduction.num_classes in (size, num_rows, num_rows - 1):
            return False
        place = (*place, reduction.shape[1:])
        if reduction.name == "mean" or (
            reduction.name == "sum"
            and place not in self.known
            and _differ([step.value for step in group])
        ):
            self.known[place] = Fact.SAMPLES
        return self.known.get(place) is Fact.SAMPLES

    def _check_that_known(self, place: Place) -> None:
        """Check that chunks differ in size, or that a trial has shown what is at ``place``."""
        if place not in self.known and self.are_chunks_equal:
            raise UnknownKindError(place[0])

    def doubt_count(self, numbers: Sequence[Any]) -> None:
        """Note a doubt if numbers need not be counts that add up."""
        sizes = self.chunk_sizes
        pairs = list(zip(numbers, sizes, strict=True))
        if all(number * sizes[0] == numbers[0] * size for number, size in pairs):
            return
        what = (
            f"numbers, such as {numbers[0]:g}, that differ between the replicas and are taken for "
            "counts that add up; use a tensor, such as mask.sum()"
        )
        surplus = {number - size for number, size in pairs}
        if len(surplus) == 1:
            what = f"its number of samples plus {surplus.pop():g} in each chunk"
        self.doubts.append(f"it is computed with {what}")

    def keeps_samples(self, group: Sequence[Step], place: Place) -> bool:
        """Return whether a reduction of some dimensions has left that of the samples."""
        place = (*place, "kept")
        if not any(step.shape for step in group):
            return False
        differ = any(step.shape != group[0].shape for step in group)
        if differ and not self._follow_samples([step.shape for step in group]):
            raise UnclearError("it is computed from a tensor whose shape depends on the samples")
        if not self.are_chunks_equal:
            self.known[place] = Fact.SAMPLES if differ else Fact.SAME
        self._check_that_known(place)
        return self.known[place] is Fact.SAMPLES

    def _follow_samples(self, shapes: Sequence[torch.Size]) -> bool:
        """Return whether one dimension of each shape has the same number of entries a sample."""
        pairs = list(zip(shapes, self.chunk_sizes, strict=True))
        first, size = pairs[0]
        return len({len(shape) for shape in shapes}) == 1 and any(
            all(shape[d] * size == first[d] * own for shape, own in pairs)
            for d in range(len(first))
        )

    def are_over_samples(
        self, reductions: Sequence[Reduction], values: Sequence[Any], place: Place
    ) -> bool:
        """Return whether the tensors that were reduced on the replicas had entries of samples.

        Raises:
            UnclearError: they were computed from samples, but have no entries of them; or the
                classes of a cross entropy are the samples of each chunk.
            UnknownKindError: it is not known.
        """
        first, fact = reductions[0], self.known.get(place)
        if first.num_classes is not None:
            if any(reduction.num_classes != first.num_classes for reduction in reductions):
                raise UnclearError("the classes of its cross entropy are the samples of each chunk")
            return True
        if any(reduction.shape != first.shape for reduction in reductions):
            fact = Fact.SAMPLES
        elif fact is None or (fact is Fact.SAME and self.compares_again):
            self._check_that_known(place)
            if values[0] is not None and not _differ(values):
                fact = Fact.SAME
            else:  # as many may have been selected on all replicas
                is_selected = self.is_trial or _is_selected(first.source)
                fact = Fact.SAMPLES if is_selected else Fact.UNCLEAR
        self.known[place] = fact
        if fact is Fact.UNCLEAR:
            raise UnclearError("it reduces a tensor that has no entry for each sample")
        return fact is Fact.SAMPLES

    def compare(self, values: Sequence[torch.Tensor]) -> Fact:
        """Compare tensors of one shape between the replicas; 0-dim integers may be counts."""
        if not _differ(values):
            return Fact.SAME
        if values[0].dim() or not is_integer(values[0]):
            return Fact.UNCLEAR
        self.doubt_count([int(value) for value in values])
        return Fact.COUNT


class UnknownKindError(Exception):
    """Chunks of one size do not tell how something was computed; the argument is its kind."""


def _is_selected(node: Any) -> bool:
    """Return whether the tensor of an autograd node comes from entries that an index selected."""
    nodes, seen = [node], set[Any]()
    with looking_at_nodes:
        while nodes and len(seen) < _MAX_NODES:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            if operator_name(node.name()) in _SELECTIONS:
                return True
            seen.add(node)
            nodes += [parent for parent, _ in node.next_functions]
    return False


def _differ(values: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors have different values; this waits for their devices.

    Of emulated devices that keep shapes only, nobody knows: they are taken for equal.
    """
    try:
        first, *others = (value.detach().cpu() for value in values)
        return not all(first.allclose(other, rtol=0, atol=0, equal_nan=True) for other in others)
    except SymbolicValueError:
        return False
