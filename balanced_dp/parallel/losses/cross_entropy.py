"""Count the targets of each cross entropy that a replica computes.

While replicas run, the two functions with which torch computes cross entropies are replaced:
``cross_entropy_loss`` and ``nll_loss_nd``. In a replica, a replacement calls torch's function,
counts the targets, and returns a clone of the result. A mean over no targets is NaN, and a loss
that adds other terms to this NaN would be NaN, too. So the replacement returns 0 instead. If no
replica has targets, the mean over the whole batch is still NaN.

Autograd saves the number of targets, too, as ``_saved_total_weight``. But this number is missing if
gradients are disabled or labels are smoothed, so it is not used.
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
"""The name of each reduction, by the number that ``torch.nn._reduction.get_enum`` gives to it."""


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """A cross entropy that one replica has computed.

    Attributes:
        kind: the reduction over the targets, ``"mean"`` or ``"sum"``.
        count: the number of targets that are not ignored. With class weights, it is the sum of the
            weights of these targets. If the targets are class probabilities, it is the number of
            all targets, even with class weights. The count is an integer or a 0-dim tensor.
        target: the targets if the input has the shape (N, N) and the targets have the shape (N,),
            else None. ``compares_samples`` reads them.
        value: the cross entropy.
        result: the clone of ``value`` that the replica's ``forward`` received, and may write to.
    """

    kind: str
    count: Any
    target: Tensor | None
    value: Tensor
    result: Tensor

    def compares_samples(self) -> bool:
        """Return whether the targets are the row numbers 0, 1, ..., each once, in any order.

        Such targets indicate a contrastive loss, which compares each sample with the other samples
        of the chunk. Reading the targets waits for their device.
        """
        return (rows := self.target) is not None and sorted(rows.tolist()) == [*range(len(rows))]

    def is_(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is the result of this cross entropy, and was not written to.

        ``self.result.detach()`` counts as the result, too. A write in place is recognized by the
        tensor's version counter, which is 0 in a new clone and grows with each write. An inference
        tensor has no version counter, so the answer for it is False.
        """
        is_result = not tensor.is_inference() and memory_of(tensor) == memory_of(self.result)
        return is_result and tensor._version == 0


def memory_of(tensor: Tensor) -> tuple[Any, Any]:
    """Return a key that identifies the place in memory where the data of a tensor begins."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


current_call: ContextVar[Any] = ContextVar("current_call", default=None)
"""The running ``Call`` (one call of a function on several devices), or None.

It has the same value in the threads that run the replicas of the call.
"""

_of_replica: ContextVar[list[Counted] | None] = ContextVar("of_replica", default=None)
"""The list that collects the cross entropies of the replica that this thread runs, or None."""
_lock = threading.Lock()
_running = weakref.WeakSet[Any]()
"""Weak references to the running calls.

If Ctrl-C interrupts a call, the code that removes its ``Call`` from this set may not run. Because
the reference is weak, the ``Call`` still vanishes when nothing else refers to it.
"""


@contextlib.contextmanager
def running(call: Any) -> Iterator[None]:
    """Return a context manager inside which ``call`` is the running ``Call``.

    If the batch is split and the call has ``scalar_outputs="auto"``, the cross entropies that its
    replicas compute are recorded.
    """
    is_split = len(call.chunk_sizes) > 1
    call.counted = [[] for _ in call.devices] if is_split and call.scalar_outputs == "auto" else []
    token = current_call.set(call)
    try:
        with _lock:
            _running.add(call)
            _exchange()
        yield
    finally:
        current_call.reset(token)
        with _lock:
            _running.discard(call)
            _exchange()


def _exchange() -> None:
    """While calls run, replace torch's cross entropy functions by functions that count targets.

    If no call runs, restore torch's functions. A function that other code has replaced is left as
    it is. The caller holds ``_lock``.
    """
    for function, counting in _COUNTING.items():
        old, new = (function, counting) if _running else (counting, function)
        if getattr(torch._C._nn, function.__name__) is old:
            setattr(torch._C._nn, function.__name__, new)


def run_counted(index: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``, and record the cross entropies that it computes.

    A ``Counted`` record of each cross entropy is appended to ``counted[index]`` of the ``Call`` in
    ``current_call``. Nothing is recorded if no ``Call`` is running, or if ``counted`` is empty.

    Args:
        index: the index of the replica among the replicas of the call.
        function: the function that computes the outputs of the replica.
        *args: positional arguments of the function.
        **kwargs: keyword arguments of the function.
    """
    call = current_call.get()
    token = _of_replica.set(call.counted[index] if call and index < len(call.counted) else None)
    try:
        return function(*args, **kwargs)
    finally:
        _of_replica.reset(token)


def _counting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a replacement for ``function``, a cross entropy of torch, that also counts targets.

    The replacement returns the same value as ``function``, and saves the same tensors for backward.
    There are two differences if ``run_counted`` records the cross entropy:

    - A mean over no targets is 0 instead of NaN.
    - The result is a clone of the recorded value, because ``forward`` may write to the result.
    """

    @functools.wraps(function)
    def compute(*args: Any, **options: Any) -> Tensor:
        loss = function(*args, **options)
        found = None if torch.compiler.is_compiling() else _of_replica.get()
        is_plain = torch._C._functorch.peek_interpreter_stack() is None
        # torch.nn.functional passes five or more arguments by position. A call with fewer is not
        # counted.
        if found is None or len(args) < 5 or args[3] not in REDUCTIONS or not is_plain:
            return loss
        input, target, weight, reduction, ignore_index = args[:5]
        kind = REDUCTIONS[reduction]
        count = _count(target, weight, ignore_index)
        if kind == "mean" and isinstance(count, Tensor):
            # If no target counts, the mean is 0 / 0, which is NaN. Whatever forward adds to NaN
            # would be lost.
            loss.detach().masked_fill_(count == 0, 0)
            # If the class weights of all targets are 0, the gradient is NaN, too.
            if weight is not None and loss.grad_fn:
                ignore_if_empty([loss.grad_fn], [count])
        square = target if input.shape == 2 * target.shape else None  # shapes (N, N) and (N,)
        result = loss.clone()  # forward may write to the clone, but not to the recorded loss
        found.append(Counted(kind, count, square, loss, result))
        return result

    _register_builtin(compute, f"aten::{function.__name__}")  # torch.jit.script needs this
    return compute


_COUNTING = {f: _counting(f) for f in (torch._C._nn.cross_entropy_loss, torch._C._nn.nll_loss_nd)}
"""For each of torch's two cross entropy functions, the replacement that counts targets."""


def _count(target: Tensor, weight: Tensor | None, ignore_index: int) -> int | Tensor:
    """Return the number of targets that are not ignored, or the sum of their class weights.

    If the targets are class probabilities, each vector of probabilities is one target, and all
    targets are counted.
    """
    if target.is_floating_point():  # probabilities of classes: all count
        return target.numel() // target.shape[min(1, target.dim() - 1)]
    is_counted = target != ignore_index
    if weight is None:
        return is_counted.count_nonzero()
    weights = weight.detach()[target.where(is_counted, 0).long()]
    return (weights * is_counted).sum()


def ignore_if_empty(nodes: Sequence[Any], weights: Sequence[Any]) -> None:
    """Let hooks replace NaN gradients by 0 on the replicas whose loss has weight 0.

    The backward of a mean over no entries computes 0 / 0, which is NaN. If this NaN were added to
    the gradients of the other replicas, the sum would be NaN.

    Args:
        nodes: for each replica, the autograd node whose gradients may be NaN, or None.
        weights: for each replica, the weight of its loss, a number or a tensor. The value of a
            tensor is not read on the host, since the host would have to wait for the device.
    """
    for node, weight in zip(nodes, weights, strict=True):
        if node and (isinstance(weight, Tensor) or weight == 0):
            node.register_hook(functools.partial(_zero_if_empty, torch.as_tensor(weight == 0)))


def _zero_if_empty(is_empty: Tensor, gradients: Sequence[Tensor | None], *_: Any) -> Any:
    """Return ``gradients`` with NaN replaced by 0 if ``is_empty``; called as a hook of a node."""
    return tuple(
        g if g is None else g.masked_fill(is_empty.to(g.device) & g.isnan(), 0) for g in gradients
    )
