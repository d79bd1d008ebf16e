"""What the losses of chunks weigh, as the caller says."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from .arguments import Arguments, described, named_arguments
from .errors import ArgumentError


def loss_weights(
    loss_weight: Callable[..., Any] | str,
    function: Callable[..., Any],
    arguments: Iterable[Arguments],
) -> list[Any]:
    """Return what ``loss_weight`` says of each chunk: numbers, tensors or dictionaries of them.

    Args:
        loss_weight: a function, which gets the arguments that it names, or the name of one.
        function: whose arguments they are.
        arguments: of each chunk.

    Raises:
        ArgumentError: the call lacks an argument, or the result is no number of at least 0.
    """
    return [_weight(loss_weight, function, args, kwargs) for args, kwargs in arguments]


def _weight(
    loss_weight: Callable[..., Any] | str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    named = dict(named_arguments(function, args, kwargs))
    if isinstance(loss_weight, str):
        if not isinstance(named.get(loss_weight), torch.Tensor):
            raise ArgumentError(
                f"loss_weight is {loss_weight!r}, but the arguments of the call are "
                f"{', '.join(named) or 'none'}; name a tensor among them"
            )
        return (named[loss_weight] != -100).sum()
    weight = _call_with_named(loss_weight, named, args, kwargs)
    if isinstance(weight, Mapping):
        return {name: _checked(value) for name, value in weight.items()}
    return _checked(weight)


def _call_with_named(
    loss_weight: Callable[..., Any],
    named: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return what ``loss_weight`` says of the arguments that it names, or takes in their order."""
    parameters = inspect.signature(loss_weight).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return loss_weight(*args, **kwargs)
    own = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    required = [parameter.name for parameter in own if parameter.default is parameter.empty]
    if all(name in named for name in required):
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        wanted = named if takes_all else [p.name for p in own if p.name in named]
        return loss_weight(**{name: named[name] for name in wanted})
    by_order = [name for name in required if name not in kwargs]
    if len(by_order) > len(args):
        missing = [name for name in required if name not in named]
        raise ArgumentError(
            f"loss_weight ({described(loss_weight)}) takes {', '.join(required)}, but the call "
            f"has no {', '.join(missing)}: its arguments are {', '.join(named) or 'none'}; give "
            f"{missing[-1]} a default"
        )
    return loss_weight(*args[: len(by_order)], **{n: kwargs[n] for n in required if n in kwargs})


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
