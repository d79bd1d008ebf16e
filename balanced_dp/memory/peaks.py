"""Peak memory statistics for overlapping measurements, each of which resets the peaks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..devices import is_cuda, is_emulated
from ..emulation import device_module

_open: weakref.WeakSet[Peaks] = weakref.WeakSet()
_lock = threading.Lock()


class Peaks:
    """The peak memory of devices since this object was created.

    The constructor resets the devices' peaks, and first saves them in all other ``Peaks`` objects.
    So measured blocks may be nested, and a logger may write a record inside of one. Other calls of
    ``reset_peak_memory_stats`` are not noticed.

    Args:
        devices: devices that count their memory, without duplicates.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._earlier = dict.fromkeys(devices, (0, 0))
        with _lock:
            for device in devices:
                for other in _open:
                    if device in other._earlier:
                        other._earlier[device] = other.of(device)
                module = _statistics_of(device)
                if is_cuda(device):
                    module.init()  # else torch raises "Invalid device argument"
                module.reset_peak_memory_stats(device)
            _open.add(self)

    @property
    def allocated(self) -> tuple[int, ...]:
        """The peak of the allocated bytes of each device, once if it repeats."""
        return tuple(self.of(device)[0] for device in self._earlier)

    def of(self, device: torch.device) -> tuple[int, int]:
        """Return the peaks of the allocated and of the reserved bytes of a device."""
        module = _statistics_of(device)
        allocated, reserved = self._earlier[device]
        return (
            max(allocated, module.max_memory_allocated(device)),
            max(reserved, module.max_memory_reserved(device)),
        )


def _statistics_of(device: torch.device) -> Any:
    """Return the module with the memory statistics of a device, to read and to reset.

    The peaks of emulated devices are separate from those that a script sees in ``torch.cuda``.
    """
    return device_module if is_emulated(device) else torch.get_device_module(device)
