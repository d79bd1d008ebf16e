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
    ImbalanceWarning,
    ProbeError,
    ScatterError,
    SymbolicValueError,
)
from .memory import (
    DeviceBreakdown,
    DeviceMemory,
    DevicePeak,
    MemoryLogger,
    MemoryProbe,
    StepMemory,
    memory_breakdown,
)
from .split import split_batch

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BalanceWarning",
    "BalancedDataParallel",
    "BalancedDataParallelError",
    "DeviceBreakdown",
    "DeviceMemory",
    "DevicePeak",
    "EmulatedDevices",
    "EmulationError",
    "GatherError",
    "ImbalanceWarning",
    "MemoryBreakdown",
    "MemoryLogger",
    "MemoryProbe",
    "ProbeError",
    "ScatterError",
    "StepMemory",
    "SymbolicValueError",
    "balanced_data_parallel",
    "emulate_devices",
    "memory_breakdown",
    "split_batch",
]
