"""Convert arguments such as ``device_ids`` to ``torch.device``; return streams of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .emulation.machine import current_machine, has_machine, is_emulated
from .errors import ArgumentError, ArgumentTypeError

Device = int | str | torch.device


def default_device_type() -> str | None:
    """Return the device type that ints in ``device_ids`` refer to, such as ``"cuda"``, or None.

    Inside ``emulate_devices``, this is the type of the emulated devices. Elsewhere, it is the type
    of torch's accelerator. The result is None if there is no accelerator, and for MPS, which has a
    single device.
    """
    if has_machine():
        return current_machine().device_type
    # torch.accelerator is not used here: torch 2.5 does not have it, and in torch 2.6, it raises an
    # error without accelerators.
    device: torch.device = torch._C._get_accelerator()
    has_several = device.type not in ("cpu", "mps")  # MPS has a single device
    return device.type if has_several and torch.get_device_module(device).is_available() else None


def resolve_devices(device_ids: Sequence[Device] | None) -> list[torch.device]:
    """Return a ``torch.device`` for each entry of ``device_ids``.

    If ``device_ids`` is None, return all devices of the type that ``default_device_type`` returns,
    or an empty list if this type is None.

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
    """Return the ``torch.device`` that ``device_id`` refers to.

    An int is the index of a device of the type that ``default_device_type`` returns. A string
    without an index, such as ``"cuda"``, refers to the current device of the type that it names.

    Raises:
        ArgumentError: the device does not exist.
    """
    device_type = default_device_type()
    if isinstance(device_id, int) and device_type is None:
        raise ArgumentError(
            f"device {device_id} does not exist: there is no accelerator; omit device_ids to run "
            "without splitting; to split, use device_ids=['cpu', 'cpu'] or emulate_devices"
        )
    name = f"{device_type}:{device_id}" if isinstance(device_id, int) else device_id
    try:
        device = torch.device(name)
        module = torch.get_device_module(device)
    except (RuntimeError, TypeError) as error:  # an unknown device, or one without a module
        raise ArgumentError(f"there is no device {device_id!r}: {error}") from None
    if device.type == "cpu":
        return torch.device("cpu")  # the device of CPU tensors has no index
    if (device.index or 0) >= module.device_count():
        raise ArgumentError(
            f"device {device} does not exist: torch finds {module.device_count()} of this type"
        )
    if device.index is None:
        return torch.device(device.type, module.current_device())
    return device


CUDA_LIKE = {"cuda"}
"""Device types that have CUDA's streams, memory allocator and NCCL communicators.

Tests add the type of a stand-in for CUDA devices.
"""


def is_cuda(device: torch.device) -> bool:
    """Return whether ``device`` has CUDA's streams, memory allocator and NCCL communicators.

    Emulated devices have none of these, even if their type is ``"cuda"``.
    """
    return device.type in CUDA_LIKE and not is_emulated(device)


_streams: dict[tuple[torch.device, torch.device | str], torch.Stream] = {}


def side_stream(device: torch.device, purpose: torch.device | str) -> torch.Stream:
    """Return the stream on which a CUDA device does the kind of work that ``purpose`` names.

    The stream is created at the first call. All threads get the same stream for the same arguments.

    Args:
        device: the device of the stream.
        purpose: the kind of work that is launched on the stream:

            - ``"weights"``: copies of parameters and buffers to or from ``device``.
            - ``"copies"``: copies of inputs from the CPU to ``device``, and of gradients that
              leave ``device``.
            - another device: copies of gradients that arrive on ``device`` from that other device.
              Each source has its own stream on ``device``, so that copies from different sources
              do not wait for each other.
            - ``device`` itself: the addition of the gradients that have arrived on ``device``.

            So a copy of gradients uses two streams: the source's stream ``"copies"``, and the
            destination's stream for this source.
    """
    if (device, purpose) not in _streams:  # setdefault: two threads may make a stream
        _streams.setdefault((device, purpose), torch.get_device_module(device).Stream(device))
    return _streams[device, purpose]


def has_streams(device: torch.device) -> bool:
    """Return whether devices of the type of ``device`` have streams, as CUDA devices do."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "stream")


def on_stream(stream: torch.Stream) -> Any:
    """Return a context manager that makes ``stream`` the current stream of its device.

    The return type is ``Any``, because torch does not annotate the type of the context manager.
    """
    return torch.get_device_module(stream.device).stream(stream)
