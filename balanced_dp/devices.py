"""Which devices ``device_ids`` and ``output_device`` name."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch

from .emulation.machine import DEVICE_TYPE, has_machine
from .errors import ArgumentError, ArgumentTypeError

Device = int | str | torch.device

OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""What a device without memory says where it is not torch's allocator that asks for some.

Source: an H100 with 2 MiB to spare, where the first matrix product is a plain RuntimeError.
"""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether a device had no memory left, whoever says so."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
    )


def default_device_type() -> str | None:
    """Returns the type of device that ints name: an emulated one, the accelerator, or None."""
    if has_machine():
        return DEVICE_TYPE
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type != "mps":  # one device only, as stock has it
        return accelerator.type
    return None


def resolve_devices(
    device_ids: Sequence[Device] | None, device_type: str | None
) -> list[torch.device]:
    """Returns the devices that ``device_ids`` names; ints are of ``device_type``.

    Raises:
        ArgumentError, ArgumentTypeError: there is no such device, or no device at all.
    """
    if device_ids is None:
        if device_type is None:
            return []
        count = torch.get_device_module(device_type).device_count()
        return [torch.device(device_type, index) for index in range(count)]
    if isinstance(device_ids, str | int) or not isinstance(device_ids, Sequence):
        raise ArgumentTypeError(f"device_ids must be a list of devices, got {device_ids!r}")
    if not device_ids:
        raise ArgumentError("device_ids is empty; leave it out to use all devices")
    return [resolve_device(device_id, device_type) for device_id in device_ids]


def resolve_device(device_id: Device, device_type: str | None) -> torch.device:
    """Returns the device that ``device_id`` names; an int is of ``device_type``.

    Raises:
        ArgumentError, ArgumentTypeError: there is no such device.
    """
    if isinstance(device_id, bool) or not isinstance(device_id, int | str | torch.device):
        raise ArgumentTypeError(
            f"a device must be an int, a string or a torch.device, got {device_id!r}"
        )
    if isinstance(device_id, int):
        if device_type is None:
            raise ArgumentError(
                f"device {device_id} does not exist: there is no accelerator here. Leave "
                "device_ids out to run without splitting, name ['cpu', 'cpu'], or use "
                "emulate_devices"
            )
        if device_id < 0:
            raise ArgumentError(f"a device index must not be negative, got {device_id}")
        device = torch.device(device_type, device_id)
    else:
        try:
            device = torch.device(device_id)
            torch.get_device_module(device)
        except RuntimeError as error:  # torch does not know it, or cannot say what it holds
            raise ArgumentError(f"there is no device {device_id!r}: {error}") from None
    if device.type == "cpu":
        return torch.device("cpu")  # tensors do not say "cpu:0"
    module = torch.get_device_module(device)
    if (device.index or 0) >= module.device_count():
        raise ArgumentError(
            f"device {device} does not exist: there are {module.device_count()} of its type"
        )
    if device.index is None:
        return torch.device(device.type, module.current_device())
    return device


CUDA_LIKE = {"cuda"}
"""Types of devices with CUDA's streams, allocator and communicators; tests add a stand-in."""


def is_cuda(device: torch.device) -> bool:
    """Returns whether the device is one of CUDA's kind."""
    return device.type in CUDA_LIKE


@functools.cache
def copy_stream(device: torch.device) -> torch.Stream:
    """Returns the stream of a CUDA device on which inputs and gradients travel."""
    stream: torch.Stream = torch.get_device_module(device).Stream(device)
    return stream


@functools.cache
def weight_stream(device: torch.device) -> torch.Stream:
    """Returns the stream of a CUDA device on which weights travel, and nothing else."""
    stream: torch.Stream = torch.get_device_module(device).Stream(device)
    return stream


def on_stream(stream: torch.Stream) -> contextlib.AbstractContextManager[Any]:
    """Context manager in which a stream of a CUDA device is current."""
    context = torch.get_device_module(stream.device).stream(stream)
    assert isinstance(context, contextlib.AbstractContextManager)
    return context
