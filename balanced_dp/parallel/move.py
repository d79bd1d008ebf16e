"""Move tensors to another device, without blocking the host where that is possible."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..devices import copy_stream, is_cuda, on_stream


def move(tensor: torch.Tensor, device: torch.device, copy: bool = False) -> torch.Tensor:
    """Return the tensor on ``device``; a new tensor if ``copy`` is set. Differentiable."""
    return move_all([tensor], device, copy)[0]


def move_all(
    tensors: Iterable[torch.Tensor], device: torch.device, copy: bool = False
) -> list[torch.Tensor]:
    """Return each tensor on ``device``, as ``move`` does."""
    return [
        _upload(tensor, device)
        if is_cuda(device) and tensor.device.type == "cpu"
        # A copy to the CPU that does not block could be read before it is complete.
        else tensor.to(device, non_blocking=device.type != "cpu", copy=copy)
        for tensor in tensors
    ]


def _upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on a CUDA device that does not wait for the kernels queued there."""
    stream = copy_stream(device)
    with on_stream(stream):
        copied = tensor.to(device, non_blocking=True)
    current = torch.get_device_module(device).current_stream(device)
    current.wait_stream(stream)
    copied.record_stream(current)
    return copied
