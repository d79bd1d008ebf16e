"""Trace what a replica computes from means and sums over samples.

While a replica runs, the results of reductions over samples are of a subclass of their class, which
torch asks whenever a function is called on them. What the function returns is traced as well. So
the few operators of a loss are recorded, and the many of the model cost nothing. Afterwards each
tensor has its own class again.
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
"""How many entries a tensor may have that is traced: traces keep it until the call ends."""

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
        num_classes: for a cross entropy, the number of classes.
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
        value: the tensor of the chunk; None if the function returned several.
        requires_grad: whether it required a gradient when it was recorded.
        reduction: the mean or sum that it is; None if it is none.
        function: the function that was called on traced tensors; None if there were none.
        args, kwargs: its arguments, with a step in place of each traced tensor, and lists in place
            of tuples.
    """

    index: int
    value: Any
    requires_grad: bool
    reduction: Reduction | None = None
    function: Callable[..., Any] | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the function, or of the reduction."""
        if self.function is not None:
            return getattr(self.function, "__name__", "")
        return "" if self.reduction is None else self.reduction.name

    def parents(self) -> list[Step]:
        """Return the steps among the arguments, in order."""
        return list(_steps_in([self.args, self.kwargs]))

    def repeat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function with other arguments; one that would write copies first."""
        assert self.function is not None
        if not is_in_place(self.function):
            return self.function(*args, **kwargs)
        target = args[0].clone()
        self.function(target, *args[1:], **kwargs)
        return target


class Trace:
    """The traced tensors of one replica."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._steps: dict[int, Step] = {}
        self._traced: list[tuple[torch.Tensor, type]] = []
        self._num_steps = 0

    def step_of(self, tensor: torch.Tensor) -> Step | None:
        """Return how a tensor was computed; None if it is not traced."""
        return self._steps.get(id(tensor))

    def record(
        self,
        value: torch.Tensor,
        reduction: Reduction | None = None,
        function: Callable[..., Any] | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Trace a tensor, from now on."""
        is_new = id(value) not in self._steps
        self._steps[id(value)] = self._step(value, reduction, function, args, kwargs)
        if is_new:
            # Replicas on one device may share what they write to.
            kind = getattr(type(value), "original", type(value))
            with contextlib.suppress(TypeError):  # a class that is built in another way
                value.__class__ = _traced_class(kind)
                self._traced.append((value, kind))

    def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a function on traced tensors, and trace what it returns."""
        target = args[0] if is_in_place(function) else None
        if function is torch.autograd.grad or (target is not None and target.numel() > MAX_NUMEL):
            return function(*args, **kwargs)  # a gradient of a sum may be one of each sample
        if target is not None:
            with torch.set_grad_enabled(target.requires_grad):
                before = target.clone()
            step = self.step_of(target)
            if step is None:
                used = self._with_steps([before, *args[1:]])
            else:
                step.value, used = before, self._with_steps(args)
        else:
            used = self._with_steps(args)
        named = {name: self._with_steps(value) for name, value in kwargs.items() if name != "out"}
        num_steps = self._num_steps
        output = function(*args, **kwargs)
        result = output if target is None else target
        if isinstance(result, torch.Tensor) and result.numel() <= MAX_NUMEL:
            step = self.step_of(result)
            if getattr(function, "__name__", "") in _TO_DEVICE:
                function, used, named = torch.Tensor.to, [used[0], result.dtype], {}
            if step is None or target is not None:
                self.record(result, None, function, used, named)
            elif step.index >= num_steps:  # a reduction of traced tensors
                step.function, step.args, step.kwargs = function, used, named
        elif isinstance(result, tuple | list) and result:
            parts = self._step(None, None, function, used, named)
            for position, part in enumerate(result):
                if isinstance(part, torch.Tensor) and part.numel() <= MAX_NUMEL:
                    self.record(part, None, operator.getitem, [parts, position])
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

    def _step(self, value: Any, reduction: Any, function: Any, args: Any, kwargs: Any) -> Step:
        requires_grad = value is not None and value.requires_grad
        self._num_steps += 1
        return Step(
            self._num_steps - 1, value, requires_grad, reduction, function, args, kwargs or {}
        )

    def _with_steps(self, value: Any) -> Any:
        """Return arguments with a step in place of each traced tensor."""
        if isinstance(value, torch.Tensor):
            return self._steps.get(id(value), value)
        if type(value) in (tuple, list):
            return [self._with_steps(item) for item in value]
        return value


class _Traced(torch.Tensor):
    """A tensor that is traced."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        trace = current_trace.get()
        with torch._C.DisableTorchFunctionSubclass():
            if trace is None or torch._C._functorch.peek_interpreter_stack() is not None:
                return func(*args, **kwargs or {})
            return trace.call(func, args, kwargs or {})


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


@functools.cache
def _traced_class(kind: type) -> type:
    return type(f"Traced{kind.__name__}", (_Traced, kind), {"original": kind})


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
