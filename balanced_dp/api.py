"""The names that ``balanced_dp`` offers."""

from .devices import training_devices
from .emulation import EmulatedDevices, MemoryBreakdown, emulate_devices
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BalancedDataParallelError,
    BalanceWarning,
    DistributedError,
    EmulationError,
    GatherError,
    ImbalanceWarning,
    InfeasiblePlanError,
    ProbeError,
    ReportError,
    ScatterError,
    SymbolicValueError,
)
from .memory import (
    DeviceMemory,
    MemoryLogger,
    MemoryProbe,
    StepMemory,
    memory_breakdown,
)
from .parallel import BalancedCriterion, BalancedDataParallel, PerDevice, balanced_data_parallel
from .planning import LinearTerm, MemoryModel, Plan, WeightedSplit, plan
from .split import split_batch, split_by_weights
from .tuning import Alternative, Measurement, Provenance, Report, Workload, measure_step, tune

__all__ = [
    "Alternative",
    "ArgumentError",
    "ArgumentTypeError",
    "BalanceWarning",
    "BalancedCriterion",
    "BalancedDataParallel",
    "BalancedDataParallelError",
    "DeviceMemory",
    "DistributedError",
    "EmulatedDevices",
    "EmulationError",
    "GatherError",
    "ImbalanceWarning",
    "InfeasiblePlanError",
    "LinearTerm",
    "Measurement",
    "MemoryBreakdown",
    "MemoryLogger",
    "MemoryModel",
    "MemoryProbe",
    "PerDevice",
    "Plan",
    "ProbeError",
    "Provenance",
    "Report",
    "ReportError",
    "ScatterError",
    "StepMemory",
    "SymbolicValueError",
    "WeightedSplit",
    "Workload",
    "balanced_data_parallel",
    "emulate_devices",
    "measure_step",
    "memory_breakdown",
    "plan",
    "split_batch",
    "split_by_weights",
    "training_devices",
    "tune",
]
