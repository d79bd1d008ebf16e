"""Measure a workload at a few splits, fit a memory model, plan, and measure the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from ..errors import ArgumentError, InfeasiblePlanError
from ..planning.split_planner import RESERVE, Goal, check_batch, check_fits, check_goal
from ..split import even_share
from .measurement import Measurement
from .open_devices import default_num_devices, open_devices, uses_emulation
from .options import ranked
from .report_types import Alternative, Provenance, Report
from .reports import report_of_measurements
from .step_benchmark import StepMeter, step_meter
from .workload_search import WorkloadSearch
from .workloads import Workload


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
    on_measurement: Callable[[Measurement], object] = lambda measurement: None,
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
        on_measurement: called with each measurement.

    Raises:
        ArgumentError: If the batch, the devices or their capacities cannot be planned with.
        InfeasiblePlanError: If no option fits.
        SymbolicValueError: If the workload reads values, which symbolic devices do not compute.
    """
    check_goal(goal)
    if reserve is None:
        is_known = capacities is not None or not uses_emulation(emulate)
        reserve = RESERVE if is_known else 0

    def measured(
        gather: bool, spread: bool, capacities: Sequence[int] | None, swept: Sequence[int] = ()
    ) -> Report:
        """Return the report of the best split, whether it fits or not."""
        opened = devices
        if opened is None:
            opened = default_num_devices(emulate) if capacities is None else len(capacities)
        # Parameters are spread in proportion to what devices of unlike memory hold.
        are_unlike = spread and uses_emulation(emulate) and len(set(capacities or ())) > 1
        with ExitStack() as stack:
            if isinstance(opened, int):
                memory = capacities if are_unlike else None
                opened = stack.enter_context(
                    open_devices(opened, memory=memory, emulate=emulate, symbolic=symbolic)
                )
            meter = stack.enter_context(step_meter(workload, opened, gather, spread))
            known = capacities or default_capacities(meter, batch_size)
            check_batch(batch_size, known, reserve)
            if len(known) != len(opened):
                raise ArgumentError(
                    f"capacities must be one for each of {len(opened)} devices, got {len(known)}"
                )
            budgets = [capacity - reserve for capacity in known]
            search = WorkloadSearch(meter, budgets, on_measurement)
            model = search.run(batch_size, swept)
            return report_of_measurements(
                list(search.measured.values()),
                Provenance.of_this_process(
                    torch.get_device_module(d).get_device_name(d) for d in opened
                ),
                known,
                reserve,
                batch_size=batch_size,
                model=model,
                num_parameters=meter.num_parameters,
                precision=meter.precision,
                gather=gather,
                spread=spread,
            )

    def alternative(gather: bool, spread: bool, capacities: Sequence[int]) -> Alternative:
        try:
            return Alternative(gather, spread, options=measured(gather, spread, capacities).options)
        except InfeasiblePlanError:  # none of its options fits
            return Alternative(gather, spread)
        except Exception as error:  # the user's loss may not work for chunks
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return Alternative(gather, spread, reason=reason)

    def alternatives(capacities: Sequence[int]) -> Iterator[Alternative]:
        gathers = gather
        if gather:
            apart = alternative(False, spread, capacities)
            gathers = apart.reason is not None
            yield apart
        if not spread:
            yield alternative(gathers, True, capacities)

    try:
        report = replace(measured(gather, spread, capacities, sorted(set(sweep))), goal=goal)
    except InfeasiblePlanError as error:
        if with_alternatives and capacities is not None:
            found = [option for other in alternatives(capacities) for option in other.options]
            budgets = [capacity - reserve for capacity in capacities]
            for option in ranked(found, batch_size, budgets, "speed"):
                raise InfeasiblePlanError(f"{error}; this batch fits with {option.line}") from None
        raise
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
