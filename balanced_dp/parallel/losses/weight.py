"""What the losses of chunks weigh, as the caller says."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from ...errors import ArgumentError
from ..call_inputs import described, named_arguments, parameters


def weight_of_chunk(
    loss_weight: Callable[..., Any] | str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return what ``loss_weight`` says of a chunk: a number, a tensor or a dictionary of them.

    It is a function, which gets the arguments of ``function`` that it names, or the name of one.

    Raises:
        ArgumentError: the call lacks an argument, or the result is no number of at least 0.
    """
    named = dict(named_arguments(function, args, kwargs))
    if isinstance(loss_weight, str):
        if not isinstance(named.get(loss_weight), torch.Tensor):
            raise ArgumentError(
                f"loss_weight is {loss_weight!r}, but the arguments of the call are "
                f"{', '.join(named) or 'none'}; name a tensor among them"
            )
        return (named[loss_weight] != -100).sum()
    weight = _call_with_named(loss_weight, function, named, args, kwargs)
    if isinstance(weight, Mapping):
        return {name: _checked(value) for name, value in weight.items()}
    return _checked(weight)


def _call_with_named(
    loss_weight: Callable[..., Any],
    function: Callable[..., Any],
    named: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return what ``loss_weight`` says of the arguments that it names, or of all."""
    signature = inspect.signature(loss_weight)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    wanted = {n for n, p in signature.parameters.items() if p.default is p.empty}
    if not takes_all and (takes_any or wanted <= {*named, *parameters(function)}):
        args = ()
        kwargs = {n: v for n, v in named.items() if takes_any or n in signature.parameters}
    elif not takes_all and len(wanted) != len(named):
        raise ArgumentError(
            f"loss_weight ({described(loss_weight)}) takes {', '.join(signature.parameters)}, but "
            f"the arguments of the call are {', '.join(named) or 'none'}; take these, or some by "
            "their names"
        )
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(
            f"loss_weight ({described(loss_weight)}): {error}; the arguments of the call are "
            f"{', '.join(named) or 'none'}; give what may be missing a default"
        ) from None
    return loss_weight(*bound.args, **bound.kwargs)


def _checked(weight: Any) -> float | torch.Tensor:
    """Return a weight, which is not read where that would wait for a device."""
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        return weight.detach().reshape(())
    if not isinstance(weight, Real) or not 0 <= float(weight) < math.inf:
        raise ArgumentError(
            f"loss_weight must return a number of at least 0, a tensor with one, or a dictionary "
            f"of such by the names of outputs, got {weight!r}"
        )
    return float(weight)
