"""Count what the mean of a cross entropy is over, where torch computes it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

_MEAN, _SUM = 1, 2  # of torch.nn._reduction.get_enum
_FUNCTIONS = ("cross_entropy_loss", "nll_loss_nd")
"""What ``F.cross_entropy`` and ``F.nll_loss`` look up in ``torch._C._nn`` at each call."""


@dataclass(slots=True)
class CountedLoss:
    """A mean or a sum that torch has computed.

    Attributes:
        loss: what torch returned, 0-dim; 0 where it is a mean over nothing.
        size: how many targets there were.
        count: what it is a mean over, 0-dim: the targets that are not ignored, or their weights.
            None for a sum.
        divisor: what its sum was divided by, 0-dim: the count, or 1 for a sum that is not 0 though
            nothing counts. None for a sum.
        value: its value, whatever is added to ``loss`` in place.
        node: the node of autograd that has computed it, None where it recorded nothing.
        call: the call that has, if it was noted.
    """

    loss: torch.Tensor
    size: int
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
    """Yield a list to which each cross entropy of this context is added, if it is a mean or a sum.

    Threads that run in a copy of the context count as well. But for labels that are smoothed and
    weighted, autograd saves what it would have saved, so that activation checkpointing, which
    computes a loss again without counting it, finds the same tensors.
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
        reduction: int = _MEAN,
        ignore_index: int = -100,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        found = _counted.get()
        if (
            found is None
            or reduction not in (_MEAN, _SUM)
            or target.is_floating_point()  # probabilities of classes: all count
            or torch.compiler.is_compiling()
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return function(input, target, weight, reduction, ignore_index, *args, **kwargs)
        if reduction == _SUM:
            loss = function(input, target, weight, reduction, ignore_index, *args, **kwargs)
            found.append(CountedLoss(loss, target.numel(), None, None, loss.clone(), loss.grad_fn))
            return loss
        is_counted = target != ignore_index
        if weight is None:
            count = torch.count_nonzero(is_counted)
        else:
            count = (weight.detach()[target.where(is_counted, 0).long()] * is_counted).sum()
        is_empty, divisor = count.logical_not(), count
        if weight is not None and any((*args, *kwargs.values())):
            # Smoothed labels have a loss even where their weights are 0.
            divisor = count.where(~is_empty, 1)
            total = function(input, target, weight, _SUM, ignore_index, *args, **kwargs)
            loss = total / divisor
        else:
            if weight is not None and input.requires_grad and torch.is_grad_enabled():
                # The gradient of targets that weigh nothing is 0 / 0.
                input = input.view_as(input)
                input.register_hook(lambda gradient: gradient.masked_fill(is_empty, 0))
            loss = function(input, target, weight, reduction, ignore_index, *args, **kwargs)
            loss.data.masked_fill_(is_empty, 0)  # instead of 0 / 0
        found.append(CountedLoss(loss, target.numel(), count, divisor, loss.clone(), loss.grad_fn))
        return loss

    return compute


def counted_loss(loss: torch.Tensor) -> CountedLoss | None:
    """Return what this context has counted of a loss that torch has just returned."""
    found = _counted.get() or []
    return next((item for item in reversed(found) if item.loss is loss), None)
