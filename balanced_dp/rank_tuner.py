"""Measures one rank of DistributedDataParallel, plans for all, and holds both engines together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from .errors import InfeasiblePlanError
from .measurement import Measurement, StepMeter, open_devices, step_meter
from .memory_model import fit_laws
from .plan import check_batch, utilizations
from .rank_plan import RankModel, RankPlan, plan_ranks
from .split import even_share
from .tuner import LARGEST_MEASURED_BATCH, OnMeasurement, tune
from .tuning import SCHEMA, Origin, Report
from .units import format_bytes
from .workloads import Workload

_FEW = 9
"""About how many shares are measured."""

_MAX_ROUNDS = 4
"""How often the laws are fitted anew to the plan that they led to."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """A plan for ranks, what it rests on, and what one process makes of the same devices.

    Attributes:
        schema: the version of these fields.
        origin: where and how it came about.
        workload: the workload's name.
        num_parameters: how many numbers its model learns.
        precision: the dtype of autocast, or None.
        plan: the plan.
        measured_bytes: what each rank's share takes, measured, in the order of ranks; of a share
            that cannot be measured (none, or too many samples for this machine), the prediction.
        bucket_bytes: of what each rank holds, ``DistributedDataParallel``'s buckets, which the
            gradients are views of.
        model: the laws.
        measurements: what they were fitted to, each of a single rank.
        balanced: the plans of ``BalancedDataParallel``, with outputs gathered and with the loss
            computed on each device, as far as they fit.
        no_balanced: why the others do not.
    """

    schema: int
    origin: Origin
    workload: str
    num_parameters: int
    precision: str | None
    plan: RankPlan
    measured_bytes: tuple[int, ...]
    bucket_bytes: int
    model: RankModel
    measurements: tuple[Measurement, ...]
    balanced: tuple[Report, ...]
    no_balanced: tuple[str, ...]


def tune_ranks(
    workload: Workload,
    batch_size: int,
    capacities: Sequence[int],
    *,
    reserve: int = 0,
    on_measurement: OnMeasurement = lambda measurement, num_left: None,
) -> RankReport:
    """Returns each rank's share of a batch, and how both engines use the same devices.

    One rank is measured: torch's ``DistributedDataParallel`` with its buckets, in this process, on
    an emulated device that keeps shapes only. All ranks need the same for the same share.

    Args:
        workload: what is trained.
        batch_size: samples of the whole batch.
        capacities: bytes that each rank's device can hold, rank 0 first.
        reserve: bytes of each device that are not to be planned with.
        on_measurement: called with each measurement when it is made, and about how many are left.

    Raises:
        ArgumentError: there is nothing to plan with.
        InfeasiblePlanError: the batch does not fit.
        SymbolicValueError: the workload reads values that are not computed.
    """
    check_batch(batch_size, capacities, reserve)
    with (
        open_devices(1, emulate=True) as devices,
        _alone() as group,
        step_meter(workload, devices, wrap=lambda net: _Rank(net, group)) as meter,
    ):
        search = _Search(meter, on_measurement)
        planned = search.plan(batch_size, capacities, reserve)
        num_parameters = meter.num_parameters
        bucket_bytes = meter.gradient_bytes
    measured_bytes = tuple(
        search.peak_bytes(size) or planned.predicted_bytes[rank]
        for rank, size in enumerate(planned.chunk_sizes)
    )
    if max(utilizations(measured_bytes, planned.budgets)) > 1:
        raise InfeasiblePlanError(
            f"a batch of {batch_size} does not fit: measured, its best shares "
            f"{planned.chunk_sizes} need {', '.join(map(format_bytes, measured_bytes))}"
        )
    balanced, no_balanced = _balanced_plans(
        workload, batch_size, capacities, reserve, on_measurement
    )
    return RankReport(
        schema=SCHEMA,
        origin=Origin.of_this_process(),
        workload=workload.name,
        num_parameters=num_parameters,
        precision=None if workload.precision is None else str(workload.precision),
        plan=planned,
        measured_bytes=measured_bytes,
        bucket_bytes=bucket_bytes,
        model=search.fit(),
        measurements=tuple(search.measured.values()),
        balanced=balanced,
        no_balanced=no_balanced,
    )


def _balanced_plans(
    workload: Workload,
    batch_size: int,
    capacities: Sequence[int],
    reserve: int,
    on_measurement: OnMeasurement,
) -> tuple[tuple[Report, ...], tuple[str, ...]]:
    """Returns one process's plans, gathering and not, and why there are not both."""
    found = []
    reasons = []
    for gather in (True, False):
        try:
            report = tune(
                workload,
                batch_size,
                capacities=capacities,
                reserve=reserve,
                emulate=True,
                gather=gather,
                with_alternative=False,
                on_measurement=on_measurement,
            )
            found.append(report)
        except Exception as error:  # the loss is somebody's, and may be one for a whole batch only
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return tuple(found), tuple(reasons)


class _Search:
    """Measured shares of one rank, each once."""

    def __init__(self, meter: StepMeter, on_measurement: OnMeasurement) -> None:
        self.meter = meter
        self.on_measurement = on_measurement
        self.measured: dict[int, Measurement] = {}

    def plan(self, batch_size: int, capacities: Sequence[int], reserve: int) -> RankPlan:
        """Returns the plan when it leads to no more shares to measure."""
        even = even_share(batch_size, len(capacities))
        for size in (1, 2, even // 2, even, 2 * even):
            self.measure(size)
        for _ in range(_MAX_ROUNDS):
            planned = plan_ranks(self.fit(), batch_size, capacities, reserve)
            before = len(self.measured)
            for size in (*planned.chunk_sizes, *planned.max_batch_chunk_sizes):
                self.measure(size)
            if len(self.measured) == before:
                break
        planned = plan_ranks(self.fit(), batch_size, capacities, reserve)
        for size in planned.chunk_sizes:
            self.measure(size)
        return planned

    def peak_bytes(self, size: int) -> int | None:
        """Returns what a share took, if it was measured."""
        found = self.measured.get(size)
        return None if found is None else found.peak_bytes[0]

    def measure(self, size: int) -> None:
        """Measures a share, unless it was before or cannot be trained on."""
        is_possible = self.meter.smallest_chunk <= size <= LARGEST_MEASURED_BATCH
        if is_possible and size not in self.measured:
            self.measured[size] = self.meter.measure(size)
            self.on_measurement(self.measured[size], max(0, _FEW - len(self.measured)))

    def fit(self) -> RankModel:
        """Returns the laws of what was measured so far."""
        laws = [
            law
            for phase in range(2)
            for law in fit_laws(
                [(size, 0, m.phase_peak_bytes[phase][0]) for size, m in self.measured.items()]
            )
        ]
        return RankModel(tuple(laws), len(self.measured))


class _Rank(nn.Module):
    """One rank of ``DistributedDataParallel``, which gets its share of a batch."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.device = next(module.parameters()).device
        # A static graph may leave parameters out.
        self.ddp = DistributedDataParallel(
            module, process_group=group, gradient_as_bucket_view=True, static_graph=True
        )
        self.ddp.register_comm_hook(None, noop_hook)  # buckets have no values to be added up
        # It measures time, and complains that it cannot on this kind of device.
        self.ddp.logger = SimpleNamespace(set_runtime_stats_and_log=lambda: None)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(self.device), (inputs, kwargs)
        )
        return self.ddp(*inputs, **kwargs)

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Returns the share of this rank: all that it is given."""
        return (batch_size,)


@contextmanager
def _alone() -> Iterator[dist.ProcessGroup | None]:
    """Gives a process group of this process only."""
    if dist.is_initialized():
        group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        try:
            yield group
        finally:
            dist.destroy_process_group(group)
        return
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in the stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
