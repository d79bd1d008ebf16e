"""Add up 0-dim tensors of the replicas, and what is done to their gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...torch_versions import run_at_once


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on ``device``."""
    there = [tensor.to(device) for tensor in tensors]
    for before, after in zip(tensors, there, strict=True):
        if after is not before and after.grad_fn is not None:
            run_at_once(after.grad_fn)  # or other replicas would wait for the first
    return there


def total(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of tensors of one shape, on ``device``."""
    return functools.reduce(torch.add, moved(tensors, device))


def weighted_mean(
    tensors: Sequence[Tensor],
    weights: Sequence[Any],
    device: torch.device,
    *,
    ignores_empty: bool = True,
) -> Tensor:
    """Return the weighted mean of 0-dim tensors on ``device``.

    Args:
        tensors: a mean over each chunk. One whose weight is 0 is ignored if it is not finite.
        weights: for each, a number or a 0-dim tensor, which is not read: that would wait for its
            device.
        device: the device of the result.
        ignores_empty: whether those with the weight 0 are always ignored. If not, they are added as
            they are, since a count of 0 was replaced by 1 in their divisor.
    """
    shares, means = column(weights, device), torch.stack(moved(tensors, device))
    total, is_empty = shares.sum(), shares == 0
    if ignores_empty:
        means = means.masked_fill(is_empty, 0)
    else:
        means = means.masked_fill(is_empty & (total != 0) & ~means.isfinite(), 0)
        total = total.where(total != 0, 1)
    dtype = torch.promote_types(means.dtype, torch.float32)  # where no sum of counts overflows
    shares = shares.masked_fill(is_empty, 1).to(dtype) / total.to(dtype)
    return torch.dot(means.to(dtype), shares).to(means.dtype)


def column(weights: Sequence[Any], device: torch.device) -> Tensor:
    """Return weights as a vector on ``device``, without waiting for it."""
    return torch.stack(
        [
            weight.to(device)
            if isinstance(weight, Tensor)
            else torch.full((), weight, device=device)
            for weight in weights
        ]
    ).double()


def ignore_if_empty(nodes: Sequence[Any], weights: Sequence[Any]) -> None:
    """Replace gradients of a reduction that are 0 / 0, on replicas whose weight is 0, by 0."""
    for node, weight in zip(nodes, weights, strict=False):
        if isinstance(weight, Tensor):
            node.register_prehook(functools.partial(_zero_where, weight == 0))


def _zero_where(is_empty: Tensor, gradients: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        g if g is None else g.masked_fill(is_empty.to(g.device) & ~g.isfinite(), 0)
        for g in gradients
    )
