"""Compute values of the batch from the steps that the replicas have traced.

The means and sums of the replicas are joined into those over the batch, and the steps that were
computed from them are repeated with these. Every other argument of a step must be equal on all
replicas, or a count, which adds up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from ...errors import SymbolicValueError
from .numbers import Fact, Numbers, Place, UnclearError
from .origins import Origin, operator_name, origin_of
from .step import Reduction, Step, version_of
from .trace import Trace
from .weighted import moved, total, weighted_mean

Steps = tuple[Step, ...]
"""The same step of each replica."""

_MAX_FACTS = 10_000

_UNLIKE = "the replicas computed it in different ways"
_JOINED = "it reduces a tensor that has no entry for each sample"
_MIXED = "a mean or sum over each chunk is combined with samples"


@dataclass(slots=True, eq=False)
class BatchValues:
    """The values of the batch in one call.

    Attributes:
        traces: the steps of each replica.
        numbers: the chunk sizes, and what is known of numbers and tensors. It is updated.
        device: the device of the results.
        compares_again: whether tensors are compared again that an earlier call has compared, which
            waits for their devices.
    """

    traces: Sequence[Trace]
    numbers: Numbers
    device: torch.device
    compares_again: bool
    _values: dict[Step, Any] = field(default_factory=dict)
    _of_samples: set[Step] = field(default_factory=set)
    """Steps with entries of samples, which have no value for the batch."""
    _same: set[Step] = field(default_factory=set)
    """Steps that depend on parameters only."""
    _entries: dict[Step, Sequence[Any]] = field(default_factory=dict)
    """Over how many entries the steps are sums that were computed from sums only."""

    def of(self, outputs: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        """Return the value of the batch of a 0-dim output.

        Args:
            outputs: the output of each replica.
            name: its dotted path.

        Raises:
            UnclearError: it is not known.
        """
        if len(self.numbers.facts) > _MAX_FACTS:
            self.numbers.facts.clear()
        if self.compares_again:
            self._look_at_lost_steps()
        steps = [trace.step_of(t) for trace, t in zip(self.traces, outputs, strict=True)]
        roots = tuple(step for step in steps if step is not None)
        if not roots:
            return self._constant(outputs, (name,))
        if len(roots) < len(steps):
            raise UnclearError(_UNLIKE)
        self._compute_all(roots, name)
        if roots[0] in self._of_samples:
            raise UnclearError("it is an entry of a single sample")
        value: torch.Tensor = self._values[roots[0]]
        return value

    def _look_at_lost_steps(self) -> None:
        """Doubt all values if a mean or sum over samples was combined with larger tensors."""
        for group in zip(*(trace.lost for trace in self.traces), strict=False):
            try:
                self._compute_all(group, "")
            except UnclearError:
                continue  # what depends on it is unclear, too
            if group[0] not in self._same and group[0] not in self._of_samples:
                self.numbers.doubts.append(f"{_MIXED}, or with other larger tensors")
                return

    def _compute_all(self, roots: Steps, name: str) -> None:
        """Compute the steps that a step takes, and itself."""
        groups: list[Steps] = [roots]
        found: dict[Step, Steps] = {}
        while groups:
            group = groups.pop()
            known = found.setdefault(group[0], group)
            if any(one is not other for one, other in zip(known, group, strict=True)):
                raise UnclearError(_UNLIKE)
            if known is group:
                groups += self._parents(group)
        ordered = sorted(found.values(), key=lambda group: group[0].index)
        kind = hash((name, *(group[0].name for group in ordered)))
        for position, group in enumerate(ordered):
            if group[0] not in self._values and group[0] not in self._of_samples:
                self._compute(group, (kind, position))

    def _parents(self, group: Steps) -> list[Steps]:
        """Return the steps that a step of all replicas uses."""
        first, parents = group[0], [step.parents() for step in group]
        # With as many reductions on all replicas, one differs from another by its number.
        num_reductions = [trace.num_reductions for trace in self.traces]
        are_aligned = all(number == num_reductions[0] for number in num_reductions)
        for step, found in zip(group, parents, strict=True):
            if step.function != first.function or len(found) != len(parents[0]):
                raise UnclearError(_UNLIKE)
            if step.reduction is not None and first.reduction is not None:
                is_other = step.reduction.function != first.reduction.function
                if is_other or (are_aligned and step.ordinal != first.ordinal):
                    raise UnclearError(_UNLIKE)
        return list(zip(*parents, strict=True))

    def _compute(self, group: Steps, place: Place) -> None:
        """Compute the value of a step for the batch, unless it has entries of samples."""
        first = group[0]
        parents = first.parents()
        for step in group:
            if step.value is not None and step.version != version_of(step.value):
                raise UnclearError("it was written to in place")
        if self._of_samples.issuperset(parents):
            self._join(group, place)
            return
        for step in group:
            node = step.node if step.value is None else step.value.grad_fn
            if node is not step.node:
                name = "detach" if node is None else operator_name(node.name())
                raise UnclearError(f"it is computed by {name}, whose inputs are not known")
        if all(parent in self._entries for parent in parents):
            self._entries[first] = self._entries[parents[0]]
        if self._same.issuperset(parents):
            self._same.add(first)
        try:
            args = self._merged([step.args for step in group], first, place)
            kwargs = self._merged([step.kwargs for step in group], first, place)
        except _SamplesError:
            if not self._same.issuperset(set(parents) - self._of_samples):
                raise UnclearError(_MIXED) from None
            self._same.discard(first)
            self._join(group, place)
            return
        try:
            self._values[first] = first.repeat(args, kwargs, self.device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of whatever function; forward itself has ended well
            text = str(error).partition("\n")[0]
            raise UnclearError(f"it cannot be computed for the whole batch ({text})") from None

    def _join(self, group: Steps, place: Place) -> None:
        """Join the values of a step on all replicas, if it is a mean or sum over samples."""
        first = group[0]
        values = [step.value for step in group]
        reductions = [step.reduction for step in group if step.reduction]
        if not reductions or self._keeps_samples(group, place):
            self._of_samples.add(first)
            return
        if all(reduction.shape == reductions[0].shape for reduction in reductions):
            if not self._is_over_samples(reductions[0], values, place):
                self._values[first] = None if values[0] is None else values[0].to(self.device)
                self._same.add(first)
                return
        else:
            self.numbers.facts[_place_of(reductions[0], place)] = Fact.SAMPLES
        self._check_classes(reductions, place)
        name, counts = reductions[0].name, [reduction.count for reduction in reductions]
        if values[0] is None:  # too large to be kept
            self._values[first] = None
        elif name == "mean":
            self._values[first] = weighted_mean(values, counts, self.device)
        elif name == "sum":
            self._values[first] = total(values, self.device)
            self._entries[first] = counts
        else:
            self._values[first] = getattr(torch, name)(torch.stack(moved(values, self.device)), 0)

    def _keeps_samples(self, group: Steps, place: Place) -> bool:
        """Return whether a reduction of some dimensions has left that of the samples."""
        first, size = group[0], self.numbers.chunk_sizes[0]
        if not first.shape or not self.numbers.are_chunks_equal:
            return any(step.shape != first.shape for step in group)
        # The number of entries that were reduced to one is a multiple, if these were samples.
        assert first.reduction is not None
        if first.reduction.shape.numel() // max(1, first.shape.numel()) % size:
            return True
        fact = self.numbers.facts.get(_place_of(first.reduction, place))
        if size in first.shape and fact is not Fact.SAMPLES:
            self.numbers.doubts.append(
                f"it reduces a tensor of shape {tuple(first.reduction.shape)}, which may have its "
                "samples along another dimension"
            )
        return False

    def _check_classes(self, reductions: Sequence[Reduction], place: Place) -> None:
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

    def _may_have_samples(self, shape: torch.Size) -> bool:
        """Return whether a tensor of one shape on all replicas may have entries of samples."""
        size = self.numbers.chunk_sizes[0]
        return self.numbers.are_chunks_equal and math.prod(shape) % size == 0

    def _is_over_samples(
        self, reduction: Reduction, values: Sequence[torch.Tensor | None], place: Place
    ) -> bool:
        """Return whether tensors of one shape on all replicas had entries of samples.

        Raises:
            UnclearError: they were computed from samples, but have no entries of them.
        """
        place = _place_of(reduction, place)
        fact = self.numbers.facts.get(place)
        if fact is Fact.SAMPLES or reduction.num_classes is not None:
            return True
        if fact is None or self.compares_again:
            fact = self.numbers.facts[place] = self._supposed(reduction, values, fact)
        if fact is Fact.UNCLEAR:
            raise UnclearError(_JOINED)
        return fact is Fact.SUPPOSED_SAMPLES

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

    def _merged(self, items: Sequence[Any], step: Step, place: Place) -> Any:
        """Return the arguments of a step for the batch, from those of the replicas.

        Raises:
            UnclearError: they differ, and are no counts.
            _SamplesError: an argument has entries of samples.
        """
        first = items[0]
        if isinstance(first, Step):
            if first in self._of_samples:
                raise _SamplesError
            return self._values[first]
        if all(isinstance(item, torch.Tensor) for item in items):
            return self._constant(items, place)
        if any(type(item) is not type(first) for item in items):
            raise UnclearError(_UNLIKE)
        if isinstance(first, dict):
            if any(item.keys() != first.keys() for item in items):
                raise UnclearError(_UNLIKE)
            return {n: self._merged([d[n] for d in items], step, (*place, n)) for n in first}
        if isinstance(first, list):
            if any(len(item) != len(first) for item in items):
                raise UnclearError(_UNLIKE)
            columns = enumerate(zip(*items, strict=True))
            return [self._merged(column, step, (*place, i)) for i, column in columns]
        if isinstance(first, Real) and not isinstance(first, bool):
            entries = next((self._entries.get(parent) for parent in step.parents()), None)
            return self.numbers.of_batch(items, step.name.strip("_"), entries, place)
        if not all(_is_equal(item, first) for item in items):
            raise UnclearError(_UNLIKE)
        return first

    def _constant(self, values: Sequence[torch.Tensor], place: Place) -> torch.Tensor:
        """Return tensors that are not traced, one of each replica, as that of the batch.

        Raises:
            UnclearError: they differ, and are no counts.
            _SamplesError: they have entries of samples.
        """
        facts = self.numbers.facts
        is_given = all(any(item is value for item in self.numbers.given) for value in values)
        fact = Fact.SAME if is_given else facts.get(place)
        if any(value.shape != values[0].shape for value in values):
            fact = Fact.SAMPLES
        elif fact is None or (self.compares_again and not is_given):
            fact = facts[place] = self._compared(values)
        if fact is Fact.UNCLEAR:
            node = values[0].grad_fn
            what = "it has a part" if node is None else f"it uses a {operator_name(node.name())}"
            raise UnclearError(f"{what} that is no mean or sum over samples")
        if fact is Fact.SAMPLES:
            raise _SamplesError
        return total(values, self.device) if fact is Fact.COUNT else values[0].to(self.device)

    def _compared(self, values: Sequence[torch.Tensor]) -> Fact:
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


class _SamplesError(Exception):
    """A step uses entries of samples, so it has a value for each chunk and none for the batch."""


def _place_of(reduction: Reduction, place: Place) -> Place:
    """Return the place of a reduction; one of the same form may also be over parameters."""
    return (*place, reduction.shape[1:])


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # an array, for example
        return False


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
