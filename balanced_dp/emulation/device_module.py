"""The device module of emulated devices, ``torch.get_device_module("lazy")``.

It provides functions that ``torch.cuda`` has, and ``memory_breakdown``, for the devices of the open
``emulate_devices`` context. As in ``torch.cuda``, a device is an int, a string, a ``torch.device``,
or None for the current device.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .ledger import DeviceLedger, MemoryBreakdown
from .machine import current_machine, has_machine

Device = torch.device | str | int | None

_initialized = True
"""A flag that ``torch.utils.checkpoint`` reads.

Because it is true, checkpointing saves the states of the devices' random number generators.
"""


class device:  # in lower case, as torch.cuda.device is
    """Context manager that changes the current device of this thread."""

    def __init__(self, device: Device) -> None:
        self.index = current_machine().index_of(device)

    def __enter__(self) -> Any:
        self.previous = current_device()
        set_device(self.index)
        return self

    def __exit__(self, *exc: object) -> None:
        set_device(self.previous)


is_available = has_machine


def device_count() -> int:
    """Return the number of emulated devices; it is 0 outside of ``emulate_devices``."""
    return len(current_machine().devices) if has_machine() else 0


def current_device() -> int:
    """Return the index of this thread's current device."""
    return current_machine().thread.current_index


def set_device(device: Device) -> None:
    """Make ``device`` the current device of this thread."""
    current_machine().thread.current_index = _index(device)


def memory_allocated(device: Device = None) -> int:
    """Return the bytes currently occupied by tensors on the device."""
    return ledger_of(device).allocated_bytes


def max_memory_allocated(device: Device = None) -> int:
    """Return the maximum of ``memory_allocated`` since the last ``reset_peak_memory_stats``."""
    return ledger_of(device).peak_bytes


# The emulated allocator has no cache.
memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


def reset_peak_memory_stats(device: Device = None) -> None:
    """Reset ``max_memory_allocated`` of the device to the bytes allocated now."""
    ledger_of(device).reset_peak()


def memory_stats(device: Device = None) -> dict[str, int]:
    """Return some of the statistics of ``torch.cuda.memory_stats``, with the same keys."""
    ledger = ledger_of(device)
    counted = ledger.statistics(ledger.peak_bytes)
    stats = {"num_alloc_retries": 0, "num_ooms": ledger.num_ooms}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats.update({f"{kind}.all.{name}": value for name, value in counted.items()})
    return stats


def memory_breakdown(device: Device = None) -> MemoryBreakdown:
    """Return the bytes on the device for each use of memory, such as "activation".

    The result has the bytes allocated now, and those allocated when the peak was reached. For GPUs,
    ``torch.cuda`` has no such function.
    """
    return ledger_of(device).breakdown()


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the device's free and total bytes."""
    ledger = ledger_of(device)
    return max(0, ledger.capacity_bytes - ledger.allocated_bytes), ledger.capacity_bytes


def get_device_name(device: Device = None) -> str:
    """Return the device's name."""
    return f"Emulated device {_index(device)}"


def get_device_properties(device: Device = None) -> Any:
    """Return an object with the name of the device, its capacity in bytes and other properties.

    The compute capability and the number of multiprocessors are those of an A100, so that scripts
    choose features that recent GPUs support, such as bfloat16.
    """
    return SimpleNamespace(
        name=get_device_name(device),
        total_memory=ledger_of(device).capacity_bytes,
        major=8,
        minor=0,
        multi_processor_count=108,
    )


def synchronize(device: Device = None) -> None:
    """Only check that the device exists: operations on it are synchronous, so none is pending."""
    _index(device)


def empty_cache() -> None:
    """Do nothing: the emulated allocator has no cache."""


def get_rng_state(device: Device = None) -> torch.Tensor:
    """Return the state of the random number generator of the device."""
    return current_machine().generators[_index(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    """Set the state of the random number generator of the device."""
    current_machine().generators[_index(device)].set_state(new_state)


def ledger_of(device: Device) -> DeviceLedger:
    """Return the ``DeviceLedger`` of the device, which records the memory allocated on it."""
    return current_machine().ledgers[_index(device)]


def _index(device: Device) -> int:
    return current_machine().index_of(device)
