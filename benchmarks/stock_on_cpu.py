"""``nn.DataParallel``'s own steps without GPUs, for what they cost in Python.

``torch.nn.parallel``'s replicate, scatter, parallel_apply and gather run as they are. What they
need of CUDA has a stand-in: copies are made on the CPU, by the cheapest means that torch has, and
streams and current devices are nothing.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import parallel

_replicate = importlib.import_module("torch.nn.parallel.replicate")
_parallel_apply = importlib.import_module("torch.nn.parallel.parallel_apply")
_scatter_gather = importlib.import_module("torch.nn.parallel.scatter_gather")


class Broadcast(torch.autograd.Function):
    """As torch's: the tensors themselves for the first device, copies for the others."""

    @staticmethod
    def forward(ctx: Any, devices: Sequence[int], *inputs: torch.Tensor) -> tuple[Any, ...]:
        ctx.num_inputs = len(inputs)
        return tuple(tensor for copies in broadcast(inputs, devices) for tensor in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        first, *others = (
            gradients[i : i + ctx.num_inputs] for i in range(0, len(gradients), ctx.num_inputs)
        )
        total = _flatten_dense_tensors(first)
        for other in others:
            total.add_(_flatten_dense_tensors(other))
        return None, *(part.data for part in _unflatten_dense_tensors(total, first))


def broadcast(tensors: Sequence[torch.Tensor], devices: Sequence[int]) -> list[list[torch.Tensor]]:
    """Returns the tensors and their copies, as ``comm.broadcast_coalesced`` does."""
    copies = [[tensor.detach() for tensor in tensors]]
    flat = _flatten_dense_tensors(tensors)
    for _ in devices[1:]:
        parts = _unflatten_dense_tensors(flat.clone(), tensors)
        copies.append([part.data for part in parts])
    return copies


def broadcast_coalesced_reshape(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], detach: bool = False
) -> list[list[torch.Tensor]]:
    """Stands in for the function of this name in torch's replicate."""
    groups: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(i)
    result: list[list[Any]] = [[None] * len(tensors) for _ in devices]
    for indices in groups.values():
        group = [tensors[i] for i in indices]
        if detach:
            copies = broadcast(group, devices)
        else:
            flat = Broadcast.apply(devices, *group)
            copies = [flat[i : i + len(group)] for i in range(0, len(flat), len(group))]
        for device, tensors_there in zip(result, copies, strict=True):
            for i, tensor in zip(indices, tensors_there, strict=True):
                device[i] = tensor
    return result


class Scatter(torch.autograd.Function):
    """As torch's, to the CPU."""

    @staticmethod
    def forward(
        ctx: Any, devices: Sequence[int], sizes: None, dim: int, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.dim = dim
        return tuple(chunk.clone() for chunk in tensor.chunk(len(devices), dim))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, torch.cat(gradients, ctx.dim)


class Gather(torch.autograd.Function):
    """As torch's, to the CPU."""

    @staticmethod
    def forward(ctx: Any, device: int, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.dim, ctx.sizes = dim, [tensor.size(dim) for tensor in tensors]
        return torch.cat(tensors, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *gradient.split(ctx.sizes, ctx.dim)


_accelerator = SimpleNamespace(
    is_available=lambda: True,
    current_accelerator=lambda: torch.device("cpu"),
    current_stream=lambda device: contextlib.nullcontext(),
    device_index=lambda device: contextlib.nullcontext(),
)


@contextlib.contextmanager
def stock_on_cpu() -> Iterator[None]:
    """Has torch's own steps run without GPUs."""
    with (
        mock.patch.object(_replicate, "_broadcast_coalesced_reshape", broadcast_coalesced_reshape),
        mock.patch.object(_scatter_gather, "Scatter", Scatter),
        mock.patch.object(_scatter_gather, "Gather", Gather),
        mock.patch.object(torch, "accelerator", _accelerator),
    ):
        yield


def stock_steps(module: nn.Module, num_devices: int) -> Callable[..., Any]:
    """Returns what calls the module as ``nn.DataParallel.forward`` does."""
    ids = list(range(num_devices))

    def forward(*inputs: Any) -> Any:
        scattered, kwargs = _scatter_gather.scatter_kwargs(inputs, {}, ids)
        replicas = _replicate.replicate(module, ids, not torch.is_grad_enabled())
        outputs = _parallel_apply.parallel_apply(replicas, scattered, kwargs, ids)
        return parallel.gather(outputs, 0)

    return forward
