"""The demo: a transformer trained on real text, on one device, with the even split and balanced.

It prints nothing (``cli`` does); it measures, and hands back what it measured.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from .data_parallel import BalancedDataParallel
from .devices import is_out_of_memory
from .emulation import EmulatedDevices
from .errors import ArgumentError, BalanceWarning, SymbolicValueError
from .measurement import open_devices, uses_emulation
from .memory.peaks import reset_peaks
from .memory.step import spread
from .models import CharTransformer
from .split import even_share, split_batch
from .units import parse_bytes
from .workloads import encoded_text

LOSS_TOLERANCE = 1e-4
"""How far the loss curves of the runs may lie apart at any step: float32 sums in another order."""

Step = Callable[[], None]


def default_num_devices(emulate: bool) -> int:
    """Returns all accelerators of this machine, or four emulated devices."""
    return 4 if uses_emulation(emulate) else torch.accelerator.device_count()


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
            if getattr(self, name) < minimum:
                raise ArgumentError(f"{name} must be at least {minimum}, got {getattr(self, name)}")
        split_batch(self.batch_size, self.num_devices, self.gpu0_bsz or 0)
        if self.memory is not None:
            parse_bytes(self.memory)
        if self.emulated:
            return
        if self.memory is not None:
            raise ArgumentError(
                f"memory={self.memory!r} limits emulated devices, but the accelerators of this "
                "machine are used; set emulate (--emulate), or leave memory out"
            )
        if self.num_devices > torch.accelerator.device_count():
            raise ArgumentError(
                f"num_devices={self.num_devices}, but there are "
                f"{torch.accelerator.device_count()} accelerators; emulated devices can be any "
                "number (--emulate)"
            )

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
        """Steps in all, for a progress bar."""
        tries = 0 if self.gpu0_bsz is not None else self.even_share + 1
        return 3 * self.steps + _STEPS_TO_TRY * tries


@dataclass(frozen=True, slots=True)
class DemoRun:
    """What one run needed.

    Attributes:
        name: which split it was.
        devices: names of the devices.
        chunk_sizes: samples of each device.
        peak_bytes: the most that was allocated on each device at one time.
        breakdown: bytes on device 0 at its peak for each use; None on real devices.
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

    Args:
        settings: what to train on.
        on_step: called after each training step, ``settings.num_steps`` times in all if nothing
            runs out of memory.
    """
    batches = _batches(settings, settings.steps)
    even = settings.even_share
    runs = [
        _run("one device", settings, 1, settings.batch_size, batches, on_step),
        _run("even split", settings, settings.num_devices, even, batches, on_step),
    ]
    gpu0_bsz = settings.gpu0_bsz
    if gpu0_bsz is None:
        gpu0_bsz = find_gpu0_bsz(settings, on_step)
    runs.append(_run("balanced", settings, settings.num_devices, gpu0_bsz, batches, on_step))
    return runs


def find_gpu0_bsz(settings: DemoSettings, on_step: Step = lambda: None) -> int:
    """Returns the ``gpu0_bsz`` with which the fullest device needs least, by trying each value.

    Emulated devices are tried with shapes only. The values are all up to the even share.
    """
    batches = _batches(settings, _STEPS_TO_TRY)
    peaks = {}
    for gpu0_bsz in range(settings.even_share + 1):
        with _open_devices(settings, settings.num_devices, symbolic=True, memory=None) as devices:
            _train(settings, devices, gpu0_bsz, batches, [], on_step)
            peaks[gpu0_bsz] = max(_peak_bytes(devices))
    return min(peaks, key=lambda gpu0_bsz: peaks[gpu0_bsz])


_STEPS_TO_TRY = 2  # the optimizer has its state from the second step on


def loss_difference(runs: Sequence[DemoRun]) -> float | None:
    """Returns how far the complete loss curves lie apart at most; None if fewer than two are."""
    curves = [run.losses for run in runs if run.out_of_memory is None]
    if len(curves) < 2:
        return None
    difference: float = max(max(step) - min(step) for step in zip(*curves, strict=True))
    return difference


def _batches(settings: DemoSettings, count: int) -> list[torch.Tensor]:
    encoded, _ = encoded_text()
    generator = torch.Generator().manual_seed(settings.seed)
    length = settings.context + 1
    starts = torch.randint(
        len(encoded) - length, (count, settings.batch_size, 1), generator=generator
    )
    return list(encoded[starts + torch.arange(length)])


def _run(
    name: str,
    settings: DemoSettings,
    num_devices: int,
    gpu0_bsz: int,
    batches: Sequence[torch.Tensor],
    on_step: Step,
) -> DemoRun:
    with _open_devices(settings, num_devices, symbolic=False, memory=settings.memory) as devices:
        losses: list[float] = []
        out_of_memory = None
        start = time.perf_counter()
        try:
            _train(settings, devices, gpu0_bsz, batches, losses, on_step)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            out_of_memory = str(error)
        return DemoRun(
            name=name,
            devices=tuple(map(str, devices)),
            chunk_sizes=split_batch(settings.batch_size, num_devices, gpu0_bsz),
            peak_bytes=_peak_bytes(devices),
            breakdown=(
                devices.memory_breakdown(0).peak if isinstance(devices, EmulatedDevices) else None
            ),
            losses=tuple(losses),
            seconds=time.perf_counter() - start,
            out_of_memory=out_of_memory,
        )


@contextlib.contextmanager
def _open_devices(
    settings: DemoSettings, num_devices: int, *, symbolic: bool, memory: str | None
) -> Iterator[Sequence[torch.device]]:
    with open_devices(
        num_devices, memory=memory, symbolic=symbolic, emulate=settings.emulate
    ) as devices:
        for device in devices:
            reset_peaks(device)
        yield devices


def _train(
    settings: DemoSettings,
    devices: Sequence[torch.device],
    gpu0_bsz: int,
    batches: Sequence[torch.Tensor],
    losses: list[float],
    on_step: Step,
) -> None:
    """Trains, and adds each step's loss to ``losses``, unless the devices keep shapes only."""
    torch.manual_seed(settings.seed)
    _, vocabulary = encoded_text()
    model = BalancedDataParallel(
        gpu0_bsz,
        CharTransformer(vocabulary, settings.context).to(devices[0]),
        device_ids=devices,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches:
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BalanceWarning)  # the even split is one of the runs
            logits = model(batch[:, :-1])
        targets = batch[:, 1:].to(devices[0])
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        with contextlib.suppress(SymbolicValueError):
            losses.append(loss.item())
        on_step()


def _peak_bytes(devices: Sequence[torch.device]) -> tuple[int, ...]:
    return tuple(torch.get_device_module(device).max_memory_allocated(device) for device in devices)
