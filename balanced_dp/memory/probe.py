"""The probe, which reads the memory of devices from torch's allocator and from NVML."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pynvml
import torch

from ..devices import Device, resolve_devices
from ..emulation.machine import is_emulated
from ..errors import ProbeError
from .nvml import Board, find_board, list_boards, memory_of
from .peaks import Peaks
from .records import DeviceMemory, StepMemory

SAMPLING_INTERVAL_S = 0.010


class MemoryProbe:
    """A probe that reads the memory of devices from torch's allocator and from NVML.

    NVML (package ``nvidia-ml-py``) is loaded when the first probe needs it. For emulated devices,
    and for accelerators without NVML, only the device module (the counterpart of ``torch.cuda``)
    is asked.

    Args:
        devices: devices as ints, strings or ``torch.device``. Inside ``emulate_devices``, None
            means all emulated devices. Elsewhere, None means all of torch's accelerators, and the
            GPUs that NVML lists but torch does not see.

    Attributes:
        devices: the devices that torch sees, as a list of ``torch.device`` without duplicates. The
            list does not contain GPUs that only NVML lists.
        nvml_error: the reason why NVML is not used; None if NVML is used, or if no device needs it.

    Raises:
        ArgumentError, ArgumentTypeError: ``devices`` is invalid.
        ProbeError: there is no device, or torch has no memory statistics for a device (the CPU, for
            example).

    Examples:
        >>> with emulate_devices(2, memory="1GiB") as devices:
        ...     x = torch.ones(1024, device=devices[1])
        ...     [memory.allocated_bytes for memory in MemoryProbe().snapshot()]
        ...     del x  # no tensor may outlive the emulated devices
        [0, 4096]
    """

    def __init__(self, devices: Sequence[Device] | None = None) -> None:
        self.devices = list(dict.fromkeys(resolve_devices(devices)))
        self.nvml_error: str | None = None
        self._boards: dict[torch.device, Board] = {}
        for device in self.devices:
            if not hasattr(torch.get_device_module(device), "memory_allocated"):
                raise ProbeError(
                    f"{device} does not count its memory; to measure on a machine without "
                    "accelerators, use emulate_devices"
                )
        boards: list[Board] = []
        if any(map(_has_nvml, self.devices)) or not self.devices:
            try:
                boards = list_boards()
            except pynvml.NVMLError as error:
                self.nvml_error = f"NVML failed: {error}"
        for device in filter(_has_nvml, self.devices):
            if board := find_board(torch.cuda.get_device_properties(device), boards):
                self._boards[device] = board
        unseen = [board for board in boards if board not in self._boards.values()]
        self._unseen = unseen if devices is None else []
        if not self.devices and not self._unseen:
            reason = self.nvml_error or "NVML lists no board"
            remedy = "without GPUs, use emulate_devices, or the command balanced-dp run"
            raise ProbeError(f"torch sees no accelerator, and {reason}; {remedy}")

    def snapshot(self) -> tuple[DeviceMemory, ...]:
        """Return the current memory of each device, without synchronizing the devices.

        If the probe was created without ``devices``, the GPUs that NVML lists but torch does not
        see come last.
        """
        return (
            *map(self._snapshot_device, self.devices),
            *(_add_nvml(DeviceMemory(device=None), board) for board in self._unseen),
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
        )
        if device in self._boards:
            return _add_nvml(memory, self._boards[device])
        if _has_nvml(device):  # mem_get_info would create a CUDA context, which takes memory
            reason = f"NVML lists no device with the UUID {uuid}, nor exactly one at its PCI bus id"
            return replace(memory, error=self.nvml_error or reason)
        try:
            free_bytes, total_bytes = module.mem_get_info(device)
        except RuntimeError as error:  # some accelerators do not support mem_get_info
            return replace(memory, error=str(error))
        return replace(memory, free_bytes=free_bytes, used_bytes=total_bytes - free_bytes)

    @contextmanager
    def measure(self) -> Iterator[StepMemory]:
        """Measure the memory that a ``with`` block takes on each device.

        The peak memory statistics of the devices are reset when the block begins. If NVML is
        available, a thread samples the used memory every 10 ms, or less often while other threads
        hold the GIL. The thread ends with the block.

        Yields:
            A ``StepMemory``, whose fields are complete when the block has ended.

        Examples:
            >>> with emulate_devices(2, memory="1GiB") as devices:
            ...     with MemoryProbe().measure() as usage:
            ...         x = torch.ones(1024, device=devices[1])
            ...     usage.devices[1].peak_allocated_bytes, usage.imbalance
            ...     del x  # no tensor may outlive the emulated devices
            (4096, 1.0)

        Raises:
            ProbeError: torch sees none of the probe's devices. For example, NVML lists GPUs, but
                torch was built without CUDA.
        """
        if not self.devices:
            raise ProbeError("torch sees no device to measure; use emulate_devices")
        usage = StepMemory()
        retries = [_retries(device) for device in self.devices]
        peaks = Peaks(self.devices)
        with _sampled_peaks(self._boards) as peaks_of_used:
            yield usage
        for device in self.devices:
            allocated_bytes, reserved_bytes = peaks.of(device)
            memory = replace(
                self._snapshot_device(device),
                peak_allocated_bytes=allocated_bytes,
                peak_reserved_bytes=reserved_bytes,
                peak_used_bytes=peaks_of_used.get(device),
            )
            usage.devices += (memory,)
        usage.reason = None
        pairs = zip(usage.devices, retries, strict=True)
        if retried := [str(now.device) for now, before in pairs if now.num_alloc_retries != before]:
            usage.reason = (
                f"on {', '.join(retried)} the allocator had to empty its cache and try again, so "
                "the block needs more memory than the peaks show"
            )


def _add_nvml(memory: DeviceMemory, board: Board) -> DeviceMemory:
    """Return a copy of ``memory``, updated with what NVML knows about ``board``."""
    memory = replace(
        memory,
        nvml_index=board.nvml_index,
        mig_index=board.mig_index,
        uuid=board.uuid or memory.uuid,
        name=board.name or memory.name,
    )
    try:
        return replace(memory, **memory_of(board))
    except pynvml.NVMLError as error:
        return replace(memory, error=f"NVML failed: {error}")


@contextmanager
def _sampled_peaks(
    boards: Mapping[torch.device, Board],
) -> Iterator[Mapping[torch.device, int | None]]:
    """Start a thread that samples the used memory of boards until the ``with`` block ends.

    The boards are the GPUs or MIG slices of the devices. A sample is taken every 10 ms, or less
    often while other threads hold the GIL. While four threads ran pure Python code, a sample was
    taken every 36 ms. Few samples suffice: the allocator usually keeps the memory that it has
    reserved, so later samples show this memory, too. A last sample is always taken when the block
    ends.

    Yields:
        A dict from each device in ``boards`` to its largest sample in bytes. Before the first
        successful query of a device, its entry is None. The thread updates the dict while the block
        runs. The actual peak may be higher than the largest sample.
    """
    peaks: dict[torch.device, int | None] = dict.fromkeys(boards)
    has_ended = threading.Event()

    def sample() -> None:
        is_last = not boards  # without boards, the thread ends immediately
        while not is_last:
            is_last = has_ended.wait(SAMPLING_INTERVAL_S)
            for device, board in boards.items():
                with suppress(pynvml.NVMLError):
                    peaks[device] = max(peaks[device] or 0, memory_of(board)["used_bytes"])

    thread = threading.Thread(target=sample, name="NVML sampler", daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        has_ended.set()
        thread.join()


def _has_nvml(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and not is_emulated(device)


def _retries(device: torch.device) -> Any:
    """Return how often torch's allocator emptied its cache and tried again; None if unknown."""
    stats: dict[str, int] = torch.get_device_module(device).memory_stats(device)
    return stats.get("num_alloc_retries")
