"""Trace what a replica computes from means and sums over samples.

While a replica runs, results of reductions get a subclass of their class, whose
``__torch_function__`` torch calls for every function on them. What the function returns is traced
as well. So the few operators of a loss are recorded, and the many of the model cost nothing.
Afterwards each tensor has its own class again.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

ResultT = TypeVar("ResultT")

MAX_NUMEL = 2**16
"""The most entries of a traced tensor: a trace keeps it, as long as its call or ``PerDevice``."""

_SMALL_NUMEL = 2**10
"""The most entries that are traced if the tensors of which they were computed had fewer."""

_TO_DEVICE = ("to", "cuda", "cpu")
"""Functions that may move a tensor; the steps of all replicas are repeated on one device."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """A mean, a sum or another function of many entries.

    Attributes:
        name: of the function: ``"mean"``, ``"sum"``, ``"amax"`` or ``"amin"``.
        count: how many entries it is over: a number, or a 0-dim tensor.
        shape: the shape of the tensor that was reduced.
        source: the autograd node of that tensor, or None.
        function: the function of torch that was called.
        num_classes: for a cross entropy, the number of classes.
    """

    name: str
    count: int | torch.Tensor
    shape: torch.Size
    source: Any
    function: Callable[..., Any]
    num_classes: int | None = None


@dataclass(slots=True, eq=False)
class Step:
    """A traced tensor, and how it was computed.

    Attributes:
        index: steps have a higher one than the steps that they use.
        value: the tensor of the chunk; None if the function returned several, or a large one.
        shape: its shape.
        node: the autograd node of the tensor when it was recorded.
        version: the version of the tensor, which a write in place raises.
        reduction: the mean or sum that it is; None if it is none.
        ordinal: the number of reductions before it, if it is one.
        function: the function that was called on traced tensors; None if there were none.
        args, kwargs: its arguments, with a step in place of each traced tensor, and lists in place
            of tuples.
        has_grad: whether gradients were enabled.
        autocast: whether autocast was, and its dtype.
    """

    index: int
    value: Any
    shape: torch.Size = field(default_factory=torch.Size)
    node: Any = None
    version: int = 0
    reduction: Reduction | None = None
    ordinal: int = 0
    function: Callable[..., Any] | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    has_grad: bool = True
    autocast: tuple[bool, torch.dtype] | None = None

    @property
    def name(self) -> str:
        """The name of the function, or of the reduction."""
        if self.function is not None:
            return getattr(self.function, "__name__", "")
        return "" if self.reduction is None else self.reduction.name

    def parents(self) -> list[Step]:
        """Return the steps among the arguments, in order."""
        return list(_steps_in([self.args, self.kwargs]))

    def repeat(self, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Any:
        """Call the function with other arguments, in the modes in which it was called.

        What it would write to is copied first.

        Args:
            args: its positional arguments.
            kwargs: its keyword arguments.
            device: the device of both.
        """
        assert self.function is not None
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


class Trace:
    """The traced tensors of one replica.

    Attributes:
        dim: the batch dimension.
        num_steps: the number of steps.
        num_reductions: how many of them are reductions.
        lost: the steps that were combined with larger tensors, which are not traced.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.num_steps = 0
        self.num_reductions = 0
        self.lost: list[Step] = []
        self._steps: dict[int, Step] = {}
        self._traced: list[tuple[torch.Tensor, type]] = []

    def step_of(self, tensor: torch.Tensor) -> Step | None:
        """Return how a tensor was computed; None if it is not traced, or was written to since."""
        step = self._steps.get(id(tensor))
        return step if step is not None and step.version == version_of(tensor) else None

    def record(self, value: torch.Tensor, reduction: Reduction) -> None:
        """Record a reduction, and trace its result from now on."""
        step = self._step(reduction)
        step.ordinal = self.num_reductions
        self.num_reductions += 1
        if value.numel() <= MAX_NUMEL:
            self._trace(value, step)
        else:
            step.shape = value.shape
            self.lost.append(step)

    def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a function on traced tensors, and trace what it returns or writes."""
        target = args[0] if args and is_in_place(function) else None
        used = self._with_steps(args)
        named = {name: self._with_steps(value) for name, value in kwargs.items() if name != "out"}
        parents = list(_steps_in([used, named]))
        if isinstance(target, torch.Tensor) and self._fits(target, parents):
            with torch.set_grad_enabled(target.requires_grad):
                before = target.clone()
            if isinstance(used[0], Step):
                step = used[0]
                step.value, step.node, step.version = before, before.grad_fn, version_of(before)
            else:
                used[0] = before
        num_steps = self.num_steps
        output = function(*args, **kwargs)
        result = target if isinstance(target, torch.Tensor) else output
        name = getattr(function, "__name__", "")
        if function is torch.autograd.grad:
            # The gradient of a sum over samples is one of each sample.
            self.lost += [p for p in parents if p.reduction is None or p.reduction.name != "sum"]
        elif name == "register_hook":
            for step in parents:
                if step.function is not None:  # gradients pass by its value
                    step.version = -1
        elif isinstance(result, torch.Tensor):
            known = self.step_of(result)
            if known is not None and known.index >= num_steps:  # a reduction of traced tensors
                _explain(known, function, used, named, result.device)
            elif known is None and not self._fits(result, parents):
                self.lost += filter(_has_values, parents)
            elif known is None:
                if name in _TO_DEVICE:
                    function, used, named = torch.Tensor.to, [used[0], result.dtype], {}
                step = _explain(self._step(), function, used, named, result.device)
                self._trace(result, step)
        elif isinstance(result, tuple | list):
            tensors = [(i, t) for i, t in enumerate(result) if isinstance(t, torch.Tensor)]
            for position, part in tensors:
                if self._fits(part, parents):
                    parts = _explain(self._step(), function, used, named, part.device)
                    step = _explain(
                        self._step(), operator.getitem, [parts, position], {}, part.device
                    )
                    self._trace(part, step)
        return output

    def ignore_gradients_where(self, is_ignored: torch.Tensor, output: torch.Tensor) -> None:
        """Replace gradients of an output, such as 0 / 0, by 0 if ``is_ignored``, which is 0-dim."""
        steps = [self.step_of(output)]
        while steps:
            step = steps.pop()
            if step is not None and step.reduction is None:
                steps += step.parents()
            elif step is not None and step.value.requires_grad:
                fill = functools.partial(_filled, is_ignored.to(step.value.device))
                step.value.register_hook(fill)

    def begin(self) -> None:
        """Trace the tensors that were traced before ``end``."""
        for tensor, kind in self._traced:
            tensor.__class__ = _traced_class(kind)

    def end(self) -> None:
        """Give each tensor its own class back."""
        for tensor, kind in self._traced:
            tensor.__class__ = kind

    def _step(self, reduction: Reduction | None = None) -> Step:
        self.num_steps += 1
        return Step(self.num_steps - 1, None, reduction=reduction)

    def _trace(self, value: torch.Tensor, step: Step) -> None:
        """Trace a tensor as the result of a step."""
        is_new = id(value) not in self._steps
        step.value, step.shape, step.node = value, value.shape, value.grad_fn
        step.version = version_of(value)
        self._steps[id(value)] = step
        if is_new:
            # Another replica on this device may trace the same tensor.
            kind = getattr(type(value), "original", type(value))
            with contextlib.suppress(TypeError):  # a class with another memory layout
                value.__class__ = _traced_class(kind)
                self._traced.append((value, kind))

    def _fits(self, value: torch.Tensor, parents: Sequence[Step]) -> bool:
        """Return whether a tensor is small, or no larger than what it was computed from."""
        # Vectors of integers are indices and offsets, so others are not computed from their values.
        may_grow = any(_has_values(step) for step in parents)
        num_entries = sum(step.shape.numel() for step in parents)
        return value.numel() <= min(MAX_NUMEL, max(_SMALL_NUMEL * may_grow, num_entries))

    def _with_steps(self, value: Any) -> Any:
        """Return arguments with a step in place of each traced tensor."""
        if isinstance(value, torch.Tensor):
            step = self.step_of(value)
            if step is None and id(value) in self._steps:  # it was written to, through a view
                self.lost.append(self._steps[id(value)])
            return value if step is None else step
        if type(value) in (tuple, list):
            return [self._with_steps(item) for item in value]
        return value


class _Traced(torch.Tensor):
    """A tensor that is traced."""

    original: type

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        trace = current_trace.get()
        with torch._C.DisableTorchFunctionSubclass():
            if trace is None or torch._C._functorch.peek_interpreter_stack() is not None:
                return func(*args, **kwargs or {})
            return trace.call(func, args, kwargs or {})

    def _plain(self) -> torch.Tensor:
        """Return the tensor with its own class, for what asks for the class."""
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.view_as(self)
        plain.__class__ = self.original
        return plain

    def __format__(self, spec: str) -> str:
        return format(self._plain(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._plain().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


current_trace: ContextVar[Trace | None] = ContextVar("trace", default=None)
"""The trace of the replica that runs in this thread."""

_traces: ContextVar[Sequence[Trace]] = ContextVar("traces", default=())


@contextlib.contextmanager
def tracing(traces: Sequence[Trace]) -> Iterator[None]:
    """Context manager in which functions that ``traced`` returned are traced."""
    token = _traces.set(traces)
    try:
        for trace in traces:
            trace.begin()
        yield
    finally:
        _traces.reset(token)
        for trace in traces:
            trace.end()


def traced(function: Callable[[], ResultT], index: int) -> Callable[[], ResultT]:
    """Return a function whose tensors are traced, for the replica ``index``, in ``tracing``."""

    def run() -> ResultT:
        traces = _traces.get()
        if not traces:
            return function()
        token = current_trace.set(traces[index])
        try:
            return function()
        finally:
            current_trace.reset(token)

    return run


def _explain(
    step: Step,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> Step:
    """Note the call that a step is, and the modes in which it is made."""
    step.function, step.args, step.kwargs = function, args, kwargs
    step.has_grad, step.autocast = torch.is_grad_enabled(), autocast_of(device)
    return step


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
def _traced_class(kind: type) -> type:
    return type(f"Traced{kind.__name__}", (_Traced, kind), {"original": kind})


def version_of(tensor: torch.Tensor) -> int:
    """Return the version of a tensor; 0 if it has none."""
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if tensor.is_inference() else tensor._version


def _has_values(step: Step) -> bool:
    return not step.shape or step.value is None or not _is_integer(step.value.dtype)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _filled(is_filled: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return grad.masked_fill(is_filled, 0)


def _steps_in(value: Any) -> Iterator[Step]:
    if isinstance(value, Step):
        yield value
    elif isinstance(value, dict):
        yield from _steps_in(list(value.values()))
    elif type(value) in (tuple, list):
        for item in value:
            yield from _steps_in(item)
