"""The buckets of ``DistributedDataParallel``, weighted."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ArgumentError
from .local_weight import LocalWeight, Share, copied_weight, scale


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

    A gradient may share memory with one that still flows, so it cannot be weighted in place before
    it is in its bucket. There it can, if what the bucket holds is of one pass. Gradients that add
    up in ``no_sync()``, and all where another communication hook sees the buckets, are weighted
    one by one on their way, which takes memory for each.
    """

    def __init__(
        self, weight: LocalWeight, model: DistributedDataParallel, *, takes_all: bool
    ) -> None:
        self._weight = weight
        self._model = weakref.ref(model)
        self._takes_all = takes_all
        self._has_accumulated = False
        self._decided: Share | None = None
        self._is_by_bucket = False

    def attach(self, parameter: Tensor) -> None:
        """Has autograd call it with each gradient, and nobody who did this for another model."""
        if parameter in _HANDLES:
            _HANDLES[parameter].remove()
        _HANDLES[parameter] = parameter.register_hook(self._weighted)

    def _weighted(self, gradient: Tensor) -> Tensor | None:
        model = self._model()
        if model is None:  # its parameters are used without it
            return None
        share = self._decide(model)
        if self._is_by_bucket or share.factor == 1:
            return None
        return gradient * share.factor if share.factor else torch.zeros_like(gradient)

    def _decide(self, model: DistributedDataParallel) -> Share:
        """Returns the share of this pass, once it is known where that is applied."""
        share = self._weight.share
        if self._decided is not share:
            is_reduced = model.require_forward_param_sync  # what the last forward prepared for
            self._is_by_bucket = is_reduced and not (self._takes_all or self._has_accumulated)
            self._has_accumulated = not is_reduced
            self._decided = share
        return share

    def __reduce__(self) -> Any:
        return copied_weight, ()

    def bucket_factor(self, model: DistributedDataParallel) -> float:
        """Returns by what a bucket is still to be multiplied."""
        share = self._decide(model)
        return share.factor if self._is_by_bucket else 1.0


_HANDLES = WeakTensorKeyDictionary()
"""The hooks of parameters."""


def _average(
    state: _WeightedGradients,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # public, but not in the stubs
) -> torch.futures.Future[Tensor]:
    """Is the communication hook: the average over ranks, each bucket weighted."""
    model = state._model()
    assert model is not None
    buffer = bucket.buffer()
    scale(buffer, state.bucket_factor(model) / model.process_group.size())
    work = dist.all_reduce(buffer, group=model.process_group, async_op=True)
    averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return averaged


_average.__annotations__ = get_type_hints(_average)  # DDP looks at them, and not as text
