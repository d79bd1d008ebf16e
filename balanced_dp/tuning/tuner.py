"""Measures a workload at the splits that matter, fits the laws, plans, and measures the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from ..errors import ArgumentError, InfeasiblePlanError
from ..planning.memory_model import MemoryModel, fit
from ..planning.split_planner import Planner, check_batch, check_fits, describe, utilizations
from ..split import best_values, even_share
from .report_types import SCHEMA, Alternative, Origin, Report
from .step_benchmark import Measurement, StepMeter, default_num_devices, open_devices, step_meter
from .workloads import Workload

_MAX_ROUNDS = 4
"""How often the laws are fitted anew to the plan that they led to."""

_FEW = 12
"""About how many steps are measured."""

_MOST_VALUES = 64
"""How many values are measured, evenly spaced, where no laws say which."""

_LARGEST_MEASURED_BATCH = 2**16
"""Batches are made on the CPU with their values, whatever the devices keep."""

OnMeasurement = Callable[[Measurement, int], object]
"""Is called with each measurement and about how many are left."""


def tune(
    workload: Workload,
    batch_size: int,
    devices: int | Sequence[torch.device] | None = None,
    capacities: Sequence[int] | None = None,
    *,
    reserve: int = 0,
    sweep: Iterable[int] = (),
    emulate: bool = False,
    gather: bool = True,
    with_alternative: bool = True,
    on_measurement: OnMeasurement = lambda measurement, num_left: None,
) -> Report:
    """Returns the best split of a batch, why it is the best, and what was measured to find it.

    A handful of training steps are measured: on the accelerators if there are two or more, else on
    emulated devices that keep shapes only, so that neither the batch nor the model need fit this
    machine. Around the value where device 0 and the others cross, every split is measured that the
    choice depends on, and so is the choice.

    Args:
        workload: what is trained.
        batch_size: samples of the whole batch.
        devices: how many devices, or which. By default all accelerators, or one emulated device
            for each capacity, or four.
        capacities: bytes that each device can hold, device 0 first. By default what accelerators
            have; for emulated devices, what the even split needs of its fullest, in whole MiB.
        reserve: bytes of each device that are not to be planned with.
        sweep: values of ``gpu0_bsz`` to measure in any case.
        emulate: emulated devices even where there are accelerators.
        gather: whether outputs are gathered and the loss computed on device 0; else each device
            computes that of its chunk.
        with_alternative: whether the other way is measured, too, for the report to compare.
        on_measurement: called with each measurement when it is made, and about how many are left.

    Raises:
        ArgumentError: there is nothing to plan with.
        InfeasiblePlanError: no split of the batch fits.
        SymbolicValueError: the workload reads values that are not computed.
    """
    if capacities is not None:
        check_batch(batch_size, capacities, reserve)

    def alternative(capacities: Sequence[int]) -> Alternative | str:
        """Returns the best split with the loss computed elsewhere, or why there is none."""
        try:
            with _opened_meter(workload, devices, capacities, emulate, not gather) as meter:
                other = _measured(meter, batch_size, capacities, reserve, (), on_measurement)
        except Exception as error:  # the loss is somebody's, and may be one for the batch only
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return Alternative(other.plan, other.chosen)

    def on_first(measured: Measurement, num_left: int) -> None:
        on_measurement(measured, num_left + _FEW * with_alternative)

    try:
        with _opened_meter(workload, devices, capacities, emulate, gather) as meter:
            known = default_capacities(meter, batch_size) if capacities is None else capacities
            check_batch(batch_size, known, reserve)
            if len(known) != len(meter.devices):
                raise ArgumentError(
                    f"capacities must be one for each of {len(meter.devices)} devices, got "
                    f"{len(known)}"
                )
            swept = sorted(set(sweep))
            report = _measured(meter, batch_size, known, reserve, swept, on_first)
            check_fits(report.plan, report.chosen.peak_bytes)
            if report.plan.weighted is not None:
                weights = report.plan.weighted.chunk_sizes
                report = replace(report, weighted=meter.measure(batch_size, None, weights))
    except InfeasiblePlanError as error:
        is_possible = with_alternative and capacities is not None
        other = alternative(capacities or ()) if is_possible else ""
        if isinstance(other, str) or min(other.plan.headroom_bytes) < 0:
            raise
        where = "computed on each device (gather=False)" if gather else "of gathered outputs"
        raise InfeasiblePlanError(
            f"{error}; with the loss {where} this batch fits, with gpu0_bsz={other.plan.gpu0_bsz}"
        ) from None
    if not with_alternative:
        return report
    other = alternative(report.plan.capacity_bytes)
    if isinstance(other, str):
        return replace(report, no_alternative=other)
    return replace(report, alternative=other)


def _measured(
    meter: StepMeter,
    batch_size: int,
    capacities: Sequence[int],
    reserve: int,
    swept: Sequence[int],
    on_measurement: OnMeasurement,
) -> Report:
    """Returns the report of the best split, whether it fits or not."""
    search = _Search(meter, [c - reserve for c in capacities], on_measurement)
    model = search.run(batch_size, swept)
    return report_of_measurements(
        list(search.measured.values()),
        Origin.of_this_process(
            torch.get_device_module(d).get_device_name(d) for d in meter.devices
        ),
        capacities,
        reserve,
        batch_size=batch_size,
        model=model,
        num_parameters=meter.num_parameters,
        precision=meter.precision,
        gather=meter.gather,
    )


@contextmanager
def _opened_meter(
    workload: Workload,
    devices: int | Sequence[torch.device] | None,
    capacities: Sequence[int] | None,
    emulate: bool,
    gather: bool,
) -> Iterator[StepMeter]:
    if devices is None:
        devices = default_num_devices(emulate) if capacities is None else len(capacities)
    with ExitStack() as stack:
        if isinstance(devices, int):
            devices = stack.enter_context(open_devices(devices, emulate=emulate))
        yield stack.enter_context(step_meter(workload, devices, gather))


def default_capacities(meter: StepMeter, batch_size: int) -> list[int]:
    """Returns what accelerators have; of emulated devices what the even split needs, in whole MiB.

    Raises:
        ArgumentError: there is no batch, or no second device.
    """
    check_batch(batch_size, [1] * len(meter.devices), 0)
    measured = meter.measure(batch_size, even_share(batch_size, len(meter.devices)))
    if measured.mode != "real":
        return [-(-max(measured.peak_bytes) // 2**20) * 2**20] * len(meter.devices)
    return [torch.get_device_module(d).get_device_properties(d).total_memory for d in meter.devices]


class _Search:
    """Measured splits of a workload, each once."""

    def __init__(
        self, meter: StepMeter, budgets: Sequence[int], on_measurement: OnMeasurement
    ) -> None:
        self.meter = meter
        self.budgets = budgets
        self.on_measurement = on_measurement
        self.num_expected = _FEW
        self.measured: dict[tuple[int, int], Measurement] = {}

    def run(self, batch_size: int, swept: Sequence[int]) -> MemoryModel:
        """Measures the splits that the choice depends on, and returns the laws."""
        even = even_share(batch_size, len(self.budgets))
        if swept and not 0 <= swept[0] <= swept[-1] <= even:
            raise ArgumentError(
                f"sweep goes from {swept[0]} to {swept[-1]}, but for a batch of {batch_size} on "
                f"{len(self.budgets)} devices gpu0_bsz is from 0 to {even}, the even split"
            )
        self.num_expected += len(swept)
        self.measure_around(batch_size)
        for gpu0_bsz in swept:
            self.measure(batch_size, gpu0_bsz)
        smaller = batch_size
        while len(self.fitting()) < 3 and smaller > 1:  # memory ran out
            smaller = -(-smaller // 2)
            self.measure_around(smaller)
        if not self.fitting():
            raise InfeasiblePlanError(
                f"not even a batch of {smaller} ran: {self.measured[smaller, 0].out_of_memory}"
            )
        self.refine(batch_size)
        model = fit(self.fitting())
        if not model.is_lawful:
            values = range(0, even + 1, max(1, even // _MOST_VALUES))
            self.num_expected = len(self.measured) + len(values)
            for gpu0_bsz in values:
                self.measure(batch_size, gpu0_bsz)
        return model

    def measure(self, batch_size: int, gpu0_bsz: int) -> None:
        """Measures the split, or the next that the model can train on, unless it was before."""
        if gpu0_bsz:
            even = even_share(batch_size, len(self.budgets))
            gpu0_bsz = min(even, max(gpu0_bsz, self.meter.smallest_chunk))
        if (batch_size, gpu0_bsz) not in self.measured:
            measurement = self.meter.measure(batch_size, gpu0_bsz)
            self.measured[batch_size, gpu0_bsz] = measurement
            self.on_measurement(measurement, max(0, self.num_expected - len(self.measured)))

    def measure_around(self, batch_size: int) -> None:
        """Measures splits of a batch, and of twice that, that tell the laws apart."""
        even = even_share(batch_size, len(self.budgets))
        for gpu0_bsz in (even, 0, even // 2, 1):
            self.measure(batch_size, gpu0_bsz)
        for gpu0_bsz in (2 * even, 0):
            self.measure(2 * batch_size, gpu0_bsz)

    def fitting(self) -> list[Measurement]:
        """Returns the measurements that laws can be fitted to."""
        return [m for m in self.measured.values() if m.status == "ok"]

    def refine(self, batch_size: int) -> None:
        """Measures what the plan rests on, until the laws lead to nothing new."""
        for _ in range(_MAX_ROUNDS):
            before = len(self.measured)
            planner = Planner(fit(self.fitting()), self.budgets)
            best = planner.best_gpu0_bsz(batch_size)
            for gpu0_bsz in range(max(0, best - 1), best + 2):
                self.measure(batch_size, gpu0_bsz)
            for choose in (planner.tightest_gpu0_bsz, planner.even_share):
                # One that is too large to be made is planned from the largest that is not.
                largest = min(planner.max_batch_size(choose), _LARGEST_MEASURED_BATCH)
                if largest:
                    self.measure(largest, choose(largest))
            if len(self.measured) == before:
                return


def best_measured(swept: Iterable[Measurement], budgets: Sequence[int]) -> Measurement:
    """Returns that of a batch with the least full device, of equal ones the fastest.

    Raises:
        InfeasiblePlanError: memory ran out in all of them.
    """
    measured = list(swept)
    ran = {m.chunk_sizes[0]: m for m in measured if m.status == "ok"}
    if not ran:
        raise InfeasiblePlanError(
            f"a batch of {measured[0].batch_size} does not fit: memory ran out with each of the "
            f"{len(measured)} splits that were measured; choose a smaller batch"
        )
    full = {value: max(utilizations(m.peak_bytes, budgets)) for value, m in ran.items()}
    return ran[best_values(full)[-1]]


def report_of_measurements(
    measurements: Sequence[Measurement],
    origin: Origin,
    capacities: Sequence[int],
    reserve: int = 0,
    *,
    batch_size: int | None = None,
    model: MemoryModel | None = None,
    num_parameters: int = 0,
    precision: str | None = None,
    gather: bool = True,
) -> Report:
    """Returns the report of the best of the measured splits, whether it fits or not.

    Args:
        measurements: of one workload: the even split of a batch and other splits, and of another
            batch size at least one, so that the laws can be told apart.
        origin: where and how they came about.
        capacities: bytes that each device can hold.
        reserve: bytes of each device that are not to be planned with.
        batch_size: of the batch to plan for; by default the one that most were measured with.
        model: the laws, by default those of all measurements.
        num_parameters: how many numbers the model learns.
        precision: the dtype of autocast.
        gather: whether outputs were gathered and their loss computed on device 0.

    Raises:
        ArgumentError: the even split is not among them.
        InfeasiblePlanError: memory ran out with every split.
    """
    if batch_size is None:
        batch_size = Counter(m.batch_size for m in measurements).most_common(1)[0][0]
    if model is None:
        model = fit(m for m in measurements if m.status == "ok")
    even = even_share(batch_size, len(capacities))
    swept = {m.chunk_sizes[0]: m for m in measurements if m.batch_size == batch_size}
    if even not in swept:
        raise ArgumentError(
            f"the sweep of {measurements[0].workload} lacks gpu0_bsz={even}, the even split "
            f"of its batch of {batch_size}"
        )
    chosen = best_measured(swept.values(), [c - reserve for c in capacities])
    value = chosen.chunk_sizes[0]
    return Report(
        schema=SCHEMA,
        origin=origin,
        workload=measurements[0].workload,
        num_parameters=num_parameters,
        precision=precision,
        gather=gather,
        plan=describe(model, batch_size, capacities, reserve, value, gather=gather),
        chosen=chosen,
        even=swept[even],
        weighted=None,
        alternative=None,
        no_alternative=None,
        model=model,
        measurements=tuple(measurements),
    )
