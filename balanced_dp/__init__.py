"""A torch.nn.DataParallel that gives the first GPU a smaller share of the batch."""

from .criterion import BalancedCriterion
from .data_parallel import BalancedDataParallel, balanced_data_parallel
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
from .measurement import Measurement, measure_step
from .memory import (
    DeviceBreakdown,
    DeviceMemory,
    DevicePeak,
    MemoryLogger,
    MemoryProbe,
    StepMemory,
    memory_breakdown,
)
from .memory_model import Law, MemoryModel
from .per_device import PerDevice
from .plan import Plan, WeightedSplit, plan
from .split import split_batch, split_by_weights
from .tuner import tune
from .tuning import Alternative, Origin, Report
from .workloads import Workload

__all__ = [
    "Alternative",
    "ArgumentError",
    "ArgumentTypeError",
    "BalanceWarning",
    "BalancedCriterion",
    "BalancedDataParallel",
    "BalancedDataParallelError",
    "DeviceBreakdown",
    "DeviceMemory",
    "DevicePeak",
    "DistributedError",
    "EmulatedDevices",
    "EmulationError",
    "GatherError",
    "ImbalanceWarning",
    "InfeasiblePlanError",
    "Law",
    "Measurement",
    "MemoryBreakdown",
    "MemoryLogger",
    "MemoryModel",
    "MemoryProbe",
    "Origin",
    "PerDevice",
    "Plan",
    "ProbeError",
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
    "tune",
]
