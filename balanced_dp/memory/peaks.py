"""The peak memory of devices during a measurement, and a logger of peak memory.

Torch keeps only one peak for each device, but measurements can overlap. So before ``Peaks`` resets
torch's peak, it saves the peaks of the running measurements.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..devices import is_cuda
from ..emulation import device_module
from ..emulation.machine import is_emulated
from ..errors import ArgumentTypeError
from ..split import as_integer
from .records import imbalance_of

_open: weakref.WeakSet[Peaks] = weakref.WeakSet()
_lock = threading.Lock()


def capacities_of(devices: Sequence[torch.device]) -> list[int]:
    """Return the total memory of each device in bytes."""
    return [torch.get_device_module(d).get_device_properties(d).total_memory for d in devices]


class Peaks:
    """The peak memory of devices since this object was created.

    The constructor resets torch's peak memory statistics of the devices. Before the reset, it saves
    the peaks of all other ``Peaks`` objects of these devices. So blocks of ``MemoryProbe.measure``
    may be nested, and a ``MemoryLogger`` may write a record inside a block. If other code calls
    ``reset_peak_memory_stats``, the peaks before the call may be lost.

    Args:
        devices: devices for which torch has memory statistics (not the CPU, for example), without
            duplicates.
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
        """The peak of the allocated bytes of each device, in the order of ``devices``."""
        return tuple(self.of(device)[0] for device in self._earlier)

    def of(self, device: torch.device) -> tuple[int, int]:
        """Return the peaks of the allocated bytes and of the reserved bytes of ``device``."""
        module = _statistics_of(device)
        allocated, reserved = self._earlier[device]
        return (
            max(allocated, module.max_memory_allocated(device)),
            max(reserved, module.max_memory_reserved(device)),
        )


def _statistics_of(device: torch.device) -> Any:
    """Return the module whose functions read and reset the memory statistics of ``device``.

    For an emulated device, the result is the emulation's own module and not ``torch.cuda``, even if
    the device's type is ``"cuda"``. The two modules have separate peaks. So the peak that
    ``Peaks`` reads does not change if a script calls ``torch.cuda.reset_peak_memory_stats``.
    """
    return device_module if is_emulated(device) else torch.get_device_module(device)


class MemoryLogger:
    """A logger of the peak memory of each device of a model, and of how much these peaks differ.

    A record has one value for each device, with a tag such as ``memory/cuda:0 (gpu:3)/peak_MiB``,
    where ``gpu:3`` is the device's name in NVML. The value is the maximum memory in MiB that
    tensors have occupied since the last record or, for the first record, since the logger was
    created. A record ends with ``memory/imbalance``: (max - min) / max of the devices' values.

    Steps without a record cost nothing. Writing a record does not synchronize the devices, because
    the allocator keeps its counts on the host. Writing a record resets torch's peak memory
    statistics of the devices. A record that is written inside a ``with`` block of
    ``MemoryProbe.measure`` does not change the peaks that are measured for the block.

    Args:
        model: the ``BalancedDataParallel`` whose devices are logged.
        writer: a ``SummaryWriter``, any other object with a method
            ``add_scalar(tag, value, step)``, or a function with these arguments.
        every: the number of steps from one record to the next, at least 1.

    Raises:
        ArgumentError: ``every`` is below 1.
        ArgumentTypeError: ``every`` is not an integer, or ``writer`` neither has ``add_scalar`` nor
            is a function.
        ProbeError: torch has no memory statistics for a device of the model.

    Examples:
        >>> with emulate_devices(2) as devices:
        ...     model = BalancedDataParallel(1, torch.nn.Linear(4, 2).to(devices[0]), list(devices))
        ...     logger = MemoryLogger(model, lambda tag, value, step: print(step, tag), every=2)
        ...     for _ in range(2):
        ...         loss = model(torch.ones(3, 4)).sum()
        ...         logger.step()
        ...     del model, loss  # no tensor may outlive the emulated devices
        2 memory/lazy:0/peak_MiB
        2 memory/lazy:1/peak_MiB
        2 memory/imbalance
    """

    def __init__(self, model: Any, writer: Any, every: int = 100) -> None:
        self.every = as_integer("every", every, minimum=1)
        write = getattr(writer, "add_scalar", writer)
        if not callable(write):
            raise ArgumentTypeError(
                f"writer must have add_scalar(tag, value, step) or be a function, got {writer!r}"
            )
        self.num_steps = 0
        self._write: Callable[[str, float, int], object] = write
        probe = model.memory
        self._labels = [memory.label for memory in probe.snapshot()]
        self._devices = probe.devices
        self._peaks = Peaks(self._devices)

    def step(self) -> None:
        """Count a training step, and write a record at every ``every``-th step.

        Call this method after each training step.
        """
        self.num_steps += 1
        if self.num_steps % self.every:
            return
        peaks = self._peaks.allocated
        self._peaks = Peaks(self._devices)
        for label, peak_bytes in zip(self._labels, peaks, strict=True):
            self._write(f"memory/{label}/peak_MiB", peak_bytes / 2**20, self.num_steps)
        self._write("memory/imbalance", imbalance_of(peaks), self.num_steps)
