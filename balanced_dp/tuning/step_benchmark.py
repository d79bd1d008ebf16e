"""Measure what training steps of a workload take of each device."""

from __future__ import annotations

import copy
import functools
import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..devices import is_emulated, is_out_of_memory
from ..emulation import emulate_devices
from ..emulation.machine import current_machine
from ..errors import ArgumentError, BalanceWarning
from ..memory.breakdown import memory_breakdown
from ..memory.peaks import Peaks
from ..memory.step_memory import imbalance_of
from ..parallel.auto_split import smallest_chunk
from ..parallel.criterion import BalancedCriterion
from ..parallel.data_parallel import BalancedDataParallel
from ..parallel.split_policy import SplitPolicy
from .workloads import Workload

Mode = Literal["symbolic", "emulated", "real"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Record what a training step took of each device; tuples are in the order of the devices.

    Attributes:
        workload: the workload's name.
        mode: emulated devices with shapes only or with values, or real ones.
        batch_size: samples in the whole batch.
        gpu0_bsz: the most samples of device 0, or None with ``device_weights``.
        chunk_sizes: the chunk size of each device.
        status: ``"oom"`` if memory ran out; the peaks are those until then.
        backward_peak_bytes: peaks of allocated bytes in forward and backward pass and loss.
        optimizer_peak_bytes: peaks of allocated bytes in the optimizer's step.
        first_peak_bytes: peaks of the first step, which starts without optimizer state, or None
            if the model had been trained before.
        breakdown: bytes by use of each device at its peak, as in ``memory_breakdown``.
        seconds: wall time of the step, which means nothing on emulated devices.
        out_of_memory: the message of the error if memory ran out.
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
        """Return the peak of allocated bytes of each device, with optimizer state."""
        return tuple(map(max, zip(*self.phase_peak_bytes, strict=True)))

    @property
    def phase_peak_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Return the peaks of both phases in order."""
        return self.backward_peak_bytes, self.optimizer_peak_bytes

    @property
    def imbalance(self) -> float:
        """Return (max - min) / max of the peaks, 0 to 1."""
        return imbalance_of(self.peak_bytes)

    @property
    def samples_per_s(self) -> float:
        """Return the samples per second of wall time, 0 if memory ran out."""
        return self.batch_size / self.seconds if self.status == "ok" else 0.0


@contextmanager
def open_devices(
    num_devices: int,
    *,
    memory: Sequence[int] | int | str | None = None,
    symbolic: bool = True,
    emulate: bool = False,
    as_cuda: bool = False,
) -> Iterator[Sequence[torch.device]]:
    """Yield the machine's accelerators if there are two or more, otherwise emulated devices.

    Args:
        num_devices: number of devices.
        memory: capacity of emulated devices, as in ``emulate_devices``.
        symbolic: whether emulated devices keep shapes only.
        emulate: whether to emulate devices in any case.
        as_cuda: whether emulated devices are named as CUDA's, as in ``emulate_devices``.

    Raises:
        ArgumentError: If there are fewer accelerators, or ``memory`` is given for them.
    """
    check_devices(num_devices, memory, emulate)
    if uses_emulation(emulate):
        # Each replica has a thread: more threads in each operator would only compete with it.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with emulate_devices(
                num_devices, memory=memory, symbolic=symbolic, as_cuda=as_cuda
            ) as devices:
                yield devices
        finally:
            torch.set_num_threads(num_threads)
        return
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    yield [torch.device(accelerator.type, index) for index in range(num_devices)]
    torch.get_device_module(accelerator).empty_cache()


def check_devices(num_devices: int, memory: object, emulate: bool) -> None:
    """Raise ArgumentError if ``open_devices`` cannot open these devices."""
    if uses_emulation(emulate):
        return
    count = torch.accelerator.device_count()
    if num_devices > count:
        raise ArgumentError(
            f"num_devices={num_devices}, but there are {count} accelerators; any number of devices "
            "can be emulated (--emulate)"
        )
    if memory is not None:
        raise ArgumentError(
            f"memory={memory!r} limits emulated devices, but the accelerators of this machine are "
            "used; set emulate (--emulate) or omit memory"
        )


def uses_emulation(emulate: bool) -> bool:
    """Return whether devices are emulated: on request, or without two accelerators."""
    return emulate or torch.accelerator.device_count() < 2


def default_num_devices(emulate: bool) -> int:
    """Return the number of accelerators of this machine, or 4 if devices are emulated."""
    return 4 if uses_emulation(emulate) else torch.accelerator.device_count()


def measure_step(
    workload: Workload,
    batch_size: int,
    gpu0_bsz: int | None,
    devices: Sequence[torch.device],
    device_weights: Sequence[float] | None = None,
    *,
    gather: bool = True,
    spread: bool = False,
) -> Measurement:
    """Train for two steps and return the peaks of both and what the second one took.

    If memory runs out, the measurement says so, and what was allocated is freed.

    Args:
        workload: the workload to train; its model is newly made.
        batch_size: samples in the whole batch.
        gpu0_bsz: the most samples of device 0.
        devices: real or emulated devices.
        device_weights: the weight of each device, as in ``BalancedDataParallel``.
        gather: whether to gather outputs and compute their loss on device 0. Otherwise each device
            computes the loss of its chunk.
        spread: whether to spread parameters, gradients and optimizer state over all devices.

    Raises:
        ArgumentError, ArgumentTypeError: If there is no such split.
    """
    with step_meter(workload, devices, gather, spread) as meter:
        return meter.measure(batch_size, gpu0_bsz, device_weights)


@contextmanager
def step_meter(
    workload: Workload,
    devices: Sequence[torch.device],
    gather: bool = True,
    spread: bool = False,
) -> Iterator[StepMeter]:
    """Yield a ``StepMeter``, and free what it holds at the end."""
    meter = StepMeter(workload, devices, gather, spread)
    # Garbage is collected after each measurement: exclude what was there before.
    is_ours = gc.get_freeze_count() == 0
    if is_ours:
        gc.freeze()
    try:
        yield meter
    finally:
        if is_ours:
            gc.unfreeze()
        meter.close()


class StepMeter:
    """Measure training steps at several splits, with one model and one optimizer.

    Args:
        workload: the workload to train.
        devices: real or emulated devices.
        gather: whether to gather outputs, or to compute the loss on each device.
        spread: whether to spread parameters over all devices.
    """

    def __init__(
        self,
        workload: Workload,
        devices: Sequence[torch.device],
        gather: bool = True,
        spread: bool = False,
    ) -> None:
        self.workload = workload
        self.devices = list(devices)
        self.gather = gather
        self.spread = spread
        self._has_state = False

    @functools.cached_property
    def _module(self) -> nn.Module:
        with torch.device(self.devices[0]):
            module = self.workload.model()
        return module.to(self.devices[0])

    @functools.cached_property
    def _criterion(self) -> BalancedCriterion:
        return BalancedCriterion(copy.deepcopy(self.workload.loss)).to(self.devices[0])

    @functools.cached_property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self.workload.make_optimizer(self._module.parameters())

    def close(self) -> None:
        """Free the model and the optimizer's state; the next measurement makes them again."""
        for name in ("_module", "_criterion", "_optimizer"):
            vars(self).pop(name, None)
        self._has_state = False

    @property
    def smallest_chunk(self) -> int:
        """Return the smallest chunk that a replica trains on."""
        return smallest_chunk(self._module)

    @property
    def precision(self) -> str | None:
        """Return the dtype of autocast as text."""
        return None if self.workload.precision is None else str(self.workload.precision)

    @property
    def num_parameters(self) -> int:
        """Return the number of trained parameters."""
        return sum(p.numel() for p in self._module.parameters() if p.requires_grad)

    def measure(
        self,
        batch_size: int,
        gpu0_bsz: int | None,
        device_weights: Sequence[float] | None = None,
        *,
        num_steps: int | None = None,
        on_loss: Callable[[torch.Tensor], object] = lambda loss: None,
    ) -> Measurement:
        """Train, and return what the last step took, as ``measure_step``.

        By default one step is measured, after another one if there is no optimizer state yet.
        ``on_loss`` is called with the loss of each step.
        """
        first = model = None
        for _ in range(num_steps or 2 - self._has_state):
            step = StepRecorder(self.devices)
            try:
                if model is None:
                    model = BalancedDataParallel(
                        gpu0_bsz,
                        self._module,
                        self.devices,
                        gather=self.gather,
                        device_weights=device_weights,
                        spread=self.spread,
                    )
                on_loss(self._train(step, model, batch_size))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                step.out_of_memory = str(error)
                step.end_phase()
                break
            if not self._has_state:
                self._has_state, first = True, tuple(map(max, zip(*step.phases, strict=True)))
        if self._has_state:
            self._optimizer.zero_grad()
        else:  # the optimizer's state may be incomplete
            self.close()
        gc.collect()  # an exception may have left cycles
        torch.get_device_module(self.devices[0]).empty_cache()
        backward, optimizer = (*step.phases, (0,) * len(self.devices))[:2]
        return Measurement(
            workload=self.workload.name,
            mode=mode_of(self.devices[0]),
            batch_size=batch_size,
            gpu0_bsz=gpu0_bsz,
            chunk_sizes=SplitPolicy(gpu0_bsz, self.devices, device_weights).split(batch_size),
            status="ok" if step.out_of_memory is None else "oom",
            backward_peak_bytes=backward,
            optimizer_peak_bytes=optimizer,
            first_peak_bytes=first,
            breakdown=step.breakdown,
            seconds=step.seconds,
            out_of_memory=step.out_of_memory,
        )

    def _train(self, step: StepRecorder, model: nn.Module, batch_size: int) -> torch.Tensor:
        """Train for one step and return the loss."""
        args, kwargs, target = self.workload.make_batch(batch_size)
        self._optimizer.zero_grad()
        step.begin_phase()
        precision = self.workload.precision
        autocast = torch.autocast(self.devices[0].type, precision, enabled=precision is not None)
        with warnings.catch_warnings(), autocast:
            warnings.simplefilter("ignore", BalanceWarning)  # the even split is measured as well
            output = model(*args, **kwargs)
            if self.gather:
                target = tree_map_only(torch.Tensor, lambda t: t.to(self.devices[0]), target)
            loss: torch.Tensor = self._criterion(output, target)
        loss.backward()
        step.end_phase(model, self._optimizer)
        self._optimizer.step()
        step.end_phase(model, self._optimizer)
        return loss


class StepRecorder:
    """Record the phases of a training step, as far as memory suffices.

    Attributes:
        phases: peaks of allocated bytes, one tuple for forward and backward pass and loss, and one
            for the optimizer.
        uses: by phase, the bytes by use of each device at its peak, as in ``memory_breakdown``.
        seconds: the wall time of the phases.
        out_of_memory: the message of the error if memory ran out.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.phases: list[tuple[int, ...]] = []
        self.uses: list[tuple[dict[str, int], ...]] = []
        self.seconds = 0.0
        self.out_of_memory: str | None = None
        self.begin_phase()

    def begin_phase(self) -> None:
        """Begin a phase; what was allocated since the last one is not counted."""
        self._started = time.perf_counter()
        self._peaks = Peaks(self.devices)

    def end_phase(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """End a phase and begin the next one; with a model, break down its peaks."""
        for device in self.devices:
            torch.get_device_module(device).synchronize(device)
        self.seconds += time.perf_counter() - self._started
        self.phases.append(tuple(self._peaks.of(device)[0] for device in self.devices))
        if model is not None:
            self.uses.append(tuple(entry.uses for entry in memory_breakdown(model, optimizer)))
        self.begin_phase()

    @property
    def breakdown(self) -> tuple[dict[str, int], ...]:
        """Return the bytes by use of each device, in the phase in which it was the fullest."""
        if not self.uses:
            return tuple({} for _ in self.devices)
        by_device = zip(*self.uses, strict=True)
        # Of equally full phases the later one.
        return tuple(max(reversed(uses), key=lambda u: sum(u.values())) for uses in by_device)


def mode_of(device: torch.device) -> Mode:
    """Return how what is measured on a device is measured."""
    if not is_emulated(device):
        return "real"
    return "symbolic" if current_machine().symbolic else "emulated"
