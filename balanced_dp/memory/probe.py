"""The probe, which reads the memory of devices from torch's allocator and from NVML."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from ..devices import Device, default_device_type, is_cuda, is_emulated, resolve_devices
from ..errors import ArgumentError, ArgumentTypeError, ProbeError
from ..torch_versions import has_cuda_context
from .breakdown import chunk_size_of, replica_bytes
from .nvml import Board, Nvml, NvmlError, connection, find_board
from .nvml_sampler import Sampler
from .peaks import Peaks
from .step_memory import DevicePeak, StepMemory

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
        self.devices = list(dict.fromkeys(resolve_devices(devices, default_device_type())))
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
            try:
                self._open_nvml(uses_all)
            except NvmlError as error:
                self.nvml_error = str(error)
        if not self.devices and not self._unseen:
            reason = self.nvml_error or "NVML lists no board"
            raise ProbeError(f"torch sees no accelerator, and {reason}")

    def _open_nvml(self, uses_all: bool) -> None:
        nvml = connection(os.getpid())
        boards = nvml.boards()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        for device in filter(_has_nvml, self.devices):
            properties = torch.cuda.get_device_properties(device)
            board = find_board(device.index, properties, boards, visible)
            self._boards[device] = board
            with suppress(NvmlError):
                self._used_before[device] = nvml.memory(board).used_bytes
        if uses_all:
            self._unseen = [board for board in boards if board not in self._boards.values()]
        self._nvml = nvml

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
            num_alloc_retries=_retries(device),
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
        memory = replace(memory, **asdict(info))
        listed = self._nvml.processes(board)
        others = dict(listed or {})
        ours = others.pop(os.getpid(), None)
        has_context = device is not None and _has_context(device)
        if listed is not None and os.getpid() not in listed and not has_context:
            ours = 0
        reserved_bytes = memory.reserved_bytes or 0
        # In a container our PID may be that of another process, and some drivers list ours with 0.
        if ours is not None and ours >= reserved_bytes:
            sizes = [size for size in others.values() if size is not None]
            return replace(
                memory,
                process_bytes=ours,
                process_bytes_source="process",
                other_process_bytes=sum(sizes) if len(sizes) == len(others) else None,
            )
        if device in self._used_before:
            change = info.used_bytes - self._used_before[device]
            if change >= reserved_bytes > 0:
                return replace(memory, process_bytes=change, process_bytes_source="device-delta")
        return memory

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
        block = _Block(self)
        try:
            yield usage
            block.finish(usage)
        except BaseException as error:
            with suppress(Exception):  # the exception of the block is the one to raise
                block.finish(usage)
            usage.valid = False
            usage.reason = f"the block ended with {type(error).__name__}: {error}"
            raise
        finally:
            block.close()


class _Block:
    """A measurement, which begins with the constructor: it synchronizes the devices first."""

    def __init__(self, probe: MemoryProbe) -> None:
        devices = probe.devices
        self.probe = probe
        self.splits: set[tuple[int, ...] | None] = set()
        _synchronize(devices)
        self.peaks = Peaks(devices)
        self.start = {
            device: (torch.get_device_module(device).memory_allocated(device), _retries(device))
            for device in devices
        }
        model = probe._model
        self.hook = None if model is None else model.register_forward_hook(self.record_split)
        self.sampler: Sampler | None = None
        if probe._nvml is not None and probe._boards:
            self.sampler = Sampler(probe._nvml, list(probe._boards.values()))
        self.start_s = time.perf_counter()

    def record_split(self, model: Any, inputs: Any, output: Any) -> None:
        """Record the chunk sizes of a batch; a forward hook."""
        self.splits.add(model.chunk_sizes)

    def close(self) -> None:
        """End the sampler, and record no more batches."""
        if self.sampler is not None:
            self.sampler.stop()
        if self.hook is not None:
            self.hook.remove()

    def finish(self, usage: StepMemory) -> None:
        """Synchronize the devices and complete ``usage``."""
        _synchronize(self.probe.devices)
        usage.elapsed_s = time.perf_counter() - self.start_s
        self.close()
        usage.sampling_error = self.probe.nvml_error
        if self.sampler is not None:
            usage.num_samples, usage.sampling_error = self.sampler.num_samples, self.sampler.error
        usage.devices = tuple(map(self._peak, self.probe.devices))
        retried = ", ".join(peak.device for peak in usage.devices if peak.num_alloc_retries)
        usage.valid = not retried
        usage.reason = None
        if retried:
            usage.reason = (
                f"on {retried} the allocator had to empty its cache and try again, so the peaks "
                "are lower than what the block would take"
            )

    def _peak(self, device: torch.device) -> DevicePeak:
        module = torch.get_device_module(device)
        board, sampler = self.probe._boards.get(device), self.sampler
        start_allocated_bytes, earlier = self.start[device]
        retries = _retries(device)
        # Batches with different splits have no common chunk sizes.
        chunk_size = chunk_size_of(self.probe._model, device) if len(self.splits) == 1 else None
        allocated_bytes, reserved_bytes = self.peaks.of(device)
        return DevicePeak(
            device=str(device),
            capacity_bytes=module.get_device_properties(device).total_memory,
            start_allocated_bytes=start_allocated_bytes,
            peak_allocated_bytes=allocated_bytes,
            peak_reserved_bytes=reserved_bytes,
            peak_used_bytes=sampler.peak_used_bytes(board) if sampler and board else None,
            num_alloc_retries=None if retries is None else retries - (earlier or 0),
            chunk_size=chunk_size,
            replica_bytes=replica_bytes(self.probe._model, device, chunk_size),
        )


def _synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if _has_context(device):  # else synchronizing would create one, which takes memory
            torch.get_device_module(device).synchronize(device)


def _has_context(device: torch.device) -> bool:
    """Return whether this process may have a context on the device."""
    return not is_cuda(device) or has_cuda_context(device)


def _has_nvml(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and not is_emulated(device)


def _retries(device: torch.device) -> int | None:
    stats: dict[str, int] = torch.get_device_module(device).memory_stats(device)
    return stats.get("num_alloc_retries")
