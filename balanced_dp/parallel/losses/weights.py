"""Weights given by the caller; sums and weighted means of tensors on several devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ...errors import ArgumentError, ArgumentTypeError
from ...torch_versions import run_at_once
from ..nested import described, named_arguments, parameters

ScalarOutputs = Literal["auto", "mean", "sum", "stack"]
"""How 0-dim outputs are joined, as in ``BalancedDataParallel``."""

Tensors = Sequence[Tensor]
"""One for each replica."""


def joined(tensors: Tensors, weights: Sequence[Any] | None, device: torch.device) -> Tensor:
    """Return the sum or the weighted mean of 0-dim tensors, on ``device``.

    Args:
        tensors: a mean or a sum over each chunk. Where the weight is 0, it is ignored, also if it
            is 0 / 0. If all weights are 0, the result is NaN.
        weights: for each, a number or a 0-dim tensor, which is not read: that would wait for its
            device. None adds the tensors up.
        device: the device of the result.
    """
    if weights is None:
        return functools.reduce(torch.add, moved(tensors, device))
    means = torch.stack(moved(tensors, device))
    # torch.full, because other ways copy numbers from the host, and wait.
    numbers = (w if isinstance(w, Tensor) else torch.full((), w, device=device) for w in weights)
    totals = torch.stack([number.to(device) for number in numbers]).double()
    totals = totals.where(totals.sum() != 0, math.nan)
    means = means.masked_fill(totals == 0, 0)
    dtype = torch.promote_types(means.dtype, torch.float32)  # where no sum of counts overflows
    return torch.dot(means.to(dtype), (totals / totals.sum()).to(dtype)).to(means.dtype)


def moved(tensors: Tensors, device: torch.device) -> list[Tensor]:
    """Return the tensors on ``device``."""
    there = [tensor.to(device) for tensor in tensors]
    for before, after in zip(tensors, there, strict=True):
        if after is not before and after.grad_fn is not None:
            run_at_once(after.grad_fn)  # or other replicas would wait for the first
    return there


def check_options(scalar_outputs: object, loss_weight: object = None) -> None:
    """Check the arguments ``scalar_outputs`` and ``loss_weight``.

    Raises:
        ArgumentError: ``scalar_outputs`` is none of ``ScalarOutputs``, or both are given.
        ArgumentTypeError: ``loss_weight`` is neither a function nor None.
    """
    kinds = get_args(ScalarOutputs)
    if scalar_outputs not in kinds:
        raise ArgumentError(f"scalar_outputs must be one of {kinds}, got {scalar_outputs!r}")
    if loss_weight is not None and scalar_outputs != "auto":
        raise ArgumentError(f"give loss_weight or scalar_outputs={scalar_outputs!r}, not both")
    if loss_weight is not None and not callable(loss_weight):
        raise ArgumentTypeError(f"loss_weight must be a function, got {loss_weight!r}")


def weight_of_chunk(
    loss_weight: Callable[..., Any],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return the weight of a chunk: a number, a 0-dim tensor, or a dictionary of these.

    Args:
        loss_weight: it is called with the arguments of ``function`` that its parameters name.
        function: the function that computes the losses.
        args: its positional arguments for the chunk.
        kwargs: its keyword arguments.

    Raises:
        ArgumentError: the call lacks an argument, or the result is not a number of at least 0.
    """
    named = dict(named_arguments(function, args, kwargs))
    names = [n for n, p in parameters(loss_weight).items() if n in named or p.default is p.empty]
    if not named.keys() >= {*names}:
        raise ArgumentError(
            f"loss_weight ({described(loss_weight)}) takes {', '.join(names)}, but the arguments "
            f"of the call are {', '.join(named) or 'none'}; name its parameters after some of "
            "these, with a default for each that a call may omit"
        )
    weight = loss_weight(**{name: named[name] for name in names})
    if isinstance(weight, Mapping):
        return {name: _checked(value) for name, value in weight.items()}
    return _checked(weight)


def _checked(weight: Any) -> float | Tensor:
    """Return a weight after a check; a tensor is not read, as that would wait for its device."""
    if isinstance(weight, Tensor) and weight.numel() == 1:
        return weight.detach().reshape(())
    if not isinstance(weight, Real) or not 0 <= float(weight) < math.inf:
        raise ArgumentError(
            f"loss_weight must return a number of at least 0, a tensor with one, or a dictionary "
            f"of these by output name, got {weight!r}"
        )
    return float(weight)
