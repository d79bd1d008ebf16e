"""``torch.lazy``: what ``torch.get_device_module("lazy")`` answers, as ``torch.cuda`` would.

The functions work on the devices of the open ``emulate_devices`` context. A device is given as an
int, a string, a ``torch.device`` or None for the current one, as in ``torch.cuda``.
"""

from __future__ import annotations

import uuid as _uuid
from dataclasses import dataclass

import torch

from .ledger import DeviceLedger, MemoryBreakdown
from .machine import current_machine, has_machine

Device = torch.device | str | int | None

_initialized = True
"""Asked by torch.utils.checkpoint, which keeps the generators' state only where this is true."""


@dataclass(frozen=True, slots=True)
class EmulatedDeviceProperties:
    """What ``get_device_properties`` returns: memory is in bytes, the uuid new in each context."""

    name: str
    total_memory: int
    uuid: _uuid.UUID


class device:  # named as torch.cuda.device
    """Context manager that makes a device the current one of this thread."""

    def __init__(self, device: Device) -> None:
        self.index = current_machine().index_of(device)

    def __enter__(self) -> None:
        self.previous = current_device()
        set_device(self.index)

    def __exit__(self, *exc: object) -> None:
        set_device(self.previous)


def is_available() -> bool:
    """Returns whether an ``emulate_devices`` context is open."""
    return has_machine()


def device_count() -> int:
    """Returns the number of emulated devices, 0 outside of a context."""
    return len(current_machine().devices) if has_machine() else 0


def current_device() -> int:
    """Returns the index of this thread's current device."""
    return current_machine().thread.current_index


def set_device(device: Device) -> None:
    """Makes ``device`` the current one of this thread."""
    machine = current_machine()
    machine.thread.current_index = machine.index_of(device)


def memory_allocated(device: Device = None) -> int:
    """Returns the bytes that tensors hold on the device now."""
    return _ledger(device).allocated_bytes


def max_memory_allocated(device: Device = None) -> int:
    """Returns the most bytes held at one time since the peak was last reset."""
    return _ledger(device).peak_bytes


# This allocator keeps no reserve.
memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


def reset_peak_memory_stats(device: Device = None) -> None:
    """Starts the search for a peak anew, from what is held now."""
    _ledger(device).reset_peak()


def memory_stats(device: Device = None) -> dict[str, int]:
    """Returns the figures under the names of ``torch.cuda.memory_stats``, in bytes."""
    ledger = _ledger(device)
    current, peak, total = ledger.allocated_bytes, ledger.peak_bytes, ledger.total_bytes
    stats = {"num_alloc_retries": 0, "num_ooms": ledger.num_ooms}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        values = {"current": current, "peak": peak, "allocated": total, "freed": total - current}
        stats.update({f"{kind}.all.{name}": value for name, value in values.items()})
    return stats


def memory_breakdown(device: Device = None) -> MemoryBreakdown:
    """Returns what the device's memory is used for, now and at the peak; CUDA has no such thing."""
    return _ledger(device).breakdown()


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Returns the device's free and total bytes."""
    ledger = _ledger(device)
    return ledger.capacity_bytes - ledger.allocated_bytes, ledger.capacity_bytes


def get_device_name(device: Device = None) -> str:
    """Returns the device's name."""
    return get_device_properties(device).name


def get_device_properties(device: Device = None) -> EmulatedDeviceProperties:
    """Returns the device's name, its capacity in bytes and its uuid."""
    machine = current_machine()
    index = machine.index_of(device)
    return EmulatedDeviceProperties(
        name=f"Emulated device {index}",
        total_memory=machine.ledgers[index].capacity_bytes,
        uuid=machine.uuids[index],
    )


def synchronize(device: Device = None) -> None:
    """Does nothing but check the device: operations here are complete when they return."""
    current_machine().index_of(device)


def empty_cache() -> None:
    """Does nothing: memory is given back when its last tensor dies."""


def manual_seed(seed: int) -> None:
    """Seeds the current device's generator."""
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds the generators of all devices, as ``torch.manual_seed`` does too."""
    current_machine().manual_seed_all(seed)


def get_rng_state(device: Device = None) -> torch.Tensor:
    """Returns the state of the device's generator."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    """Sets the state of the device's generator."""
    _generator(device).set_state(new_state)


def _ledger(device: Device) -> DeviceLedger:
    machine = current_machine()
    return machine.ledgers[machine.index_of(device)]


def _generator(device: Device) -> torch.Generator:
    machine = current_machine()
    return machine.generators[machine.index_of(device)]
