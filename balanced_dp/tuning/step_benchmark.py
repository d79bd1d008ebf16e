"""Measures what training steps of a workload take of each device, for one split."""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..devices import is_out_of_memory
from ..emulation import emulate_devices
from ..emulation.machine import DEVICE_TYPE, current_machine
from ..errors import ArgumentError, BalanceWarning
from ..memory.breakdown import memory_breakdown
from ..memory.peaks import Peaks
from ..parallel.auto_split import smallest_chunk
from ..parallel.criterion import BalancedCriterion
from ..parallel.data_parallel import BalancedDataParallel
from .workloads import Workload

Mode = Literal["symbolic", "emulated", "real"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What training steps took of each device; tuples are in the order of the devices.

    Attributes:
        workload: the workload's name.
        mode: emulated devices with shapes only or with numbers, or real ones.
        batch_size: samples of the whole batch.
        gpu0_bsz: what device 0 got at most; None where ``device_weights`` made the split.
        chunk_sizes: what each device got.
        status: ``"oom"`` where memory ran out; the peaks are those until then.
        backward_peak_bytes: peaks of allocated bytes in forward and backward pass and loss.
        optimizer_peak_bytes: peaks while the optimizer ran.
        first_peak_bytes: peaks of the very first step, before which there was no optimizer state.
            None where the model had been trained before.
        breakdown: bytes by use of each device at its peak, as of ``memory_breakdown``.
        seconds: the step's wall time, of no meaning where devices are emulated.
        out_of_memory: what ran out, or None.
    """

    workload: str
    mode: Mode
    batch_size: int
    gpu0_bsz: int | None
    chunk_sizes: tuple[int, ...]
    status: Literal["ok", "oom"]
    backward_peak_bytes: tuple[int, ...]
    optimizer_peak_bytes: tuple[int, ...]
    first_peak_bytes: tuple[int, ...] | None
    breakdown: tuple[dict[str, int], ...]
    seconds: float
    out_of_memory: str | None = None

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that was allocated on each device once there is optimizer state."""
        return tuple(map(max, zip(*self.phase_peak_bytes, strict=True)))

    @property
    def phase_peak_bytes(self) -> tuple[tuple[int, ...], ...]:
        """The peaks of both phases, in order."""
        return self.backward_peak_bytes, self.optimizer_peak_bytes


@contextmanager
def open_devices(
    num_devices: int,
    *,
    memory: Sequence[int] | int | str | None = None,
    symbolic: bool = True,
    emulate: bool = False,
) -> Iterator[Sequence[torch.device]]:
    """Gives the machine's accelerators if there are two or more, else emulated devices.

    Args:
        num_devices: how many.
        memory: capacity of emulated devices, as of ``emulate_devices``.
        symbolic: whether emulated devices keep shapes only.
        emulate: emulated devices whatever there is.

    Raises:
        ArgumentError: there are fewer accelerators, or ``memory`` is to limit them.
    """
    check_devices(num_devices, memory, emulate)
    if uses_emulation(emulate):
        # Each replica has a thread already: more in each operator only get in each other's way.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with emulate_devices(num_devices, memory=memory, symbolic=symbolic) as devices:
                yield devices
        finally:
            torch.set_num_threads(num_threads)
        return
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    yield [torch.device(accelerator.type, index) for index in range(num_devices)]
    torch.get_device_module(accelerator).empty_cache()


def check_devices(num_devices: int, memory: object, emulate: bool) -> None:
    """Raises ArgumentError where ``open_devices`` cannot give that; arguments as there."""
    if uses_emulation(emulate):
        return
    count = torch.accelerator.device_count()
    if num_devices > count:
        raise ArgumentError(
            f"num_devices={num_devices}, but there are {count} accelerators; emulated devices can "
            "be any number (--emulate)"
        )
    if memory is not None:
        raise ArgumentError(
            f"memory={memory!r} limits emulated devices, but the accelerators of this machine are "
            "used; set emulate (--emulate), or leave memory out"
        )


def uses_emulation(emulate: bool) -> bool:
    """Returns whether devices are emulated: on request, or for want of two accelerators."""
    return emulate or torch.accelerator.device_count() < 2


def default_num_devices(emulate: bool) -> int:
    """Returns all accelerators of this machine, or four emulated devices."""
    return 4 if uses_emulation(emulate) else torch.accelerator.device_count()


def measure_step(
    workload: Workload,
    batch_size: int,
    gpu0_bsz: int | None,
    devices: Sequence[torch.device],
    device_weights: Sequence[float] | None = None,
    *,
    gather: bool = True,
) -> Measurement:
    """Returns what the second of two training steps took, and the first one's peaks.

    Memory that runs out is an answer, not an error, and what was allocated is given back.

    Args:
        workload: what is trained; its model is made anew.
        batch_size: samples of the whole batch.
        gpu0_bsz: what device 0 gets at most.
        devices: real or emulated devices.
        device_weights: the share of each device, as of ``BalancedDataParallel``.
        gather: whether the loss is that of gathered outputs; else each device computes that of
            its chunk.

    Raises:
        ArgumentError, ArgumentTypeError: there is no such split.
    """
    with step_meter(workload, devices, gather) as meter:
        return meter.measure(batch_size, gpu0_bsz, device_weights)


@contextmanager
def step_meter(
    workload: Workload, devices: Sequence[torch.device], gather: bool = True
) -> Iterator[StepMeter]:
    """Gives a ``StepMeter`` and at the end gives back what it holds."""
    meter = StepMeter(workload, devices, gather)
    # Garbage is collected after each step: what was there before need not be looked at again.
    is_ours = gc.get_freeze_count() == 0
    if is_ours:
        gc.freeze()
    try:
        yield meter
    finally:
        if is_ours:
            gc.unfreeze()
        del meter._module, meter._criterion, meter._optimizer


class StepMeter:
    """Measures steps of one model at several splits: it is made once, and its optimizer's state.

    Args:
        workload: what is trained.
        devices: real or emulated devices.
        gather: whether the loss is that of gathered outputs, or computed on each device.
    """

    def __init__(
        self, workload: Workload, devices: Sequence[torch.device], gather: bool = True
    ) -> None:
        self.workload = workload
        self.devices = list(devices)
        self.gather = gather
        with torch.device(self.devices[0]):
            self._module = workload.model()
        self._module.to(self.devices[0])
        self._criterion = BalancedCriterion(copy.deepcopy(workload.loss)).to(self.devices[0])
        self._optimizer = workload.make_optimizer(self._module.parameters())
        self._has_state = False

    @property
    def smallest_chunk(self) -> int:
        """The fewest samples that a replica trains on."""
        return smallest_chunk(self._module)

    @property
    def precision(self) -> str | None:
        """The dtype of autocast, as reports name it."""
        return None if self.workload.precision is None else str(self.workload.precision)

    @property
    def num_parameters(self) -> int:
        """How many numbers the model learns."""
        return sum(p.numel() for p in self._module.parameters() if p.requires_grad)

    def measure(
        self,
        batch_size: int,
        gpu0_bsz: int | None,
        device_weights: Sequence[float] | None = None,
    ) -> Measurement:
        """Returns what a training step takes, as ``measure_step``."""
        model = self.parallel(gpu0_bsz, device_weights)
        first = None
        step = self._record(model, batch_size)
        if not self._has_state and step.out_of_memory is None:
            self._has_state = True
            first = step.peak_bytes
            step = self._record(model, batch_size)
        if not self._has_state:
            self._optimizer.state.clear()  # it may be there in part
        self._optimizer.zero_grad()
        gc.collect()  # an exception may have left cycles
        torch.get_device_module(self.devices[0]).empty_cache()
        backward, optimizer = (*step.phases, (0,) * len(self.devices))[:2]
        return Measurement(
            workload=self.workload.name,
            mode=_mode(self.devices[0]),
            batch_size=batch_size,
            gpu0_bsz=gpu0_bsz,
            chunk_sizes=model.split(batch_size),
            status="ok" if step.out_of_memory is None else "oom",
            backward_peak_bytes=backward,
            optimizer_peak_bytes=optimizer,
            first_peak_bytes=first,
            breakdown=tuple(step.breakdown),
            seconds=step.seconds,
            out_of_memory=step.out_of_memory,
        )

    def _record(self, model: nn.Module, batch_size: int) -> StepRecord:
        step = StepRecord(self.devices)
        with step.up_to_out_of_memory():
            self.train(step, model, batch_size)
        return step

    def parallel(
        self, gpu0_bsz: int | None, device_weights: Sequence[float] | None = None
    ) -> BalancedDataParallel[nn.Module]:
        """Returns the model, wrapped to be split like that."""
        return BalancedDataParallel(
            gpu0_bsz,
            self._module,
            self.devices,
            gather=self.gather,
            device_weights=device_weights,
        )

    def train(self, step: StepRecord, model: nn.Module, batch_size: int) -> torch.Tensor:
        """Trains for one step, which is added to the record, and returns the loss."""
        args, kwargs, target = self.workload.make_batch(batch_size)
        self._optimizer.zero_grad()
        step.begin()
        precision = self.workload.precision
        autocast = torch.autocast(self.devices[0].type, precision, enabled=precision is not None)
        with warnings.catch_warnings(), autocast:
            warnings.simplefilter("ignore", BalanceWarning)  # the even split is one to measure
            output = model(*args, **kwargs)
            if self.gather:
                target = tree_map_only(torch.Tensor, lambda t: t.to(self.devices[0]), target)
            loss: torch.Tensor = self._criterion(output, target)
        loss.backward()
        step.end_phase(model, self._optimizer)
        self._optimizer.step()
        step.end_phase(model, self._optimizer)
        return loss


class StepRecord:
    """What training steps took of each device, as far as they came.

    Attributes:
        devices: the devices.
        phases: peaks of allocated bytes, for each step one tuple of forward and backward pass and
            loss, and one of the optimizer.
        breakdown: bytes by use of each device at its peak, as of ``memory_breakdown``.
        seconds: the steps' wall time.
        out_of_memory: what ran out, or None.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.phases: list[tuple[int, ...]] = []
        self.breakdown: list[dict[str, int]] = [{} for _ in devices]
        self.seconds = 0.0
        self.out_of_memory: str | None = None
        self.begin()

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that was allocated on each device in any phase."""
        return tuple(map(max, zip(*self.phases, strict=True)))

    def begin(self) -> None:
        """Begins a phase; what was allocated since the last one ended is not counted."""
        self._started = time.perf_counter()
        self._peaks = Peaks(self.devices)

    @contextmanager
    def up_to_out_of_memory(self) -> Iterator[None]:
        """Takes note of memory that runs out, and of the phase in which it did, and goes on."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.out_of_memory = str(error)
            self.end_phase()

    def end_phase(self, model: Any = None, optimizer: Any = None) -> None:
        """Ends a phase, and begins the next."""
        for device in self.devices:
            torch.get_device_module(device).synchronize(device)
        self.seconds += time.perf_counter() - self._started
        peaks = tuple(self._peaks.of(device)[0] for device in self.devices)
        if model is not None:
            for index, entry in enumerate(memory_breakdown(model, optimizer)):
                if entry.peak_bytes >= max((p[index] for p in self.phases), default=0):
                    self.breakdown[index] = entry.uses
        self.phases.append(peaks)
        self.begin()


def _mode(device: torch.device) -> Mode:
    if device.type != DEVICE_TYPE:
        return "real"
    return "symbolic" if current_machine().symbolic else "emulated"
