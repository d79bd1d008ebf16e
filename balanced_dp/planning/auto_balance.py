"""Choose the next value of ``gpu0_bsz="auto"`` from observed peaks. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from ..split import best_gpu0_bsz, even_share, is_better, split_batch
from .memory_model import LinearTerm, MemoryModel, fit
from .split_planner import Planner, utilizations

MAX_CHANGES = 5
"""How often the value changes during the search, apart from changes after running out of memory."""

_MAX_FITTED = 16
"""The model is fitted to this number of observations, the latest ones."""

_MAX_SKIPPED = 100
"""The search ends after this number of iterations that tell nothing."""

_UNKNOWN = MemoryModel((), (), (), num_points=0, residual=math.inf)
"""The model before the first iteration."""


class AutoBalance:
    """Choose the next ``gpu0_bsz`` from what was observed.

    The search starts with the even split, or with what an earlier one has found, continues with the
    values that a model of the observed peaks plans, and stays with the best value once the model
    plans no new one. The first change
    assumes the most bytes that a sample can take, so that no other device gets fuller than device 0
    was with the even split.

    Args:
        capacities: capacity of each device in bytes.
        is_free: whether values are tried with which a device might hold more than its capacity, and
            each iteration counts, as on emulated devices. Otherwise the first one after each change
            does not, since kernels are tuned in it.

    Attributes:
        smallest: the smallest chunk of device 0 that is not empty.
        num_changes: how often the search has changed the value.
        is_settling: whether the next iteration does not count.
        is_frozen: whether the search is over.
    """

    def __init__(self, capacities: Sequence[int], is_free: bool = False) -> None:
        self.capacities = capacities
        self.is_free = is_free
        self.is_settling = False
        self.smallest = 1
        self.num_changes = 0
        self.is_frozen = False
        # Batch size and value -> the peak of each device.
        self._observed: dict[tuple[int, int], tuple[int, ...]] = {}
        self._planner = Planner(_UNKNOWN, capacities)
        self._values: dict[int, int] = {}
        # Batch size -> value with which device 0, or another device, ran out of memory.
        self._too_large: dict[int, int] = {}
        self._too_small: dict[int, int] = {}
        self._num_skipped = 0
        self._first_share = Fraction(1)
        """The share of device 0 in a batch while nothing is known of it."""

    def state_dict(self, batch_size: int) -> dict[str, Any]:
        """Return the value for a batch, and what ran out of memory, as numbers and lists."""
        return {
            "batch_size": batch_size,
            "gpu0_bsz": self.gpu0_bsz(batch_size),
            "capacities": list(self.capacities),
            "too_large": [list(pair) for pair in self._too_large.items()],
            "too_small": [list(pair) for pair in self._too_small.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the search with the value of another one.

        With another number of devices, device 0 starts with the same fraction of the even share,
        or with all of it if it was idle. What ran out of memory is only taken over from devices of
        the same capacities.
        """
        num_devices, num_before = len(self.capacities), len(state["capacities"])
        self._values = {}
        self._first_share = Fraction(
            state["gpu0_bsz"] * num_before, state["batch_size"] * num_devices
        )
        if not self._first_share and num_devices != num_before:
            self._first_share = Fraction(1)
        if state["capacities"] == list(self.capacities):
            self._too_large = dict(state["too_large"])
            self._too_small = dict(state["too_small"])

    def gpu0_bsz(self, batch_size: int) -> int:
        """Return the value for a batch, as predicted if its size is new."""
        if batch_size not in self._values:
            self._values[batch_size] = self._limited(batch_size, self._predicted(batch_size))
        return self._values[batch_size]

    def observe(
        self,
        batch_size: int,
        peak_bytes: tuple[int, ...],
        empty_bytes: int,
        replica_bytes: int,
    ) -> None:
        """Record an iteration; change or freeze the value if its batch was the largest so far.

        Args:
            batch_size: the batch of the iteration, split by the current value.
            peak_bytes: the peak of each device in the iteration.
            empty_bytes: what device 0 would hold with an empty batch.
            replica_bytes: the least that another device holds of the model.
        """
        value = self.gpu0_bsz(batch_size)
        known = self._observed.get((batch_size, value), peak_bytes)
        self._observed[batch_size, value] = tuple(map(max, zip(known, peak_bytes, strict=True)))
        if batch_size < max(size for size, _ in self._observed):
            # The largest batch decides, since it fills the devices the most.
            self.skip()
            return
        if len(self._observed) == 1:
            model = _cautious_model(self._split(batch_size, value), peak_bytes, replica_bytes)
        else:
            latest = list(self._observed.items())[-_MAX_FITTED:]
            # An iteration is observed as a whole: as a single phase.
            model = fit(
                ((self._split(*key), [peaks]) for key, peaks in latest),
                [[empty_bytes]] * len(latest),
            )
        self._planner = Planner(model, self.capacities)
        best = self._best_observed(batch_size)
        candidate = self._limited(batch_size, self._predicted(batch_size))
        if not self._is_worth_trying(batch_size, candidate, best):
            # 0 means without gradients, which no fitted term predicts.
            self.is_frozen = not self._is_idling_worth_trying(batch_size, best)
            candidate = self._limited(batch_size, best) if self.is_frozen else 0
        self.num_changes += candidate != value
        self.is_settling = candidate != value and not self.is_free
        self._values = {batch_size: candidate}

    def settle(self) -> bool:
        """Return whether this iteration does not count; the next one does."""
        was_settling, self.is_settling = self.is_settling, False
        return was_settling

    def skip(self) -> None:
        """Record an iteration that tells nothing; end the search after many of them."""
        self._num_skipped += 1
        self.is_frozen |= self._num_skipped >= _MAX_SKIPPED

    def forget(self, batch_size: int) -> None:
        """Search again if anything was observed of such batches, with none of it."""
        others = {key: peaks for key, peaks in self._observed.items() if key[0] != batch_size}
        if len(others) < len(self._observed):
            self._observed, self.is_frozen = others, False
            self._planner = Planner(_UNKNOWN, self.capacities)

    def out_of_memory(self, batch_size: int, index: int) -> None:
        """Change the value with which device ``index`` ran out of memory."""
        self.is_settling = not self.is_free
        value = self.gpu0_bsz(batch_size)
        ran = [chunk for size, chunk in self._observed if size == batch_size]
        if index == 0:
            self._too_large[batch_size] = value
            # A value that ran before will run again; without one, try half.
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
        if not self._may_try(batch_size, candidate):
            return False
        if not self._planner.model.is_accurate:
            return True
        expected = self._planner.utilization(batch_size, candidate)
        if len(self._observed) == 1:  # an upper bound
            return self.is_free or expected <= 1
        return is_better(expected, self._utilization(batch_size, best))

    def _is_idling_worth_trying(self, batch_size: int, best: int) -> bool:
        """Return whether 0, which the model cannot predict, could be the best value."""
        is_allowed = not self._limited(batch_size, 0) and self._may_try(batch_size, 0)
        if not is_allowed or not self._first_is_bottleneck(batch_size, best):
            return False
        _, others = self._planner.utilizations(batch_size, 0)
        return is_better(others, self._utilization(batch_size, best))

    def _best_observed(self, batch_size: int) -> int:
        """Return the best of the observed values."""
        values = [value for size, value in self._observed if size == batch_size]
        if not self._planner.model.is_accurate:
            # Batches differ in more than their size: compare the devices within each iteration.
            return min(
                (v for v in values if self._first_is_bottleneck(batch_size, v)),
                default=max(values),
            )
        return best_gpu0_bsz({v: self._utilization(batch_size, v) for v in values})

    def _predicted(self, batch_size: int) -> int:
        even = even_share(batch_size, len(self.capacities))
        if not self._planner.model.is_accurate:
            fractions = [
                Fraction(v, n) for n, v in self._observed if self._first_is_bottleneck(n, v)
            ]
            return min(even, math.ceil(batch_size * min(fractions, default=self._first_share)))
        value = self._planner.best_gpu0_bsz(batch_size)
        if len(self._observed) > 1:
            return value
        [(size, observed_value)] = self._observed
        if size == batch_size and self._first_is_bottleneck(size, observed_value):
            value = min(value, observed_value - 1)  # a new value, to learn from
        # An idle device 0 needs different terms, so observe it with a sample first.
        return max(value, min(1, even - 1))

    def _limited(self, batch_size: int, value: int) -> int:
        """Return the value within the limits where memory ran out; that of device 0 prevails."""
        value = max([value, *(v + 1 for n, v in self._too_small.items() if n <= batch_size)])
        value = min([value, *(v - 1 for n, v in self._too_large.items() if n <= batch_size)])
        if 0 < value < self.smallest:
            value = self.smallest
        return max(0, min(value, even_share(batch_size, len(self.capacities))))

    def _split(self, batch_size: int, value: int) -> tuple[int, ...]:
        return split_batch(batch_size, len(self.capacities), value)

    def _utilizations(self, batch_size: int, value: int) -> list[float]:
        return utilizations(self._observed[batch_size, value], self.capacities)

    def _utilization(self, batch_size: int, value: int) -> float:
        return max(self._utilizations(batch_size, value))

    def _first_is_bottleneck(self, batch_size: int, value: int) -> bool:
        first, *others = self._utilizations(batch_size, value)
        return first >= max(others)


def _cautious_model(
    chunk_sizes: Sequence[int], peak_bytes: Sequence[int], replica_bytes: int
) -> MemoryModel:
    """Return a model of one iteration, with the most bytes that a sample can take."""
    (own, first), *others = zip(chunk_sizes, peak_bytes, strict=True)
    size, peak = max(others)
    if not size:  # a batch of one sample
        size, peak = own, first
    fixed = min(replica_bytes, peak)
    per_sample = (peak - fixed) / size
    first_per_sample = min(per_sample, first / own) if own else per_sample
    return MemoryModel(
        first_terms=(LinearTerm(first - first_per_sample * own, first_per_sample),),
        idle_terms=(),
        other_terms=(LinearTerm(fixed, per_sample),),
        num_points=1,
        residual=0.0,
    )
