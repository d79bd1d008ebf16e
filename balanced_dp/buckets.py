"""Many tensors to other devices, in few pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import comm

from .scatter_gather import move

SMALLEST_BUCKET_BYTES = 2**17
"""Copying as many between devices takes about as long as beginning to (5 us at 25 GB/s)."""

LARGEST_BUCKET_BYTES = 25 * 2**20
"""Source: ``bucket_cap_mb`` of torch 2.13's ``DistributedDataParallel``."""

Copies = Mapping[torch.device, Sequence[torch.Tensor]]
"""For each device, copies of the same tensors in the same order."""


def fill_buckets(tensors: Sequence[torch.Tensor], order: Iterable[int]) -> list[list[int]]:
    """Returns the positions of the tensors of each bucket.

    The tensors of a bucket are alike in device, dtype and ``requires_grad``, and are an eighth of
    all together, within the limits above. One whose memory is not its elements in order has a
    bucket of its own, and so has one that is larger.

    Args:
        tensors: what is to be sent.
        order: positions, in the order in which they go into buckets.
    """
    eighth = sum(tensor.nbytes for tensor in tensors) // 8
    bucket_bytes = min(max(eighth, SMALLEST_BUCKET_BYTES), LARGEST_BUCKET_BYTES)
    buckets: list[list[int]] = []
    filling: dict[Any, list[int]] = {}
    free_bytes: dict[Any, int] = {}
    for position in order:
        tensor = tensors[position]
        if not _is_plain(tensor):
            buckets.append([position])
            continue
        kind = tensor.device, tensor.dtype, tensor.requires_grad
        if free_bytes.get(kind, -1) < tensor.nbytes:
            filling[kind] = []
            free_bytes[kind] = bucket_bytes
            buckets.append(filling[kind])
        filling[kind].append(position)
        free_bytes[kind] -= tensor.nbytes
    return buckets


def copy_to(
    devices: Sequence[torch.device],
    tensors: Sequence[torch.Tensor],
    buckets: Iterable[Sequence[int]],
) -> dict[torch.device, list[torch.Tensor]]:
    """Returns copies of the tensors on each device, none of which is theirs.

    Args:
        devices: where the copies go; none twice.
        tensors: those of a bucket are on one device.
        buckets: the positions of those that travel together.
    """
    copies = {device: list(tensors) for device in devices}
    for positions in buckets:
        sent = _send([tensors[position] for position in positions], devices)
        for device, parts in zip(devices, sent, strict=True):
            for position, part in zip(positions, parts, strict=True):
                copies[device][position] = part
    return copies


def bring_to(
    device: torch.device, gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Returns the gradients of a bucket on ``device``, dense ones in one piece."""
    is_dense = [g is not None and g.layout is torch.strided for g in gradients]
    dense = [g for g in gradients if g is not None and g.layout is torch.strided]
    parts = iter(_send(dense, [device])[0] if dense else ())
    return [
        next(parts) if is_dense else None if g is None else move(g, device)
        for g, is_dense in zip(gradients, is_dense, strict=True)
    ]


def _is_plain(tensor: torch.Tensor) -> bool:
    is_wrapper = hasattr(tensor, "__tensor_flatten__")
    return tensor.layout is torch.strided and tensor.is_contiguous() and not is_wrapper


def _send(
    tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]
) -> list[Sequence[torch.Tensor]]:
    if len(tensors) == 1:
        return [[copy] for copy in _send_one(tensors[0], devices, copy=True)]
    flat = _flatten_dense_tensors(tensors)
    return [_parts(arrived, tensors) for arrived in _send_one(flat, devices)]


def _send_one(
    tensor: torch.Tensor, devices: Sequence[torch.device], copy: bool = False
) -> Sequence[torch.Tensor]:
    types = {tensor.device.type, *(device.type for device in devices)}
    if len(devices) > 1 and types == {"cuda"} and _is_plain(tensor) and not tensor.is_complex():
        everywhere: Sequence[torch.Tensor]
        everywhere = comm.broadcast(tensor, [tensor.device, *devices])  # by NCCL, where it can
        return everywhere[1:]
    return [move(tensor, device, copy) for device in devices]


def _parts(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    parts: Sequence[torch.Tensor] = _unflatten_dense_tensors(flat, like)
    if torch.is_grad_enabled():
        return parts
    # They are tensors of their own: what is written to one leaves the version of others alone.
    return [part.data for part in parts]
