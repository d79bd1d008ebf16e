"""A step in the computation of a loss: a traced tensor, and the function that computed it."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


class UnclearError(Exception):
    """The value for the batch is not known; the message says why."""


@dataclass(slots=True, eq=False)
class Reduction:
    """A mean, a sum or another function of many entries.

    Attributes:
        name: of the function: ``"mean"``, ``"sum"``, ``"amax"`` or ``"amin"``.
        count: how many entries it is over: a number, or a 0-dim tensor.
        shape: the shape of the tensor that was reduced.
        source: the autograd node of that tensor, or None.
        num_classes: for a cross entropy, the number of classes; ``shape`` is that of its targets.
    """

    name: str
    count: int | torch.Tensor
    shape: torch.Size
    source: Any
    num_classes: int | None = None


@dataclass(slots=True, eq=False)
class Step:
    """A traced tensor, and how it was computed.

    Attributes:
        index: steps have a higher one than the steps that they use.
        function: the function of torch that was called.
        reduction: the mean or sum that it is; None if it is none.
        ordinal: the number of reductions before it, if it is one.
        args, kwargs: the arguments, with a step in place of each traced tensor, and lists in place
            of tuples; none if no tensor among them was traced.
        parents: the steps among the arguments, in order.
        has_grad: whether gradients were enabled.
        autocast: whether autocast was, and its dtype.
        value: the tensor of the chunk; None if the function returned several, or a large one.
        shape: its shape.
        node: the autograd node of the tensor when it was recorded.
        version: the version of the tensor, which a write in place raises.
    """

    index: int
    function: Callable[..., Any]
    reduction: Reduction | None = None
    ordinal: int = 0
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    parents: Sequence[Step] = ()
    has_grad: bool = True
    autocast: tuple[bool, torch.dtype] | None = None
    value: Any = None
    shape: torch.Size = field(default_factory=torch.Size)
    node: Any = None
    version: int = 0

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.function, "__name__", "")

    @property
    def has_values(self) -> bool:
        """Whether it is more than a vector of integers, which are indices or offsets."""
        is_unique = self.reduction is not None and self.reduction.name == "unique"
        return is_unique or not self.shape or self.value is None or not is_integer(self.value)

    def explain(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        parents: Sequence[Step],
    ) -> Step:
        """Note the call that the step is, and the modes in which it is made."""
        self.function, self.args, self.kwargs, self.parents = function, args, kwargs, parents
        self.has_grad = torch.is_grad_enabled()
        self.autocast = autocast_of(parents[0].value.device)
        return self

    def keep(self, value: torch.Tensor) -> None:
        """Keep the tensor of the chunk, with what tells later whether it has changed."""
        self.value, self.shape, self.node = value, value.shape, value.grad_fn
        self.version = version_of(value)

    def repeat(self, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Any:
        """Call the function with other arguments, in the modes in which it was called.

        What it would write to is copied first.

        Args:
            args: its positional arguments.
            kwargs: its keyword arguments.
            device: the device of both.
        """
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.set_grad_enabled(self.has_grad and torch.is_grad_enabled()))
            if self.autocast is not None and self.autocast != autocast_of(device):
                enabled, dtype = self.autocast
                modes.enter_context(torch.autocast(device.type, dtype, enabled))
            if not is_in_place(self.function):
                return self.function(*args, **kwargs)
            target = args[0].clone()
            self.function(target, *args[1:], **kwargs)
            return target


def autocast_of(device: torch.device) -> tuple[bool, torch.dtype] | None:
    """Return whether autocast is enabled for a device, and its dtype; None if it has none."""
    try:
        return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    except RuntimeError:
        return None


@functools.cache
def is_in_place(function: Callable[..., Any]) -> bool:
    """Return whether a function of torch writes to its first argument, by its name."""
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        not_written = ("__int__", "__index__", "__invert__", "__iter__")
        return name in ("__set__", "__setitem__") or (
            name.startswith("__i") and name not in not_written
        )
    return name.endswith("_")


@functools.cache
def operator_name(name: str) -> str:
    """Return the name of an operator from that of its autograd node."""
    return re.sub(r"Backward(s|\d*)$", "", name.rpartition("::")[2])


def is_integer(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has integers, as counts, indices and offsets are."""
    is_bool = tensor.dtype is torch.bool
    return not (is_bool or tensor.is_floating_point() or tensor.is_complex())


def version_of(tensor: torch.Tensor) -> int:
    """Return the version of a tensor; 0 if it has none."""
    return 0 if tensor.is_inference() else tensor._version
