"""Many tensors to other devices, in few pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import comm

from .devices import is_cuda
from .scatter_gather import move, move_all

BUCKET_BYTES = 25 * 2**20
"""What a bucket holds at most, unless it is a single tensor.

Source: ``bucket_cap_mb`` of torch 2.13's ``DistributedDataParallel``.
"""

Copies = Mapping[torch.device, Sequence[torch.Tensor]]
"""For each device, copies of the same tensors in the same order."""


def fill_buckets(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Returns the positions of the tensors of each bucket.

    The tensors of a bucket have one dtype, and at most an eighth of all bytes or ``BUCKET_BYTES``.
    One that is larger has a bucket of its own, and so has one whose memory is not its elements in
    order, and one with hooks: autograd would call them with None where a bucket has gradients for
    others only.

    Args:
        tensors: all on one device.
    """
    plain = [_is_plain(tensor) for tensor in tensors]
    num_bytes = sum(tensor.nbytes for tensor in compress(tensors, plain))
    bucket_bytes = min(num_bytes // 8, BUCKET_BYTES)
    buckets: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    free_bytes: dict[torch.dtype, int] = {}
    for position, tensor in enumerate(tensors):
        kind = tensor.dtype
        if not plain[position] or has_hooks(tensor):
            buckets.append([position])
            continue
        if free_bytes.get(kind, -1) < tensor.nbytes:
            filling[kind] = []
            free_bytes[kind] = bucket_bytes
            buckets.append(filling[kind])
        filling[kind].append(position)
        free_bytes[kind] -= tensor.nbytes
    return buckets


def copy_to(
    devices: Sequence[torch.device], tensors: Sequence[torch.Tensor]
) -> dict[torch.device, list[torch.Tensor]]:
    """Returns, for each device, copies of the tensors in their order, also of those already there.

    Between CUDA devices they travel in few pieces, by NCCL where torch has it.

    Args:
        devices: where the copies go; none twice.
        tensors: what is to be copied; differentiably, unless gradients are off.
    """
    if not all(map(is_cuda, devices)):
        return {device: move_all(tensors, device, copy=True) for device in devices}
    is_recorded = torch.is_grad_enabled()
    together = {
        i: t
        for i, t in enumerate(tensors)
        if _is_plain(t)
        and is_cuda(t.device)
        and t.device not in devices
        and not (t.is_complex() or (is_recorded and t.requires_grad))  # torch's gives real ones
    }
    copies = {
        device: [t if i in together else move(t, device, copy=True) for i, t in enumerate(tensors)]
        for device in devices
    }
    if together:
        sources = list(together.values())
        everywhere = [sources[0].device, *devices]
        sent = comm.broadcast_coalesced(sources, everywhere, BUCKET_BYTES)
        for device, parts in zip(devices, sent[1:], strict=True):
            for i, part in zip(together, parts, strict=True):
                copies[device][i] = part
    return copies


def bring_to(
    device: torch.device, gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Returns the gradients of a bucket on ``device``. Differentiable.

    Dense ones travel to a CUDA device in one piece.
    """
    if not is_cuda(device):
        return [None if g is None else move(g, device) for g in gradients]
    dense = [g for g in gradients if g is not None and g.layout is torch.strided]
    parts = iter(in_one_piece(dense, device))
    return [
        None if g is None else next(parts) if g.layout is torch.strided else move(g, device)
        for g in gradients
    ]


def in_one_piece(tensors: Sequence[torch.Tensor], device: torch.device) -> Sequence[torch.Tensor]:
    """Returns the dense tensors, alike in dtype, on ``device``; they share memory there."""
    if len(tensors) < 2:
        return move_all(tensors, device)
    flat = move(_flatten_dense_tensors(tensors), device)
    parts: Sequence[torch.Tensor] = _unflatten_dense_tensors(flat, tensors)
    if flat.requires_grad:  # under create_graph
        return parts
    # They are tensors of their own: what is written to one leaves the version of others alone.
    return [part.data for part in parts]


def has_hooks(tensor: torch.Tensor) -> bool:
    """Returns whether anybody is told of the gradient of a tensor."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _is_plain(tensor: torch.Tensor) -> bool:
    is_wrapper = hasattr(tensor, "__tensor_flatten__")
    return tensor.layout is torch.strided and tensor.is_contiguous() and not is_wrapper
