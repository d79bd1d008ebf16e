"""Peaks that several who measure at a time can reset without spoiling each other's."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch

from ..devices import is_cuda

_open: weakref.WeakSet[Peaks] = weakref.WeakSet()
_lock = threading.Lock()


def reset_peaks(device: torch.device) -> None:
    """Resets the peak memory statistics of a device, also before CUDA is initialized."""
    module = torch.get_device_module(device)
    if is_cuda(device):
        module.init()  # before, torch has no counters, and says "Invalid device argument"
    module.reset_peak_memory_stats(device)


class Peaks:
    """The most that devices held since this was made.

    Making it resets the devices' own peaks. What these were until then is kept for all others that
    are open, so blocks may be nested, and a logger may write in the middle of one. Somebody
    else's ``reset_peak_memory_stats`` is not seen. Devices are those that count their memory, each
    given once.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._earlier = dict.fromkeys(devices, (0, 0))
        with _lock:
            for device in devices:
                for other in _open:
                    if device in other._earlier:
                        other._earlier[device] = other.of(device)
                reset_peaks(device)
            _open.add(self)

    def of(self, device: torch.device) -> tuple[int, int]:
        """Return the peaks of allocated and of reserved bytes."""
        module = torch.get_device_module(device)
        allocated, reserved = self._earlier[device]
        return (
            max(allocated, module.max_memory_allocated(device)),
            max(reserved, module.max_memory_reserved(device)),
        )
