"""The probe, which reads the memory of devices from torch's allocator and from NVML."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..devices import Device, is_emulated, resolve_devices
from ..errors import ProbeError
from .nvml import Board, Nvml, NvmlError, connection, find_board
from .nvml_sampler import Sampler
from .peaks import Peaks
from .records import DeviceMemory, StepMemory


class MemoryProbe:
    """A probe of the memory of devices, as torch's allocator and NVML report it.

    NVML (package ``nvidia-ml-py``) is loaded when the first probe needs it. Emulated devices, and
    accelerators without NVML, are measured by their device module alone.

    Args:
        devices: devices as ints, strings or ``torch.device``. None means all devices: the emulated
            ones inside ``emulate_devices``, else torch's accelerators and the boards that NVML
            lists and torch does not see.

    Attributes:
        devices: the devices, as a list of ``torch.device`` without duplicates.
        nvml_error: why NVML is not used; None if it is, or if no device needs it.

    Raises:
        ArgumentError, ArgumentTypeError: ``devices`` is invalid.
        ProbeError: there is no device, or a device does not count its memory.

    Examples:
        >>> with emulate_devices(2, memory="1GiB") as devices:
        ...     x = torch.ones(1000, device=devices[1])
        ...     [memory.allocated_bytes for memory in MemoryProbe().snapshot()]
        ...     del x
        [0, 4096]
    """

    def __init__(self, devices: Sequence[Device] | None = None) -> None:
        self.devices = list(dict.fromkeys(resolve_devices(devices)))
        self.nvml_error: str | None = None
        self._nvml: Nvml | None = None
        self._boards: dict[torch.device, Board] = {}
        self._unseen: list[Board] = []
        for device in self.devices:
            if not hasattr(torch.get_device_module(device), "memory_allocated"):
                raise ProbeError(
                    f"{device} does not count its memory; to measure on a machine without "
                    "accelerators, use emulate_devices"
                )
        if any(map(_has_nvml, self.devices)) or not self.devices:
            try:
                self._open_nvml(devices is None)
            except NvmlError as error:
                self.nvml_error = str(error)
        if not self.devices and not self._unseen:
            reason = self.nvml_error or "NVML lists no board"
            raise ProbeError(f"torch sees no accelerator, and {reason}")

    def _open_nvml(self, lists_unseen: bool) -> None:
        self._nvml = connection(os.getpid())
        boards = self._nvml.boards()
        for device in filter(_has_nvml, self.devices):
            board = find_board(torch.cuda.get_device_properties(device), boards)
            if board is not None:
                self._boards[device] = board
        if lists_unseen:
            self._unseen = [board for board in boards if board not in self._boards.values()]

    def snapshot(self) -> tuple[DeviceMemory, ...]:
        """Return the memory of each device now, without synchronizing the devices."""
        return (
            *map(self._snapshot_device, self.devices),
            *(self._add_nvml(DeviceMemory(device=None), board) for board in self._unseen),
        )

    def _snapshot_device(self, device: torch.device) -> DeviceMemory:
        module = torch.get_device_module(device)
        properties = module.get_device_properties(device)
        uuid = getattr(properties, "uuid", None)
        memory = DeviceMemory(
            device=str(device),
            uuid=None if uuid is None else str(uuid),
            name=properties.name,
            total_bytes=properties.total_memory,
            allocated_bytes=module.memory_allocated(device),
            reserved_bytes=module.memory_reserved(device),
            peak_allocated_bytes=module.max_memory_allocated(device),
            peak_reserved_bytes=module.max_memory_reserved(device),
            num_alloc_retries=_retries(device),
            error=self.nvml_error,
        )
        if device in self._boards:
            return self._add_nvml(memory, self._boards[device])
        if _has_nvml(device):  # mem_get_info would create a CUDA context, which takes memory
            reason = f"NVML lists no device with the UUID {uuid}, nor one device at its PCI bus id"
            return replace(memory, error=self.nvml_error or reason)
        try:
            free_bytes, total_bytes = module.mem_get_info(device)
        except RuntimeError as error:  # not every accelerator's driver supports it
            return replace(memory, error=str(error))
        return replace(memory, free_bytes=free_bytes, used_bytes=total_bytes - free_bytes)

    def _add_nvml(self, memory: DeviceMemory, board: Board) -> DeviceMemory:
        """Return ``memory`` with the fields of NVML."""
        assert self._nvml is not None
        memory = replace(
            memory,
            nvml_index=board.nvml_index,
            mig_index=board.mig_index,
            uuid=board.uuid or memory.uuid,
            name=board.name or memory.name,
        )
        try:
            return replace(memory, **self._nvml.memory(board))  # type: ignore[arg-type]
        except NvmlError as error:
            return replace(memory, error=str(error))

    @contextmanager
    def measure(self) -> Iterator[StepMemory]:
        """Measure the memory that a ``with`` block takes on each device.

        The devices' peaks are reset at the beginning. If NVML is available, a thread samples it
        every 10 ms, or less often while other threads hold Python's lock. The thread ends with the
        block.

        Yields:
            The results, which are complete when the block has ended.

        Examples:
            >>> with emulate_devices(2, memory="1GiB") as devices:
            ...     with MemoryProbe().measure() as usage:
            ...         x = torch.ones(1000, device=devices[1])
            ...     usage.devices[1].peak_allocated_bytes, usage.imbalance
            ...     del x
            (4096, 1.0)

        Raises:
            ProbeError: torch sees no device.
        """
        if not self.devices:
            raise ProbeError("torch sees no device to measure; use emulate_devices")
        usage = StepMemory()
        retries = [_retries(device) for device in self.devices]
        peaks = Peaks(self.devices)
        sampler = Sampler(self._nvml, [*self._boards.values()]) if self._nvml else None
        try:
            yield usage
        finally:
            if sampler is not None:
                sampler.stop()
        for device in self.devices:
            allocated_bytes, reserved_bytes = peaks.of(device)
            memory = replace(
                self._snapshot_device(device),
                peak_allocated_bytes=allocated_bytes,
                peak_reserved_bytes=reserved_bytes,
            )
            if sampler is not None and device in self._boards:
                memory = replace(memory, peak_used_bytes=sampler.peaks[self._boards[device]])
            usage.devices += (memory,)
        usage.reason = None
        pairs = zip(usage.devices, retries, strict=True)
        if retried := [str(now.device) for now, before in pairs if now.num_alloc_retries != before]:
            usage.reason = (
                f"on {', '.join(retried)} the allocator had to empty its cache and try again, so "
                "the peaks are lower than the block needs"
            )


def _has_nvml(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and not is_emulated(device)


def _retries(device: torch.device) -> Any:
    """Return how often the allocator emptied its cache and tried again; None if unknown."""
    stats: dict[str, int] = torch.get_device_module(device).memory_stats(device)
    return stats.get("num_alloc_retries")
