"""What ``torch.cuda`` has and ``device_module`` lacks, for emulated devices that are named "cuda".

Operations on emulated devices are synchronous and in order, so streams and events do nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import EmulationError
from ..units import format_bytes
from . import device_module
from .device_module import Device
from .machine import current_machine


def _always(answer: Any) -> Callable[..., Any]:
    """Return a function, or method, that returns ``answer`` for any arguments."""
    return lambda *args, **kwargs: answer


class Stream(device_module.device):
    """The only stream of an emulated device; as a context manager, it makes the device current."""

    def __init__(self, device: Device = None, priority: int = 0, **kwargs: Any) -> None:
        super().__init__(device)
        self.device = current_machine().devices[self.index]
        self.device_index, self.priority = self.index, priority
        self.cuda_stream = self.stream_id = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.device == other.device

    def __hash__(self) -> int:
        return hash(self.device)

    wait_stream = wait_event = synchronize = _always(None)
    query = _always(True)
    is_capturing = _always(False)

    def record_event(self, event: Event | None = None) -> Event:
        """Record the event, a new one by default, and return it."""
        event = event or Event()
        event.record(self)
        return event


class Event:
    """An event, which knows when it was recorded."""

    def __init__(self, enable_timing: bool = False, **kwargs: Any) -> None:
        self._time_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Note the time."""
        self._time_s = time.perf_counter()

    wait = synchronize = _always(None)
    query = _always(True)

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds of wall time until ``end_event``."""
        if self._time_s is None or end_event._time_s is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._time_s - self._time_s) * 1e3


class StreamContext(device_module.device):
    """Context manager of ``torch.cuda.stream``: it makes the stream's device the current one."""

    def __init__(self, stream: Stream | None) -> None:
        super().__init__(None if stream is None else stream.device)


class device_of(device_module.device):  # the name of torch.cuda.device_of
    """Context manager that makes the device of a tensor the current one, if it is emulated."""

    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(obj.device if obj.is_cuda else None)


stream = StreamContext
current_stream = default_stream = Stream


def set_stream(stream: Stream) -> None:
    """Make the stream's device the current one."""
    device_module.set_device(stream.device)


init = ipc_collect = _lazy_init = set_sync_debug_mode = _always(None)
is_initialized = is_bf16_supported = is_tf32_supported = _always(True)
is_current_stream_capturing = _always(False)  # there are no CUDA graphs
get_sync_debug_mode = _always(0)  # the mode without warnings


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """Return the compute capability that the device claims."""
    properties = device_module.get_device_properties(device)
    return properties.major, properties.minor


def get_arch_list() -> list[str]:
    """Return the architecture of emulated devices."""
    return ["sm_{}{}".format(*get_device_capability(0))]


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """Return whether the devices differ."""
    machine = current_machine()
    return machine.index_of(device) != machine.index_of(peer_device)


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """Return the device's memory by use, now and at the peak."""
    breakdown = device_module.memory_breakdown(device)
    rows = [
        f"{use:<16} {format_bytes(breakdown.now[use]):>12} {format_bytes(peak):>12}"
        for use, peak in breakdown.peak.items()
    ]
    head = f"{device_module.get_device_name(device):<16} {'now':>12} {'peak':>12}"
    return "\n".join([head, *rows])


# Scripts have a peak of their own to reset, so that they and our measurements do not meet.


def max_memory_allocated(device: Device = None) -> int:
    """Return the maximum of ``memory_allocated`` since the script last reset it."""
    return device_module._ledger(device).script_peak_bytes


def reset_peak_memory_stats(device: Device = None) -> None:
    """Reset the script's peak to the memory allocated now."""
    device_module._ledger(device).reset_script_peak()


def memory_stats(device: Device = None) -> dict[str, int]:
    """Return allocator statistics, with the script's peaks."""
    peak = max_memory_allocated(device)
    stats = device_module.memory_stats(device)
    return {name: peak if name.endswith(".peak") else value for name, value in stats.items()}


memory_cached = device_module.memory_reserved
max_memory_reserved = max_memory_cached = max_memory_allocated
reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Reset the number of bytes ever allocated."""
    device_module._ledger(device).total_bytes = 0


def seed() -> None:
    """Seed the current device's generator at random."""
    device_module._generator(None).seed()


def seed_all() -> None:
    """Seed all generators alike, at random."""
    current_machine().manual_seed_all(torch.Generator().seed())


def initial_seed() -> int:
    """Return the seed of the current device's generator."""
    return device_module._generator(None).initial_seed()


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the state of each device's generator."""
    return [generator.get_state() for generator in current_machine().generators]


def set_rng_state_all(new_states: Sequence[torch.Tensor]) -> None:
    """Set the state of each device's generator."""
    for index, state in enumerate(new_states):
        device_module.set_rng_state(state, index)


# Copies between devices, as torch.nn.parallel.comm asks torch._C for them.


def broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    """Return the tensor on each device."""
    return [tensor.to(_device(index)) for index in devices]


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    """Return the tensors on each device."""
    first = _device(devices[0])
    if any(tensor.device != first for tensor in tensors):
        raise RuntimeError(f"All tensors must be on devices[0]: {first}")
    return [[tensor.to(_device(index)) for tensor in tensors] for index in devices]


def broadcast_out(tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy the tensor into each of ``out``, and return these."""
    return [target.copy_(tensor) for target in out]


def scatter(
    tensor: torch.Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: object = None,
) -> list[torch.Tensor]:
    """Return a chunk of the tensor on each device."""
    chunks = (
        tensor.split(list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(devices), dim)
    )
    return [chunk.to(_device(index)) for chunk, index in zip(chunks, devices, strict=False)]


def scatter_out(
    tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int, streams: object = None
) -> list[torch.Tensor]:
    """Copy chunks of the tensor into ``out``, and return these."""
    chunks = tensor.split([target.size(dim) for target in out], dim)
    return [target.copy_(chunk) for target, chunk in zip(out, chunks, strict=True)]


def gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None) -> torch.Tensor:
    """Return the tensors joined on a device; -1 is the CPU, None the current device."""
    target = torch.device("cpu") if destination == -1 else _device(destination)
    return torch.cat([tensor.to(target) for tensor in tensors], dim)


def gather_out(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    """Copy the tensors, joined, into ``out``, and return it."""
    parts = out.split([tensor.size(dim) for tensor in tensors], dim)
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor)
    return out


def _device(index: int | None) -> torch.device:
    machine = current_machine()
    return machine.devices[machine.index_of(index)]


COMMUNICATION = {
    "_broadcast": broadcast,
    "_broadcast_coalesced": broadcast_coalesced,
    "_broadcast_out": broadcast_out,
    "_scatter": scatter,
    "_scatter_out": scatter_out,
    "_gather": gather,
    "_gather_out": gather_out,
}
"""By the name in ``torch._C``, which only builds with CUDA have."""


def refusal(name: str) -> type:
    """Return a class that raises an EmulationError when it is called, as a function or a class."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise EmulationError(f"emulated devices do not support {name}")

    return type(name.rpartition(".")[2], (), {"__new__": refuse})
