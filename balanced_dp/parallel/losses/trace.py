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
from typing import Any, TypeVar

import torch

from .step import Reduction, Step, is_in_place, version_of

ResultT = TypeVar("ResultT")

MAX_NUMEL = 2**16
"""The most entries of a traced tensor, which a trace keeps until the end of the call."""

_SMALL_NUMEL = 2**10
"""The most entries that are traced if the tensors of which they were computed had fewer."""

_TO_DEVICE = ("to", "cuda", "cpu")
"""Functions that may move a tensor; the steps of all replicas are repeated on one device."""


class Trace:
    """The traced tensors of one replica.

    Attributes:
        dim: the batch dimension.
        num_steps: the number of steps.
        num_reductions: how many of them are reductions.
        lost: the steps that were used as is not traced, such as with larger tensors.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.num_steps = 0
        self.num_reductions = 0
        self.lost: list[Step] = []
        self._steps: dict[int, Step] = {}

    def step_of(self, tensor: torch.Tensor) -> Step | None:
        """Return how a tensor was computed; None if it is not traced, or was written to since."""
        step = self._steps.get(id(tensor))
        return step if step is not None and step.version == version_of(tensor) else None

    def record(
        self,
        function: Callable[..., Any],
        value: torch.Tensor,
        reduced: torch.Tensor,
        name: str,
        count: int | torch.Tensor | None = None,
        num_classes: int | None = None,
        is_lost: bool = False,
    ) -> torch.Tensor:
        """Record that a function reduced ``reduced`` to ``value``, which is returned and traced.

        By default the count is that of the entries of ``reduced``; see ``Reduction``. ``is_lost``
        says that it will be combined with what is not traced.
        """
        if self.step_of(value) is not None:  # it was recorded as a function of traced tensors
            return value
        if count is None:
            count = reduced.numel() // max(1, value.numel())
        reduction = Reduction(name, count, reduced.shape, reduced.grad_fn, num_classes)
        step = self._step(function, reduction)
        step.ordinal = self.num_reductions
        self.num_reductions += 1
        step.shape = value.shape
        if value.numel() <= MAX_NUMEL:
            self._trace(value, step)
        else:
            is_lost = True
        if is_lost:
            self.lost.append(step)
        return value

    def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a function on traced tensors, and trace what it returns or writes."""
        parents: list[Step] = []
        used = self._with_steps(args, parents)
        named = {n: self._with_steps(v, parents) for n, v in kwargs.items() if n != "out"}
        if not parents:
            return function(*args, **kwargs)
        target = args[0] if args and is_in_place(function) else None
        if isinstance(target, torch.Tensor) and self._fits(target, parents):
            used[0] = _before_write(used[0], target)
        num_steps = self.num_steps
        output = function(*args, **kwargs)
        result = target if isinstance(target, torch.Tensor) else output
        name = getattr(function, "__name__", "")
        if function is torch.autograd.grad:
            # The gradient of a sum over samples is one of each sample.
            self.lost += [p for p in parents if p.reduction is None or p.reduction.name != "sum"]
        elif name == "register_hook":
            for step in parents:
                if step.parents:  # gradients pass by its value
                    step.version = -1
        elif isinstance(result, torch.Tensor):
            known = self.step_of(result)
            if name in _TO_DEVICE:
                function, used, named = torch.Tensor.to, [used[0], result.dtype], {}
            if known is None:
                step = self._step(function).explain(function, used, named, parents)
                self._trace_if_small(result, step, parents)
            elif known.index >= num_steps:  # a reduction of traced tensors
                known.explain(function, used, named, parents)
        elif isinstance(result, tuple | list) and any(isinstance(r, torch.Tensor) for r in result):
            several = self._step(function).explain(function, used, named, parents)
            for position, part in enumerate(result):
                if isinstance(part, torch.Tensor):
                    step = self._step(operator.getitem)
                    step.args, step.parents = [several, position], [several]
                    self._trace_if_small(part, step, parents)
        return output

    def ignore_gradients_where(self, is_ignored: torch.Tensor, output: torch.Tensor) -> None:
        """Replace gradients of an output, such as 0 / 0, by 0 if ``is_ignored``, which is 0-dim."""
        root = self.step_of(output)
        steps, seen = [] if root is None else [root], set()
        while steps:
            step = steps.pop()
            if step in seen:
                continue
            seen.add(step)
            if step.reduction is None:
                steps += step.parents
            elif step.value.requires_grad:
                where = is_ignored.to(step.value.device)
                step.value.register_hook(lambda grad, where=where: grad.masked_fill(where, 0))

    def end(self) -> None:
        """Give each tensor its own class back."""
        for step in self._steps.values():
            _set_class(step.value, is_traced=False)

    def _step(self, function: Callable[..., Any], reduction: Reduction | None = None) -> Step:
        self.num_steps += 1
        return Step(self.num_steps - 1, function, reduction)

    def _trace_if_small(self, result: torch.Tensor, step: Step, parents: Sequence[Step]) -> None:
        """Trace what a call on traced tensors returned, unless it is too large."""
        if self._fits(result, parents):
            self._trace(result, step)
        else:
            self.lost += [parent for parent in parents if parent.has_values]

    def _trace(self, value: torch.Tensor, step: Step) -> None:
        """Trace a tensor as the result of a step."""
        step.keep(value)
        self._steps[id(value)] = step
        _set_class(value, is_traced=True)

    def _fits(self, value: torch.Tensor, parents: Sequence[Step]) -> bool:
        """Return whether a tensor is small, or no larger than what it was computed from."""
        # Vectors of integers are indices and offsets, so others are not computed from their values.
        may_grow = any(step.has_values for step in parents)
        num_entries = sum(step.shape.numel() for step in parents)
        return value.numel() <= min(MAX_NUMEL, max(_SMALL_NUMEL * may_grow, num_entries))

    def _with_steps(self, value: Any, found: list[Step]) -> Any:
        """Return arguments with a step in place of each traced tensor; add these to ``found``."""
        if isinstance(value, torch.Tensor):
            step = self.step_of(value)
            if step is not None:
                found.append(step)
                return step
            if id(value) in self._steps:  # it was written to, through a view
                self.lost.append(self._steps[id(value)])
        elif type(value) in (tuple, list):
            return [self._with_steps(item, found) for item in value]
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
    """Context manager in which functions that are called by ``traced`` are traced."""
    token = _traces.set(traces)
    try:
        yield
    finally:
        _traces.reset(token)
        for trace in traces:
            trace.end()


def traced(index: int, function: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
    """Call a function as the replica ``index``; in ``tracing``, its tensors are traced."""
    traces = _traces.get()
    token = current_trace.set(traces[index] if traces else current_trace.get())
    try:
        return function(*args, **kwargs)
    finally:
        current_trace.reset(token)


@functools.cache
def _traced_class(kind: type) -> type:
    return type(f"Traced{kind.__name__}", (_Traced, kind), {"original": kind})


def _set_class(tensor: torch.Tensor, is_traced: bool) -> None:
    # Another replica on this device may trace the same tensor, which has the class already.
    kind = getattr(type(tensor), "original", type(tensor))
    try:
        tensor.__class__ = _traced_class(kind) if is_traced else kind
    except TypeError:  # a class with another memory layout stays
        return


def _before_write(used: Any, target: torch.Tensor) -> Any:
    """Return the argument for a tensor that will be written to, with a copy of its value."""
    with torch.set_grad_enabled(target.requires_grad):
        before = target.clone()
    if not isinstance(used, Step):
        return before
    used.keep(before)
    return used
