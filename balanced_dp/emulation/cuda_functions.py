"""Stand-ins for the functions of ``torch._C`` that ``torch.cuda`` and ``torch.accelerator`` call.

Operations on emulated devices run synchronously, in the order of the calls, so streams and events
never wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import device_module
from .device_module import Device, ledger_of
from .machine import current_machine


def _always(answer: Any) -> Callable[..., Any]:
    """Return a function, or method, that returns ``answer`` for any arguments."""
    return lambda *args, **kwargs: answer


class Stream(device_module.device):
    """The only stream of an emulated device; as a context manager, it makes the device current."""

    def __init__(self, device: Device = None, priority: int = 0, **kwargs: Any) -> None:
        super().__init__(kwargs.get("device_index", device))
        self.device = current_machine().devices[self.index]
        self.device_index, self.priority = self.index, priority
        self.cuda_stream = self.stream_id = self.device_type = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.device == other.device

    def __hash__(self) -> int:
        return hash(self.device)

    wait_stream = wait_event = synchronize = _always(None)
    query = _always(True)
    is_capturing = _always(False)

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new event if ``event`` is None, and return the recorded event."""
        event = event or Event()
        event.record(self)
        return event


class Event:
    """An event with the time at which it was recorded."""

    def __init__(self, enable_timing: bool = False, **kwargs: Any) -> None:
        self._time_s = math.nan

    def record(self, stream: Stream | None = None) -> None:
        """Record the present time as the time of this event."""
        self._time_s = time.perf_counter()

    wait = synchronize = _always(None)
    query = _always(True)

    def elapsed_time(self, end_event: Event) -> float:
        """Return the wall time from this event to ``end_event`` in milliseconds."""
        return (end_event._time_s - self._time_s) * 1e3


# Optimizers import dynamo. In torch 2.5, dynamo asserts that the classes of streams and events are
# subclasses of _StreamBase and _EventBase. Mypy reads the types of a newer torch, which lacks both.
if torch.__version__ < "2.6":
    torch._streambase._StreamBase.register(Stream)  # type: ignore[attr-defined]
    torch._streambase._EventBase.register(Event)  # type: ignore[attr-defined]


def exchange_device(index: int) -> int:
    """Set this thread's current device to ``index``, and return the index of the previous device.

    If ``index`` is negative, the current device does not change.
    """
    before = device_module.current_device()
    if index >= 0:
        device_module.set_device(index)
    return before


# For the memory statistics that scripts read and reset, the ledger keeps a separate peak, so that a
# reset by a script does not disturb the measurements of this library.


def _memory_stats(index: int) -> dict[str, Any]:
    ledger = ledger_of(index)
    counted = ledger.statistics(ledger.script_peak_bytes)
    none = dict.fromkeys(counted, 0)
    pools = dict.fromkeys(("all", "large_pool", "small_pool"), none)
    return {
        **dict.fromkeys(("num_alloc_retries", "num_device_alloc"), 0),
        "num_ooms": ledger.num_ooms,
        **dict.fromkeys(("oversize_allocations", "oversize_segments"), none),
        **dict.fromkeys(("inactive_split_bytes", "inactive_split"), pools),
        **dict.fromkeys(("allocation", "segment", "active"), pools),
        **{f"{use}_bytes": {**pools, "all": counted} for use in _USES},
    }


_USES = ("allocated", "reserved", "active", "requested")


# Copies between devices, for torch.nn.parallel.comm. as_cuda.py patches tensor.to, so that it
# accepts an int as the device.


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], indices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    if any(tensor.get_device() != indices[0] for tensor in tensors):
        raise RuntimeError(f"All tensors must be on devices[0]: {indices[0]}")
    return [[tensor.to(index) for tensor in tensors] for index in indices]


def _scatter(
    tensor: torch.Tensor, indices: Sequence[int], sizes: Any, dim: int, streams: object
) -> list[torch.Tensor]:
    chunks = tensor.split(list(sizes), dim) if sizes else tensor.chunk(len(indices), dim)
    return [chunk.to(index) for chunk, index in zip(chunks, indices, strict=False)]


def _gather(tensors: Sequence[torch.Tensor], dim: int, index: int | None) -> torch.Tensor:
    sizes, shape = [tensor.size(dim) for tensor in tensors], list(tensors[0].shape)
    shape[dim] = sum(sizes)
    target = "cpu" if index == -1 else current_machine().index_of(index)
    gathered = tensors[0].new_empty(shape, device=target)
    for part, tensor in zip(gathered.split(sizes, dim), tensors, strict=True):
        part.copy_(tensor)
    return gathered


_BY_NAMES: dict[tuple[str, ...], Callable[..., Any]] = {
    ("_cuda_getDeviceCount",): device_module.device_count,
    ("_cuda_getDevice", "_accelerator_getDeviceIndex"): device_module.current_device,
    ("_cuda_setDevice", "_accelerator_setDeviceIndex"): device_module.set_device,
    ("_accelerator_exchangeDevice", "_accelerator_maybeExchangeDevice"): exchange_device,
    ("_cuda_synchronize", "_accelerator_synchronizeDevice"): device_module.synchronize,
    ("_cuda_emptyCache", "_accelerator_emptyCache", "_cuda_ipc_collect"): _always(None),
    ("_cuda_setMemoryFraction", "_cuda_set_sync_debug_mode"): _always(None),
    ("_cuda_memoryStats", "_accelerator_getDeviceStats"): _memory_stats,
    ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"): (
        lambda index: ledger_of(index).reset_script_peak()
    ),
    ("_accelerator_getMemoryInfo",): device_module.mem_get_info,
    ("_accelerator_isAllocatorInitialized",): _always(True),
    ("_accelerator_getAccelerator",): lambda: torch.device("cuda"),
    ("_cuda_isCurrentStreamCapturing",): _always(False),
    ("_cuda_getCurrentStream", "_cuda_getDefaultStream"): lambda index: (0, index, 0),
    ("_cuda_setStream",): lambda **stream: device_module.set_device(stream["device_index"]),
    ("_cuda_getCurrentRawStream",): _always(0),  # imported by torch._dynamo
    ("_accelerator_getStream",): Stream,
    ("_accelerator_setStream",): lambda stream: device_module.set_device(stream.device),
    ("_broadcast",): lambda tensor, indices: [tensor.to(index) for index in indices],
    ("_broadcast_coalesced",): _broadcast_coalesced,
    ("_scatter",): _scatter,
    ("_gather",): _gather,
}

ANSWERS = {name: answer for names, answer in _BY_NAMES.items() for name in names}
"""For each name of a replaced function of ``torch._C``, the function that replaces it."""
