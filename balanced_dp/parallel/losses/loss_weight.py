"""Call ``loss_weight`` for the weight of each chunk's losses."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from ...errors import ArgumentError, ArgumentTypeError
from ..nested import described, named_arguments, parameters


def check_loss_weight(loss_weight: object, scalar_outputs: str = "auto") -> None:
    """Check an argument ``loss_weight``.

    Raises:
        ArgumentTypeError: it is neither a function nor a name nor None.
        ArgumentError: ``scalar_outputs`` is not a mean.
    """
    if loss_weight is not None and scalar_outputs not in ("auto", "mean"):
        raise ArgumentError(f"loss_weight is for means, but scalar_outputs is {scalar_outputs!r}")
    if loss_weight is not None and not callable(loss_weight) and not isinstance(loss_weight, str):
        raise ArgumentTypeError(
            f"loss_weight must be a function or the name of an argument, got {loss_weight!r}"
        )


def weight_of_chunk(
    loss_weight: Callable[..., Any] | str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return the weight of a chunk: a number, a 0-dim tensor, or a dictionary of these.

    Args:
        loss_weight: a function, which is called with the arguments of ``function`` that its
            parameters name; or the name of one of these, whose entries other than -100 count.
        function: the function that computes the losses.
        args: its positional arguments for the chunk.
        kwargs: its keyword arguments.

    Raises:
        ArgumentError: the call lacks an argument, or the result is not a number of at least 0.
    """
    named = dict(named_arguments(function, args, kwargs))
    if isinstance(loss_weight, str):
        if not isinstance(named.get(loss_weight), Tensor):
            raise ArgumentError(
                f"loss_weight is {loss_weight!r}, but the arguments of the call are "
                f"{', '.join(named) or 'none'}; name a tensor among them"
            )
        return (named[loss_weight] != -100).sum()
    signature = inspect.signature(loss_weight)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    by_name = {n: v for n, v in named.items() if n in signature.parameters or takes_any}
    # Parameters with names of their own get the arguments by position.
    is_unlike = not takes_any and not {*signature.parameters} & {*named, *parameters(function)}
    try:
        bound = signature.bind(*args, **kwargs) if is_unlike else signature.bind(**by_name)
    except TypeError:
        raise ArgumentError(
            f"loss_weight ({described(loss_weight)}) takes {', '.join(signature.parameters)}, but "
            f"the arguments of the call are {', '.join(named) or 'none'}; name its "
            "parameters after some of these, with a default for each that a call may omit"
        ) from None
    weight = loss_weight(*bound.args, **bound.kwargs)
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
