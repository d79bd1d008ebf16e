"""Measures a workload at the splits that matter, fits the laws, plans, and measures the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .measurement import Measurement, StepMeter, open_devices, step_meter
from .memory_model import MemoryModel, fit
from .plan import EQUAL, Plan, Planner, check_batch, plan
from .workloads import Workload

_MAX_ROUNDS = 4
"""How often the laws are fitted anew to the plan that they led to."""

_LARGEST_MEASURED_BATCH = 2**16
"""Batches are made on the CPU with their values, whatever the devices keep."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """A plan and what it rests on.

    Attributes:
        workload: the workload's name.
        plan: the plan.
        chosen: the planned split, measured.
        model: the laws.
        measurements: what they were fitted to, in the order of measuring.
    """

    workload: str
    plan: Plan
    chosen: Measurement
    model: MemoryModel
    measurements: tuple[Measurement, ...]

    @property
    def prediction_error(self) -> float:
        """How far the farthest device's prediction is off, as a part of what was measured."""
        pairs = zip(self.plan.predicted_bytes, self.chosen.peak_bytes, strict=True)
        return max(abs(predicted - held) / held for predicted, held in pairs if held)


def plan_workload(
    workload: Workload,
    batch_size: int,
    capacities: Sequence[int],
    reserve: int = 0,
    on_measurement: Callable[[Measurement], object] = lambda measurement: None,
) -> Tuning:
    """Returns the best split of the batch on devices of these capacities, which need not be here.

    Steps are measured on emulated devices with shapes only, so neither the batch nor the model
    need fit this machine. Around the value where device 0 and the others cross, every split is
    measured that the choice depends on.

    Args:
        workload: what is trained.
        batch_size: samples of the whole batch.
        capacities: bytes that each device can hold, device 0 first.
        reserve: bytes of each that are not to be planned with.
        on_measurement: called with each measurement when it is made.

    Raises:
        ArgumentError: there is nothing to plan with.
        InfeasiblePlanError: no split of the batch fits.
        SymbolicValueError: the workload reads values that are not computed.
    """
    num_devices = len(capacities)
    check_batch(batch_size, capacities, reserve)
    even = -(-batch_size // num_devices)
    with (
        open_devices(num_devices, emulate=True) as devices,
        step_meter(workload, devices) as meter,
    ):
        search = _Search(meter, [c - reserve for c in capacities], on_measurement)
        for size, gpu0_bsz in (
            (batch_size, even),
            (batch_size, 0),
            (batch_size, even // 2),
            (batch_size, 1),
            (2 * batch_size, 2 * even),
            (2 * batch_size, 0),
        ):
            search.measure(size, gpu0_bsz)
        search.refine(batch_size, even)
        model = fit(search.measured.values())
        if not model.is_lawful:
            for gpu0_bsz in range(even + 1):
                search.measure(batch_size, gpu0_bsz)
        chosen = search.best(batch_size)
    return Tuning(
        workload=workload.name,
        plan=plan(model, batch_size, capacities, reserve, chosen.gpu0_bsz),
        chosen=chosen,
        model=model,
        measurements=tuple(search.measured.values()),
    )


class _Search:
    """Measured splits of a workload, each once."""

    def __init__(
        self,
        meter: StepMeter,
        budgets: Sequence[int],
        on_measurement: Callable[[Measurement], object],
    ) -> None:
        self.meter = meter
        self.budgets = budgets
        self.on_measurement = on_measurement
        self.measured: dict[tuple[int, int], Measurement] = {}

    def measure(self, batch_size: int, gpu0_bsz: int) -> None:
        """Measures the split unless it was measured before."""
        if (batch_size, gpu0_bsz) not in self.measured:
            measurement = self.meter.measure(batch_size, gpu0_bsz)
            self.measured[batch_size, gpu0_bsz] = measurement
            self.on_measurement(measurement)

    def refine(self, batch_size: int, even: int) -> None:
        """Measures what the plan rests on, until the laws lead to nothing new."""
        for _ in range(_MAX_ROUNDS):
            before = len(self.measured)
            planner = Planner(fit(self.measured.values()), self.budgets)
            best = planner.best_gpu0_bsz(batch_size)
            for gpu0_bsz in range(max(0, best - 1), min(even, best + 1) + 1):
                self.measure(batch_size, gpu0_bsz)
            for choose in (planner.tightest_gpu0_bsz, planner.even_share):
                largest = planner.max_batch_size(choose)
                if 0 < largest <= _LARGEST_MEASURED_BATCH:
                    self.measure(largest, choose(largest))
            if len(self.measured) == before:
                return

    def best(self, batch_size: int) -> Measurement:
        """Returns the split of the batch with the least full device, of equal ones the fastest."""

        def utilization(measurement: Measurement) -> float:
            pairs = zip(measurement.peak_bytes, self.budgets, strict=True)
            return max(peak / budget for peak, budget in pairs)

        measured = [m for (size, _), m in self.measured.items() if size == batch_size]
        limit = min(map(utilization, measured)) * (1 + EQUAL)
        return max((m for m in measured if utilization(m) <= limit), key=lambda m: m.gpu0_bsz)
