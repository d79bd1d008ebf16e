"""A torch.nn.DataParallel that gives the first GPU a smaller share of the batch."""

from .data_parallel import BalancedDataParallel, balanced_data_parallel
from .emulation import EmulatedDevices, MemoryBreakdown, emulate_devices
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BalancedDataParallelError,
    BalanceWarning,
    EmulationError,
    GatherError,
    ScatterError,
    SymbolicValueError,
)
from .split import split_batch

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BalanceWarning",
    "BalancedDataParallel",
    "BalancedDataParallelError",
    "EmulatedDevices",
    "EmulationError",
    "GatherError",
    "MemoryBreakdown",
    "ScatterError",
    "SymbolicValueError",
    "balanced_data_parallel",
    "emulate_devices",
    "split_batch",
]
