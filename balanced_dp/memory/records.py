"""The memory of a device, and what a measured block took. Pure, without torch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import ArgumentError, ArgumentTypeError, BalanceWarning, ProbeError
from ..units import format_bytes

ProcessBytesSource = Literal["process", "device-delta", "unknown"]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device, in bytes; None where it is not known.

    There are three layers. Tensors occupy ``allocated_bytes``. Torch's allocator holds
    ``reserved_bytes``: the tensors and its cache. The device has ``used_bytes`` in use: all of
    that, CUDA contexts, workspaces outside of the allocator, and other processes.

    Attributes:
        device: torch's name of the device; None for a board that NVML lists and torch does not see.
        nvml_index: the index of the board in NVML and nvidia-smi.
        mig_index: the index of the MIG slice, None for a whole board.
        uuid: the UUID of nvidia-smi, ``GPU-...`` or ``MIG-...``.
        name: the name of the device.
        total_bytes: the capacity of the device.
        used_bytes: memory in use by all processes.
        free_bytes: memory not in use.
        reserved_by_driver_bytes: memory that the driver reserves for itself.
        memory_info_version: the version of NVML's query, 1 or 2. Version 1 counts the memory
            reserved by the driver as used.
        process_bytes: memory in use by this process.
        process_bytes_source: the source of ``process_bytes``. ``"process"``: NVML's list of
            processes. ``"device-delta"``: the growth of ``used_bytes`` since the probe was made, by
            any process, since the list does not have this PID, as in a container. ``"unknown"``:
            there is no ``process_bytes``.
        other_process_bytes: memory in use by the other listed processes; None if this process
            cannot be told from them.
        allocated_bytes: memory occupied by tensors of this process.
        reserved_bytes: memory managed by torch's allocator.
        peak_allocated_bytes: maximum of ``allocated_bytes`` since the peak was last reset; of a
            measured block, in the block.
        peak_reserved_bytes: maximum of ``reserved_bytes``, likewise.
        num_alloc_retries: number of times that the allocator emptied its cache and tried again; of
            a measured block, in the block.
        error: why values are missing, such as a lost GPU.
        start_allocated_bytes: of a measured block, ``allocated_bytes`` at its beginning.
        peak_used_bytes: of a measured block, the largest sample of ``used_bytes``: a lower bound.
        chunk_size: of a measured block, the number of samples of each batch on the device.
    """

    device: str | None
    nvml_index: int | None = None
    mig_index: int | None = None
    uuid: str | None = None
    name: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_by_driver_bytes: int | None = None
    memory_info_version: int | None = None
    process_bytes: int | None = None
    process_bytes_source: ProcessBytesSource = "unknown"
    other_process_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    num_alloc_retries: int | None = None
    error: str | None = None
    start_allocated_bytes: int | None = None
    peak_used_bytes: int | None = None
    chunk_size: int | None = None

    @property
    def label(self) -> str:
        """The CUDA and NVML names, ``"cuda:0 (gpu:3)"``, or the only one that is known."""
        board = "" if self.nvml_index is None else board_label(self.nvml_index, self.mig_index)
        if self.device is None:
            return board
        return f"{self.device} ({board})" if board else self.device


def board_label(nvml_index: int, mig_index: int | None) -> str:
    """Return the name of a board, ``gpu:3``, or of a slice, ``gpu:3 mig:1``."""
    return f"gpu:{nvml_index}" + ("" if mig_index is None else f" mig:{mig_index}")


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

    devices: tuple[DeviceMemory, ...] = ()
    elapsed_s: float = math.nan
    valid: bool = False
    reason: str | None = "the block has not ended"
    num_samples: int = 0
    sampling_error: str | None = None

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The peak allocated bytes of each device.

        Raises:
            ProbeError: the block has not ended.
        """
        if not self.devices:
            raise ProbeError(f"there are no peaks: {self.reason}")
        return tuple(memory.peak_allocated_bytes or 0 for memory in self.devices)

    @property
    def imbalance(self) -> float:
        """(max - min) / max of the devices' peaks, 0 to 1.

        Raises:
            ProbeError: the block has not ended.
        """
        return imbalance_of(self.peak_bytes)

    @property
    def utilization(self) -> tuple[float, ...]:
        """The peak over the capacity, for each device.

        Raises:
            ProbeError: the block has not ended, or the capacity of a device is not known.
        """
        for memory in self.devices:
            if not memory.total_bytes:
                raise ProbeError(f"the capacity of {memory.device} is not known")
        capacities = [memory.total_bytes or 1 for memory in self.devices]
        return tuple(p / capacity for p, capacity in zip(self.peak_bytes, capacities, strict=True))

    @property
    def fullest(self) -> DeviceMemory:
        """The bottleneck device: the first of those with the highest utilization.

        Raises:
            ProbeError: the block has not ended, or the capacity of a device is not known.
        """
        return self.devices[self.utilization.index(max(self.utilization))]

    def check_split(self, tolerance: float = 0.10, warn: bool = False) -> str | None:
        """Return advice on how to balance the split, None if it is balanced.

        Utilizations are compared, so devices with different capacities may hold different amounts.

        Args:
            tolerance: the difference of utilizations that counts as balanced, as a fraction of the
                highest one, at least 0 and below 1.
            warn: whether to issue the advice as an ``BalanceWarning``, too.

        Raises:
            ArgumentError: ``tolerance`` is out of range.
            ArgumentTypeError: ``tolerance`` is not a number.
            ProbeError: the block has not ended, or the capacity of a device is not known.
        """
        message = _advice(self, tolerance)
        if warn and message is not None:
            warnings.warn(message, BalanceWarning, stacklevel=2)
        return message


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
    emptiest = usage.devices[utilization.index(min(utilization))]
    fact = " and ".join(
        f"{memory.device} peaks at {format_bytes(memory.peak_allocated_bytes or 0)}"
        + (f" of {format_bytes(memory.total_bytes or 0)}" * is_unlike)
        for memory in (usage.fullest, emptiest)
        for is_unlike in [usage.fullest.total_bytes != emptiest.total_bytes]
    )
    return f"{fact}, {difference:.0%} apart: {_remedy(usage, utilization, tolerance)}"


def _remedy(usage: StepMemory, utilization: Sequence[float], tolerance: float) -> str:
    first, others = utilization[0], max(utilization[1:])
    if imbalance_of([first, others]) <= tolerance:
        return "gpu0_bsz cannot change that; check what else is on the devices"
    if first < others:
        return "raise gpu0_bsz (balanced-dp tune finds the best value)"
    if usage.devices[0].chunk_size == 0:
        return (
            "gpu0_bsz is 0 already; see memory_breakdown for what the device holds. Outputs need "
            "not be gathered (gather=False), parameters may be on all devices (spread=True)"
        )
    return "lower gpu0_bsz (balanced-dp tune finds the best value)"
