"""The buckets of ``DistributedDataParallel``, weighted."""

from __future__ import annotations

import weakref
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ArgumentError
from .local_weight import LocalWeight, Share, copied_weight, scale

# Public, but not in the stubs.
_Bucket: TypeAlias = dist.GradBucket  # type: ignore[name-defined,attr-defined]

_FEW = 2**14
"""Gradients of at most as many elements are weighted in their bucket, with one call for them all.

A call for each on its way there costs more than the pass over memory that it saves.
"""


def weight_buckets(
    model: DistributedDataParallel, group: dist.ProcessGroup | None, timeout: timedelta | None
) -> LocalWeight:
    """Weights the gradients of ``model`` from now on, and returns what is told the weights."""
    if model._delay_all_reduce_params:
        raise ArgumentError(
            "DistributedDataParallel averages delay_all_reduce_named_params by itself, without "
            "weights; leave that argument out"
        )
    ranks = dist.get_process_group_ranks(group or model.process_group)
    weight = LocalWeight(ranks, timeout)
    has_hook = "comm_hook" in model._get_ddp_logging_data()
    gradients = _WeightedGradients(weight, model, takes_all=has_hook)
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and name not in model.parameters_to_ignore:
            gradients.attach(parameter)
    if not has_hook:
        model.register_comm_hook(gradients, _average)
    return weight


class _WeightedGradients:
    """Weights gradients of ``DistributedDataParallel`` where no memory is somebody else's.

    A gradient may share memory with one that still flows, so it is not weighted in place, but

    - where torch copies it to its bucket, in the same pass over memory;
    - in its bucket, if it is small, or of a kind that is not copied like that;
    - before all that and each in memory of its own, where it adds up with others in ``no_sync()``,
      or where another communication hook sees the buckets.
    """

    def __init__(
        self, weight: LocalWeight, model: DistributedDataParallel, *, takes_all: bool
    ) -> None:
        self._weight = weight
        self._model = weakref.ref(model)
        self._takes_all = takes_all
        self._has_accumulated = False
        self._decided: Share | None = None
        self._factor_before = self._factor_in_bucket = 1.0
        # Their addresses in buckets; as tensors, torch gives out new ones each time.
        self._weighted_parts: set[int] = set()

    def attach(self, parameter: Tensor) -> None:
        """Has autograd call it with each gradient, and nobody who did this for another model."""
        for handle in _HANDLES.get(parameter, ()):
            handle.remove()
        handles = [parameter.register_hook(self._weighted)]
        if not self._takes_all:
            handles.append(parameter.register_post_accumulate_grad_hook(self._weight_when_copied))
        _HANDLES[parameter] = handles

    def _weighted(self, gradient: Tensor) -> Tensor | None:
        model = self._model()
        if model is None:  # its parameters are used without it
            return None
        self._decide(model)
        factor = self._factor_before
        if factor == 1:
            return None
        return gradient * factor if factor else torch.zeros_like(gradient)

    def _weight_when_copied(self, parameter: Tensor) -> None:
        _unwrap(parameter)  # reentrant checkpoints come here again before it is copied
        model, gradient = self._model(), parameter.grad
        if model is None or not model.require_forward_param_sync:  # nothing is going to be copied
            return
        if type(gradient) is not Tensor or gradient.layout != torch.strided:
            return
        if gradient.is_complex() or gradient.requires_grad or gradient.numel() <= _FEW:
            return
        self._decide(model)
        parameter.grad = _WeightedWhenCopied(gradient, self._factor_in_bucket, self._weighted_parts)
        # For whoever called backward() it is what it was. This comes before torch copies from
        # buckets, which it queues when the last gradient is there.
        Variable._execution_engine.queue_callback(partial(_unwrap, parameter))

    def average(self, bucket: _Bucket) -> torch.futures.Future[Tensor]:
        """Returns the average over ranks of a bucket, once all of its parts are weighted."""
        model = self._model()
        assert model is not None
        self._decide(model)
        buffer = bucket.buffer()
        # Torch cuts a complex bucket, which it keeps as real numbers, into wrong parts.
        if buffer.is_sparse or bucket.parameters()[0].is_complex():
            scale([buffer], self._factor_in_bucket)
        else:
            parts = {part.data_ptr(): part for part in bucket.gradients()}
            rest = [part for address, part in parts.items() if address not in self._weighted_parts]
            scale(rest, self._factor_in_bucket)
            self._weighted_parts.difference_update(parts)
        work = dist.all_reduce(buffer, group=model.process_group, async_op=True)
        averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda d: d.value()[0])
        return averaged

    def _decide(self, model: DistributedDataParallel) -> None:
        """Sets where the share of this pass is applied, once that is known."""
        share = self._weight.share
        if self._decided is share:
            return
        is_reduced = model.require_forward_param_sync  # what the last forward prepared for
        is_by_bucket = is_reduced and not (self._takes_all or self._has_accumulated)
        self._factor_before = 1.0 if is_by_bucket else share.factor
        in_bucket = share.factor if is_by_bucket else 1.0
        self._factor_in_bucket = in_bucket / model.process_group.size()
        self._has_accumulated = not is_reduced
        self._decided = share

    def __reduce__(self) -> Any:
        return copied_weight, ()


_HANDLES = WeakTensorKeyDictionary()
"""The hooks of parameters."""


class _WeightedWhenCopied(Tensor):
    """A gradient on its way to a bucket.

    ``tensor.copy_(it)`` multiplies, as torch's reducer does to a bucket if there is a communication
    hook. For all else it is just that gradient.
    """

    _gradient: Tensor
    _factor: float
    _weighted_parts: set[int]

    @staticmethod
    def __new__(
        cls, gradient: Tensor, factor: float, weighted_parts: set[int]
    ) -> _WeightedWhenCopied:
        self: _WeightedWhenCopied = Tensor._make_wrapper_subclass(
            cls,
            gradient.size(),
            strides=gradient.stride(),
            dtype=gradient.dtype,
            device=gradient.device,
        )
        self._gradient = gradient
        self._factor = factor
        self._weighted_parts = weighted_parts
        return self

    # Torch's stubs declare both for plain tensors: a method here, any callable and any types there.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], cls):
            return args[1]._copy_to(args[0])
        args, kwargs = tree_map_only(cls, attrgetter("_gradient"), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument of its own
        return repr(self._gradient)

    def _copy_to(self, part: Tensor) -> Tensor:
        self._weighted_parts.add(part.data_ptr())
        if self._factor == 0:  # what a rank without samples has computed may be NaN
            return part.zero_()
        return torch.mul(self._gradient, self._factor, out=part)


def _unwrap(parameter: Tensor) -> None:
    if isinstance(parameter.grad, _WeightedWhenCopied):
        parameter.grad = parameter.grad._gradient


def _average(state: _WeightedGradients, bucket: _Bucket) -> torch.futures.Future[Tensor]:
    """Is the communication hook."""
    return state.average(bucket)


# Torch compares them with types, and not as text; those of a method cannot be set.
_average.__annotations__ = get_type_hints(_average)
