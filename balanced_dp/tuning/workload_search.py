"""Measure the splits of a workload on which the choice of the best one depends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import ArgumentError, InfeasiblePlanError
from ..planning.memory_model import MemoryModel, fit
from ..planning.split_planner import Planner
from ..split import even_share
from .measurement import Measurement, fittable
from .options import fits
from .step_benchmark import StepMeter

_MAX_ROUNDS = 4
"""How often the model is fitted again after measuring what it planned."""

_LARGEST_BATCH = 2**16
"""The largest batch to measure: it is made on the CPU, even if devices keep shapes only."""

_LARGEST_MULTIPLE = 4
"""The same as a multiple of the batch, where devices are emulated with all values, on the CPU."""

_A_LITTLE_LESS = (1.0, 0.999, 0.995, 0.98)
"""Fractions of the largest batch that is predicted to fit, to be measured until one does."""

_MOST_VALUES = 32
"""The most evenly spaced values to measure if the model is not accurate."""


class WorkloadSearch:
    """Measure splits of a workload, each one once."""

    def __init__(
        self,
        meter: StepMeter,
        budgets: Sequence[int],
        on_measurement: Callable[[Measurement], object],
    ) -> None:
        self.meter = meter
        self.budgets = budgets
        self.on_measurement = on_measurement
        self.largest_batch = _LARGEST_BATCH
        self.measured: dict[tuple[int, int | tuple[int, ...]], Measurement] = {}
        """By batch size, and ``gpu0_bsz`` or weights."""

    def run(self, batch_size: int, swept: Sequence[int]) -> MemoryModel:
        """Measure the splits that the choice depends on, and return a model of all of them."""
        even = even_share(batch_size, len(self.budgets))
        if swept and not 0 <= swept[0] <= swept[-1] <= even:
            raise ArgumentError(
                f"sweep goes from {swept[0]} to {swept[-1]}, but for a batch of {batch_size} on "
                f"{len(self.budgets)} devices gpu0_bsz is from 0 to {even}, the even split"
            )
        self.measure_around(batch_size)
        if any(measured.mode == "emulated" for measured in self.measured.values()):
            self.largest_batch = _LARGEST_MULTIPLE * batch_size
        for gpu0_bsz in swept:
            self.measure(batch_size, gpu0_bsz)
        smaller = batch_size
        while len(fittable(self.measured.values())) < 3 and smaller > 1:  # memory ran out
            smaller = -(-smaller // 2)
            self.measure_around(smaller)
        if not fittable(self.measured.values()):
            raise InfeasiblePlanError(
                f"not even a batch of {smaller} ran: {self.measured[smaller, 0].out_of_memory}"
            )
        self.refine(batch_size)
        model = fit(fittable(self.measured.values()))
        if not model.is_accurate:
            for gpu0_bsz in range(0, even + 1, -(-(even + 1) // _MOST_VALUES)):
                self.measure(batch_size, gpu0_bsz)
        return model

    def measure(self, batch_size: int, gpu0_bsz: int) -> Measurement:
        """Measure the split, or the nearest one that the model can train on, unless it is known."""
        if gpu0_bsz:
            even = even_share(batch_size, len(self.budgets))
            gpu0_bsz = min(even, max(gpu0_bsz, self.meter.smallest_chunk))
        return self._measured(batch_size, gpu0_bsz)

    def measure_weights(self, weights: tuple[int, ...]) -> None:
        """Measure a split by weights, unless it is known or the model cannot train on it."""
        size = sum(weights)
        smallest = min(filter(None, weights), default=0)
        if size <= self.largest_batch and smallest >= self.meter.smallest_chunk:
            self._measured(size, weights)

    def _measured(self, batch_size: int, split: int | tuple[int, ...]) -> Measurement:
        if (batch_size, split) not in self.measured:
            arguments = (split,) if isinstance(split, int) else (None, split)
            self.measured[batch_size, split] = found = self.meter.measure(batch_size, *arguments)
            self.on_measurement(found)
        return self.measured[batch_size, split]

    def measure_around(self, batch_size: int) -> None:
        """Measure splits of a batch and of twice its size, from which the terms can be fitted."""
        even = even_share(batch_size, len(self.budgets))
        for gpu0_bsz in (even, 0, even // 2, 1):
            self.measure(batch_size, gpu0_bsz)
        for gpu0_bsz in (2 * even, 0):
            self.measure(2 * batch_size, gpu0_bsz)

    def refine(self, batch_size: int) -> None:
        """Measure what the model plans, and fit it again, until it plans nothing new."""
        for _ in range(_MAX_ROUNDS):
            before = len(self.measured)
            planner = Planner(fit(fittable(self.measured.values())), self.budgets)
            best = planner.best_gpu0_bsz(batch_size)
            near = range(max(0, best - 1), best + 2)
            for gpu0_bsz in (*near, planner.fastest_gpu0_bsz(batch_size)):
                self.measure(batch_size, gpu0_bsz)
            for choose in (planner.balanced_gpu0_bsz, planner.even_share):
                # The largest batch may be too large to be made on the CPU.
                largest = min(planner.max_batch_size(choose), self.largest_batch)
                if largest:
                    self.measure(largest, choose(largest))
            if len(set(self.budgets)) > 1:
                split = planner.weighted_split(batch_size)
                for weights in (
                    split.chunk_sizes,
                    split.max_batch_chunk_sizes,
                    planner.fastest_split(batch_size),
                ):
                    self.measure_weights(weights or ())
            if len(self.measured) == before:
                break
        for choose in (planner.balanced_gpu0_bsz, planner.even_share):
            largest = planner.max_batch_size(choose)
            for size in (round(part * largest) for part in _A_LITTLE_LESS):
                known = self.measured.get((size, choose(size)))
                if known is None and 0 < size < self.largest_batch:
                    known = self.measure(size, choose(size))
                if known is None or fits(known, self.budgets):
                    break
