"""The probe, which reads the memory of devices from torch's allocator and from NVML."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import torch

from ..devices import Device, default_device_type, is_emulated, resolve_devices
from ..errors import ArgumentError, ArgumentTypeError, ProbeError
from ..torch_versions import has_cuda_context
from .breakdown import chunk_size_of, replica_bytes
from .device_map import find_board
from .device_memory import DeviceMemory, ProcessBytesSource
from .nvml import Board, MemoryInfo, Nvml, NvmlError
from .nvml_sampler import Sampler
from .peaks import Peaks
from .step_memory import DevicePeak, StepMemory


class MemoryProbe:
    """A probe of the memory of devices, as torch's allocator and NVML report it.

    NVML (package ``nvidia-ml-py``) is loaded when the first probe needs it. Emulated devices, and
    accelerators without NVML, are measured by their device module alone.

    Args:
        devices: devices as ints, strings or ``torch.device``. None means those of ``model``, or if
            there is none, all devices: the emulated ones inside ``emulate_devices``, else torch's
            accelerators and the boards that NVML lists and torch does not see.
        model: the ``BalancedDataParallel`` to measure. Then measured steps know the chunk sizes,
            and ``StepMemory.check_split`` gives numbers.

    Attributes:
        devices: the devices, as a list of ``torch.device`` without duplicates.
        nvml_error: why NVML is not used, None if it is, or if no device needs it.

    Raises:
        ArgumentError, ArgumentTypeError: ``devices`` or ``model`` is invalid.
        ProbeError: there is no device, a device does not count its memory, or its NVML device
            cannot be determined.

    Examples:
        >>> with emulate_devices(2, memory="1GiB") as devices:
        ...     x = torch.ones(1000, device=devices[1])
        ...     [memory.allocated_bytes for memory in MemoryProbe().snapshot()]
        ...     del x
        [0, 4096]
    """

    def __init__(self, devices: Sequence[Device] | None = None, *, model: Any = None) -> None:
        if isinstance(devices, torch.nn.Module):
            raise ArgumentTypeError(
                "devices must be a list of devices, got a module; pass it as model=..."
            )
        uses_all = devices is None and model is None
        if model is not None:
            if devices is not None:
                raise ArgumentError("pass devices or model, not both: a model has devices")
            if not hasattr(model, "chunk_sizes"):
                raise ArgumentTypeError(
                    f"model must be a BalancedDataParallel, got {type(model).__name__}"
                )
            devices = model.devices
            if not devices:
                raise ProbeError(
                    "the model has no devices to measure; pass device_ids, or use emulate_devices"
                )
        device_type = default_device_type()
        self.devices = list(dict.fromkeys(resolve_devices(devices, device_type)))
        self.nvml_error: str | None = None
        self._model = model
        self._nvml: Nvml | None = None
        self._boards: dict[torch.device, Board] = {}
        self._used_before: dict[torch.device, int] = {}
        self._unseen: list[Board] = []
        for device in self.devices:
            if not hasattr(torch.get_device_module(device), "memory_allocated"):
                raise ProbeError(
                    f"{device} does not count its memory; to measure on a machine without "
                    "accelerators, use emulate_devices"
                )
        if any(map(_has_nvml, self.devices)) or (uses_all and not self.devices):
            self._open_nvml(uses_all)
        if not self.devices and not self._unseen:
            reason = self.nvml_error or "NVML lists no board"
            raise ProbeError(f"torch sees no accelerator, and {reason}")

    def _open_nvml(self, uses_all: bool) -> None:
        try:
            self._nvml = _nvml(os.getpid())
            boards = self._nvml.boards()
        except NvmlError as error:
            self.nvml_error = str(error)
            return
        for device in filter(_has_nvml, self.devices):
            module = torch.get_device_module(device)
            known = module.get_device_properties(device)
            pci_bus_id = (known.pci_domain_id, known.pci_bus_id, known.pci_device_id)
            board = find_board(device.index, str(known.uuid), pci_bus_id, boards, os.environ)
            self._boards[device] = board
            with suppress(NvmlError):
                self._used_before[device] = self._nvml.memory(board).used_bytes
        if uses_all:
            self._unseen = [board for board in boards if board not in self._boards.values()]

    def snapshot(self) -> tuple[DeviceMemory, ...]:
        """Return the memory of each device now, without synchronizing the devices."""
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
        if _has_nvml(device):  # mem_get_info would create a CUDA context, which takes memory
            return memory
        try:
            free_bytes, total_bytes = module.mem_get_info(device)
        except RuntimeError as error:  # not every accelerator's driver supports it
            return replace(memory, error=str(error))
        return replace(memory, free_bytes=free_bytes, used_bytes=total_bytes - free_bytes)

    def _add_nvml(
        self, memory: DeviceMemory, board: Board, device: torch.device | None
    ) -> DeviceMemory:
        assert self._nvml is not None
        memory = replace(
            memory,
            nvml_index=board.nvml_index,
            mig_index=board.mig_index,
            uuid=board.uuid or memory.uuid,
            name=board.name or memory.name,
        )
        try:
            info = self._nvml.memory(board)
        except NvmlError as error:
            return replace(memory, error=str(error))
        processes = self._nvml.processes(board)
        ours, source = self._process_bytes(processes, info, device)
        others = None
        if processes is not None and source == "process":
            sizes = [size for pid, size in processes.items() if pid != os.getpid()]
            others = None if None in sizes else sum(size or 0 for size in sizes)
        return replace(
            memory,
            **asdict(info),
            process_bytes=ours,
            process_bytes_source=source,
            other_process_bytes=others,
        )

    def _process_bytes(
        self, processes: dict[int, int | None] | None, info: MemoryInfo, device: torch.device | None
    ) -> tuple[int | None, ProcessBytesSource]:
        if processes is not None and os.getpid() not in processes and not _has_context(device):
            return 0, "process"  # not listed, and this process does not use the device
        reserved_bytes = 0 if device is None else torch.cuda.memory_reserved(device)
        listed = (processes or {}).get(os.getpid())
        # In a container our PID may be that of another process, and some drivers list ours with 0.
        if listed is not None and listed >= reserved_bytes:
            return listed, "process"
        if device in self._used_before and reserved_bytes:
            change = info.used_bytes - self._used_before[device]
            if change >= reserved_bytes:
                return change, "device-delta"
        return None, "unknown"

    @contextmanager
    def measure(self) -> Iterator[StepMemory]:
        """Measure the memory that a ``with`` block takes on each device.

        The devices are synchronized at both ends of the block, and their peaks are reset. If NVML
        is available, a thread samples it every 10 ms, or less often while other threads hold
        Python's lock. The thread ends with the block. If the block raises, the results are there,
        too, but not ``valid``.

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
            raise ProbeError(
                "torch sees no device to measure; install a build of torch for this accelerator, "
                "or use emulate_devices"
            )
        usage = StepMemory()
        with ExitStack() as stack:
            block = _Block(self)
            if block.sampler is not None:
                stack.callback(block.sampler.stop)
            if self._model is not None:
                stack.enter_context(self._model.register_forward_hook(block.record_split))
            try:
                yield usage
            except BaseException as error:
                with suppress(Exception):  # the exception of the block is the one to raise
                    block.finish(usage)
                usage.valid = False
                usage.reason = f"the block ended with {type(error).__name__}: {error}"
                raise
            block.finish(usage)


class _Block:
    """A measurement, which begins with the constructor: it synchronizes the devices first."""

    def __init__(self, probe: MemoryProbe) -> None:
        self.probe = probe
        self.splits: set[tuple[int, ...] | None] = set()
        devices = probe.devices
        _synchronize(devices)
        self.peaks = Peaks(devices)
        self.allocated_bytes = {d: torch.get_device_module(d).memory_allocated(d) for d in devices}
        self.num_alloc_retries = {d: _num_alloc_retries(d) for d in devices}
        self.sampler: Sampler | None = None
        if probe._nvml is not None and probe._boards:
            self.sampler = Sampler(probe._nvml, list(probe._boards.values()))
        self.time_s = time.perf_counter()

    def record_split(self, model: Any, inputs: Any, output: Any) -> None:
        """Record the chunk sizes of a batch; a forward hook."""
        self.splits.add(model.chunk_sizes)

    def finish(self, usage: StepMemory) -> None:
        """Synchronize the devices and complete ``usage``."""
        _synchronize(self.probe.devices)
        usage.elapsed_s = time.perf_counter() - self.time_s
        usage.sampling_error = self.probe.nvml_error
        if self.sampler is not None:
            self.sampler.stop()
            usage.num_samples, usage.sampling_error = self.sampler.num_samples, self.sampler.error
        usage.devices = tuple(map(self._peak, self.probe.devices))
        retried = [peak.device for peak in usage.devices if (peak.num_alloc_retries or 0) > 0]
        usage.valid = not retried
        usage.reason = None
        if retried:
            usage.reason = (
                f"on {', '.join(retried)} the allocator had to empty its cache and try again, so "
                "the peaks are lower than what the block would take"
            )

    def _peak(self, device: torch.device) -> DevicePeak:
        module = torch.get_device_module(device)
        board, sampler = self.probe._boards.get(device), self.sampler
        earlier, retries = self.num_alloc_retries[device], _num_alloc_retries(device)
        # Batches with different splits have no common chunk sizes.
        chunk_size = chunk_size_of(self.probe._model, device) if len(self.splits) == 1 else None
        allocated_bytes, reserved_bytes = self.peaks.of(device)
        return DevicePeak(
            device=str(device),
            capacity_bytes=module.get_device_properties(device).total_memory,
            start_allocated_bytes=self.allocated_bytes[device],
            peak_allocated_bytes=allocated_bytes,
            peak_reserved_bytes=reserved_bytes,
            peak_used_bytes=sampler.peak_used_bytes(board) if sampler and board else None,
            num_alloc_retries=None if retries is None else retries - (earlier or 0),
            chunk_size=chunk_size,
            replica_bytes=replica_bytes(self.probe._model, device, chunk_size),
        )


@functools.cache
def _nvml(pid: int) -> Nvml:
    """Return the connection of this process, which a forked process cannot use."""
    return Nvml()


def _synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if _has_context(device):  # else synchronizing would create one, which takes memory
            torch.get_device_module(device).synchronize(device)


def _has_context(device: torch.device | None) -> bool:
    """Return whether this process may have a context on the device."""
    if device is not None and device.type == "cuda" and not is_emulated(device):
        return has_cuda_context(device)
    return device is not None


def _has_nvml(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and not is_emulated(device)


def _num_alloc_retries(device: torch.device) -> int | None:
    stats: dict[str, int] = torch.get_device_module(device).memory_stats(device)
    return stats.get("num_alloc_retries")
