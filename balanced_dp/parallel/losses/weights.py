"""Sums and weighted means of tensors that are on several devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...torch_versions import run_at_once

Tensors = Sequence[Tensor]
"""One for each replica."""


def total(tensors: Tensors, device: torch.device) -> Tensor:
    """Return the sum of tensors of one shape, on ``device``."""
    return functools.reduce(torch.add, moved(tensors, device))


def weighted_mean(
    tensors: Tensors, weights: Sequence[Any], device: torch.device, if_empty: float = math.nan
) -> Tensor:
    """Return the weighted mean of 0-dim tensors on ``device``.

    Args:
        tensors: a mean over each chunk. Where the weight is 0, it is ignored, also if it is 0 / 0.
        weights: for each, a number or a 0-dim tensor, which is not read: that would wait for its
            device.
        device: the device of the result.
        if_empty: the weights if all are 0.
    """
    means = torch.stack(moved(tensors, device))
    shares = torch.stack([_to_tensor(weight, device) for weight in weights]).double()
    shares = shares.where(shares.sum() != 0, if_empty)
    means = means.masked_fill(shares == 0, 0)
    dtype = torch.promote_types(means.dtype, torch.float32)  # where no sum of counts overflows
    return torch.dot(means.to(dtype), (shares / shares.sum()).to(dtype)).to(means.dtype)


def _to_tensor(weight: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.to(device)
    return torch.full((), weight, device=device)  # other ways copy from the host, and wait


def moved(tensors: Tensors, device: torch.device) -> list[Tensor]:
    """Return the tensors on ``device``."""
    there = [tensor.to(device) for tensor in tensors]
    for before, after in zip(tensors, there, strict=True):
        if after is not before and after.grad_fn is not None:
            run_at_once(after.grad_fn)  # or other replicas would wait for the first
    return there


def ignore_if_empty(nodes: Sequence[Any], weights: Sequence[Any]) -> None:
    """Replace the gradients of sums that are 0 / 0, on replicas whose weight is 0, by 0."""
    for node, weight in zip(nodes, weights, strict=False):
        if isinstance(weight, Tensor):
            node.register_prehook(functools.partial(_zero_where, weight == 0))


def _zero_where(is_empty: Tensor, gradients: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        g if g is None else g.masked_fill(is_empty.to(g.device) & ~g.isfinite(), 0)
        for g in gradients
    )
