"""Gradients averaged over ranks as those of the whole batch, though ranks have unlike shares."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ..errors import ArgumentError, ArgumentTypeError
from .local_weight import LocalWeight
from .weighted_buckets import weight_buckets
from .weighted_shards import weight_shards

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def weight_gradients(
    model: ModuleT,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> ModuleT:
    """Returns the model, whose gradients are from now on those of the whole batch.

    ``DistributedDataParallel`` averages gradients over ranks, each counting the same, which is
    wrong where they have chunks of unlike size. Here each counts for what its loss is a mean over:
    ``model.local_weight(n)`` tells it, before each backward pass. Then gradients are those of the
    mean over the whole batch on one device.

    ``model.local_weight(n)`` takes a number of at least 0, or a tensor with one: samples, or tokens
    where the loss is a mean over tokens. All ranks call it, as often as each other and with the
    passes in the same order; before the forward pass is best, since ranks add up their counts while
    they compute. A rank with 0 counts nothing, whatever its loss (which may be NaN), but has to run
    forward and backward for the others. A weight holds until the next one.

    - Passes in ``no_sync()`` are weighted each by its own. Gradients are then what the same passes
      over whole batches would have accumulated on one device.
    - What comes to ``.grad`` is weighted, also of ``model.module``, which reduces nothing. Hooks on
      parameters see what this rank has computed; post-accumulate hooks see it weighted, and if they
      are registered later, as a tensor without memory of its own (``.detach()`` has some).
    - A parameter is weighted by one model, the last that was given.
    - A communication hook, such as bf16 compression, gets gradients that are weighted.
    - Of ``fully_shard``, gradients are weighted where they are reduced, with all that has
      accumulated. So each rank must have the same share of all passes in between, and tell none
      for a pass without backward.

    Args:
        model: of ``DistributedDataParallel`` or ``fully_shard``, not yet compiled.
        process_group: the ranks that share a batch; by default those that average gradients.
        timeout: how long to wait for another rank's weight; by default that of torch for gloo,
            half an hour. A rank that is stuck later is noticed by the group that averages.

    Raises:
        ArgumentTypeError: the model is of another kind, or the timeout no ``timedelta``.
        ArgumentError: it has weights already, gradients that are averaged past the weights
            (``delay_all_reduce_named_params``, ``mixed_precision``, the "python_reducer" of
            ``torch.compile``, or a mesh of ``fully_shard`` that does not shard), or a weight is no
            number of at least 0.
        DistributedError: in backward: a rank has not told its weight in time, and which; no weight
            was told at all; or weights differ where ``fully_shard`` cannot tell them apart. In
            ``local_weight``: another model weights parameters of this one.

    Source:
        ``DistributedDataParallel`` divides by the world size
        (https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html):
        the mean of ``world_size * n_r / sum(n) * gradient_r`` is that of the whole batch.
    """
    if timeout is not None and not isinstance(timeout, timedelta):
        raise ArgumentTypeError(
            f"timeout must be a datetime.timedelta, such as timedelta(minutes=5), got {timeout!r}"
        )
    if isinstance(getattr(model, "local_weight", None), LocalWeight):
        raise ArgumentError("this model has weights already")
    if isinstance(model, DistributedDataParallel):
        weight = weight_buckets(model, process_group, timeout)
    elif isinstance(model, FSDPModule):
        weight = weight_shards(model, process_group, timeout)
    else:
        remedy = "wrap it in one of them first, and compile it last"
        if isinstance(model, FullyShardedDataParallel):
            remedy = "FullyShardedDataParallel averages in one flat parameter; use fully_shard"
        raise ArgumentTypeError(
            f"model must be of DistributedDataParallel or fully_shard, got a "
            f"{type(model).__name__}: {remedy}"
        )
    object.__setattr__(model, "local_weight", weight)
    return model
