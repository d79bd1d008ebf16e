"""Count the targets of cross entropies where torch computes them.

While replicas run, two functions of torch are replaced by functions that also count. These return
the tensors that torch's functions return. A mean over no targets is NaN. It is replaced by 0, so
that other terms of the loss are kept; the joined loss is NaN only if no replica has targets.
Autograd saves the count as ``_saved_total_weight``, but not without gradients or with smoothed
labels, so this is not used.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.jit._builtins import _register_builtin

REDUCTIONS = {1: "mean", 2: "sum"}
"""As in ``torch.nn._reduction.get_enum``."""


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """A cross entropy that one replica has computed.

    Attributes:
        kind: ``"mean"`` or ``"sum"``.
        count: the number of its targets, or their total weight, as a number or a 0-dim tensor.
        target: the targets if there are as many classes as rows, else None.
        value: its value, with its graph.
        node: its node in the graph, or None.
        result: the tensor that torch returned, detached from its graph.
        version: the version of that tensor, which an in-place write increments.
    """

    kind: str
    count: Any
    target: Tensor | None
    value: Tensor
    node: Any
    result: Tensor
    version: int

    def compares_samples(self) -> bool:
        """Return whether the targets are the row numbers in any order. Waits for the device."""
        rows = None if self.target is None else sorted(self.target.tolist())
        return rows is not None and rows == [*range(len(rows))]

    def is_(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the result, detached or not, and was not written to.

        Return False for an inference tensor, because it has no version that shows writes.
        """
        is_result = not tensor.is_inference() and memory_of(tensor) == memory_of(self.result)
        return is_result and tensor._version == self.version


def memory_of(tensor: Tensor) -> tuple[Any, Any]:
    """Return a key of the place in memory where a tensor begins."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


current_call: ContextVar[Any] = ContextVar("current_call", default=None)
"""The running ``Call``, also in the threads of its replicas; None outside of calls."""

_of_replica: ContextVar[list[Counted] | None] = ContextVar("of_replica", default=None)
_lock = threading.Lock()
_running = weakref.WeakSet[Any]()
"""The running calls. An interrupted call vanishes from this set, as nothing else refers to it."""


@contextlib.contextmanager
def running(call: Any) -> Iterator[None]:
    """Context manager in which a ``Call`` is running, and its cross entropies are counted."""
    is_split = len(call.chunk_sizes) > 1
    call.counted = [[] for _ in call.devices] if is_split and call.scalar_outputs == "auto" else []
    token = current_call.set(call)
    try:
        with _lock:
            _running.add(call)
            _exchange(is_counting=True)
        yield
    finally:
        current_call.reset(token)
        with _lock:
            _running.discard(call)
            if not _running:
                _exchange(is_counting=False)


def _exchange(is_counting: bool) -> None:
    """Replace functions of torch, or restore them. Skip functions that other code has replaced."""
    for function, counting in _COUNTING.items():
        old, new = (function, counting) if is_counting else (counting, function)
        if getattr(torch._C._nn, function.__name__) is old:
            setattr(torch._C._nn, function.__name__, new)


def run_counted(index: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function of a replica, and add its cross entropies to the list of the call."""
    call = current_call.get()
    token = _of_replica.set(call.counted[index] if call and index < len(call.counted) else None)
    try:
        return function(*args, **kwargs)
    finally:
        _of_replica.reset(token)


def _counting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a replacement that also counts targets. It computes and saves what torch's does."""

    @functools.wraps(function)
    def compute(*args: Any, **options: Any) -> Tensor:
        loss = function(*args, **options)
        found = None if torch.compiler.is_compiling() else _of_replica.get()
        is_plain = torch._C._functorch.peek_interpreter_stack() is None
        # torch.nn.functional passes the arguments that are read here by position.
        if found is None or len(args) < 5 or args[3] not in REDUCTIONS or not is_plain:
            return loss
        input, target, weight, reduction, ignore_index = args[:5]
        kind = REDUCTIONS[reduction]
        count = _count(target, weight, ignore_index)
        result = loss.detach()
        if kind == "mean" and isinstance(count, Tensor):
            # If no target counts, the mean is 0 / 0, and NaN would hide what is added to it.
            result.masked_fill_(count == 0, 0)
            if weight is not None and loss.grad_fn:  # the classes of all targets may weigh 0
                ignore_if_empty([loss.grad_fn], [count])
        version = 0 if loss.is_inference() else loss._version
        square = target if input.shape == 2 * target.shape else None  # (N, N) and (N,)
        value = loss.clone()  # since forward may write to the loss
        found.append(Counted(kind, count, square, value, loss.grad_fn, result, version))
        return loss

    _register_builtin(compute, f"aten::{function.__name__}")  # for torch.jit.script in forward
    return compute


_COUNTING = {f: _counting(f) for f in (torch._C._nn.cross_entropy_loss, torch._C._nn.nll_loss_nd)}
"""The two functions of torch and their replacements."""


def _count(target: Tensor, weight: Tensor | None, ignore_index: int) -> int | Tensor:
    """Return the number of targets that count, or their weight."""
    if target.is_floating_point():  # probabilities of classes: all count
        return target.numel() // target.shape[min(1, target.dim() - 1)]
    is_counted = target != ignore_index
    if weight is None:
        return is_counted.count_nonzero()
    weights = weight.detach()[target.where(is_counted, 0).long()]
    return (weights * is_counted).sum()


def ignore_if_empty(nodes: Sequence[Any], weights: Sequence[Any]) -> None:
    """For replicas whose weight is 0, let nodes return gradients of 0 in place of 0 / 0."""
    for node, weight in zip(nodes, weights, strict=True):
        if node and (isinstance(weight, Tensor) or weight == 0):
            node.register_hook(functools.partial(_zero_if_empty, torch.as_tensor(weight == 0)))


def _zero_if_empty(is_empty: Tensor, gradients: Sequence[Tensor | None], *_: Any) -> Any:
    """Replace gradients that are 0 / 0 by 0. This is a hook of autograd nodes."""
    return tuple(
        g if g is None else g.masked_fill(is_empty.to(g.device) & g.isnan(), 0) for g in gradients
    )
