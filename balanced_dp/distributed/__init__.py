"""The same balance with a process for each device: ``DistributedDataParallel`` and ``fully_shard``.

torch.distributed, torchrun and these two do the work. Here is what they lack: shares of unlike
size, and a loss that keeps gradients exact with them.
"""

from .batch_sampler import BalancedBatchSampler, EmptyBatches
from .loss_scaling import count_all_ranks, scale_loss
from .ranks import split_ranks
from .to_ddp import convert

__all__ = [
    "BalancedBatchSampler",
    "EmptyBatches",
    "convert",
    "count_all_ranks",
    "scale_loss",
    "split_ranks",
]
