"""Measure the splits of a workload that the searches choose, and report them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from ..devices import capacities_of
from ..errors import ArgumentError, InfeasiblePlanError
from ..search import MAX_SPLITS, Search, Split, fill_alike
from ..split import as_integer, even_share, split_batch
from ..units import format_bytes
from .open_devices import accelerators, open_devices
from .options import Goal, Option, check_goal
from .report import Provenance, Report, mode_of
from .step import StepMeter
from .workload import Workload

RESERVE = 512 * 2**20
"""Bytes of each device to keep free by default, for CUDA's context and workspaces of libraries."""

_LARGEST_BATCH = 2**16
"""The largest batch to measure: it is made on the CPU, even if devices keep shapes only."""

_LARGEST_MULTIPLE = 4
"""The same as a multiple of the batch, where emulated devices compute values."""


def check_reserve(capacities: Sequence[int], reserve: int) -> None:
    """Raise ArgumentError if the reserve leaves nothing of a capacity."""
    if any(capacity <= reserve for capacity in capacities):
        raise ArgumentError(
            f"{format_bytes(reserve)} of each device is kept free, but there are devices of "
            f"{', '.join(map(format_bytes, sorted(set(capacities))))}; lower --reserve"
        )


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
    devices that keep shapes only, so that neither the batch nor the model need fit this machine.
    Nothing is predicted: all splits and batches of the report were measured.

    Args:
        workload: the workload to train.
        batch_size: samples in the whole batch.
        devices: the devices or their number. By default all accelerators, or one emulated device
            for each capacity, or four.
        capacities: capacity of each device in bytes. By default the accelerators' own; for
            emulated devices the highest peak of the even split, rounded up to whole MiB.
        reserve: bytes of each capacity to keep free. By default 512 MiB for contexts and
            workspaces, or 0 if the capacity is the peak of the even split.
        sweep: values of ``gpu0_bsz`` to measure in addition.
        emulate: whether to emulate devices even if there are accelerators.
        symbolic: whether emulated devices keep shapes only. Otherwise they compute values, for
            workloads that read them.
        gather: whether to gather outputs and compute their loss on device 0. Otherwise each device
            computes the loss of its chunk.
        spread: whether to spread parameters, gradients and optimizer state over all devices.
        goal: how options are ranked: ``"speed"``, the smallest of all largest chunks;
            ``"headroom"``, the lowest utilization of the bottleneck device; or ``"batch"``, the
            largest batch. By default speed, or headroom if the capacity is the peak of the even
            split.
        with_alternatives: whether to compare with the loss on each device, and with parameters on
            all devices as well.
        on_measurement: called with each measurement.

    Raises:
        ArgumentError: If the batch, the devices or their capacities cannot be used.
        InfeasiblePlanError: If no option fits.
        SymbolicValueError: If the workload reads values, which symbolic devices do not compute.
    """
    is_known = capacities is not None or bool(accelerators(emulate=emulate))
    if goal is None:
        goal = "speed" if is_known else "headroom"
    check_goal(goal)
    reserve = as_integer("reserve", RESERVE * is_known if reserve is None else reserve, minimum=0)
    batch_size = as_integer("batch_size", batch_size, minimum=1)
    swept = sorted(set(sweep))
    run = _Run(workload, batch_size, reserve, capacities, on_measurement)

    def measure(gather: bool, spread: bool) -> None:
        opened = devices
        with ExitStack() as stack:
            if opened is None or isinstance(opened, int):
                known = run.capacities
                num = len(known) if opened is None and known is not None else opened
                # Parameters are spread in proportion to what devices of unlike memory hold.
                unlike = spread and len(set(known or ())) > 1 and not accelerators(num, emulate)
                memory = known if unlike else None
                opened = stack.enter_context(
                    open_devices(num, memory=memory, emulate=emulate, symbolic=symbolic)
                )
            meter = stack.enter_context(StepMeter(workload, opened, gather, spread))
            run.measure(meter, swept)

    measure(gather, spread)
    failures = {}
    for name in ("gather=False", "spread=True") if with_alternatives else ():
        apart = (False, spread) if name == "gather=False" else (gather, True)
        if apart == (gather, spread):
            continue
        try:
            measure(*apart)
            gather = apart[0]
        except Exception as error:  # the user's loss may not work for chunks
            failures[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    report = Report(
        workload=workload.name,
        precision=None if workload.precision is None else str(workload.precision),
        batch_size=batch_size,
        capacity_bytes=tuple(run.capacities or ()),
        reserve_bytes=reserve,
        goal=goal,
        options=tuple(run.options),
        failures=failures,
        **run.about,
    )
    if not report.ranked_options:
        raise InfeasiblePlanError(report.what_lacks())
    return report


@dataclass
class _Run:
    """The measurements of a workload, each made once; ``about`` are fields of the report."""

    workload: Workload
    batch_size: int
    reserve: int
    capacities: Sequence[int] | None
    on_measurement: Callable[[Option], object]
    options: list[Option] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def measure(self, meter: StepMeter, swept: Sequence[int]) -> None:
        """Measure the splits that the searches choose, for one ``gather`` and ``spread``."""
        size, num_devices = self.batch_size, len(meter.devices)
        even = even_share(size, num_devices)
        if num_devices < 2:
            raise ArgumentError(f"a plan is for two or more devices, got {num_devices}")
        if self.capacities is not None and len(self.capacities) != num_devices:
            raise ArgumentError(
                f"capacities must be one for each of {num_devices} devices, got "
                f"{len(self.capacities)}"
            )
        check_reserve(self.capacities or (), self.reserve)
        if swept and not 0 <= swept[0] <= swept[-1] <= even:
            raise ArgumentError(
                f"sweep goes from {swept[0]} to {swept[-1]}, but for a batch of {size} on "
                f"{num_devices} devices gpu0_bsz is from 0 to {even}, the even split"
            )
        known: dict[Split, Option] = {}

        def peaks(split: Split) -> list[float]:
            if split not in known:
                is_value = split == split_batch(sum(split), num_devices, split[0])
                value, weights = (split[0], None) if is_value else (None, split)
                known[split] = meter.measure(sum(split), value, weights)
                self.options.append(known[split])
                self.on_measurement(known[split])
            found: list[float] = list(known[split].peak_bytes)
            if (index := known[split].ran_out) is not None:
                found[index] = math.inf
            return found

        self._describe(meter, peaks(split_batch(size, num_devices, even)))
        budgets = [capacity - self.reserve for capacity in self.capacities or ()]
        limit = _LARGEST_MULTIPLE * size if self.about["mode"] == "emulated" else _LARGEST_BATCH
        search = Search(size, budgets, meter.smallest_chunk, for_speed=True, largest=limit)
        for value in (even, *swept):
            split = search.split(value)
            if value == even or search.allows(split):
                search.tell(split, peaks(split))
        while (wanted := search.next()) is not None:
            search.tell(wanted, peaks(wanted))
        if all(max(full) == math.inf for full in search.told.values()):
            least = min(known.values(), key=lambda option: option.batch_size)
            raise InfeasiblePlanError(
                f"not even a batch of {least.batch_size} ran: {least.out_of_memory}"
            )
        for batch_size in (size, None) if len(set(budgets)) > 1 else ():
            for _ in range(MAX_SPLITS):
                weights = fill_alike(search.told, batch_size)
                if weights is None or weights in known or not 0 < sum(weights) <= limit:
                    break
                if not search.allows(weights):
                    break
                search.tell(weights, peaks(weights))

    def _describe(self, meter: StepMeter, in_even: Sequence[float]) -> None:
        """Record the devices; the default capacity is the highest peak of the even split."""
        mode, has_capacity = mode_of(meter.devices[0]), self.about.get("has_capacity", True)
        if self.capacities is None and mode == "real":
            self.capacities = capacities_of(meter.devices)
        elif self.capacities is None:
            has_capacity = False
            highest = max((peak for peak in in_even if peak < math.inf), default=1)
            self.capacities = [math.ceil(highest / 2**20) * 2**20] * len(meter.devices)
        self.about = {
            "provenance": Provenance.of(meter.devices),
            "mode": mode,
            "num_parameters": meter.num_parameters,
            "has_capacity": has_capacity,
        }
