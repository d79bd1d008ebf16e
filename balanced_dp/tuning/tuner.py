"""Measure the splits that the searches choose for a workload, and report them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import get_args

import torch

from ..emulation.fallback import accelerators, training_devices
from ..emulation.machine import current_machine
from ..errors import ArgumentError, ArgumentTypeError, InfeasiblePlanError
from ..memory.peaks import capacities_of
from ..search import MAX_SPLITS, Split
from ..split import as_integer, split_batch
from .options import Goal, Option
from .report import Report, checked_reserve, mode_of
from .step import StepMeter
from .workload import Workload
from .workload_search import WorkloadSearch, fill_alike

_LARGEST_BATCH = 2**16
"""The largest batch to measure. Batches are created on the CPU even if devices keep only shapes."""

_LARGEST_MULTIPLE = 4
"""The largest batch, as a multiple of the requested one, if emulated devices compute values."""


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
    goal: Goal | None = None,
    with_alternatives: bool = True,
    on_measurement: Callable[[Option], object] = lambda option: None,
) -> Report:
    """Measure a workload at a few splits and return a report with the best one.

    The training steps run on the accelerators if there are two or more, otherwise on emulated
    devices. By default emulated devices keep shapes only, so the batch and the model may be larger
    than the memory of this machine. Nothing is predicted: all splits and batches of the report were
    measured.

    Args:
        workload: the workload to train.
        batch_size: samples in the whole batch.
        devices: the devices or their number. By default one for each capacity, all
            accelerators, or four emulated ones.
        capacities: capacity of each device in bytes, which emulated devices may exceed. The default
            for accelerators is their own capacity. The default for emulated devices is the highest
            peak of the even split, rounded up to whole MiB.
        reserve: bytes of each capacity to keep free. By default 1 GiB for contexts and
            workspaces, or 0 if the capacity is the peak of the even split.
        sweep: values of ``gpu0_bsz`` to measure in addition.
        emulate: whether to emulate devices even if there are accelerators.
        symbolic: whether emulated devices keep shapes only. Otherwise they compute values, for
            workloads that read them.
        gather: whether to gather outputs and compute their loss on device 0. Otherwise each device
            computes the loss of its chunk.
        spread: whether to spread parameters, gradients and optimizer state over all devices.
        goal: how options are ranked. For ``"speed"`` the best option is that with the smallest
            largest chunk; for ``"headroom"``, that with the lowest utilization of its fullest
            device; for ``"batch"``, that with the largest batch. By default speed, or headroom if
            the capacity is the peak of the even split.
        with_alternatives: whether to also measure with the loss on each device (``gather=False``),
            and with parameters spread over all devices (``spread=True``).
        on_measurement: called with each measurement.

    Raises:
        ArgumentError: If the batch, the devices or their capacities cannot be used.
        ArgumentTypeError: If ``workload`` is not a ``Workload``.
        InfeasiblePlanError: If no option fits.
        SymbolicValueError: If the workload reads values, which symbolic devices do not compute.
    """
    if goal not in (None, *get_args(Goal)):
        raise ArgumentError(f"goal must be speed, headroom or batch, got {goal!r}")
    if not isinstance(workload, Workload):
        fact = "workload must be a Workload, as balanced_dp.tuning.workload.find_workload returns"
        raise ArgumentTypeError(f"{fact}, got {workload!r}")
    batch_size = as_integer("batch_size", batch_size, minimum=1)
    given = capacities if devices is None else devices
    num = given if given is None or isinstance(given, int) else len(given)
    if num is not None and num < 2:
        raise ArgumentError(f"a plan is for two or more devices, got {num}")
    if capacities is not None and len(capacities) != num:
        raise ArgumentError(
            f"capacities must be one for each of {num} devices, got {len(capacities)}"
        )
    with ExitStack() as stack:
        if devices is None or isinstance(devices, int):
            emulates = not accelerators(num, emulate)
            devices = stack.enter_context(
                training_devices(num, memory=capacities, symbolic=symbolic, emulate=emulates)
            )
            if emulates:
                current_machine().ignore_capacities()
        if capacities is None and mode_of(devices[0]) == "real":
            capacities = capacities_of(devices)
        reserve = checked_reserve(reserve, capacities)
        meter = stack.enter_context(StepMeter(workload, devices))
        run = _Run(meter, batch_size, sorted(set(sweep)), on_measurement)
        even = split_batch(batch_size, len(devices), batch_size)
        report = Report.of(
            devices,
            [run.measured(even, gather, spread)],
            capacities,
            reserve,
            goal,
            workload=workload.name,
            num_parameters=meter.num_parameters,
            precision=None if workload.precision is None else str(workload.precision),
        )
        run.search(report, gather, spread)
        failures = {}
        for name in ("gather=False", "spread=True") if with_alternatives else ():
            apart = (False, spread) if name == "gather=False" else (gather, True)
            try:  # what is measured already is not measured again
                run.search(report, *apart)
                gather = apart[0]
            except Exception as error:  # the user's loss may not work for chunks
                failures[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    report = replace(report, options=tuple(run.known.values()), failures=failures)
    if not report.ranked_options:
        raise InfeasiblePlanError(report.what_lacks())
    return report


@dataclass
class _Run:
    """The measurements of a workload, each made once."""

    meter: StepMeter
    batch_size: int
    swept: Sequence[int]
    on_measurement: Callable[[Option], object]
    known: dict[tuple[Split, bool, bool], Option] = field(default_factory=dict)

    def measured(self, split: Split, gather: bool, spread: bool) -> Option:
        """Return the measurement of a split."""
        key = split, gather, spread
        if key not in self.known:
            self.known[key] = self.meter.measure(split, gather=gather, spread=spread)
            self.on_measurement(self.known[key])
        return self.known[key]

    def search(self, report: Report, gather: bool, spread: bool) -> None:
        """Measure the splits that the searches choose, for one ``gather`` and ``spread``."""
        size, budgets = self.batch_size, report.budgets

        def tell(split: Split) -> None:
            option = self.measured(split, gather, spread)
            peaks: list[float] = list(option.peak_bytes)
            if option.ran_out is not None:
                peaks[option.ran_out] = math.inf
            search.tell(split, peaks)

        limit = _LARGEST_MULTIPLE * size if report.mode == "emulated" else _LARGEST_BATCH
        search = WorkloadSearch(size, budgets, self.meter.smallest_chunk, largest=limit)
        tell(search.split(search.even))
        for split in map(search.split, self.swept):
            if search.allows(split):
                tell(split)
        while (wanted := search.next()) is not None:
            tell(wanted)
        for batch_size in (size, None) if len(set(budgets)) > 1 else ():
            for _ in range(MAX_SPLITS):
                weights = fill_alike(search.told, batch_size)
                if weights is None or weights in search.told or not 0 < sum(weights) <= limit:
                    break
                if not search.allows(weights):
                    break
                tell(weights)
