"""The class ``Machine``, which holds all emulated devices, and functions that use a ``Machine``.

Each ``emulate_devices`` context has one ``Machine``. ``current_machine`` returns the machine of the
context that is open.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..errors import EmulationError
from ..free_threading import looking_at_nodes
from ..memory.units import format_bytes
from .ledger import Allocation, Block, DeviceLedger, Label, round_up

DEVICE_TYPE = "lazy"
"""The device type of emulated accelerators.

The type "lazy" has a dispatch key of its own and allows any device index. Backward nodes of "lazy"
tensors run in the thread that called ``backward``, as on the CPU, so autograd needs no separate
threads for the devices. Two other types would not work. Without an extension in C++, the type
PrivateUse1 can only have the index 0. With the type "cuda", the backward pass aborts the process if
there is no GPU.
"""

MAX_DEVICES = 128
"""The largest number of emulated devices: torch stores a device index as a signed 8-bit integer."""

DEVICES = [torch.device(DEVICE_TYPE, index) for index in range(MAX_DEVICES)]
"""The devices that emulated tensors have inside torch: ``DEVICES[1]`` is "lazy:1", for example."""

Patches = dict[Any, dict[str, Any]]
"""For each patched module or class, the names of the replaced attributes and their new values.

The attributes are replaced while an ``emulate_devices`` context is open.
"""


class _PerThread(threading.local):
    """Variables that have separate values in each thread."""

    current_index = 0
    """The index of the thread's current device, as ``torch.cuda.current_device()`` returns it."""
    optimizer_task: int | None = None
    """The id of the backward pass in which an optimizer's ``step`` runs.

    The value is None if no ``step`` runs, and -1 if a ``step`` runs outside of a backward pass.
    """
    is_adding_gradients = False


class Machine:
    """The devices of an ``emulate_devices`` context, their memory, and the bytes copied among them.

    Args:
        capacities: the capacity of each device in bytes.
        symbolic: whether to keep only the shapes, not the values, of floating-point and complex
            tensors.
        device_type: the device type that the devices report to scripts, "lazy" or "cuda". Inside
            torch, tensors on the devices always have the type "lazy" (``DEVICE_TYPE``).
    """

    def __init__(self, capacities: Iterable[int], symbolic: bool, device_type: str) -> None:
        self.symbolic = symbolic
        self.device_type = device_type
        self.ledgers = [
            DeviceLedger(capacity, partial(_out_of_memory, device_type, index, capacity))
            for index, capacity in enumerate(capacities)
        ]
        self.devices = [torch.device(device_type, index) for index in range(len(self.ledgers))]
        self.generators = [torch.Generator() for _ in self.devices]
        self.manual_seed_all(torch.initial_seed())
        self._copied_bytes: Counter[tuple[torch.device, torch.device]] = Counter()
        self._lock = threading.Lock()
        self.thread = _PerThread()
        self.is_closed = False
        self.default_device: str | None = None
        """The device of tensors created without a ``device`` argument; None means torch's default.

        ``torch.set_default_tensor_type`` sets this attribute.
        """
        self.reads_unknown_as_nan = False
        """Whether reading a value that was not computed gives NaN, instead of raising an error.

        In symbolic mode, floating-point tensors have shapes but no values. If this attribute is
        true, ``Tensor.item`` of a tensor without values returns NaN, or False for a bool tensor,
        and copying a floating-point tensor to the CPU gives a tensor of NaN. If this attribute is
        false, ``item`` and the copy raise an error.
        """

    def index_of(self, device: torch.device | str | int | None) -> int:
        """Return the index of the emulated device ``device``.

        If ``device`` is None or has no index, return the index of this thread's current device.

        Raises:
            EmulationError: the device does not exist, or is not an emulated device.
        """
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            if device.type not in (DEVICE_TYPE, self.device_type):
                raise EmulationError(f"{device} is not an emulated device")
            device = device.index
        if device is None:
            return self.thread.current_index
        if not 0 <= device < len(self.devices):
            raise EmulationError(
                f"there is no emulated device {self.device_type}:{device}, because "
                f"num_devices={len(self.devices)}; raise it (balanced-dp run: --devices)"
            )
        return device

    def ignore_capacities(self) -> None:
        """Allow each device to hold more memory than its capacity.

        The devices still report their capacities. ``balanced-dp run`` and ``tune`` search for a
        split (the number of samples for each device) that fits in memory. The first split that they
        measure may not fit, and must not end the search.
        """
        for ledger in self.ledgers:
            ledger.limit_bytes = sys.maxsize

    def manual_seed_all(self, seed: int) -> None:
        """Set the seed of the random number generator of every device to ``seed``."""
        for generator in self.generators:
            generator.manual_seed(seed)

    def enter(self, index: int, storage: Any, label: Label) -> Block:
        """Return the block of memory of ``storage``; allocate it first, unless its size is right.

        Args:
            index: the index of the device.
            storage: the storage. Its attribute ``_allocation`` is set to the new ``Allocation``.
            label: what the memory is used for. A storage that already has memory keeps its label,
                even if the size of the memory changes.

        Raises:
            torch.OutOfMemoryError: the storage does not fit on the device.
        """
        earlier: Allocation | None = getattr(storage, "_allocation", None)
        if earlier is not None:
            if earlier.block.num_bytes == round_up(storage.nbytes()):
                return earlier.block
            label = earlier.block.label
        # Only the storage refers to the allocation, so both are deallocated together.
        allocation = storage._allocation = self.ledgers[index].allocate(
            storage.nbytes(), label, marks_peak=not self.thread.is_adding_gradients
        )
        return allocation.block

    def record_copy(self, source: torch.device, target: torch.device, num_bytes: int) -> None:
        """Add ``num_bytes`` to the bytes copied from ``source`` to ``target``.

        If ``source`` and ``target`` are the same device, nothing is added.
        """
        with self._lock:
            self._copied_bytes[source, target] += num_bytes * (source != target)

    def copied_bytes(self) -> dict[tuple[torch.device, torch.device], int]:
        """Return the number of bytes copied, for each pair of devices ``(source, target)``."""
        with self._lock:
            return dict(+self._copied_bytes)


def label_of_results(machine: Machine) -> Label:
    """Return the label (use of memory, such as activation) of the results of the running operator.

    The first of these cases that applies decides the label:

    - An optimizer's ``step`` runs: "other". But in the backward pass of a closure that ``step``
      calls, the cases below apply.
    - The running autograd node receives gradients of leaf tensors: "gradient".
    - All other cases: "activation".
    """
    task = torch._C._current_graph_task_id()  # -1 outside of backward passes
    if machine.thread.optimizer_task == task:
        return Label.OTHER
    if task != -1:
        with looking_at_nodes:
            if type(torch._C._current_autograd_node()).__name__ in _TAKES_GRADIENTS:
                return Label.GRADIENT
    return Label.ACTIVATION


_TAKES_GRADIENTS = {"AccumulateGrad", "BroadcastBackward"}
"""The types of autograd nodes that receive gradients of leaf tensors.

``AccumulateGrad`` adds a gradient to the ``grad`` of a leaf tensor. ``BroadcastBackward``, a node
of ``BalancedDataParallel``, sends gradients to the device of the leaf tensors.
"""


def _out_of_memory(
    device_type: str, index: int, capacity_bytes: int, requested_bytes: int, free_bytes: int
) -> torch.OutOfMemoryError:
    # CUDA's message, because training loops search for "CUDA out of memory.".
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {format_bytes(requested_bytes)}. "
        f"GPU {index} has a total capacity of {format_bytes(capacity_bytes)} of which "
        f"{format_bytes(free_bytes)} is free. (This is the emulated device {device_type}:{index}.)"
    )


_current: Machine | None = None
_lock = threading.Lock()


def current_machine() -> Machine:
    """Return the ``Machine`` of the open ``emulate_devices`` context.

    Raises:
        EmulationError: no ``emulate_devices`` context is open.
    """
    if _current is None:
        raise EmulationError(
            f"there are no emulated devices here: {DEVICE_TYPE!r} works only inside the block of "
            "emulate_devices or training_devices; copy results to the CPU before the block ends"
        )
    return _current


def has_machine() -> bool:
    """Return whether an ``emulate_devices`` context is open."""
    return _current is not None


@contextmanager
def make_current(machine: Machine) -> Iterator[None]:
    """Context manager in which ``current_machine`` returns ``machine``.

    At the end of the ``with`` block, ``machine`` is closed: tensors on its devices can no longer be
    used.

    Raises:
        EmulationError: another ``emulate_devices`` context is open.
    """
    global _current
    with _lock:
        if _current is not None:
            raise EmulationError(
                "emulate_devices contexts cannot be nested: first leave the open context, which "
                f"has {len(_current.devices)} devices"
            )
        _current = machine
    try:
        yield
    finally:
        _current = None
        machine.is_closed = True


def is_emulated(device: torch.device) -> bool:
    """Return whether ``device`` has the device type of the open ``emulate_devices`` context.

    The index of ``device`` is not checked. If no context is open, the result is False.
    """
    return has_machine() and device.type == current_machine().device_type


def is_symbolic(device: torch.device) -> bool:
    """Return whether ``device`` is an emulated device that keeps only the shapes of tensors."""
    return is_emulated(device) and current_machine().symbolic
