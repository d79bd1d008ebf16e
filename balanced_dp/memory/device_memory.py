"""The record of one device's memory that a probe returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .nvml import Board

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
        peak_allocated_bytes: maximum of ``allocated_bytes`` since the peak was last reset.
        peak_reserved_bytes: maximum of ``reserved_bytes`` since the peak was last reset.
        num_alloc_retries: number of times that the allocator emptied its cache and tried again.
        error: why values are missing, such as a lost GPU.
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

    @property
    def label(self) -> str:
        """The CUDA and NVML names, ``"cuda:0 (gpu:3)"``, or the only one that is known."""
        board = "" if self.nvml_index is None else Board(self.nvml_index, self.mig_index).label
        if self.device is None:
            return board
        return f"{self.device} ({board})" if board else self.device
