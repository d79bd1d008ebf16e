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
from .trace import Step, Trace
from .weighted import moved, total, weighted_mean

Steps = tuple[Step, ...]
"""The same step of each replica."""

Place = tuple[Any, ...]
"""The output, the position of a step, and that of an operand: where the history has a fact."""

_UNLIKE = "the replicas computed it in different ways"
_MIXED = "a mean or sum over the samples of a chunk is combined with these samples"
_JOINED = "its samples are joined before they are added up"


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
    _of_samples: set[Step] = field(default_factory=set)
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
        if not roots:
            return self._constant(outputs, (name,))
        if len(roots) < len(steps):
            raise UnclearError(_UNLIKE)
        ordered = self._in_order(roots)
        for position, group in enumerate(ordered):
            if group[0] not in self._values and group[0] not in self._of_samples:
                self._compute(group, (name, len(ordered), position))
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
        """Compute the value of a step, or find out that it has an entry for each sample."""
        first = group[0]
        parents = first.parents()
        are_samples = [parent in self._of_samples for parent in parents]
        if first.function is None or (all(are_samples) and first.reduction):
            self._reduce(group, place)
        elif all(are_samples):
            self._of_samples.add(first)
        elif any(are_samples):
            raise UnclearError(_MIXED)
        else:
            for step in group:
                if step.value is not None and step.value.requires_grad != step.requires_grad:
                    name = operator_name(step.value.grad_fn.name())
                    raise UnclearError(f"it is computed by {name}, whose inputs are not known")
            if all(parent in self._entries for parent in parents):
                self._entries[first] = self._entries[parents[0]]
            args = self._merged([step.args for step in group], first, place)
            kwargs = self._merged([step.kwargs for step in group], first, place)
            self._values[first] = first.repeat(args, kwargs)

    def _reduce(self, group: Steps, place: Place) -> None:
        """Join the means or sums of a step."""
        first = group[0]
        values = [step.value for step in group]
        reductions = [step.reduction for step in group if step.reduction]
        if any(value.shape != values[0].shape for value in values):
            self._of_samples.add(first)  # it was reduced along another dimension
            return
        if all(reduction.shape == reductions[0].shape for reduction in reductions):
            if not self._is_over_samples(group, place):
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

    def _is_over_samples(self, group: Steps, place: Place) -> bool:
        """Return whether tensors of one shape on all replicas had entries of samples.

        Raises:
            UnclearError: they were computed from samples, but have no entries of them.
        """
        fact, reduction = self.facts.get(place), group[0].reduction
        assert reduction is not None
        origin = Origin.SELECTED if fact is Fact.SAMPLES else origin_of(reduction.source)
        has_equal_chunks = all(size == self.chunk_sizes[0] for size in self.chunk_sizes)
        may_be = has_equal_chunks and math.prod(reduction.shape) % self.chunk_sizes[0] == 0
        if origin is not Origin.UNKNOWN:
            fact = Fact.SAMPLES if may_be or origin is Origin.SELECTED else Fact.UNCLEAR
        elif fact is None or self.looks_anew:
            values = [step.value for step in group]
            if _are_equal(values) and not (may_be and _is_whole(values[0])):
                fact = Fact.SAME  # as a penalty on weights is; counts may be equal by chance
            else:
                fact = Fact.SAMPLES if has_equal_chunks else Fact.UNCLEAR
        self.facts[place] = fact
        if fact is Fact.UNCLEAR:
            raise UnclearError(_JOINED)
        return fact is Fact.SAMPLES

    def _merged(self, items: Sequence[Any], step: Step, place: Place) -> Any:
        """Return the arguments of a step for the batch, from those of the replicas."""
        first = items[0]
        if isinstance(first, Step):
            return self._values[first]
        if all(isinstance(item, torch.Tensor) for item in items):
            return self._constant(items, place)
        if any(type(item) is not type(first) for item in items):
            raise UnclearError(_UNLIKE)
        if isinstance(first, dict):
            return {n: self._merged([d[n] for d in items], step, (*place, n)) for n in first}
        if isinstance(first, list):
            if any(len(item) != len(first) for item in items):
                raise UnclearError(_UNLIKE)
            columns = enumerate(zip(*items, strict=True))
            return [self._merged(column, step, (*place, i)) for i, column in columns]
        if isinstance(first, Real) and not isinstance(first, bool):
            numbers = Numbers(self.chunk_sizes, self.given, self.facts, self.doubts)
            function = getattr(step.function, "__name__", "").strip("_")
            entries = next((self._entries.get(parent) for parent in step.parents()), None)
            return numbers.of_batch(items, function, entries, place)
        if any(item != first for item in items):
            raise UnclearError(_UNLIKE)
        return first

    def _constant(self, values: Sequence[torch.Tensor], place: Place) -> torch.Tensor:
        """Return tensors that are not traced, one of each replica, as that of the batch."""
        if any(value.shape != values[0].shape for value in values):
            raise UnclearError(_MIXED)
        is_given = all(any(item is value for item in self.given) for value in values)
        fact = Fact.SAME if is_given else self.facts.get(place)
        if fact is None or (self.looks_anew and not is_given):
            fact = self.facts[place] = self._compared(values)
        if fact is Fact.UNCLEAR:
            node = values[0].grad_fn
            what = "it has a part" if node is None else f"it uses a {operator_name(node.name())}"
            raise UnclearError(f"{what} that is no mean or sum over samples")
        return total(values, self.device) if fact is Fact.COUNT else values[0].to(self.device)

    def _compared(self, values: Sequence[torch.Tensor]) -> Fact:
        """Compare a tensor between the replicas; 0-dim integers may be counts."""
        is_same, value = _are_equal(values), values[0]
        if value.dim() or value.is_floating_point() or value.is_complex():
            return Fact.SAME if is_same else Fact.UNCLEAR
        size = self.chunk_sizes[0]
        has_equal_chunks = all(other == size for other in self.chunk_sizes)
        may_be_count = has_equal_chunks and int(value) > 0 and int(value) % size == 0
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
