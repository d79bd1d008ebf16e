"""Copy many tensors to other devices in few pieces.

A launch takes time for each tensor, so tensors of one dtype are flattened into buckets: parameters
and buffers on their way to several devices, which NCCL broadcasts, and gradients on their way back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import comm

from ..devices import gradient_stream, is_cuda, on_stream, weight_stream
from ..torch_versions import copy_all
from .arrivals import Arrivals
from .scatter import move

BUCKET_BYTES = 25 * 2**20
"""The most bytes in a bucket of several tensors.

Source: ``bucket_cap_mb`` of torch 2.13's ``DistributedDataParallel``.
"""

LEAST_BYTES = 2**20
"""The least capacity of a bucket of parameters, since each is launched on all devices.

Source: the first bucket of torch 2.13's ``DistributedDataParallel``.
"""

_NCCL_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}
"""The dtypes that any version of NCCL sends.

Source: ``to_nccl_data_type`` in torch/csrc/cuda/nccl.cpp.
"""

_sending = threading.Lock()
"""Held while tensors are sent, as several threads may call models that have the same devices.

NCCL launches kernels that wait for each other on one device after the other. If in between another
thread let one of these streams wait for another, there would be a deadlock.
"""

Copies = Mapping[torch.device, Sequence[torch.Tensor]]
"""For each device, copies of the same tensors in the same order."""


def fill_buckets(tensors: Sequence[torch.Tensor], *, of_gradients: bool = True) -> list[list[int]]:
    """Distribute tensors over buckets, and return the positions of the tensors in each bucket.

    The tensors of a bucket have one dtype and device, and together at most an eighth of all bytes
    and at most ``BUCKET_BYTES``. A larger tensor has a bucket of its own, and so has one that is
    not contiguous, or not an ordinary dense tensor.

    Args:
        tensors: the tensors.
        of_gradients: whether the buckets are for gradients. If so, a tensor with hooks has a bucket
            of its own, since autograd would call them with None if only others in its bucket had
            gradients. If not, a bucket holds up to ``LEAST_BYTES`` even if that is more.
    """
    sizes = [tensor.nbytes if _is_plain(tensor) else None for tensor in tensors]
    num_bytes = sum(filter(None, sizes))
    bucket_bytes = min(max(num_bytes // 8, 0 if of_gradients else LEAST_BYTES), BUCKET_BYTES)
    buckets: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], _Bucket] = {}
    for position, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        if size is None or (of_gradients and has_hooks(tensor)):
            buckets.append([position])
            continue
        kind = (tensor.dtype, tensor.device)
        bucket = filling.get(kind)
        if bucket is None or bucket.free_bytes < size:
            bucket = filling[kind] = _Bucket([], bucket_bytes)
            buckets.append(bucket.positions)
        bucket.positions.append(position)
        bucket.free_bytes -= size
    return buckets


@dataclass(slots=True)
class _Bucket:
    positions: list[int]
    free_bytes: int


def copy_to(
    devices: Sequence[torch.device],
    tensors: Sequence[torch.Tensor],
    arrivals: Arrivals | None = None,
) -> dict[torch.device, list[torch.Tensor]]:
    """Return all tensors in order for each device: copies, or those that are already there.

    Between CUDA devices they are copied in few pieces; to several, by NCCL if torch has it.

    Args:
        devices: the destinations; none twice.
        tensors: the tensors to copy. The copies are differentiable if gradients are enabled.
        arrivals: records when each copy is complete. If None, the current streams wait for all
            copies.
    """
    if not all(map(is_cuda, devices)):
        return {device: [move(t, device) for t in tensors] for device in devices}
    is_recorded = torch.is_grad_enabled()
    copies = {device: list(tensors) for device in devices}
    together = []
    for i, t in enumerate(tensors):
        is_sent = _is_plain(t) and is_cuda(t.device) and t.dtype in _NCCL_DTYPES
        if is_sent and not (is_recorded and t.requires_grad):
            together.append(i)
        else:
            for device, own in copies.items():
                own[i] = move(t, device)
    if together and devices:
        transfers = arrivals or Arrivals()
        _send(tensors, together, copies, transfers)
        if arrivals is None:
            transfers.join()
    return copies


@torch.no_grad()
def _send(
    tensors: Sequence[torch.Tensor],
    positions: Sequence[int],
    copies: Mapping[torch.device, list[torch.Tensor]],
    arrivals: Arrivals,
) -> None:
    """Set the copies at these positions. Those of a bucket share memory."""
    filled = fill_buckets([tensors[i] for i in positions], of_gradients=False)
    buckets = [[positions[i] for i in bucket] for bucket in filled]
    pieces = []  # uninitialized, and memory of the current streams
    for bucket in buckets:
        home, dtype = tensors[bucket[0]].device, tensors[bucket[0]].dtype
        size = sum(tensors[i].numel() for i in bucket)
        others = [device for device in copies if device != home]
        pieces.append([torch.empty(size, dtype=dtype, device=device) for device in others])
    devices = dict.fromkeys([*(tensors[i].device for i in positions), *copies])
    with _sending, contextlib.ExitStack() as stack:
        # After an error the pieces are freed, so the copies must be over.
        stack.push(lambda kind, *_: arrivals.join() if kind else None)
        arrivals.expect(devices)
        for device in devices:
            stack.enter_context(on_stream(weight_stream(device)))
        for bucket, there in zip(buckets, pieces, strict=True):
            originals = [tensors[i] for i in bucket]
            if not there:
                continue
            piece = _flatten_dense_tensors(originals).resolve_neg()
            if len(there) == 1:
                there[0].copy_(piece, non_blocking=True)
            else:
                comm.broadcast(piece, out=there)
            arrivals.note(originals[0].device, originals)
            for flat in there:
                # Tensors of their own, with versions of their own.
                parts = [part.data for part in _unflatten_dense_tensors(flat, originals)]
                arrivals.note(flat.device, parts)
                for i, part in zip(bucket, parts, strict=True):
                    copies[flat.device][i] = part


def bring_to(
    device: torch.device, gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the gradients of a bucket on ``device``. Differentiable.

    Between CUDA devices they are copied on a stream of their own, so that its computing goes on,
    and dense ones in one piece. The current stream of the source device waits for the copy.
    """
    source = next((g.device for g in gradients if g is not None), device)
    if not is_cuda(device) or not is_cuda(source):
        return [None if g is None else move(g, device) for g in gradients]
    present = [g for g in gradients if g is not None]
    stream = gradient_stream(device, source)
    with on_stream(stream):
        if len(present) > 1 and all(g.layout is torch.strided for g in present):
            flat = move(_flatten_dense_tensors(present), device)
            brought = list(_unflatten_dense_tensors(flat, present))
            if not torch.is_grad_enabled():  # unless create_graph is set
                # A view that becomes a .grad would keep the memory of all.
                own = [torch.empty_like(view) for view in brought]
                copy_all(own, brought)
                brought = own
        else:
            brought = [move(g, device) for g in present]
    torch.get_device_module(source).current_stream(source).wait_stream(stream)
    parts = iter(brought)
    return [None if g is None else next(parts) for g in gradients]


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has hooks on its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be flattened into a bucket and rebuilt from it."""
    is_wrapper = hasattr(tensor, "__tensor_flatten__")
    is_dense = tensor.layout is torch.strided and tensor.is_contiguous()
    return is_dense and not is_wrapper
