"""What a training step took of each device: the record, and how it is measured."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from ..devices import is_emulated, is_symbolic
from ..memory.breakdown import memory_breakdown
from ..memory.peaks import Peaks
from ..memory.records import imbalance_of
from ..planning.memory_model import MeasuredSplit

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


def by_gpu0_bsz(measurements: Iterable[Measurement], batch_size: int) -> dict[int, Measurement]:
    """Return the measured splits of a batch by ``gpu0_bsz``, in its order, and none by weights."""
    swept = {
        m.chunk_sizes[0]: m
        for m in measurements
        if m.batch_size == batch_size and m.gpu0_bsz is not None
    }
    return dict(sorted(swept.items()))


def fittable(measurements: Iterable[Measurement]) -> list[MeasuredSplit]:
    """Return what a model can be fitted to: the splits that ran."""
    return [(m.chunk_sizes, m.phase_peak_bytes) for m in measurements if m.status == "ok"]


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
            self.uses.append(tuple(memory_breakdown(model, optimizer).values()))
        self.begin_phase()

    @property
    def breakdown(self) -> tuple[dict[str, int], ...]:
        """Return the bytes by use of each device, in the phase in which it was the fullest."""
        if not self.uses:
            return tuple({} for _ in self.devices)
        by_device = zip(*self.uses, strict=True)
        # Of equally full phases the later one.
        return tuple(max(reversed(uses), key=lambda u: sum(u.values())) for uses in by_device)

    @property
    def mode(self) -> Mode:
        """Return how the devices are measured."""
        if is_symbolic(self.devices[0]):
            return "symbolic"
        return "emulated" if is_emulated(self.devices[0]) else "real"

    def measurement(
        self, workload: str, gpu0_bsz: int | None, chunk_sizes: tuple[int, ...]
    ) -> Measurement:
        """Return the record of the step."""
        backward, optimizer = (*self.phases, (0,) * len(self.devices))[:2]
        return Measurement(
            workload=workload,
            mode=self.mode,
            batch_size=sum(chunk_sizes),
            gpu0_bsz=gpu0_bsz,
            chunk_sizes=chunk_sizes,
            status="ok" if self.out_of_memory is None else "oom",
            backward_peak_bytes=backward,
            optimizer_peak_bytes=optimizer,
            breakdown=self.breakdown,
            seconds=self.seconds,
            out_of_memory=self.out_of_memory,
        )
