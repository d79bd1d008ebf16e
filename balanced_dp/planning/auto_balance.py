"""``gpu0_bsz="auto"``: which value to try next, from how full each device was. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..split import EQUAL, best_values, even_share
from .memory_model import Law, MemoryModel, fit
from .split_planner import Planner, utilizations

MAX_CHANGES = 5
"""How often a value is changed to find the best one; running out of memory comes on top."""

_MAX_FITTED = 16
"""How many observations the laws are fitted to, the latest."""

_MAX_SMALLER = 100
"""How many iterations with smaller batches are waited for the largest to come again."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What each device held at most in an iteration."""

    chunk_sizes: tuple[int, ...]
    peak_bytes: tuple[int, ...]

    @property
    def phase_peak_bytes(self) -> tuple[tuple[int, ...], ...]:
        """The peaks: from outside, an iteration has one phase."""
        return (self.peak_bytes,)


class AutoBalance:
    """Which ``gpu0_bsz`` to try next, from what was observed. Pure arithmetic.

    It starts with the even split, goes where the laws of what was observed lead, and stays with the
    best value once they lead to none that is new. The first move assumes the most that a sample can
    take, so that it cannot fill another device more than the even split fills device 0.

    ``capacities`` are bytes that each device can hold, and ``smallest`` is the fewest samples to
    give device 0, if it gets any.
    """

    def __init__(self, capacities: Sequence[int], smallest: int = 1) -> None:
        self.capacities = capacities
        self.smallest = smallest
        self.num_changes = 0
        self.is_frozen = False
        self._observed: dict[tuple[int, int], Observation] = {}
        self._planner: Planner | None = None
        self._values: dict[int, int] = {}
        # Batch size -> value with which device 0, or another device, ran out of memory.
        self._too_large: dict[int, int] = {}
        self._too_small: dict[int, int] = {}
        self._num_smaller = 0

    def gpu0_bsz(self, batch_size: int) -> int:
        """Returns the value for a batch, by the laws if its size is new."""
        if batch_size not in self._values:
            self._values[batch_size] = self._limited(batch_size, self._predicted(batch_size))
        return self._values[batch_size]

    def observe(self, observation: Observation, empty_bytes: int, replica_bytes: int) -> None:
        """Takes note of an iteration, and moves or freezes if its batch was the largest so far.

        Args:
            observation: of one batch, with the value that was given for it.
            empty_bytes: what device 0 would hold with an empty batch.
            replica_bytes: what another device holds of the model, at least.
        """
        batch_size, value = sum(observation.chunk_sizes), observation.chunk_sizes[0]
        known = self._observed.get((batch_size, value), observation)
        peaks = tuple(map(max, zip(known.peak_bytes, observation.peak_bytes, strict=True)))
        self._observed[batch_size, value] = replace(observation, peak_bytes=peaks)
        if batch_size < max(size for size, _ in self._observed):
            # The largest batch decides: it is the one that fills the devices.
            self._num_smaller += 1
            self.is_frozen = self._num_smaller >= _MAX_SMALLER
            return
        if len(self._observed) == 1:
            model = _cautious_model(observation, replica_bytes)
        else:
            model = fit(list(self._observed.values())[-_MAX_FITTED:], empty_bytes)
        self._planner = Planner(model, self.capacities)
        best = self._best_observed(batch_size)
        candidate = self._limited(batch_size, self._predicted(batch_size))
        if self._is_worth_trying(batch_size, candidate, best):
            pass
        elif self._is_idling_worth_trying(batch_size, best):
            candidate = 0  # no gradients are computed there, so no law tells what it holds
        else:
            self.is_frozen = True
            candidate = self._limited(batch_size, best)
        self.num_changes += candidate != value
        self._values = {batch_size: candidate}

    def out_of_memory(self, batch_size: int, index: int) -> None:
        """Moves away from the value of a batch with which device ``index`` ran out of memory."""
        value = self.gpu0_bsz(batch_size)
        ran = [chunk for size, chunk in self._observed if size == batch_size]
        if index == 0:
            self._too_large[batch_size] = value
            # What ran before will run again; where nothing did, half of it.
            value = max((chunk for chunk in ran if chunk < value), default=value // 2)
        else:
            self._too_small[batch_size] = value
            even = even_share(batch_size, len(self.capacities))
            above = (chunk for chunk in ran if chunk > value)
            value = min(above, default=value + math.ceil((even - value) / 2))
        self._values = {batch_size: self._limited(batch_size, value)}

    def _may_try(self, batch_size: int, value: int) -> bool:
        is_new = (batch_size, value) not in self._observed
        return is_new and self.num_changes < MAX_CHANGES - 1  # one is left to go back

    def _is_worth_trying(self, batch_size: int, candidate: int, best: int) -> bool:
        assert self._planner is not None
        if not self._may_try(batch_size, candidate):
            return False
        if not self._planner.model.is_lawful:
            return True
        expected = self._planner.utilization(batch_size, candidate)
        if len(self._observed) == 1:  # the most that there can be
            return expected <= 1
        return expected < self._utilization(batch_size, best) * (1 - EQUAL)

    def _is_idling_worth_trying(self, batch_size: int, best: int) -> bool:
        """Whether device 0 without samples, which no law tells, could be the best."""
        assert self._planner is not None
        is_allowed = not self._limited(batch_size, 0) and self._may_try(batch_size, 0)
        if not is_allowed or not self._first_is_fullest(batch_size, best):
            return False
        _, others = self._planner.utilizations(batch_size, 0)
        return others < self._utilization(batch_size, best) * (1 - EQUAL)

    def _best_observed(self, batch_size: int) -> int:
        """Returns the largest of the values that were observed to be the best."""
        values = [value for size, value in self._observed if size == batch_size]
        if self._planner is not None and not self._planner.model.is_lawful:
            # Batches that differ in more than their size: compare devices in the same iteration.
            return min(
                (v for v in values if self._first_is_fullest(batch_size, v)),
                default=max(values),
            )
        return best_values({v: self._utilization(batch_size, v) for v in values})[-1]

    def _predicted(self, batch_size: int) -> int:
        even = even_share(batch_size, len(self.capacities))
        if self._planner is None:
            return even
        if not self._planner.model.is_lawful:
            shares = [
                value / size
                for size, value in self._observed
                if self._first_is_fullest(size, value)
            ]
            return min(even, math.ceil(batch_size * min(shares, default=1.0)))
        value = self._planner.best_gpu0_bsz(batch_size)
        if len(self._observed) > 1:
            return value
        [(size, observed_value)] = self._observed
        if size == batch_size and self._first_is_fullest(size, observed_value):
            value = min(value, observed_value - 1)  # the next one at least, to learn
        # What device 0 needs without any sample follows other laws: first see it with one.
        return max(value, min(1, even - 1))

    def _limited(self, batch_size: int, value: int) -> int:
        """Returns the value, moved off those that ran out of memory; device 0's count more."""
        value = max([value, *(v + 1 for n, v in self._too_small.items() if n <= batch_size)])
        value = min([value, *(v - 1 for n, v in self._too_large.items() if n <= batch_size)])
        if 0 < value < self.smallest:
            value = self.smallest
        return max(0, min(value, even_share(batch_size, len(self.capacities))))

    def _utilizations(self, batch_size: int, value: int) -> list[float]:
        return utilizations(self._observed[batch_size, value].peak_bytes, self.capacities)

    def _utilization(self, batch_size: int, value: int) -> float:
        return max(self._utilizations(batch_size, value))

    def _first_is_fullest(self, batch_size: int, value: int) -> bool:
        first, *others = self._utilizations(batch_size, value)
        return first >= max(others)


def _cautious_model(observation: Observation, replica_bytes: int) -> MemoryModel:
    """Returns laws for one observation, with the most bytes a sample that there can be."""
    own, first = observation.chunk_sizes[0], observation.peak_bytes[0]
    size, peak = max(zip(observation.chunk_sizes[1:], observation.peak_bytes[1:], strict=True))
    if not size:  # a batch of one sample
        size, peak = own, first
    fixed = min(replica_bytes, peak)
    per_sample = (peak - fixed) / size
    first_per_sample = min(per_sample, first / own) if own else per_sample
    return MemoryModel(
        first_laws=(Law(first - first_per_sample * own, first_per_sample),),
        idle_laws=(),
        other_laws=(Law(fixed, per_sample),),
        num_points=1,
        residual=0.0,
    )
