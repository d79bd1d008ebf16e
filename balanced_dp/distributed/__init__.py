"""Uneven splits of each batch over ranks, where each rank is a process with one device.

The functions work with ``DistributedDataParallel`` and ``fully_shard``, in processes started by
torchrun. They add two things: chunks of different sizes for the ranks, and a loss that is scaled so
that the averaged gradients are those of the whole batch.
"""

from .loss_scaling import count_all_ranks, scale_loss
from .ranks import BalancedBatchSampler, EmptyBatches, split_ranks
from .to_ddp import convert

__all__ = [
    "BalancedBatchSampler",
    "EmptyBatches",
    "convert",
    "count_all_ranks",
    "scale_loss",
    "split_ranks",
]
