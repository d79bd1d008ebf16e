"""The probe, which reads the memory of devices from torch's allocator and from NVML."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from ..devices import Device, default_device_type, is_cuda, is_emulated, resolve_devices
from ..errors import ArgumentError, ArgumentTypeError, ProbeError
from ..torch_versions import has_cuda_context
from .nvml import Board, Nvml, NvmlError, connection, find_board
from .nvml_sampler import Sampler
from .peaks import Peaks
from .records import DeviceMemory, StepMemory


class MemoryProbe:
    """A probe of the memory of devices, as torch's allocator and NVML report it.

    NVML (package ``nvidia-ml-py``) is loaded when the first probe needs it. Emulated devices, and
    accelerators without NVML, are measured by their device module alone.

    Args:
        devices: devices as ints, strings or ``torch.device``. None means those of ``model``, or if
            there is none, all devices: the emulated ones inside ``emulate_devices``, else torch's
            accelerators and the boards that NVML lists and torch does not see.
        model: the ``BalancedDataParallel`` to measure. Then measured steps know the chunk sizes.

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
                self._used_before[device] = nvml.used_bytes(board)
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
            memory = replace(memory, **self._nvml.memory(board))
        except NvmlError as error:
            return replace(memory, error=str(error))
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
            change = (memory.used_bytes or 0) - self._used_before[device]
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
        usage, splits = StepMemory(), set[Any]()
        sampler: Sampler | None = None
        _synchronize(self.devices)
        peaks = Peaks(self.devices)
        before = {
            device: (torch.get_device_module(device).memory_allocated(device), _retries(device))
            for device in self.devices
        }
        start_s = time.perf_counter()

        def finish() -> None:
            _synchronize(self.devices)
            usage.elapsed_s = time.perf_counter() - start_s
            stack.close()
            usage.sampling_error = self.nvml_error
            if sampler is not None:
                usage.num_samples, usage.sampling_error = sampler.num_samples, sampler.error
            sizes = splits.pop() if len(splits) == 1 else None  # of batches that are split alike
            usage.devices = tuple(
                replace(
                    self._peak(device, peaks, sampler, sizes),
                    start_allocated_bytes=allocated_bytes,
                    num_alloc_retries=None if earlier is None else _retries(device) - earlier,
                )
                for device, (allocated_bytes, earlier) in before.items()
            )
            retried = ", ".join(str(at.device) for at in usage.devices if at.num_alloc_retries)
            usage.valid, usage.reason = not retried, None
            if retried:
                usage.reason = (
                    f"on {retried} the allocator had to empty its cache and try again, so the "
                    "peaks are lower than what the block would take"
                )

        with ExitStack() as stack:
            if self._model is not None:
                hook = self._model.register_forward_hook(lambda m, *_: splits.add(m.chunk_sizes))
                stack.callback(hook.remove)
            if self._boards and self._nvml is not None:
                sampler = Sampler(self._nvml, list(self._boards.values()))
                stack.callback(sampler.stop)
            try:
                yield usage
            except BaseException as error:
                with suppress(Exception):  # the exception of the block is the one to raise
                    finish()
                usage.valid = False
                usage.reason = f"the block ended with {type(error).__name__}: {error}"
                raise
            finish()

    def _peak(
        self,
        device: torch.device,
        peaks: Peaks,
        sampler: Sampler | None,
        chunk_sizes: Sequence[int] | None,
    ) -> DeviceMemory:
        """Return the memory of a device at the end of a block, with the peaks of the block."""
        board, chunk_size = self._boards.get(device), None
        allocated_bytes, reserved_bytes = peaks.of(device)
        if chunk_sizes is not None:
            of_replicas = zip(self._model.devices, chunk_sizes, strict=True)
            chunk_size = sum(size for used, size in of_replicas if used == device)
        return replace(
            self._snapshot_device(device),
            peak_allocated_bytes=allocated_bytes,
            peak_reserved_bytes=reserved_bytes,
            peak_used_bytes=sampler.peak_used_bytes(board) if sampler and board else None,
            chunk_size=chunk_size,
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


def _retries(device: torch.device) -> Any:
    """Return how often the allocator emptied its cache and tried again, None if it says nothing."""
    stats: dict[str, int] = torch.get_device_module(device).memory_stats(device)
    return stats.get("num_alloc_retries")
