"""Functions that return the GPUs of this machine, or emulated devices in their place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ..devices import resolve_devices
from ..split import as_integer
from .context import emulate_devices


def accelerators(num_devices: int | None = None, emulate: bool = False) -> list[torch.device]:
    """Return the GPUs that ``training_devices`` would provide for the same arguments.

    Return an empty list if ``training_devices`` would emulate devices instead.
    """
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
    """Provide the GPUs of this machine, or emulated devices if it has too few GPUs.

    With ``num_devices=3``, for example, provide the first three GPUs, or three emulated devices if
    there are fewer than three GPUs. With ``num_devices=None``, provide all GPUs, or four emulated
    devices if there are fewer than two GPUs. Every accelerator counts as a GPU here, except MPS,
    because MPS has only one device. Inside an ``emulate_devices`` context, the devices of that
    context take the place of the GPUs.

    Emulated devices cannot be used after the ``with`` block. Copy tensors that are needed later to
    the CPU.

    Args:
        num_devices: number of devices, at least 1. None means all GPUs, or four emulated devices.
        memory: capacity of emulated devices, as in ``emulate_devices``. It does not limit GPUs.
        symbolic: whether emulated devices keep only the shapes of floating-point and complex
            tensors, and not their values, as in ``emulate_devices``.
        as_cuda: whether emulated devices are named ``"cuda"``, as in ``emulate_devices``.
        emulate: whether to emulate devices even if there are GPUs.

    Returns:
        A context manager that yields the devices. Move the module to the first device, and pass
        all devices to ``BalancedDataParallel`` as ``device_ids``. If ``num_devices`` is None,
        ``device_ids`` may be omitted, because it defaults to the same devices.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid.
        EmulationError: devices must be emulated, but cannot be: another ``emulate_devices`` context
            is open, or the installed torch lacks a function or class that the emulation needs.

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
    return emulate_devices(num_devices or 4, memory=memory, symbolic=symbolic, as_cuda=as_cuda)
