"""Give each parameter a home: the device of the parameter, its gradient and optimizer state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..memory.peaks import capacities_of
from .copies import BUCKET_BYTES


def spread_parameters(module: nn.Module, devices: Sequence[torch.device]) -> None:
    """Spread the parameters of ``module`` over ``devices``; move its buffers to the first device.

    The bytes of parameters on each device are about proportional to the device's total memory. If
    the memory of a device is unknown, all devices get about the same number of bytes.

    One or more successive submodules form a group. The parameters of a group go to the same device,
    since these parameters are copied together and used soon after one another. The first group goes
    to the first device. Each later group goes to the device with the smallest
    ``(held + size) / memory``. Here ``held`` is the number of bytes of parameters already placed
    on the device, ``size`` is the number of bytes of the parameters of the group's first submodule,
    and ``memory`` is the device's total memory. So successive groups are usually on different
    devices, and all devices receive gradients during the whole backward pass, not one device after
    another.

    Args:
        module: the module. Before the call, it may be on the CPU, for example because it fits on no
            single device.
        devices: the devices; a device may be given twice.
    """
    is_known = all(hasattr(torch.get_device_module(d), "get_device_properties") for d in devices)
    num_bytes_of = capacities_of(devices) if is_known else [1] * len(devices)
    capacities = dict(zip(devices, num_bytes_of, strict=True))
    held = dict.fromkeys(devices, 0)
    num_bytes = sum(parameter.nbytes for parameter in module.parameters())
    run_bytes = min(num_bytes // (2 * len(held)), BUCKET_BYTES)
    home, free_bytes = devices[0], run_bytes
    seen: set[nn.Parameter] = set()
    for submodule in module.modules():
        own = [p for p in submodule.parameters(recurse=False) if p not in seen]
        seen.update(own)
        size = sum(parameter.nbytes for parameter in own)
        if size > free_bytes and any(held.values()):
            fractions = {d: (held[d] + size) / capacities[d] for d in devices}
            home, free_bytes = min(devices, key=fractions.__getitem__), run_bytes
        held[home] += size
        free_bytes -= size
        for parameter in own:
            move_in_place(parameter, home)
        for buffer in submodule.buffers(recurse=False):
            move_in_place(buffer, devices[0])


def move_in_place(tensor: torch.Tensor, device: torch.device) -> None:
    """Move a tensor and its ``grad`` to ``device``, without making a new tensor object.

    A tensor on the meta device, such as an offloaded parameter, is not moved.
    """
    if tensor.device == device or tensor.is_meta:
        return
    grad, tensor.grad = tensor.grad, None
    moved = tensor.detach().to(device)
    try:
        tensor.data = moved
    except RuntimeError:  # from the CPU to an emulated device, whose tensors are of another class
        is_parameter = isinstance(tensor, nn.Parameter)
        moved = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
        torch.utils.swap_tensors(tensor, moved)
    tensor.grad = None if grad is None else grad.to(device)
