"""Note the calls of torch functions that compute a loss.

Without gradients, autograd records no graph. Then a ``TorchFunctionMode`` notes the calls, each as
a ``Call``, which has the attributes of an autograd node, so that ``LossGraph`` can walk either. A
note keeps the output of its call alive, so only two kinds are noted: calls whose output is 0-dim,
and calls that join the entries of samples. With gradients, calls are noted to see how denominators
were computed, as these are usually not part of the graph.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .counted import MEAN, SUM, counted_loss

ResultT = TypeVar("ResultT")

_OPERATORS = {
    **dict.fromkeys(("add", "radd", "iadd"), "Add"),
    **dict.fromkeys(("sub", "isub", "subtract"), "Sub"),
    **dict.fromkeys(("mul", "rmul", "imul", "multiply"), "Mul"),
    **dict.fromkeys(("div", "truediv", "itruediv", "true_divide", "divide"), "Div"),
    **dict.fromkeys(("neg", "negative"), "Neg"),
    **dict.fromkeys(("float", "double", "half", "bfloat16", "to", "type", "type_as"), "ToCopy"),
    **dict.fromkeys(("cpu", "cuda", "detach", "clone", "contiguous", "requires_grad"), "Clone"),
    **dict.fromkeys(("squeeze", "unsqueeze", "view", "reshape", "flatten", "ravel"), "View"),
    **dict.fromkeys(("cat", "concat", "concatenate"), "Cat"),
    "rsub": "Rsub",
    "mean": "Mean",
    "sum": "Sum",
    "stack": "Stack",
    "getitem": "Index",
    "masked_select": "Index",
}
"""The operators of autograd nodes, by the names of the functions that are called."""

_FOLLOWED = {
    **dict.fromkeys(("Add", "Sub", "Rsub", "Mul"), 2),
    **dict.fromkeys(("Div", "Sum", "Mean", "Index", "Select", "ToCopy", "Clone", "View"), 1),
}
"""How many operands are followed; all of other operators."""

_JOINING = ("Sum", "Mean", "Stack", "Index")

_OF_LISTS = ("Stack", "Cat")
"""Operators whose first operand is a list of tensors."""

_WEIGHTED = ("l1_loss", "mse_loss")
"""Functions whose ``weight`` is part of the denominator of their mean."""

_FINISHING = ("clamp", "clamp_min", "clip", "maximum", "max")
"""Functions that turn a count into a denominator; those in place overwrite the count."""

BATCHMEAN = 3
"""The reduction of ``kl_div`` that divides the sum by the number of samples."""

_REDUCTIONS = {"mean": MEAN, "sum": SUM, "batchmean": BATCHMEAN}


class Call:
    """A call of a torch function, with the attributes of an autograd node.

    Args:
        operator: the name of its autograd node, without the suffix ``Backward0``.
        shape: the shape of its output.
        inputs: for each operand, the call that computed it, or None if it is not a tensor. If that
            call was not noted, a ``Call`` named ``AccumulateGrad`` or ``data`` stands for it.
        saved: the attributes that the autograd node would have.

    Attributes:
        output: the output; None if the call was not noted.
        count: if the call turns a count into a denominator, as ``clamp(min=1)`` does: that count.
        finish: the function that does so.
        limits: the other arguments of that function.
        added: the number that the call adds to its only tensor; None if it does not.
    """

    output: torch.Tensor | None = None
    count: torch.Tensor
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None
    limits: tuple[Any, ...] = ()
    added: float | None = None

    def __init__(
        self,
        operator: str,
        shape: torch.Size,
        inputs: Sequence[Call | None] = (),
        **saved: Any,
    ) -> None:
        self.operator = operator
        self.shape = shape
        self.next_functions = tuple((item, 0) for item in inputs)
        vars(self).update(saved)

    @property
    def operand(self) -> Call | None:
        """The call that computed the first operand, or None."""
        return self.next_functions[0][0] if self.next_functions else None

    @property
    def _input_metadata(self) -> tuple[Call]:
        return (self,)

    def name(self) -> str:
        """Return the name of the operator."""
        return self.operator


Calls = dict[int, Call]
"""The noted calls, by the ``id`` of their output."""

_notes: ContextVar[tuple[Calls, int] | None] = ContextVar("notes", default=None)


@contextlib.contextmanager
def noting(is_on: bool, dim: int) -> Iterator[Calls]:
    """Context manager that yields the calls noted inside it.

    Args:
        is_on: whether calls are noted, by functions that ``noted`` has returned.
        dim: the batch dimension.
    """
    calls: Calls = {}
    token = _notes.set((calls, dim) if is_on else None)
    try:
        yield calls
    finally:
        _notes.reset(token)


def noted(function: Callable[[], ResultT]) -> Callable[[], ResultT]:
    """Return a function that also notes the calls that ``function`` makes, inside ``noting``."""

    def run() -> ResultT:
        notes = _notes.get()
        if notes is None:
            return function()
        with _Notes(*notes):
            return function()

    return run


class _Notes(TorchFunctionMode):
    """Mode in which the calls of torch functions are noted."""

    def __init__(self, calls: Calls, dim: int) -> None:
        super().__init__()
        self._calls = calls
        self._dim = dim

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        # Inside of compiled code there are no calls to note.
        if isinstance(output, torch.Tensor) and not torch.compiler.is_dynamo_compiling():
            name = getattr(function, "__name__", "").strip("_")
            operator = _OPERATORS.get(name, name)
            operands = _operands(args, kwargs)
            if operator == "Index" and not _selects(operands[1]):
                operator = "Select"
            joined = operands[0] if operator in _OF_LISTS else operands
            if (
                not output.dim()
                or (operator in _JOINING and _joins_rows(operator, operands, self._dim))
                or self._is_derived(output, joined)
            ):
                inputs = [self._input(item) for item in joined[: _FOLLOWED.get(operator)]]
                saved = _saved(operator, function, operands, args, kwargs)
                call = Call(operator, output.shape, inputs, output=output, **saved)
                self._calls[id(output)] = call
                counted = counted_loss(output)
                if counted is not None and counted.call is None:  # not an addition in place
                    counted.call = call
        return output

    def _is_derived(self, output: torch.Tensor, operands: Any) -> bool:
        """Return whether noted operands have at least as many entries as the output."""
        known = [t for t in operands if isinstance(t, torch.Tensor) and id(t) in self._calls]
        return bool(known) and sum(t.numel() for t in known) >= output.numel()

    def _input(self, operand: Any) -> Call | None:
        if not isinstance(operand, torch.Tensor):
            return None
        if id(operand) in self._calls:
            return self._calls[id(operand)]
        is_leaf = isinstance(operand, nn.Parameter) or not operand.dim()
        return Call("AccumulateGrad" if is_leaf else "data", operand.shape)


def _operands(args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments by position; keywords that name operands come before other keywords."""
    names = [
        name for name in ("input", "tensors", "other", "dim", "axis", "mask") if name in kwargs
    ]
    return [*args, *(kwargs[name] for name in names), *(kwargs[n] for n in kwargs.keys() - names)]


def _dims(operands: list[Any]) -> tuple[int, ...] | None:
    """Return the dimensions that a reduction was called with; None for all."""
    dims = operands[1] if len(operands) > 1 else None
    if isinstance(dims, int) and not isinstance(dims, bool):
        return (dims,)
    return tuple(dims) if isinstance(dims, list | tuple) else None


def _joins_rows(operator: str, operands: list[Any], dim: int) -> bool:
    """Return whether a call reduces along the first or the batch dimension, selects or stacks."""
    if operator == "Stack":
        return not any(tensor.dim() for tensor in operands[0])
    if operator == "Index":
        return True
    num_dims, dims = operands[0].dim(), _dims(operands) or ()
    return any(each % num_dims in (0, dim % num_dims) for each in dims)


def _selects(index: Any) -> bool:
    """Return whether an index selects entries by a tensor."""
    indices = index if isinstance(index, tuple) else (index,)
    return any(isinstance(item, torch.Tensor) for item in indices)


def _saved(
    operator: str, function: Any, operands: list[Any], args: Any, kwargs: Any
) -> dict[str, Any]:
    """Return the attributes that the autograd node would have, and how to finish a count."""
    if operator in ("Sum", "Mean"):
        return {"_saved_self_sym_sizes": operands[0].shape, "_saved_dim": _dims(operands)}
    if operator in ("Mul", "Div"):
        return {"_saved_self": operands[0], "_saved_other": operands[1]}
    saved: dict[str, Any] = {}
    if operator in ("Add", "Sub", "Rsub"):
        saved["_saved_alpha"] = alpha = kwargs.get("alpha", 1)
        if operator != "Rsub" and isinstance(operands[1], int | float):
            saved["added"] = operands[1] * (alpha if operator == "Add" else -alpha)
    elif (reduction := _reduction(function, args, kwargs)) is not None:
        saved["_saved_reduction"] = _REDUCTIONS.get(reduction, 0)
    first: Any = args[0] if args else None
    is_0_dim = isinstance(first, torch.Tensor) and not first.dim()
    if is_0_dim and getattr(function, "__name__", "") in _FINISHING and "out" not in kwargs:
        saved["count"] = first
        saved["finish"] = lambda whole: function(whole.to(first.device), *args[1:], **kwargs)
        saved["limits"] = (*args[1:], *kwargs.values())
    return saved


@functools.cache
def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _reduction(function: Any, args: Any, kwargs: Any) -> str | None:
    """Return the reduction that a loss function was called with; None for other functions."""
    signature = _signature(function)
    if signature is None or "reduction" not in signature.parameters:
        return None
    if "ignore_index" in signature.parameters and function is not functional.cross_entropy:
        return ""  # a mean over targets that nobody has counted
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    is_weighted = function.__name__ in _WEIGHTED and bound.arguments.get("weight") is not None
    return "" if is_weighted else str(bound.arguments["reduction"])
