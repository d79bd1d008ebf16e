"""What a step took of each device's memory, and what that says of the split. Pure, no torch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ArgumentError, ArgumentTypeError, ImbalanceWarning, ProbeError
from ..split import best_gpu0_bsz, even_share, split_batch
from ..units import format_bytes


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """The most that one device held during a step, in bytes.

    Attributes:
        device: the device as torch names it.
        capacity_bytes: what it can hold, None where it does not tell.
        start_allocated_bytes: what tensors held when the step began.
        peak_allocated_bytes: the most that tensors held at one time.
        peak_reserved_bytes: the most that torch's allocator held, its cache included.
        peak_used_bytes: the most that NVML saw in use, by anybody: sampled, so a lower bound.
            None where NVML did not tell.
        num_alloc_retries: how often the allocator had to empty its cache and try again, None
            where it does not tell.
        chunk_size: samples that the device got, None where that is not known.
        replica_bytes: what the device's copies of parameters and buffers take, 0 where there are
            none or it is not known.
    """

    device: str
    capacity_bytes: int | None
    start_allocated_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None = None
    peak_used_bytes: int | None = None
    num_alloc_retries: int | None = None
    chunk_size: int | None = None
    replica_bytes: int = 0


@dataclass(slots=True)
class StepMemory:
    """What a measured block took; complete when the block has ended.

    Attributes:
        devices: one entry a device, empty until the block ends.
        elapsed_s: seconds that the block took, the devices' work included.
        valid: whether the peaks are those of an undisturbed block.
        reason: why they are not.
        num_samples: how often NVML was asked.
        sampling_error: why ``peak_used_bytes`` is None where it is.
    """

    devices: tuple[DevicePeak, ...] = ()
    elapsed_s: float = math.nan
    valid: bool = False
    reason: str | None = "the block has not ended"
    num_samples: int = 0
    sampling_error: str | None = None

    @property
    def imbalance(self) -> float:
        """(max - min) / max of the devices' peak allocated bytes, 0 to 1.

        Raises:
            ProbeError: the block has not ended.
        """
        return spread([peak.peak_allocated_bytes for peak in self._ended()])

    @property
    def utilization(self) -> tuple[float, ...]:
        """Peak allocated bytes over capacity, for each device.

        Raises:
            ProbeError: the block has not ended, or a device does not tell its capacity.
        """
        values = []
        for peak in self._ended():
            if not peak.capacity_bytes:
                raise ProbeError(f"{peak.device} does not tell its capacity")
            values.append(peak.peak_allocated_bytes / peak.capacity_bytes)
        return tuple(values)

    @property
    def fullest(self) -> DevicePeak:
        """The device with the highest utilization, the first of several.

        Raises:
            ProbeError: the block has not ended, or a device does not tell its capacity.
        """
        utilization = self.utilization
        return self.devices[utilization.index(max(utilization))]

    @property
    def bytes_per_sample(self) -> float | None:
        """What a sample takes of a device that runs its forward and backward pass.

        From the devices after the first, which hold little else: their peaks less what they held
        at the start and their copies of the parameters, over their chunk sizes. None where chunk
        sizes are not known, or no other device had samples.
        """
        others = [peak for peak in self._ended()[1:] if peak.chunk_size]
        extra = sum(
            peak.peak_allocated_bytes - peak.start_allocated_bytes - peak.replica_bytes
            for peak in others
        )
        num_samples = sum(peak.chunk_size or 0 for peak in others)
        return extra / num_samples if num_samples and extra > 0 else None

    @property
    def floor_bytes(self) -> float | None:
        """What the first device would hold with ``gpu0_bsz=0``: no choice of it can lower that.

        Its peak less what its own chunk takes by ``bytes_per_sample``. None where that is
        not known.
        """
        first = self._ended()[0]
        if first.chunk_size == 0:
            return first.peak_allocated_bytes
        if first.chunk_size is None or self.bytes_per_sample is None:
            return None
        return max(0.0, first.peak_allocated_bytes - first.chunk_size * self.bytes_per_sample)

    def check_split(self, tolerance: float = 0.10, warn: bool = False) -> str | None:
        """Returns what is wrong with the split and what to do about it, None if nothing is.

        Devices are compared by utilization, so that those of unlike capacity may hold unlike
        amounts. Where it is known how the batch was split, every ``gpu0_bsz`` is tried with the
        measured bytes of a sample.

        Args:
            tolerance: by how much they may differ, as a part of the fullest one's utilization,
                from 0 to below 1.
            warn: also give the sentence as an ``ImbalanceWarning``.

        Raises:
            ArgumentError, ArgumentTypeError: the tolerance is no such number.
            ProbeError: the block has not ended, or a device does not tell its capacity.
        """
        message = _advice(self, tolerance)
        if warn and message is not None:
            warnings.warn(message, ImbalanceWarning, stacklevel=2)
        return message

    def _ended(self) -> tuple[DevicePeak, ...]:
        if not self.devices:
            raise ProbeError(f"there are no peaks: {self.reason}")
        return self.devices


def spread(values: Sequence[float]) -> float:
    """Returns (max - min) / max, 0 where all are 0."""
    return (max(values) - min(values)) / max(values) if max(values) else 0.0


def _advice(usage: StepMemory, tolerance: float) -> str | None:
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float):
        raise ArgumentTypeError(f"tolerance must be a number, got {tolerance!r}")
    if not 0 <= tolerance < 1:
        raise ArgumentError(f"tolerance must be from 0 to below 1 (0.05 is 5 %), got {tolerance}")
    utilization = usage.utilization
    if not usage.valid:
        return f"these figures are not those of a whole step: {usage.reason}"
    if spread(utilization) <= tolerance:
        return None
    emptiest = usage.devices[utilization.index(min(utilization))]
    fullest = usage.fullest
    fact = f"{_compare(fullest, emptiest)}, {spread(utilization):.0%} apart"
    return f"{fact}: {_remedy(usage, utilization, tolerance)}"


def _compare(one: DevicePeak, other: DevicePeak) -> str:
    alike = one.capacity_bytes == other.capacity_bytes
    return " and ".join(
        f"{peak.device} peaks at {format_bytes(peak.peak_allocated_bytes)}"
        + ("" if alike else f" of {format_bytes(peak.capacity_bytes or 0)}")
        for peak in (one, other)
    )


def _remedy(usage: StepMemory, utilization: Sequence[float], tolerance: float) -> str:
    first, target = usage.devices[0], _best_gpu0_bsz(usage)
    others = max(utilization[1:])
    if target is None or first.chunk_size is None:
        if spread([utilization[0], others]) > tolerance:
            return "lower gpu0_bsz" if utilization[0] > others else "raise gpu0_bsz"
        return "gpu0_bsz does not change that; see what else is on the devices"
    sample = f"a sample takes about {format_bytes(usage.bytes_per_sample or 0)}"
    moved = target - first.chunk_size
    if moved:
        direction = "raise" if moved > 0 else "lower"
        remedy = (
            f"{direction} gpu0_bsz by about {abs(moved)}, from {first.chunk_size} to {target} "
            f"({sample})"
        )
    else:
        remedy = f"no other gpu0_bsz than {target} would be better, since {sample}"
    if utilization[0] > others and not target:
        floor = format_bytes(usage.floor_bytes or 0)
        remedy += (
            f"; without any samples {first.device} holds about {floor}: memory_breakdown says what "
            "for. Weights and optimizer state stay; gathered outputs go if forward returns a loss"
        )
    return remedy


def _best_gpu0_bsz(usage: StepMemory) -> int | None:
    """Returns the gpu0_bsz whose fullest device is the least full, None where that is not known.

    Of several as good it is the one in use, or else the largest: device 0 is to compute, too.
    """
    chunk_sizes = [peak.chunk_size for peak in usage.devices if peak.chunk_size is not None]
    batch_size, num_devices = sum(chunk_sizes), len(usage.devices)
    per_sample = usage.bytes_per_sample
    if per_sample is None or split_batch(batch_size, num_devices, chunk_sizes[0]) != (
        *chunk_sizes,
    ):
        return None  # one of the devices is there twice

    def utilization_of_fullest(gpu0_bsz: int) -> float:
        chunks = split_batch(batch_size, num_devices, gpu0_bsz)
        return max(
            (peak.peak_allocated_bytes + (chunk - old) * per_sample) / (peak.capacity_bytes or 1)
            for peak, chunk, old in zip(usage.devices, chunks, chunk_sizes, strict=True)
        )

    even = even_share(batch_size, num_devices)
    utilizations = {value: utilization_of_fullest(value) for value in range(even + 1)}
    return best_gpu0_bsz(utilizations, preferred=chunk_sizes[0])
