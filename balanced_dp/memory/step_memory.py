"""The peak memory of a measured step, and advice on its split. Pure, without torch."""

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
    """The peak memory of one device during a step, in bytes.

    Attributes:
        device: torch's name of the device.
        capacity_bytes: capacity of the device, None if it is not known.
        start_allocated_bytes: memory occupied by tensors at the beginning of the step.
        peak_allocated_bytes: maximum memory occupied by tensors.
        peak_reserved_bytes: maximum memory managed by torch's allocator, including its cache.
        peak_used_bytes: maximum memory in use by all processes, as sampled from NVML: a lower
            bound. None if NVML is not available.
        num_alloc_retries: number of times that the allocator emptied its cache and tried again,
            None if it does not count them.
        chunk_size: number of samples on the device, None if it is not known.
        replica_bytes: memory of the device's copies of parameters and buffers, 0 if there are none
            or it is not known.
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
    """The memory that a measured block took; complete when the block has ended.

    Attributes:
        devices: one entry for each device, empty until the block ends.
        elapsed_s: duration of the block in seconds, including the devices' work.
        valid: whether the block ran to its end without an exception or an allocator's retry.
        reason: why the block is not valid, None if it is.
        num_samples: number of samples from NVML.
        sampling_error: why ``peak_used_bytes`` is None for a device.
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
        return imbalance_of([peak.peak_allocated_bytes for peak in self._ended()])

    @property
    def utilization(self) -> tuple[float, ...]:
        """Peak allocated bytes over capacity, for each device.

        Raises:
            ProbeError: the block has not ended, or the capacity of a device is not known.
        """
        values = []
        for peak in self._ended():
            if not peak.capacity_bytes:
                raise ProbeError(f"the capacity of {peak.device} is not known")
            values.append(peak.peak_allocated_bytes / peak.capacity_bytes)
        return tuple(values)

    @property
    def fullest(self) -> DevicePeak:
        """The bottleneck device: the first of those with the highest utilization.

        Raises:
            ProbeError: the block has not ended, or the capacity of a device is not known.
        """
        utilization = self.utilization
        return self.devices[utilization.index(max(utilization))]

    @property
    def bytes_per_sample(self) -> float | None:
        """The memory per sample of a forward and backward pass.

        It is measured on all devices but the first: the sum of their peaks, less the memory at the
        start of the step and the copies of parameters, over the sum of their chunk sizes. None if
        the chunk sizes are not known or only the first device had samples.
        """
        others = [peak for peak in self._ended()[1:] if peak.chunk_size]
        chunk_bytes = sum(
            peak.peak_allocated_bytes - peak.start_allocated_bytes - peak.replica_bytes
            for peak in others
        )
        num_samples = sum(peak.chunk_size or 0 for peak in others)
        return chunk_bytes / num_samples if num_samples and chunk_bytes > 0 else None

    @property
    def floor_bytes(self) -> float | None:
        """The first device's peak with ``gpu0_bsz=0``, which no ``gpu0_bsz`` can lower.

        It is the measured peak less ``bytes_per_sample`` for each sample of the device's chunk.
        None if the chunk size or ``bytes_per_sample`` is not known.
        """
        first = self._ended()[0]
        if first.chunk_size == 0:
            return first.peak_allocated_bytes
        if first.chunk_size is None or self.bytes_per_sample is None:
            return None
        return max(0.0, first.peak_allocated_bytes - first.chunk_size * self.bytes_per_sample)

    def check_split(self, tolerance: float = 0.10, warn: bool = False) -> str | None:
        """Return advice on how to balance the split, None if it is balanced.

        Utilizations are compared, so devices with different capacities may hold different amounts.
        If the chunk sizes are known, the advice is the best of all values of ``gpu0_bsz``, as
        predicted from ``bytes_per_sample``.

        Args:
            tolerance: the difference of utilizations that counts as balanced, as a fraction of the
                highest one, at least 0 and below 1.
            warn: whether to issue the advice as an ``ImbalanceWarning``, too.

        Raises:
            ArgumentError: ``tolerance`` is out of range.
            ArgumentTypeError: ``tolerance`` is not a number.
            ProbeError: the block has not ended, or the capacity of a device is not known.
        """
        message = _advice(self, tolerance)
        if warn and message is not None:
            warnings.warn(message, ImbalanceWarning, stacklevel=2)
        return message

    def _ended(self) -> tuple[DevicePeak, ...]:
        if not self.devices:
            raise ProbeError(f"there are no peaks: {self.reason}")
        return self.devices


def imbalance_of(values: Sequence[float]) -> float:
    """Return (max - min) / max, or 0 if all values are 0."""
    return (max(values) - min(values)) / max(values) if max(values) else 0.0


def _advice(usage: StepMemory, tolerance: float) -> str | None:
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float):
        raise ArgumentTypeError(f"tolerance must be a number, got {tolerance!r}")
    if not 0 <= tolerance < 1:
        raise ArgumentError(f"tolerance must be from 0 to below 1 (0.05 is 5 %), got {tolerance}")
    utilization = usage.utilization
    if not usage.valid:
        return f"the measurement is not valid: {usage.reason}"
    difference = imbalance_of(utilization)
    if difference <= tolerance:
        return None
    fullest, emptiest = usage.fullest, usage.devices[utilization.index(min(utilization))]
    alike = fullest.capacity_bytes == emptiest.capacity_bytes
    fact = " and ".join(
        f"{peak.device} peaks at {format_bytes(peak.peak_allocated_bytes)}"
        + ("" if alike else f" of {format_bytes(peak.capacity_bytes or 0)}")
        for peak in (fullest, emptiest)
    )
    return f"{fact}, {difference:.0%} apart: {_remedy(usage, utilization, tolerance)}"


def _remedy(usage: StepMemory, utilization: Sequence[float], tolerance: float) -> str:
    first, target = usage.devices[0], _best_gpu0_bsz(usage)
    others = max(utilization[1:])
    if target is None or first.chunk_size is None:
        if imbalance_of([utilization[0], others]) > tolerance:
            return "lower gpu0_bsz" if utilization[0] > others else "raise gpu0_bsz"
        return "gpu0_bsz cannot change that; check what else is on the devices"
    sample = f"a sample takes about {format_bytes(usage.bytes_per_sample or 0)}"
    moved = target - first.chunk_size
    remedy = f"no other gpu0_bsz than {target} would be better, since {sample}"
    if moved:
        direction = "raise" if moved > 0 else "lower"
        change = f"by about {abs(moved)}, from {first.chunk_size} to {target}"
        remedy = f"{direction} gpu0_bsz {change} ({sample})"
    if utilization[0] > others and not target:
        floor = format_bytes(usage.floor_bytes or 0)
        remedy += (
            f"; without any samples {first.device} holds about {floor}, which memory_breakdown "
            "lists by use. Return the loss from forward to avoid gathered outputs"
        )
    return remedy


def _best_gpu0_bsz(usage: StepMemory) -> int | None:
    """Return the best ``gpu0_bsz``: the lowest utilization of the bottleneck device.

    Of several equally good values it is the one in use, or else the largest, with which device 0
    computes most. None if it cannot be predicted.
    """
    chunk_sizes = [peak.chunk_size for peak in usage.devices if peak.chunk_size is not None]
    batch_size, num_devices = sum(chunk_sizes), len(usage.devices)
    per_sample = usage.bytes_per_sample
    if per_sample is None:
        return None
    if split_batch(batch_size, num_devices, chunk_sizes[0]) != tuple(chunk_sizes):
        return None  # a device is used twice

    def bottleneck_utilization(gpu0_bsz: int) -> float:
        chunks = split_batch(batch_size, num_devices, gpu0_bsz)
        return max(
            (peak.peak_allocated_bytes + (chunk - old) * per_sample) / (peak.capacity_bytes or 1)
            for peak, chunk, old in zip(usage.devices, chunks, chunk_sizes, strict=True)
        )

    even = even_share(batch_size, num_devices)
    utilizations = {value: bottleneck_utilization(value) for value in range(even + 1)}
    return best_gpu0_bsz(utilizations, preferred=chunk_sizes[0])
