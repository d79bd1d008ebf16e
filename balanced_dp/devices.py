"""The devices to train on, those named by arguments such as ``device_ids``, and their streams."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .emulation import emulate_devices
from .emulation.machine import current_machine, has_machine
from .errors import ArgumentError, ArgumentTypeError
from .split import as_integer

Device = int | str | torch.device


def capacities_of(devices: Sequence[torch.device]) -> list[int]:
    """Return the total memory of each device in bytes."""
    return [torch.get_device_module(d).get_device_properties(d).total_memory for d in devices]


def is_emulated(device: torch.device) -> bool:
    """Return whether the device is one of the open ``emulate_devices`` context."""
    return has_machine() and device.type == current_machine().device_type


def is_symbolic(device: torch.device) -> bool:
    """Return whether the device is an emulated one that keeps shapes only."""
    return is_emulated(device) and current_machine().symbolic


def default_device_type() -> str | None:
    """Return the type of the devices that ints name, None if there are none.

    That is the emulated devices' type inside ``emulate_devices``, else the accelerator's.
    """
    if has_machine():
        return current_machine().device_type
    # torch.accelerator exists since 2.6, which raises if there is no accelerator.
    device: torch.device = torch._C._get_accelerator()
    has_several = device.type not in ("cpu", "mps")  # MPS has a single device
    return device.type if has_several and torch.get_device_module(device).is_available() else None


def resolve_devices(device_ids: Sequence[Device] | None) -> list[torch.device]:
    """Return the devices that ``device_ids`` names; None names all of the default type.

    Raises:
        ArgumentError: ``device_ids`` is empty, or a device does not exist.
        ArgumentTypeError: ``device_ids`` is not a sequence of devices.
    """
    if device_ids is None:
        device_type = default_device_type()
        if device_type is None:
            return []
        count = torch.get_device_module(device_type).device_count()
        return [torch.device(device_type, index) for index in range(count)]
    if isinstance(device_ids, str) or not isinstance(device_ids, Sequence):
        raise ArgumentTypeError(f"device_ids must be a list of devices, got {device_ids!r}")
    if not device_ids:
        raise ArgumentError("device_ids is empty; omit it to use all devices")
    return [resolve_device(device_id) for device_id in device_ids]


def resolve_device(device_id: Device) -> torch.device:
    """Return the device that ``device_id`` names; an int is an index of the default type.

    Raises:
        ArgumentError: the device does not exist.
    """
    device_type = default_device_type()
    if isinstance(device_id, int) and device_type is None:
        raise ArgumentError(
            f"device {device_id} does not exist: there is no accelerator. Leave device_ids out "
            "to run without splitting, pass ['cpu', 'cpu'], or use emulate_devices"
        )
    name = f"{device_type}:{device_id}" if isinstance(device_id, int) else device_id
    try:
        device = torch.device(name)
        module = torch.get_device_module(device)
    except (RuntimeError, TypeError) as error:  # unknown, or without a device module
        raise ArgumentError(f"there is no device {device_id!r}: {error}") from None
    if device.type == "cpu":
        return torch.device("cpu")  # the device of CPU tensors has no index
    if (device.index or 0) >= module.device_count():
        raise ArgumentError(
            f"device {device} does not exist: there are {module.device_count()} of its type"
        )
    if device.index is None:
        return torch.device(device.type, module.current_device())
    return device


def accelerators(num_devices: int | None = None, emulate: bool = False) -> list[torch.device]:
    """Return the GPUs that ``training_devices`` provides; none if it emulates devices."""
    found = [] if emulate else resolve_devices(None)
    return found[:num_devices] if len(found) >= (num_devices or 2) else []


def training_devices(
    num_devices: int | None = None,
    *,
    memory: int | str | Sequence[int | str] | None = None,
    symbolic: bool = False,
    as_cuda: bool = False,
    emulate: bool = False,
) -> AbstractContextManager[Sequence[torch.device]]:
    """Provide the GPUs of this machine, or emulated devices if there are too few.

    With ``num_devices``, they are the first GPUs if there are that many, otherwise emulated
    devices. Without it, they are all GPUs if there are two or more, otherwise four emulated
    devices. GPUs can be accelerators of any type. Inside ``emulate_devices``, its devices take the
    place of the GPUs.

    Emulated devices end with the ``with`` block. Copy tensors that are needed later to the CPU.

    Args:
        num_devices: number of devices, at least 1. None means all GPUs, or four emulated devices.
        memory: capacity of emulated devices, as in ``emulate_devices``. GPUs keep theirs.
        symbolic: whether emulated devices keep shapes only, as in ``emulate_devices``.
        as_cuda: whether emulated devices are named as CUDA's, as in ``emulate_devices``.
        emulate: whether to emulate devices even if there are GPUs.

    Returns:
        A context manager that yields the devices. Move the module to the first one, and pass them
        all as ``device_ids``, which may be omitted if ``num_devices`` is.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid.
        EmulationError: an ``emulate_devices`` context with fewer devices is open.

    Examples:
        >>> with training_devices(2) as devices:
        ...     model = torch.nn.Linear(8, 1).to(devices[0])
        ...     model = BalancedDataParallel(1, model, device_ids=devices)
        ...     model.split(8)
        ...     del model
        (1, 7)
    """
    if num_devices is not None:
        num_devices = as_integer("num_devices", num_devices, minimum=1)
    if found := accelerators(num_devices, emulate):
        return nullcontext(found)
    num = num_devices or 4
    return emulate_devices(num, memory=memory, symbolic=symbolic, as_cuda=as_cuda)


CUDA_LIKE = {"cuda"}
"""Device types with CUDA's streams, allocator and communicators; tests add a stand-in."""


def is_cuda(device: torch.device) -> bool:
    """Return whether the device has CUDA's streams, allocator and communicators."""
    return device.type in CUDA_LIKE and not is_emulated(device)


_streams: dict[tuple[torch.device, torch.device | str], torch.Stream] = {}


def side_stream(device: torch.device, purpose: torch.device | str) -> torch.Stream:
    """Return a stream of a CUDA device for a purpose, the same one in all threads.

    Args:
        device: the device.
        purpose: ``"weights"`` for weights, and nothing else, that are copied; ``"copies"`` for
            inputs that arrive and gradients that leave; or the device from which gradients arrive,
            the same device for adding up those that have arrived. Each pair of devices has its own:
            a copy waits for both of its streams, so devices that send to several would otherwise
            take turns.
    """
    if (device, purpose) not in _streams:  # setdefault: two threads may make one at the same time
        _streams.setdefault((device, purpose), torch.get_device_module(device).Stream(device))
    return _streams[device, purpose]


def has_streams(device: torch.device) -> bool:
    """Return whether each thread has a current stream on the device."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "stream")


def on_stream(stream: torch.Stream) -> Any:
    """Return a context manager that makes ``stream`` current. torch gives it no type."""
    return torch.get_device_module(stream.device).stream(stream)
