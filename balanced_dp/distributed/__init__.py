"""Uneven splits with one process for each device.

They work with ``DistributedDataParallel`` and ``fully_shard``, started by torchrun. This package
adds what these lack: chunks of different sizes, and a loss that is scaled for exact gradients.
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
