"""A call of ``BalancedDataParallel``: scatter, replicate, run, gather or compute the loss."""

from .criterion import BalancedCriterion
from .data_parallel import BalancedDataParallel
from .functional import balanced_data_parallel
from .per_device import PerDevice

__all__ = ["BalancedCriterion", "BalancedDataParallel", "PerDevice", "balanced_data_parallel"]
