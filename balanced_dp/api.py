"""The names that ``balanced_dp`` offers."""

from .devices import training_devices
from .emulation import emulate_devices
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BalancedDataParallelError,
    BalanceWarning,
    EmulationError,
    GatherError,
    InfeasiblePlanError,
    ProbeError,
    ReportError,
    ScatterError,
    SymbolicValueError,
)
from .memory import MemoryLogger, MemoryProbe, memory_breakdown
from .parallel import BalancedCriterion, BalancedDataParallel, PerDevice, balanced_data_parallel
from .split import split_batch, split_by_weights
from .tuning import Option, Report, Workload, tune

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BalanceWarning",
    "BalancedCriterion",
    "BalancedDataParallel",
    "BalancedDataParallelError",
    "EmulationError",
    "GatherError",
    "InfeasiblePlanError",
    "MemoryLogger",
    "MemoryProbe",
    "Option",
    "PerDevice",
    "ProbeError",
    "Report",
    "ReportError",
    "ScatterError",
    "SymbolicValueError",
    "Workload",
    "balanced_data_parallel",
    "emulate_devices",
    "memory_breakdown",
    "split_batch",
    "split_by_weights",
    "training_devices",
    "tune",
]
