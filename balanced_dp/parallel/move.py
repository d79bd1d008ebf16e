"""Move tensors to another device, without blocking the host where that is possible."""

from __future__ import annotations

import torch

from ..devices import copy_stream, is_cuda, on_stream


def move(tensor: torch.Tensor, device: torch.device, copy: bool = False) -> torch.Tensor:
    """Return the tensor on ``device``; a new tensor if ``copy`` is set. Differentiable."""
    if not is_cuda(device) or tensor.device.type != "cpu":
        # A copy to the CPU that does not block could be read before it is complete.
        return tensor.to(device, non_blocking=device.type != "cpu", copy=copy)
    stream = copy_stream(device)  # so that it does not wait for the kernels queued there
    with on_stream(stream):
        copied = tensor.to(device, non_blocking=True)
    current = torch.get_device_module(device).current_stream(device)
    current.wait_stream(stream)
    copied.record_stream(current)
    return copied
