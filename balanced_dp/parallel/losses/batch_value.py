"""Compute values of the batch from the steps that the replicas have traced.

The means and sums of the replicas are joined into those over the batch, and the steps that were
computed from them are repeated with these. Every other argument of a step must be equal on all
replicas, or a count, which adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from .facts import DIVISIONS, MULTIPLICATIONS, Fact, Facts, Place, UnknownKindError
from .step import Step, UnclearError, operator_name, version_of
from .trace import Trace
from .weighted import moved, total, weighted_mean

Steps = tuple[Step, ...]
"""The same step of each replica."""

_UNLIKE = "it was computed in different ways, as by a branch, or a loop over samples"
_MIXED = "a mean or sum over each chunk is combined with samples"


@dataclass(slots=True, eq=False)
class BatchValues:
    """The values of the batch in one call.

    Attributes:
        traces: the steps of each replica.
        facts: the chunk sizes, and what is known of numbers and tensors. It is updated.
        device: the device of the results.
        kinds: computations that are known, by what they call; if not "", why they are unclear. It
            is updated.
    """

    traces: Sequence[Trace]
    facts: Facts
    device: torch.device
    kinds: dict[int, str]
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
            UnknownKindError: chunks of one size do not tell how it is computed.
        """
        if self.facts.compares_again:
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
            except _StatisticError as error:
                self.facts.doubts.append(str(error))
                return
            except UnclearError:
                continue  # what depends on it is unclear, too
            if group[0] not in self._same and group[0] not in self._of_samples:
                self.facts.doubts.append(f"{_MIXED}, or with other larger tensors")
                return

    def _compute_all(self, roots: Steps, name: str) -> None:
        """Compute the steps that a step takes, and itself."""
        # With as many reductions on all replicas, one differs from another by its number.
        are_aligned = len({trace.num_reductions for trace in self.traces}) == 1
        groups: list[Steps] = [roots]
        found: dict[Step, Steps] = {}
        while groups:
            group = groups.pop()
            known = found.setdefault(group[0], group)
            if any(one is not other for one, other in zip(known, group, strict=True)):
                raise UnclearError(_UNLIKE)
            if known is group:
                _check_alike(group, are_aligned)
                groups += zip(*(step.parents for step in group), strict=True)
        ordered = sorted(found.values(), key=lambda group: group[0].index)
        kind = hash((name, *(group[0].name for group in ordered)))
        if not self.facts.are_chunks_equal:
            self.kinds[kind] = ""
        elif self.kinds.get(kind):
            raise UnclearError(self.kinds[kind])
        elif kind not in self.kinds and not (
            len(ordered) == 1 and self.facts.is_plain(roots, (kind, 0))
        ):
            raise UnknownKindError(kind)
        for position, group in enumerate(ordered):
            if group[0] in self._values or group[0] in self._of_samples:
                continue
            try:
                self._compute(group, (kind, position))
            except (UnclearError, UnknownKindError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # of whatever function; forward itself has ended well
                text = str(error).partition("\n")[0]
                raise UnclearError(f"it cannot be computed for the whole batch ({text})") from None

    def _compute(self, group: Steps, place: Place) -> None:
        """Compute the value of a step for the batch, unless it has entries of samples."""
        first, parents = group[0], group[0].parents
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
        try:
            args = self._merged([step.args for step in group], first, place)
            kwargs = {
                name: self._merged([step.kwargs[name] for step in group], first, (*place, name))
                for name in first.kwargs
            }
            self._values[first] = first.repeat(args, kwargs, self.device)
        except _SamplesError:
            if not self._same.issuperset(set(parents) - self._of_samples):
                raise UnclearError(_MIXED) from None
            self._join(group, place)
            return
        if self._same.issuperset(parents):
            self._same.add(first)
        is_linear = len(parents) < 2 or first.name.strip("_") not in (*DIVISIONS, *MULTIPLICATIONS)
        if is_linear and all(parent in self._entries for parent in parents):
            self._entries[first] = self._entries[parents[0]]

    def _join(self, group: Steps, place: Place) -> None:
        """Join the values of a step on all replicas, if it is a mean or sum over samples."""
        first = group[0]
        values = [step.value for step in group]
        reductions = [step.reduction for step in group if step.reduction]
        name, shape = (reductions[0].name, reductions[0].shape) if reductions else ("", ())
        place, value = (*place, shape[1:]), values[0]
        is_of_all = name == "unique" or (name in ("sort", "argsort", "topk") and len(shape) == 1)
        if not reductions or (not is_of_all and self.facts.keeps_samples(group, place)):
            self._of_samples.add(first)
            return
        if not self.facts.are_over_samples(reductions, values, place):
            self._same.add(first)
        elif name not in ("mean", "sum", "amax", "amin"):
            raise _StatisticError(f"it is computed from {name} of the samples in each chunk")
        counts = [reduction.count for reduction in reductions]
        if value is None:  # too large to be kept
            self._values[first] = None
        elif first in self._same:
            self._values[first] = value.to(self.device)
        elif name == "mean":
            self._values[first] = weighted_mean(values, counts, self.device)
        elif name == "sum":
            self._values[first] = total(values, self.device)
            self._entries[first] = counts
        else:
            self._values[first] = getattr(torch, name)(torch.stack(moved(values, self.device)), 0)

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
        if isinstance(first, list):
            if any(len(item) != len(first) for item in items):
                raise UnclearError(_UNLIKE)
            columns = enumerate(zip(*items, strict=True))
            return [self._merged(column, step, (*place, i)) for i, column in columns]
        if isinstance(first, Real) and not isinstance(first, bool):
            entries = self._entries.get(step.parents[0])
            return self.facts.number(items, step.name.strip("_"), entries, place)
        if any(item is not first and item != first for item in items):
            raise UnclearError(_UNLIKE)
        return first

    def _constant(self, values: Sequence[torch.Tensor], place: Place) -> torch.Tensor:
        """Return tensors that are not traced, one of each replica, as that of the batch.

        Raises:
            UnclearError: they differ, and are no counts.
            _SamplesError: they have entries of samples.
        """
        fact = self.facts.known.get(place)
        if any(value.shape != values[0].shape for value in values):
            fact = self.facts.known[place] = Fact.SAMPLES
        elif fact is None or (fact is Fact.SAME and self.facts.compares_again):
            fact = self.facts.known[place] = self.facts.compare(values)
        if fact is Fact.UNCLEAR:
            node = values[0].grad_fn
            what = "it has a part" if node is None else f"it uses a {operator_name(node.name())}"
            raise UnclearError(f"{what} that is no mean or sum over samples")
        if fact is Fact.SAMPLES:
            raise _SamplesError
        return total(values, self.device) if fact is Fact.COUNT else values[0].to(self.device)


def _check_alike(group: Steps, are_aligned: bool) -> None:
    """Check that the replicas called one function, with as many steps among its arguments."""
    first = group[0]
    for step in group:
        if (
            step.function != first.function
            or step.kwargs.keys() != first.kwargs.keys()
            or len(step.parents) != len(first.parents)
            or (are_aligned and step.ordinal != first.ordinal)
        ):
            raise UnclearError(_UNLIKE)


class _StatisticError(UnclearError):
    """A step is a function of all samples of a chunk that is neither a mean nor a sum."""


class _SamplesError(Exception):
    """A step uses entries of samples, so it has a value for each chunk and none for the batch."""
