"""Add up values of the replicas."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ...torch_versions import run_at_once


def moved(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return the tensors on ``device``."""
    there = [tensor.to(device) for tensor in tensors]
    for before, after in zip(tensors, there, strict=True):
        if after is not before and after.grad_fn is not None:
            run_at_once(after.grad_fn)  # or other replicas would wait for the first
    return there


def total(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of tensors of one shape, on ``device``."""
    return functools.reduce(torch.add, moved(tensors, device))


def weighted_mean(
    tensors: Sequence[torch.Tensor], weights: Sequence[Any], device: torch.device
) -> torch.Tensor:
    """Return the weighted mean of tensors of one shape, on ``device``.

    Args:
        tensors: a mean over each chunk; 0-dim if weights are tensors.
        weights: for each, a number or a 0-dim tensor, which is not read: that would wait for its
            device. A tensor whose weight is 0 is ignored, even if it is NaN. If all weights are the
            number 0, they count as equal.
        device: the device of the result.
    """
    if not any(isinstance(weight, torch.Tensor) for weight in weights):
        weights = weights if any(weights) else [1] * len(weights)
        counted = [i for i, weight in enumerate(weights) if weight]
        parts = moved([tensors[i] for i in counted], device)
        fractions = [weights[i] / sum(weights) for i in counted]
        mean: torch.Tensor = parts[0] * fractions[0]
        for part, fraction in zip(parts[1:], fractions[1:], strict=True):
            mean = mean.add(part, alpha=fraction)
        return mean
    counts = [torch.as_tensor(weight, device=device) for weight in weights]
    weight, means = torch.stack(counts), torch.stack(moved(tensors, device))
    dtype = torch.promote_types(means.dtype, torch.float32)  # where no sum of counts overflows
    means = means.masked_fill(weight == 0, 0)
    return torch.dot(means.to(dtype), weight.to(dtype) / weight.sum()).to(means.dtype)
