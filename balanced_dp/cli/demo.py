"""The demo: a transformer trained on real text, on one device, with the even split and balanced.

It prints nothing (``cli`` does); it measures, and hands back what it measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..memory.step_memory import spread
from ..split import as_integer, even_share, split_batch
from ..tuning.models import CharTransformer
from ..tuning.step_benchmark import (
    StepRecord,
    check_devices,
    open_devices,
    step_meter,
    uses_emulation,
)
from ..tuning.tuner import best_measured
from ..tuning.workloads import Batch, Workload, char_lm, encoded_text
from ..units import parse_bytes

LOSS_TOLERANCE = 1e-4
"""How far the loss curves of the runs may lie apart at any step: float32 sums in another order."""

Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the demo trains on.

    Attributes:
        num_devices: devices to split the batch over, at least 2.
        batch_size: samples in a batch, at least 1.
        steps: training steps of each run, at least 1.
        gpu0_bsz: samples of device 0; None means to try all values for the lowest peak.
        memory: capacity of each emulated device, as in ``emulate_devices``.
        emulate: emulated devices even where there are two or more accelerators.
        context: characters in a sample.
        seed: of the weights and of the choice of samples, the same for each run.
    """

    num_devices: int = 4
    batch_size: int = 32
    steps: int = 24
    gpu0_bsz: int | None = None
    memory: str | None = None
    emulate: bool = False
    context: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ArgumentError where a value cannot be used."""
        for name, minimum in (("num_devices", 2), ("batch_size", 1), ("steps", 1)):
            as_integer(name, getattr(self, name), minimum)
        if self.gpu0_bsz is not None:
            as_integer("gpu0_bsz", self.gpu0_bsz, minimum=0)
        if self.memory is not None:
            parse_bytes(self.memory)
        check_devices(self.num_devices, self.memory, self.emulate)

    @property
    def even_share(self) -> int:
        """Samples of device 0 in the even split."""
        return even_share(self.batch_size, self.num_devices)

    @property
    def emulated(self) -> bool:
        """Whether the runs are on emulated devices."""
        return uses_emulation(self.emulate)

    @property
    def num_steps(self) -> int:
        """Steps and tried values in all, for a progress bar."""
        tries = 0 if self.gpu0_bsz is not None else self.even_share + 1
        return 3 * self.steps + tries


@dataclass(frozen=True, slots=True)
class DemoRun:
    """What one run needed.

    Attributes:
        name: which split it was.
        devices: names of the devices.
        chunk_sizes: samples of each device.
        peak_bytes: the most that was allocated on each device at one time.
        breakdown: bytes on device 0 at its peak for each use; None on real devices, and where
            memory ran out.
        losses: the loss of each step, fewer than asked for if memory ran out.
        seconds: wall time of the steps.
        out_of_memory: what ran out, or None.
    """

    name: str
    devices: tuple[str, ...]
    chunk_sizes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    breakdown: dict[str, int] | None
    losses: tuple[float, ...]
    seconds: float
    out_of_memory: str | None = None

    @property
    def imbalance(self) -> float:
        """(max - min) / max of the peaks: 0 where all devices need the same."""
        return spread(self.peak_bytes)

    @property
    def samples_per_s(self) -> float:
        """Samples in a second of wall time, over all steps."""
        return sum(self.chunk_sizes) * len(self.losses) / self.seconds


def run_demo(settings: DemoSettings, on_step: Step = lambda: None) -> list[DemoRun]:
    """Trains on one device, with the even split, and balanced; returns the three in this order.

    ``on_step`` is called after each training step and each value that was tried,
    ``settings.num_steps`` times in all if nothing runs out of memory.
    """
    runs = [
        _run("one device", settings, 1, settings.batch_size, on_step),
        _run("even split", settings, settings.num_devices, settings.even_share, on_step),
    ]
    gpu0_bsz = settings.gpu0_bsz
    if gpu0_bsz is None:
        gpu0_bsz = find_gpu0_bsz(settings, on_step)
    runs.append(_run("balanced", settings, settings.num_devices, gpu0_bsz, on_step))
    return runs


def find_gpu0_bsz(settings: DemoSettings, on_step: Step = lambda: None) -> int:
    """Returns the ``gpu0_bsz`` with which the fullest device needs least, by trying each value.

    Emulated devices are tried with shapes only. The values are all up to the even share.
    """
    measured = []
    with (
        open_devices(settings.num_devices, emulate=settings.emulate) as devices,
        step_meter(_workload(settings), devices) as meter,
    ):
        for gpu0_bsz in range(settings.even_share + 1):
            measured.append(meter.measure(settings.batch_size, gpu0_bsz))
            on_step()
    return best_measured(measured, [1] * settings.num_devices).chunk_sizes[0]


def loss_difference(runs: Sequence[DemoRun]) -> float | None:
    """Returns how far the complete loss curves lie apart at most; None if fewer than two are."""
    curves = [run.losses for run in runs if run.out_of_memory is None]
    if len(curves) < 2:
        return None
    difference: float = max(max(step) - min(step) for step in zip(*curves, strict=True))
    return difference


def _workload(settings: DemoSettings) -> Workload:
    """Returns the workload whose weights and batches are those of the seed."""
    encoded, vocabulary = encoded_text()
    generator = torch.Generator().manual_seed(settings.seed)
    length = settings.context + 1

    def model() -> CharTransformer:
        torch.manual_seed(settings.seed)
        return CharTransformer(vocabulary, settings.context)

    def make_batch(batch_size: int) -> Batch:
        starts = torch.randint(len(encoded) - length, (batch_size, 1), generator=generator)
        samples = encoded[starts + torch.arange(length)]
        return (samples[:, :-1],), {}, samples[:, 1:]

    return replace(char_lm(), model=model, make_batch=make_batch)


def _train(settings: DemoSettings, record: StepRecord, gpu0_bsz: int) -> Iterator[float]:
    """Yields the loss of each step."""
    with step_meter(_workload(settings), record.devices) as meter:
        model = meter.parallel(gpu0_bsz)
        for _ in range(settings.steps):
            yield meter.train(record, model, settings.batch_size).item()


def _run(
    name: str, settings: DemoSettings, num_devices: int, gpu0_bsz: int, on_step: Step
) -> DemoRun:
    with open_devices(
        settings.num_devices, memory=settings.memory, symbolic=False, emulate=settings.emulate
    ) as all_devices:
        devices = all_devices[:num_devices]
        losses: list[float] = []
        record = StepRecord(devices)
        with record.up_to_out_of_memory():
            for loss in _train(settings, record, gpu0_bsz):
                losses.append(loss)
                on_step()
    has_uses = settings.emulated and record.out_of_memory is None
    return DemoRun(
        name=name,
        devices=tuple(map(str, devices)),
        chunk_sizes=split_batch(settings.batch_size, num_devices, gpu0_bsz),
        peak_bytes=record.peak_bytes,
        breakdown=record.breakdown[0] if has_uses else None,
        losses=tuple(losses),
        seconds=record.seconds,
        out_of_memory=record.out_of_memory,
    )
