"""Count the targets of cross entropies where torch computes them.

The mean of a cross entropy is over the targets that are not ignored, or over their weights, whose
number is not known from the loss. ``F.cross_entropy`` and ``F.nll_loss`` look up the functions that
compute it in ``torch._C._nn`` at each call. While replicas run, these functions are replaced by
ones that compute the same loss, record its count, and return 0 instead of NaN if it is a mean over
nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

MEAN, SUM = 1, 2
"""The reductions, as in ``torch.nn._reduction.get_enum``."""

_FUNCTIONS = ("cross_entropy_loss", "nll_loss_nd")
"""The functions of ``torch._C._nn`` that are replaced."""


@dataclass(slots=True, eq=False)
class CountedLoss:
    """A cross entropy that was reduced to a mean or a sum.

    Attributes:
        loss: the tensor that was returned, 0-dim; 0 if it is a mean over nothing.
        size: the number of targets.
        num_classes: the number of classes.
        count: for a mean, the number of targets that are not ignored, or the sum of their weights;
            0-dim. None for a sum.
        divisor: for a mean, the denominator, 0-dim: the count, or 1 if the count is 0 and smoothed
            labels make the numerator nonzero. None for a sum.
        value: a copy of the loss, which does not change if something is added to ``loss`` in place.
        node: the autograd node that computed it; None if no graph was recorded.
        call: the call that computed it, if it was noted.
    """

    loss: torch.Tensor
    size: int
    num_classes: int
    count: torch.Tensor | None
    divisor: torch.Tensor | None
    value: torch.Tensor
    node: Any
    call: Any = None


_counted: ContextVar[list[CountedLoss] | None] = ContextVar("counted", default=None)
_lock = threading.Lock()
_num_users = 0
_originals: dict[str, Callable[..., torch.Tensor]] = {}


@contextlib.contextmanager
def counting() -> Iterator[list[CountedLoss]]:
    """Context manager that yields a list of the cross entropies computed inside it.

    Only those that are reduced to a mean or a sum are listed. Threads that run in a copy of this
    context are included. Unless labels are both smoothed and weighted, autograd saves the same
    tensors as without counting, because activation checkpointing computes a loss again, without
    counting, and compares them.
    """
    global _num_users
    found: list[CountedLoss] = []
    with _lock:
        if not _num_users:
            for name in _FUNCTIONS:
                _originals[name] = getattr(torch._C._nn, name)
                setattr(torch._C._nn, name, _counting_version(_originals[name]))
        _num_users += 1
    token = _counted.set(found)
    try:
        yield found
    finally:
        _counted.reset(token)
        with _lock:
            _num_users -= 1
            if not _num_users:
                for name in _FUNCTIONS:
                    setattr(torch._C._nn, name, _originals.pop(name))


def _counting_version(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def compute(
        input: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        reduction: int = MEAN,
        ignore_index: int = -100,
        *smoothing: float,
        **kwargs: Any,
    ) -> torch.Tensor:
        def loss_of(reduction: int) -> torch.Tensor:
            return function(input, target, weight, reduction, ignore_index, *smoothing, **kwargs)

        found = _counted.get()
        if (
            found is None
            or reduction not in (MEAN, SUM)
            or target.is_floating_point()  # probabilities of classes: all count
            or torch.compiler.is_compiling()
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return loss_of(reduction)
        count = divisor = None
        if reduction == MEAN:
            count = divisor = _count(target, weight, ignore_index)
        if count is None:
            loss = loss_of(SUM)
        elif weight is not None and (any(smoothing) or any(kwargs.values())):
            divisor = count.where(count != 0, 1)  # smoothed labels have a loss without weights, too
            loss = loss_of(SUM) / divisor
        else:
            loss = loss_of(MEAN)
            loss.data.masked_fill_(count.logical_not(), 0)  # it was 0 / 0
            if weight is not None and loss.grad_fn is not None:
                without_nan_gradients(loss.grad_fn, count)
        size, num_classes = target.numel(), input.shape[min(1, input.dim() - 1)]
        value, node = loss.clone(), loss.grad_fn
        found.append(CountedLoss(loss, size, num_classes, count, divisor, value, node))
        return loss

    return compute


def _count(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """Return the number of targets that are not ignored, or the sum of their weights."""
    is_counted = target != ignore_index
    if weight is None:
        return torch.count_nonzero(is_counted)
    return (weight.detach()[target.where(is_counted, 0).long()] * is_counted).sum()


def without_nan_gradients(node: Any, count: torch.Tensor) -> None:
    """Replace the gradients of a division by ``count``, 0 / 0 if nothing counts, by 0.

    Args:
        node: the autograd node of the division, or of a mean over what counts.
        count: the denominator, 0-dim.
    """
    node.register_hook(functools.partial(_filled, count))


def _filled(count: torch.Tensor, grad_inputs: Any, grad_outputs: Any) -> Any:
    first, *rest = grad_inputs
    return (None if first is None else first.masked_fill(count == 0, 0), *rest)


def counted_loss(loss: torch.Tensor) -> CountedLoss | None:
    """Return the record of a loss that torch has just returned, or None if it was not counted."""
    found = _counted.get() or []
    return next((item for item in reversed(found) if item.loss is loss), None)
