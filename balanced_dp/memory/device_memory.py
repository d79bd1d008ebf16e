"""What one device holds: the record that a probe gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .nvml import Board

ProcessBytesSource = Literal["process", "device-delta", "unknown"]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What one device holds, in bytes; what cannot be known is None.

    Three layers: tensors hold ``allocated_bytes``; torch's allocator has reserved
    ``reserved_bytes``, which is those and its cache; the device has ``used_bytes`` in use, which is
    all of that, contexts, workspaces outside of the allocator, and other processes.

    Attributes:
        device: as torch names it; None for a board that NVML lists and torch does not see.
        nvml_index: NVML's and nvidia-smi's index of the board.
        mig_index: which MIG slice of the board it is, None where it is not split.
        uuid: as nvidia-smi names it, ``GPU-...`` or ``MIG-...``.
        name: the device's name.
        total_bytes: what the device can hold.
        used_bytes: what is in use, by anybody.
        free_bytes: what is not.
        reserved_by_driver_bytes: what the driver keeps for itself.
        memory_info_version: 2, or 1 where NVML counts the driver's reserve as used.
        process_bytes: what this process has in use.
        process_bytes_source: how that is known. ``"process"``: from NVML's list of processes.
            ``"device-delta"``: our PID is not on that list, as in a container, so this is by how
            much ``used_bytes`` grew since the probe was made, whoever used it. ``"unknown"``.
        other_process_bytes: what the other listed processes have in use; None where ours cannot
            be told from them.
        allocated_bytes: what tensors of this process hold.
        reserved_bytes: what torch's allocator holds for them.
        peak_allocated_bytes: the most that tensors held since the peak was last reset.
        peak_reserved_bytes: the most that the allocator held.
        num_alloc_retries: how often the allocator emptied its cache to try again.
        error: why figures are missing, such as a lost GPU.
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
        """Both numbers, ``"cuda:0 (gpu:3)"``, or the one that there is."""
        board = "" if self.nvml_index is None else Board(self.nvml_index, self.mig_index).label
        if self.device is None:
            return board
        return f"{self.device} ({board})" if board else self.device
