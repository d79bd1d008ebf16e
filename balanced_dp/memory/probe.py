"""Asks what each device really holds: the allocator's figures beside NVML's."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..devices import Device, default_device_type, resolve_devices
from ..errors import ProbeError
from .breakdown import last_chunk_sizes, replica_bytes
from .device_map import CudaDevice, find_board
from .device_memory import DeviceMemory, ProcessBytesSource
from .nvml import Board, MemoryInfo, Nvml, NvmlError
from .sampler import Sampler, Samples
from .step import DevicePeak, StepMemory


class MemoryProbe:
    """Asks torch's allocator and NVML what devices hold.

    NVML (package ``nvidia-ml-py``) is loaded here and not before. Emulated devices, and
    accelerators without NVML, are asked through their device module alone.

    Args:
        devices: devices as ints, strings or ``torch.device``. None means those of ``model``, or all
            there are: torch's accelerators, and boards that NVML lists and torch does not see;
            inside ``emulate_devices``, the emulated ones.
        model: the ``BalancedDataParallel`` that is measured. With it a measured step knows how the
            batch was split, and advice comes with numbers.

    Attributes:
        devices: the ``torch.device`` list, each once.
        nvml_error: why NVML is not asked, None where it is, or where there is nothing to ask it.

    Raises:
        ArgumentError, ArgumentTypeError: ``devices`` names no device, or one that counts nothing.
        ProbeError: there is no device, or it is not clear which NVML device one is.

    Example:
        >>> with emulate_devices(2, memory="1GiB") as devices:
        ...     x = torch.ones(1000, device=devices[1])
        ...     [memory.allocated_bytes for memory in MemoryProbe().snapshot()]
        ...     del x
        [0, 4096]
    """

    def __init__(self, devices: Sequence[Device] | None = None, *, model: Any = None) -> None:
        wants_all = devices is None and model is None
        if devices is None and model is not None:
            devices = model.devices
        device_type = default_device_type()
        self.devices = list(dict.fromkeys(resolve_devices(devices, device_type)))
        self.nvml_error: str | None = None
        self._model = model
        self._nvml: Nvml | None = None
        self._boards: dict[torch.device, Board] = {}
        self._unseen: list[Board] = []
        for device in self.devices:
            if not hasattr(torch.get_device_module(device), "memory_allocated"):
                raise ProbeError(
                    f"{device} does not count its memory; to measure on a machine without "
                    "accelerators, use emulate_devices"
                )
        if any(map(_has_nvml, self.devices)) or (wants_all and not self.devices):
            self._open_nvml(wants_all)
        if not self.devices and not self._unseen:
            reason = self.nvml_error or "NVML lists no board"
            raise ProbeError(f"torch sees no accelerator, and {reason}")
        self._info_before = {
            device: self._memory_info(board)[0] for device, board in self._boards.items()
        }

    def _open_nvml(self, wants_all: bool) -> None:
        try:
            self._nvml = Nvml()
            weakref.finalize(self, self._nvml.close)
            boards = self._nvml.boards()
        except NvmlError as error:
            self.nvml_error = str(error)
            return
        for device in filter(_has_nvml, self.devices):
            module = torch.get_device_module(device)
            described = _describe(device.index, module.get_device_properties(device))
            self._boards[device] = find_board(described, module.device_count(), boards, os.environ)
        if wants_all:
            seen = list(self._boards.values())
            self._unseen = [board for board in boards if board not in seen]

    def snapshot(self) -> tuple[DeviceMemory, ...]:
        """Returns what each device holds now. Waits for nothing."""
        return (
            *map(self._snapshot_device, self.devices),
            *(self._add_nvml(DeviceMemory(device=None), board, None) for board in self._unseen),
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
            num_alloc_retries=_num_alloc_retries(device),
            error=self.nvml_error,
        )
        if device in self._boards:
            return self._add_nvml(memory, self._boards[device], device)
        if _has_nvml(device):  # mem_get_info would open a context, which takes memory
            return memory
        free_bytes, total_bytes = module.mem_get_info(device)
        return replace(memory, free_bytes=free_bytes, used_bytes=total_bytes - free_bytes)

    def _add_nvml(
        self, memory: DeviceMemory, board: Board, device: torch.device | None
    ) -> DeviceMemory:
        info, error = self._memory_info(board)
        memory = replace(
            memory,
            nvml_index=board.nvml_index,
            mig_index=board.mig_index,
            uuid=board.uuid or memory.uuid,
            name=board.name or memory.name,
            error=error,
        )
        if info is None:
            return memory
        assert self._nvml is not None
        processes = self._nvml.processes(board)
        ours, source = self._process_bytes(processes, info, device)
        others = None
        if processes is not None and source == "process":
            sizes = [size for pid, size in processes.items() if pid != os.getpid()]
            others = None if None in sizes else sum(size or 0 for size in sizes)
        return replace(
            memory,
            total_bytes=info.total_bytes,
            used_bytes=info.used_bytes,
            free_bytes=info.free_bytes,
            reserved_by_driver_bytes=info.reserved_by_driver_bytes,
            memory_info_version=info.version,
            process_bytes=ours,
            process_bytes_source=source,
            other_process_bytes=others,
        )

    def _process_bytes(
        self, processes: dict[int, int | None] | None, info: MemoryInfo, device: torch.device | None
    ) -> tuple[int | None, ProcessBytesSource]:
        listed = (processes or {}).get(os.getpid())
        if listed is not None:
            return listed, "process"
        if device is None or not torch.get_device_module(device).is_initialized():
            # Nothing here has touched the device, so that not to be listed is to hold nothing.
            return (None, "unknown") if processes is None else (0, "process")
        before = self._info_before[device]
        if before is None or not torch.get_device_module(device).memory_reserved(device):
            return None, "unknown"
        return max(0, info.used_bytes - before.used_bytes), "device-delta"

    def _memory_info(self, board: Board) -> tuple[MemoryInfo | None, str | None]:
        assert self._nvml is not None
        try:
            return self._nvml.memory(board), None
        except NvmlError as error:
            return None, str(error)

    @contextmanager
    def measure(self) -> Iterator[StepMemory]:
        """Measures what the block takes of each device; what it gives is complete at its end.

        The devices are synchronized at both ends and the allocators' peaks are reset. Where there
        is NVML, a process of its own samples it every 10 ms. Whatever happens in the block, that
        process ends with it, and the figures are there, marked as not valid after an exception.

        Example:
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
            raise ProbeError("torch sees no device, so there is nothing to measure")
        usage = StepMemory()
        sampler = Sampler(list(self._boards.values())) if self._boards else None
        try:
            start = self._start()
            try:
                yield usage
            except BaseException as error:
                with suppress(Exception):  # the block's own exception is the one to be told
                    self._finish(usage, start, sampler)
                usage.valid = False
                usage.reason = f"the block ended with {type(error).__name__}: {error}"
                raise
            self._finish(usage, start, sampler)
        finally:
            if sampler is not None:
                sampler.stop()

    def _start(self) -> _Start:
        allocated_bytes, retries = [], []
        for device in self.devices:
            module = torch.get_device_module(device)
            module.synchronize(device)
            module.reset_peak_memory_stats(device)
            allocated_bytes.append(module.memory_allocated(device))
            retries.append(_num_alloc_retries(device))
        return _Start(allocated_bytes, retries, self._last_split(), time.perf_counter())

    def _finish(self, usage: StepMemory, start: _Start, sampler: Sampler | None) -> None:
        for device in self.devices:
            torch.get_device_module(device).synchronize(device)
        usage.elapsed_s = time.perf_counter() - start.time_s
        samples = Samples(error=self.nvml_error) if sampler is None else sampler.stop()
        usage.num_samples, usage.sampling_error = samples.num_samples, samples.error
        # The model makes a new tuple at each call: the same one means that it was not called.
        model_ran = self._last_split() is not start.split
        chunk_sizes = last_chunk_sizes(self._model) if model_ran else None
        usage.devices = tuple(
            self._peak(index, start, samples, chunk_sizes) for index in range(len(self.devices))
        )
        retried = [peak.device for peak in usage.devices if peak.num_alloc_retries]
        usage.valid = not retried
        usage.reason = None
        if retried:
            usage.reason = (
                f"on {', '.join(retried)} the allocator had to empty its cache and try again, so "
                "the peaks understate what the block would take"
            )

    def _peak(
        self,
        index: int,
        start: _Start,
        samples: Samples,
        chunk_sizes: Mapping[torch.device, int] | None,
    ) -> DevicePeak:
        device = self.devices[index]
        module = torch.get_device_module(device)
        board = self._boards.get(device)
        earlier, retries = start.num_alloc_retries[index], _num_alloc_retries(device)
        chunk_size = None if chunk_sizes is None else chunk_sizes[device]
        return DevicePeak(
            device=str(device),
            capacity_bytes=module.get_device_properties(device).total_memory,
            start_allocated_bytes=start.allocated_bytes[index],
            peak_allocated_bytes=module.max_memory_allocated(device),
            peak_reserved_bytes=module.max_memory_reserved(device),
            peak_used_bytes=None if board is None else samples.peak_used_bytes.get(board.label),
            num_alloc_retries=None if retries is None else retries - (earlier or 0),
            chunk_size=chunk_size,
            replica_bytes=replica_bytes(self._model, device, chunk_size),
        )

    def _last_split(self) -> tuple[int, ...] | None:
        return None if self._model is None else self._model.last_chunk_sizes


@dataclass(frozen=True, slots=True)
class _Start:
    """How things were when a block began; an entry a device."""

    allocated_bytes: list[int]
    num_alloc_retries: list[int | None]
    split: tuple[int, ...] | None
    time_s: float


def _has_nvml(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def _num_alloc_retries(device: torch.device) -> int | None:
    retries: int | None = (
        torch.get_device_module(device).memory_stats(device).get("num_alloc_retries")
    )
    return retries


def _describe(cuda_index: int, properties: Any) -> CudaDevice:
    uuid = getattr(properties, "uuid", None)
    pci_bus_id = None
    if hasattr(properties, "pci_bus_id"):
        pci_bus_id = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    return CudaDevice(cuda_index, None if uuid is None else str(uuid), pci_bus_id)
