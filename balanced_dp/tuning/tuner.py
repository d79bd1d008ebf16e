"""Measure training steps of a workload with several splits of the batch, and return a report.

A workload is a model with its batches, its loss and its optimizer. A split is the number of samples
of each device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import get_args

import torch

from ..emulation.fallback import accelerators, training_devices
from ..emulation.machine import current_machine, is_emulated
from ..errors import ArgumentError, ArgumentTypeError, InfeasiblePlanError
from ..memory.peaks import capacities_of
from ..search import MAX_SPLITS, Split
from ..split import as_integer, split_batch
from .options import Goal, Option
from .report import Report, checked_reserve
from .step import StepMeter
from .workload import Workload
from .workload_search import WorkloadSearch, fill_alike

_LARGEST_BATCH = 2**16
"""The search for the largest batch that fits tries no batch with more samples than this.

Batches are created on the CPU with all their values, even if the emulated devices keep only the
shapes of tensors. So batches without a limit could fill the memory of this machine.
"""

_LARGEST_MULTIPLE = 4
"""The largest batch tried on emulated devices that compute values, as a multiple of ``batch_size``.

This limit replaces ``_LARGEST_BATCH``, because the values are computed on the CPU, which is slow.
"""


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
) -> Report:
    """Measure training steps of a workload with several splits, and report which split is best.

    A split is the number of samples of each device. By default, the training steps run on the
    accelerators if there are enough (two, or the requested number), otherwise on emulated devices.
    By default, emulated devices keep the shapes of tensors but no values. So a workload can be
    measured even if its training needs more memory than this machine has. Nothing is predicted:
    each split and each batch size in the report was measured.

    Args:
        workload: what to train: a model with its batches, its loss and its optimizer.
        batch_size: the number of samples in the whole batch.
        devices: the devices, or the number of devices. If there are fewer accelerators than this
            number, all devices are emulated. By default, there is one device for each entry of
            ``capacities``. If ``capacities`` is None, too, the default is all accelerators, or
            four emulated devices if there are fewer than two accelerators.
        capacities: the capacity of each device in bytes. If a step needs more than the capacity of
            an emulated device, the step is measured, but counts as not fitting. By default, the
            capacity of an accelerator is its total memory. The default capacity of each emulated
            device is the highest peak of the even split.
        reserve: the bytes of each device to keep free. The default is 1 GiB, for CUDA's context and
            workspaces of libraries. For emulated devices without ``capacities``, the default
            is 0.
        sweep: values of ``gpu0_bsz`` to measure in addition to those that the search chooses. A
            value is skipped if it gives a device fewer samples than the model can train on, such as
            one sample if the model has a batch norm.
        emulate: whether to emulate devices even if there are accelerators.
        symbolic: whether emulated devices keep only the shapes of tensors. Otherwise they compute
            values. This is slower, but necessary if the workload reads values of tensors, such as
            with ``.item()``.
        gather: whether to gather outputs and compute their loss on device 0. Otherwise each device
            computes the loss of its own samples.
        spread: whether to spread parameters, gradients and optimizer state over all devices.
        goal: how the options (ways to train, with their measurements) are ranked. In the best
            option for ``"speed"``, the device with the most samples has as few samples as possible.
            For ``"headroom"``, the fullest device is as little full as possible. For ``"batch"``,
            the batch is as large as possible. The default is ``"speed"``, or ``"headroom"`` for
            emulated devices without ``capacities``.
        with_alternatives: whether to also measure with the loss on each device (``gather=False``),
            and with parameters spread over all devices (``spread=True``).

    Returns:
        A report of all measured options.

    Raises:
        ArgumentError: If an argument is out of its range or has a wrong length. If the workload
            returns a batch that does not have the requested size, or a loss that is not 0-dim.
        ArgumentTypeError: If ``workload`` is not a ``Workload``, or ``batch_size`` or ``reserve``
            is not an integer.
        InfeasiblePlanError: If no measured option for ``batch_size`` samples fits in memory. For
            the goal ``"batch"``, if no measured option of any batch size fits.
        SymbolicValueError: If the workload reads values of tensors, but the emulated devices keep
            only the shapes of tensors.
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
        raise ArgumentError(f"splits need two or more devices, got {num}")
    if capacities is not None and len(capacities) != num:
        raise ArgumentError(
            f"capacities must be {num} numbers, one for each device, got {len(capacities)}"
        )
    with ExitStack() as stack:
        if devices is None or isinstance(devices, int):
            emulates = not accelerators(num, emulate)
            devices = stack.enter_context(
                training_devices(num, memory=capacities, symbolic=symbolic, emulate=emulates)
            )
            if emulates:
                current_machine().ignore_capacities()
        if capacities is None and not is_emulated(devices[0]):
            capacities = capacities_of(devices)
        reserve = checked_reserve(reserve, capacities)
        meter = stack.enter_context(StepMeter(workload, devices))
        run = _Run(meter, batch_size, sorted(set(sweep)))
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
            try:  # if apart is (gather, spread), this measures nothing new
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
    """The measurements of a workload. No measurement is made twice.

    Attributes:
        meter: measures the training steps.
        batch_size: the number of samples in the requested batch.
        swept: values of ``gpu0_bsz`` to measure in addition to those that the search chooses.
        known: the measured options, as a dict from ``(split, gather, spread)`` to ``Option``. The
            split is the number of samples of each device.
    """

    meter: StepMeter
    batch_size: int
    swept: Sequence[int]
    known: dict[tuple[Split, bool, bool], Option] = field(default_factory=dict)

    def measured(self, split: Split, gather: bool, spread: bool) -> Option:
        """Return the option in ``known`` for the arguments; measure the option if it is missing."""
        key = split, gather, spread
        if key not in self.known:
            self.known[key] = self.meter.measure(split, gather=gather, spread=spread)
        return self.known[key]

    def search(self, report: Report, gather: bool, spread: bool) -> None:
        """Search for the best split with the given ``gather`` and ``spread`` by measuring splits.

        A split is the number of samples of each device. The splits tried are the even split, the
        splits with a ``gpu0_bsz`` in ``swept``, and the splits that ``WorkloadSearch`` chooses. If
        the devices have different budgets (the bytes that each may hold), splits that should fill
        all devices equally are also tried. The even split of the requested batch is always
        measured. Any other split is skipped if a device would get samples, but fewer than the model
        can train on.

        Args:
            report: a report of this workload. Only its ``budgets`` and its ``mode``
                (``"symbolic"``, ``"emulated"`` or ``"real"``) are used.
            gather: as in ``tune``.
            spread: as in ``tune``.
        """
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
