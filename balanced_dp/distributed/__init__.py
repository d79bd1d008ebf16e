"""The same balance with a process for each device: ``DistributedDataParallel`` and ``fully_shard``.

torch.distributed, torchrun and these two do the work. Here is what they lack: shares of unlike
size, and gradients that stay exact with them.
"""

from .convert import convert
from .ranks import split_ranks
from .sampler import BalancedBatchSampler, EmptyBatches
from .weights import weight_gradients

__all__ = ["BalancedBatchSampler", "EmptyBatches", "convert", "split_ranks", "weight_gradients"]
