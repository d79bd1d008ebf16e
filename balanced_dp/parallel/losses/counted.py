"""Count what the mean of a cross entropy is over, where torch computes it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

MEAN, SUM = 1, 2  # of torch.nn._reduction.get_enum
_FUNCTIONS = ("cross_entropy_loss", "nll_loss_nd")
"""What ``F.cross_entropy`` and ``F.nll_loss`` look up in ``torch._C._nn`` at each call."""


@dataclass(slots=True, eq=False)
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
        reduction: int = MEAN,
        ignore_index: int = -100,
        *smoothing: float,
        **kwargs: Any,
    ) -> torch.Tensor:
        def loss_of(input: torch.Tensor, reduction: int) -> torch.Tensor:
            return function(input, target, weight, reduction, ignore_index, *smoothing, **kwargs)

        found = _counted.get()
        if (
            found is None
            or reduction not in (MEAN, SUM)
            or target.is_floating_point()  # probabilities of classes: all count
            or torch.compiler.is_compiling()
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return loss_of(input, reduction)
        count = divisor = None
        if reduction == SUM:
            loss = loss_of(input, reduction)
        elif weight is None:
            loss = loss_of(input, reduction)
            count = divisor = torch.count_nonzero(target != ignore_index)
            loss.data.masked_fill_(count.logical_not(), 0)  # instead of 0 / 0
        else:
            is_counted = target != ignore_index
            weights = weight.detach()[target.where(is_counted, 0).long()]
            count = divisor = (weights * is_counted).sum()
            is_empty = count.logical_not()
            if any(smoothing) or any(kwargs.values()):
                # Smoothed labels have a loss even where their weights are 0.
                divisor = count.where(~is_empty, 1)
                loss = loss_of(input, SUM) / divisor
            else:
                loss = loss_of(_with_gradient_0_where(is_empty, input), reduction)
                loss.data.masked_fill_(is_empty, 0)
        found.append(CountedLoss(loss, target.numel(), count, divisor, loss.clone(), loss.grad_fn))
        return loss

    return compute


def _with_gradient_0_where(is_empty: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return the input, whose gradient would be 0 / 0 where all targets weigh nothing."""
    if input.requires_grad and torch.is_grad_enabled():
        input = input.view_as(input)
        input.register_hook(lambda gradient: gradient.masked_fill(is_empty, 0))
    return input


def counted_loss(loss: torch.Tensor) -> CountedLoss | None:
    """Return what this context has counted of a loss that torch has just returned."""
    found = _counted.get() or []
    return next((item for item in reversed(found) if item.loss is loss), None)
