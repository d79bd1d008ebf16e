"""Compute values of the batch from the steps that the replicas have traced.

The means and sums of the replicas are joined into those over the batch, and the steps that were
computed from them are repeated with these. What else goes into a step, numbers and tensors that are
not traced, has to be the same on all replicas, or a count that adds up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from .numbers import Fact, Numbers, UnclearError
from .origins import Origin, operator_name, origin_of
from .trace import Reduction, Step, Trace
from .weighted import moved, total, weighted_mean

Steps = tuple[Step, ...]
"""The same step of each replica."""

Place = tuple[Any, ...]
"""The output and its steps, the position of a step, and that of an argument."""

_UNLIKE = "the replicas computed it in different ways"
_JOINED = "its samples are joined before they are added up"


class _SamplesError(Exception):
    """A step has an argument with entries of samples, so its value is not one for the batch."""


@dataclass(slots=True, eq=False)
class BatchValues:
    """The values of the batch in one call.

    Attributes:
        traces: the steps of each replica.
        chunk_sizes: how many samples each replica had.
        device: the device of the results.
        given: the numbers and 0-dim tensors among the arguments, which every replica has got.
        facts: what earlier calls have shown of a place. It is updated.
        looks_anew: whether tensors are compared between replicas even where they were the same
            before; that waits for their devices.
        doubts: why values may not be those of the batch, though they were computed.
    """

    traces: Sequence[Trace]
    chunk_sizes: Sequence[int]
    device: torch.device
    given: Sequence[Any]
    facts: dict[Place, Fact]
    looks_anew: bool
    doubts: list[str] = field(default_factory=list)
    _values: dict[Step, Any] = field(default_factory=dict)
    _of_samples: dict[Step, Sequence[Any]] = field(default_factory=dict)
    """The values on all replicas of steps with entries of samples."""
    _as_recorded: set[Step] = field(default_factory=set)
    """Steps with entries of samples that were computed from such steps only."""
    _devices: Sequence[torch.device] = ()
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
        steps = [trace.step_of(t) for trace, t in zip(self.traces, outputs, strict=True)]
        roots = tuple(step for step in steps if step is not None)
        self._devices = [output.device for output in outputs]
        if not roots:
            return self._constant(outputs, (name,))
        if len(roots) < len(steps):
            raise UnclearError(_UNLIKE)
        ordered = self._in_order(roots)
        kind = hash((name, *(group[0].name for group in ordered)))
        for position, group in enumerate(ordered):
            if group[0] not in self._values and group[0] not in self._of_samples:
                self._compute(group, (kind, position))
        if roots[0] in self._of_samples:
            raise UnclearError("it is an entry of a single sample")
        value: torch.Tensor = self._values[roots[0]]
        return value

    def _in_order(self, roots: Steps) -> list[Steps]:
        """Return the steps that a value takes, those that others use first."""
        groups: list[Steps] = [roots]
        found: dict[Step, Steps] = {}
        while groups:
            group = groups.pop()
            known = found.setdefault(group[0], group)
            if any(one is not other for one, other in zip(known, group, strict=True)):
                raise UnclearError(_UNLIKE)
            if known is group:
                groups += _parents(group)
        return sorted(found.values(), key=lambda group: group[0].index)

    def _compute(self, group: Steps, place: Place) -> None:
        """Compute the value of a step for the batch or, with entries of samples, for each chunk."""
        first = group[0]
        parents = first.parents()
        if first.function is None or self._as_recorded.issuperset(parents):
            self._join(group, [step.value for step in group], place)
            if first in self._of_samples:
                self._as_recorded.add(first)
            return
        for step in group:
            if step.value is not None and step.value.requires_grad != step.requires_grad:
                name = operator_name(step.value.grad_fn.name())
                raise UnclearError(f"it is computed by {name}, whose inputs are not known")
        if all(parent in self._entries for parent in parents):
            self._entries[first] = self._entries[parents[0]]
        try:
            self._values[first] = self._repeated(group, place)
        except _SamplesError:
            chunks = range(len(group))
            self._join(group, [self._repeated(group, place, chunk) for chunk in chunks], place)

    def _repeated(self, group: Steps, place: Place, chunk: int | None = None) -> Any:
        """Return what a step returns with the values of the batch, or of a chunk.

        Raises:
            UnclearError: it is not known with which values.
            _SamplesError: for the batch, an argument has entries of samples.
        """
        args = self._merged([step.args for step in group], group[0], place, chunk)
        kwargs = self._merged([step.kwargs for step in group], group[0], place, chunk)
        try:
            return group[0].repeat(args, kwargs)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            text = str(error).partition("\n")[0]
            raise UnclearError(f"it cannot be computed for the whole batch ({text})") from None

    def _join(self, group: Steps, values: Sequence[Any], place: Place) -> None:
        """Join the values of a step on all replicas, if it is a mean or sum over samples."""
        first = group[0]
        reductions = [step.reduction for step in group if step.reduction]
        if not reductions or any(value.shape != values[0].shape for value in values):
            self._of_samples[first] = values  # or it was reduced along another dimension
            return
        if all(reduction.shape == reductions[0].shape for reduction in reductions):
            if not self._is_over_samples(reductions[0], values, place):
                self._values[first] = values[0].to(self.device)
                return
        else:
            self.facts[place] = Fact.SAMPLES
        if any(r.num_classes != reductions[0].num_classes for r in reductions):
            raise UnclearError("the classes of its cross entropy are the samples of each chunk")
        name, counts = reductions[0].name, [reduction.count for reduction in reductions]
        if name == "mean":
            self._values[first] = weighted_mean(values, counts, self.device)
        elif name == "sum":
            self._values[first] = total(values, self.device)
            self._entries[first] = counts
        else:
            self._values[first] = getattr(torch, name)(torch.stack(moved(values, self.device)), 0)

    @property
    def _are_chunks_equal(self) -> bool:
        return all(size == self.chunk_sizes[0] for size in self.chunk_sizes)

    def _may_have_samples(self, shape: torch.Size) -> bool:
        """Return whether a tensor of one shape on all replicas may have entries of samples."""
        return self._are_chunks_equal and math.prod(shape) % self.chunk_sizes[0] == 0

    def _is_over_samples(self, reduction: Reduction, values: Sequence[Any], place: Place) -> bool:
        """Return whether tensors of one shape on all replicas had entries of samples.

        Raises:
            UnclearError: they were computed from samples, but have no entries of them.
        """
        fact = self.facts.get(place)
        origin = Origin.SELECTED if fact is Fact.SAMPLES else origin_of(reduction.source)
        may_be = self._may_have_samples(reduction.shape)
        if origin is not Origin.UNKNOWN:
            fact = Fact.SAMPLES if may_be or origin is Origin.SELECTED else Fact.UNCLEAR
        elif fact is None or self.looks_anew:
            if _are_equal(values) and not (may_be and _is_whole(values[0])):
                fact = Fact.SAME  # as a penalty on weights is; counts may be equal by chance
            else:
                fact = Fact.SAMPLES if self._are_chunks_equal else Fact.UNCLEAR
        self.facts[place] = fact
        if fact is Fact.UNCLEAR:
            raise UnclearError(_JOINED)
        return fact is Fact.SAMPLES

    def _merged(self, items: Sequence[Any], step: Step, place: Place, chunk: int | None) -> Any:
        """Return the arguments of a step for the batch or a chunk, from those of the replicas."""
        first = items[0]
        if isinstance(first, Step):
            if first not in self._of_samples:
                return self._moved(self._values[first], chunk)
            if chunk is None:
                raise _SamplesError
            return self._of_samples[first][chunk]
        if all(isinstance(item, torch.Tensor) for item in items):
            return self._constant(items, place, chunk)
        if any(type(item) is not type(first) for item in items):
            raise UnclearError(_UNLIKE)
        if isinstance(first, dict):
            return {n: self._merged([d[n] for d in items], step, (*place, n), chunk) for n in first}
        if isinstance(first, list):
            if any(len(item) != len(first) for item in items):
                raise UnclearError(_UNLIKE)
            columns = enumerate(zip(*items, strict=True))
            return [self._merged(column, step, (*place, i), chunk) for i, column in columns]
        if isinstance(first, Real) and not isinstance(first, bool):
            numbers = Numbers(self.chunk_sizes, self.given, self.facts, self.doubts)
            entries = next((self._entries.get(parent) for parent in step.parents()), None)
            return numbers.of_batch(items, step.name.strip("_"), entries, place)
        if any(item != first for item in items):
            raise UnclearError(_UNLIKE)
        return first

    def _constant(
        self, values: Sequence[torch.Tensor], place: Place, chunk: int | None = None
    ) -> torch.Tensor:
        """Return tensors that are not traced, one of each replica, as that of the batch or a chunk.

        Raises:
            UnclearError: they differ, and are no counts and have no entries of samples.
            _SamplesError: for the batch, they have entries of samples.
        """
        is_given = all(any(item is value for item in self.given) for value in values)
        fact = Fact.SAME if is_given else self.facts.get(place)
        if any(value.shape != values[0].shape for value in values):
            fact = Fact.SAMPLES
        elif fact is None or (self.looks_anew and not is_given):
            fact = self.facts[place] = self._compared(values)
        if fact is Fact.UNCLEAR:
            node = values[0].grad_fn
            what = "it has a part" if node is None else f"it uses a {operator_name(node.name())}"
            raise UnclearError(f"{what} that is no mean or sum over samples")
        if fact is Fact.SAMPLES and chunk is None:
            raise _SamplesError
        if fact is Fact.COUNT:
            whole = total(values, self.device)
            return whole if chunk is None else whole.to(self._devices[chunk])
        return values[0].to(self.device) if chunk is None else values[chunk]

    def _moved(self, value: Any, chunk: int | None) -> Any:
        """Return a value of the batch on the device of a chunk."""
        if chunk is None or not isinstance(value, torch.Tensor):
            return value
        return value.to(self._devices[chunk])

    def _compared(self, values: Sequence[torch.Tensor]) -> Fact:
        """Compare tensors of one shape between the replicas; 0-dim integers may be counts."""
        is_same, value = _are_equal(values), values[0]
        if value.dim():
            may_be = self._may_have_samples(value.shape)
            return Fact.SAME if is_same else Fact.SAMPLES if may_be else Fact.UNCLEAR
        if value.dtype is torch.bool or value.is_floating_point() or value.is_complex():
            return Fact.SAME if is_same else Fact.UNCLEAR
        may_be_count = self._may_have_samples(value.shape) and int(value) > 0
        may_be_count = may_be_count and int(value) % self.chunk_sizes[0] == 0
        return Fact.SAME if is_same and not may_be_count else Fact.COUNT


def _parents(group: Steps) -> list[Steps]:
    """Return the steps that a step of all replicas uses."""
    parents = [step.parents() for step in group]
    if all(step.function == group[0].function for step in group) and all(
        len(found) == len(parents[0]) for found in parents
    ):
        return list(zip(*parents, strict=True))
    if not all(step.reduction for step in group):
        raise UnclearError(_UNLIKE)
    for step in group:  # it is over a stack with an entry for each sample
        step.function, step.args, step.kwargs = None, [], {}
    return []


def _are_equal(values: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors have equal values, or only NaN; this waits for their devices."""
    first, *others = (value.detach().cpu() for value in values)
    return all(
        other.equal(first) or bool((other.isnan() & first.isnan()).all()) for other in others
    )


def _is_whole(value: torch.Tensor) -> bool:
    """Return whether a tensor has whole numbers only."""
    return not value.is_complex() and bool((value.detach().double() % 1 == 0).all())
