"""Run ``nn.DataParallel``'s steps without GPUs, to measure how much time they take in Python.

The functions replicate, scatter, parallel_apply and gather of ``torch.nn.parallel`` run unchanged.
Stand-ins replace the functions of CUDA that they call. Weights are passed on instead of copied, and
their gradients are added up in the cheapest way that torch has. Setting the current stream or
device does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import parallel

_replicate = importlib.import_module("torch.nn.parallel.replicate")
_parallel_apply = importlib.import_module("torch.nn.parallel.parallel_apply")
_scatter_gather = importlib.import_module("torch.nn.parallel.scatter_gather")


class Broadcast(torch.autograd.Function):
    """Replaces torch's ``Broadcast``: the results are detached tensors instead of copies."""

    @staticmethod
    def forward(ctx: Any, devices: Sequence[int], *inputs: torch.Tensor) -> tuple[Any, ...]:
        ctx.num_inputs = len(inputs)
        return tuple(tensor for copies in broadcast(inputs, devices) for tensor in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        first, *others = (
            gradients[i : i + ctx.num_inputs] for i in range(0, len(gradients), ctx.num_inputs)
        )
        total = functools.reduce(torch._foreach_add, map(list, others), list(first))
        return None, *total


def broadcast(tensors: Sequence[torch.Tensor], devices: Sequence[int]) -> list[list[torch.Tensor]]:
    """Return for each device a list of the detached tensors, in place of copies on the device."""
    return [[tensor.detach() for tensor in tensors] for _ in devices]


def broadcast_coalesced_reshape(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], detach: bool = False
) -> list[list[torch.Tensor]]:
    """Replace ``_broadcast_coalesced_reshape`` of ``torch.nn.parallel.replicate``."""
    if detach or not tensors:
        return broadcast(tensors, devices)
    flat = Broadcast.apply(devices, *tensors)
    return [list(flat[i : i + len(tensors)]) for i in range(0, len(flat), len(tensors))]


class Scatter(torch.autograd.Function):
    """Replaces torch's ``Scatter``: the chunks are on the CPU."""

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
    """Replaces torch's ``Gather``: the result is on the CPU."""

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
    """Let the functions of ``torch.nn.parallel`` run without GPUs inside a ``with`` block."""
    with (
        mock.patch.object(_replicate, "_broadcast_coalesced_reshape", broadcast_coalesced_reshape),
        mock.patch.object(_scatter_gather, "Scatter", Scatter),
        mock.patch.object(_scatter_gather, "Gather", Gather),
        mock.patch.object(torch, "accelerator", _accelerator, create=True),
        mock.patch.object(torch.cuda, "current_stream", _accelerator.current_stream),
        mock.patch.object(torch.cuda, "stream", lambda stream: stream),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
    ):
        yield


def stock_steps(module: nn.Module, num_devices: int) -> Callable[..., Any]:
    """Return a function that calls the module as ``nn.DataParallel.forward`` does."""
    ids = list(range(num_devices))

    def forward(*inputs: Any) -> Any:
        scattered, kwargs = _scatter_gather.scatter_kwargs(inputs, {}, ids)
        replicas = _replicate.replicate(module, ids, not torch.is_grad_enabled())
        outputs = _parallel_apply.parallel_apply(replicas, scattered, kwargs, ids)
        return parallel.gather(outputs, 0)

    return forward
