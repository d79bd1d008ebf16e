"""Add up or average tensors of several replicas, and call the user's function ``loss_weight``."""

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
from ..nested import Arguments, described, named_arguments, parameters

ScalarOutputs = Literal["auto", "mean", "sum", "stack"]
"""The type of the argument ``scalar_outputs``: how 0-dim outputs of replicas are joined."""

Tensors = Sequence[Tensor]
"""One tensor for each replica."""


def joined(tensors: Tensors, weights: Sequence[Any] | None, device: torch.device) -> Tensor:
    """Return the sum or the weighted mean of 0-dim tensors, on ``device``.

    Args:
        tensors: for each replica, a mean or a sum over its part of the batch. A mean of weight 0 is
            ignored, even if the mean is 0 / 0. If all weights are 0, the result is NaN.
        weights: the weight of each mean, a number or a 0-dim tensor. If ``weights`` is None,
            ``tensors`` are added up. The value of a weight that is a tensor is not read on the
            host, since the host would have to wait for the device.
        device: the device of the result.
    """
    if weights is None:
        return functools.reduce(torch.add, moved(tensors, device))
    means = torch.stack(moved(tensors, device))
    # torch.full is used because other functions copy numbers from the host, and wait for the copy.
    numbers = (w if isinstance(w, Tensor) else torch.full((), w, device=device) for w in weights)
    totals = torch.stack([number.to(device) for number in numbers]).double()
    means = means.masked_fill(totals == 0, 0)
    dtype = torch.promote_types(means.dtype, torch.float32)  # half would round weights
    return torch.dot(means.to(dtype), (totals / totals.sum()).to(dtype)).to(means.dtype)


def moved(tensors: Tensors, device: torch.device) -> list[Tensor]:
    """Return the tensors, each copied to ``device`` unless it is there already."""
    there = [tensor.to(device) for tensor in tensors]
    for before, after in zip(tensors, there, strict=True):
        if after is not before and after.grad_fn is not None:
            # Let autograd run the backward of this copy as early as possible. By default, autograd
            # could first run the backward of the replica on ``device``, and the other replicas
            # would have to wait for their gradients.
            run_at_once(after.grad_fn)
    return there


def check_options(scalar_outputs: object, loss_weight: object = None) -> None:
    """Raise an error if ``scalar_outputs`` or ``loss_weight`` is invalid.

    Raises:
        ArgumentError: ``scalar_outputs`` is not one of the values of ``ScalarOutputs``, or
            ``loss_weight`` is given although ``scalar_outputs`` is not ``"auto"``.
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
    loss_weight: Callable[..., Any], function: Callable[..., Any], arguments: Arguments
) -> Any:
    """Return the weight that ``loss_weight`` gives to the losses of one chunk of the batch.

    The weight is a number, a 0-dim tensor, or a dictionary that maps names of outputs to such
    weights.

    Args:
        loss_weight: the function that returns the weight. Each parameter of ``loss_weight`` gets
            the argument of ``function`` that has the same name. If ``function`` is called without
            an argument of this name, the parameter keeps its default.
        function: the function that computes the losses.
        arguments: the arguments of ``function`` for the chunk.

    Raises:
        ArgumentError: the call of ``function`` lacks an argument that ``loss_weight`` needs, or a
            weight is neither a finite number of at least 0 nor a tensor of one element.
    """
    named = dict(named_arguments(function, arguments))
    names = [n for n, p in parameters(loss_weight).items() if n in named or p.default is p.empty]
    if not named.keys() >= {*names}:
        fact = f"loss_weight ({described(loss_weight)}) takes {', '.join(names)}, but the arguments"
        fact += f" of the call are {', '.join(named) or 'none'}"
        remedy = "each parameter must have the name of one of these arguments, or a default"
        raise ArgumentError(f"{fact}; {remedy}")
    weight = loss_weight(**{name: named[name] for name in names})
    if isinstance(weight, Mapping):
        return {name: _checked(value) for name, value in weight.items()}
    return _checked(weight)


def _checked(weight: Any) -> float | Tensor:
    """Check a weight that ``loss_weight`` returned, and convert it to a float or a 0-dim tensor.

    Whether a tensor is at least 0 is not checked, since reading its value would wait for a device.
    """
    if isinstance(weight, Tensor) and weight.numel() == 1:
        return weight.detach().reshape(())
    if not isinstance(weight, Real) or not 0 <= float(weight) < math.inf:
        kinds = "a number of at least 0, a tensor of one element, or a dict of them by output names"
        raise ArgumentError(f"loss_weight must return {kinds}, got {weight!r}")
    return float(weight)
