"""Measure a workload at a few splits, fit a memory model, plan, and measure the plan."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import get_args

import torch

from ..errors import ArgumentError, InfeasiblePlanError
from ..planning.memory_model import MeasuredSplit, MemoryModel, fit
from ..planning.split_planner import (
    RESERVE,
    Goal,
    Planner,
    check_batch,
    check_fits,
    describe,
    utilizations,
)
from ..split import best_gpu0_bsz, even_share
from .measurement import Measurement, by_gpu0_bsz
from .open_devices import default_num_devices, open_devices, uses_emulation
from .options import LARGEST_MEASURED_BATCH, find_options, fits, ranked
from .report_types import SCHEMA, Alternative, Provenance, Report
from .step_benchmark import StepMeter, step_meter
from .workloads import Workload

_MAX_ROUNDS = 4
"""How often the model is fitted again after measuring what it planned."""

_A_LITTLE_LESS = (1.0, 0.999, 0.995, 0.98)
"""Fractions of the largest batch that is predicted to fit, to be measured until one does."""

_FEW = 12
"""Approximate number of measured splits."""

_MOST_VALUES = 64
"""Number of evenly spaced values to measure if the model is not accurate."""

OnMeasurement = Callable[[Measurement, int], object]
"""A function of each measurement and the approximate number of those to come."""


def tune(
    workload: Workload,
    batch_size: int,
    devices: int | Sequence[torch.device] | None = None,
    capacities: Sequence[int] | None = None,
    *,
    reserve: int | None = None,
    sweep: Iterable[int] = (),
    emulate: bool = False,
    symbolic: bool = True,
    gather: bool = True,
    spread: bool = False,
    goal: Goal = "speed",
    with_alternatives: bool = True,
    on_measurement: OnMeasurement = lambda measurement, num_left: None,
) -> Report:
    """Measure a workload at a few splits and return a report on the best one.

    The training steps run on the accelerators if there are two or more, otherwise on emulated
    devices that keep shapes only, so that neither the batch nor the model need fit this machine.
    The best split and those that it is compared with are all measured.

    Args:
        workload: the workload to train.
        batch_size: samples in the whole batch.
        devices: the devices or their number. By default all accelerators, or one emulated device
            for each capacity, or four.
        capacities: capacity of each device in bytes. By default that of the accelerators; for
            emulated devices what the bottleneck device needs with the even split, in whole MiB.
        reserve: bytes of each capacity to keep free. By default 512 MiB for contexts and
            workspaces, or 0 if the capacity is what the even split needs.
        sweep: values of ``gpu0_bsz`` to measure in addition.
        emulate: whether to emulate devices even if there are accelerators.
        symbolic: whether emulated devices keep shapes only. Otherwise they compute values, for
            workloads that read them.
        gather: whether to gather outputs and compute their loss on device 0. Otherwise each device
            computes the loss of its chunk.
        spread: whether to spread parameters, gradients and optimizer state over all devices.
        goal: what the best option is the best in: ``"speed"``, the smallest of all largest chunks;
            ``"headroom"``, the lowest utilization of the bottleneck device; or ``"batch"``, the
            largest batch.
        with_alternatives: whether to compare with the loss on each device, and with parameters on
            all devices as well.
        on_measurement: called with each measurement and the approximate number of those to come.

    Raises:
        ArgumentError: If the batch, the devices or their capacities cannot be planned with.
        InfeasiblePlanError: If no option fits.
        SymbolicValueError: If the workload reads values, which symbolic devices do not compute.
    """
    if goal not in get_args(Goal):
        raise ArgumentError(f"goal must be one of {get_args(Goal)}, got {goal!r}")
    if reserve is None:
        is_known = capacities is not None or not uses_emulation(emulate)
        reserve = RESERVE if is_known else 0
    if capacities is not None:
        check_batch(batch_size, capacities, reserve)
    opened = functools.partial(_opened_meter, workload, devices, emulate, symbolic)

    num_later = (gather + (not spread)) * _FEW * with_alternatives

    def on_each(measured: Measurement, num_left: int) -> None:
        on_measurement(measured, num_left + num_later)

    def alternative(gather: bool, spread: bool, capacities: Sequence[int]) -> Alternative:
        nonlocal num_later
        num_later -= _FEW
        try:
            with opened(capacities, gather, spread) as meter:
                other = _measured(meter, batch_size, capacities, reserve, (), on_each)
        except Exception as error:  # the user's loss may not work for chunks
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return Alternative(gather, spread, reason=reason)
        return Alternative(gather, spread, options=other.options)

    def alternatives(capacities: Sequence[int]) -> Iterator[Alternative]:
        gathers = gather
        if gather:
            apart = alternative(False, spread, capacities)
            gathers = apart.reason is not None
            yield apart
        if not spread:
            yield alternative(gathers, True, capacities)

    try:
        with opened(capacities, gather, spread) as meter:
            known = default_capacities(meter, batch_size) if capacities is None else capacities
            check_batch(batch_size, known, reserve)
            if len(known) != len(meter.devices):
                raise ArgumentError(
                    f"capacities must be one for each of {len(meter.devices)} devices, got "
                    f"{len(known)}"
                )
            report = _measured(meter, batch_size, known, reserve, sorted(set(sweep)), on_each)
    except InfeasiblePlanError as error:
        if with_alternatives and capacities is not None:
            found = [option for other in alternatives(capacities) for option in other.options]
            budgets = [capacity - reserve for capacity in capacities]
            for option in ranked(found, batch_size, budgets, "speed"):
                raise InfeasiblePlanError(f"{error}; this batch fits with {option.line}") from None
        raise
    report = replace(report, goal=goal)
    if with_alternatives:
        report = replace(report, alternatives=tuple(alternatives(report.plan.capacity_bytes)))
    if not report.ranked_options:
        try:
            check_fits(report.plan, report.chosen.peak_bytes)
        except InfeasiblePlanError as error:
            for option in replace(report, goal="batch").ranked_options[:1]:
                error.args = (f"{error}; {option.batch_size} fit with {option.line}",)
            raise
    return report


def _measured(
    meter: StepMeter,
    batch_size: int,
    capacities: Sequence[int],
    reserve: int,
    swept: Sequence[int],
    on_measurement: OnMeasurement,
) -> Report:
    """Return the report of the best split, whether it fits or not."""
    search = _Search(meter, [c - reserve for c in capacities], on_measurement)
    model = search.run(batch_size, swept)
    return report_of_measurements(
        list(search.measured.values()),
        Provenance.of_this_process(
            torch.get_device_module(d).get_device_name(d) for d in meter.devices
        ),
        capacities,
        reserve,
        batch_size=batch_size,
        model=model,
        num_parameters=meter.num_parameters,
        precision=meter.precision,
        gather=meter.gather,
        spread=meter.spread,
    )


@contextmanager
def _opened_meter(
    workload: Workload,
    devices: int | Sequence[torch.device] | None,
    emulate: bool,
    symbolic: bool,
    capacities: Sequence[int] | None,
    gather: bool,
    spread: bool,
) -> Iterator[StepMeter]:
    if devices is None:
        devices = default_num_devices(emulate) if capacities is None else len(capacities)
    # Parameters are spread in proportion to what devices of unlike memory hold.
    are_unlike = spread and uses_emulation(emulate) and len(set(capacities or ())) > 1
    memory = capacities if are_unlike else None
    with ExitStack() as stack:
        if isinstance(devices, int):
            devices = stack.enter_context(
                open_devices(devices, memory=memory, emulate=emulate, symbolic=symbolic)
            )
        yield stack.enter_context(step_meter(workload, devices, gather, spread))


def default_capacities(meter: StepMeter, batch_size: int) -> list[int]:
    """Return the capacities of accelerators, or for emulated devices what the even split needs.

    Raises:
        ArgumentError: If the batch is empty, or there is no second device.
    """
    check_batch(batch_size, [1] * len(meter.devices), 0)
    measured = meter.measure(batch_size, even_share(batch_size, len(meter.devices)))
    if measured.mode != "real":
        return [-(-max(measured.peak_bytes) // 2**20) * 2**20] * len(meter.devices)
    return [torch.get_device_module(d).get_device_properties(d).total_memory for d in meter.devices]


class _Search:
    """Measure splits of a workload, each one once."""

    def __init__(
        self, meter: StepMeter, budgets: Sequence[int], on_measurement: OnMeasurement
    ) -> None:
        self.meter = meter
        self.budgets = budgets
        self.on_measurement = on_measurement
        self.num_expected = _FEW
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
        self.num_expected += len(swept)
        self.measure_around(batch_size)
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
            values = range(0, even + 1, max(1, even // _MOST_VALUES))
            self.num_expected = len(self.measured) + len(values)
            for gpu0_bsz in values:
                self.measure(batch_size, gpu0_bsz)
        return model

    def measure(self, batch_size: int, gpu0_bsz: int) -> Measurement:
        """Measure the split, or the nearest one that the model can train on, unless it is known."""
        if gpu0_bsz:
            even = even_share(batch_size, len(self.budgets))
            gpu0_bsz = min(even, max(gpu0_bsz, self.meter.smallest_chunk))
        if (batch_size, gpu0_bsz) not in self.measured:
            self.record(gpu0_bsz, self.meter.measure(batch_size, gpu0_bsz))
        return self.measured[batch_size, gpu0_bsz]

    def measure_weights(self, weights: tuple[int, ...]) -> None:
        """Measure a split by weights, unless it is known or the model cannot train on it."""
        size = sum(weights)
        is_known = (size, weights) in self.measured or size > LARGEST_MEASURED_BATCH
        if not is_known and min(filter(None, weights), default=0) >= self.meter.smallest_chunk:
            self.record(weights, self.meter.measure(size, None, weights))

    def record(self, split: int | tuple[int, ...], measured: Measurement) -> None:
        """Keep a measurement."""
        self.measured[measured.batch_size, split] = measured
        self.on_measurement(measured, max(0, self.num_expected - len(self.measured)))

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
                largest = min(planner.max_batch_size(choose), LARGEST_MEASURED_BATCH)
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
                if known is None and 0 < size < LARGEST_MEASURED_BATCH:
                    known = self.measure(size, choose(size))
                if known is None or fits(known, self.budgets):
                    break


def fittable(measurements: Iterable[Measurement]) -> list[MeasuredSplit]:
    """Return what a model can be fitted to: the splits that ran."""
    return [(m.chunk_sizes, m.phase_peak_bytes) for m in measurements if m.status == "ok"]


def best_measured(swept: Iterable[Measurement], budgets: Sequence[int]) -> Measurement:
    """Return the measurement with the lowest utilization of the bottleneck device.

    Raises:
        InfeasiblePlanError: If memory ran out in all of them.
    """
    measured = list(swept)
    ran = {m.chunk_sizes[0]: m for m in measured if m.status == "ok"}
    if not ran:
        raise InfeasiblePlanError(
            f"a batch of {measured[0].batch_size} does not fit: memory ran out with each of the "
            f"{len(measured)} measured splits; choose a smaller batch"
        )
    return ran[best_gpu0_bsz({v: max(utilizations(m.peak_bytes, budgets)) for v, m in ran.items()})]


def report_of_measurements(
    measurements: Sequence[Measurement],
    provenance: Provenance,
    capacities: Sequence[int],
    reserve: int = 0,
    *,
    batch_size: int | None = None,
    model: MemoryModel | None = None,
    num_parameters: int = 0,
    precision: str | None = None,
    gather: bool = True,
    spread: bool = False,
) -> Report:
    """Return the report of the best of the measured splits, whether it fits or not.

    Args:
        measurements: measurements of one workload: the even split of a batch, other splits of it,
            and at least one of another batch size, to tell the linear terms apart.
        provenance: where and how the measurements were made.
        capacities: capacity of each device in bytes.
        reserve: bytes of each capacity to keep free.
        batch_size: the batch size to plan for. By default the most frequent one.
        model: the memory model. By default it is fitted to all measurements.
        num_parameters: number of trained parameters.
        precision: the dtype of autocast.
        gather: whether outputs were gathered and their loss computed on device 0.
        spread: whether parameters were spread over all devices.

    Raises:
        ArgumentError: If the even split is missing.
        InfeasiblePlanError: If memory ran out with every split.
    """
    if batch_size is None:
        batch_size = Counter(m.batch_size for m in measurements).most_common(1)[0][0]
    if model is None:
        model = fit(fittable(measurements))
    even = even_share(batch_size, len(capacities))
    swept = by_gpu0_bsz(measurements, batch_size)
    if even not in swept:
        raise ArgumentError(
            f"the sweep of {measurements[0].workload} lacks gpu0_bsz={even}, the even split "
            f"of its batch of {batch_size}"
        )
    budgets = [c - reserve for c in capacities]
    chosen = best_measured(swept.values(), budgets)
    value = chosen.chunk_sizes[0]
    return Report(
        schema=SCHEMA,
        provenance=provenance,
        workload=measurements[0].workload,
        num_parameters=num_parameters,
        precision=precision,
        gather=gather,
        spread=spread,
        plan=describe(model, batch_size, capacities, reserve, value, gather=gather, spread=spread),
        chosen=chosen,
        even=swept[even],
        options=find_options(model, measurements, batch_size, budgets, gather, spread),
        alternatives=(),
        model=model,
        measurements=tuple(measurements),
    )
