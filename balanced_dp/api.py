"""The public names of ``balanced_dp``."""

from .emulation import emulate_devices as emulate_devices
from .emulation.fallback import training_devices as training_devices
from .errors import ArgumentError as ArgumentError
from .errors import ArgumentTypeError as ArgumentTypeError
from .errors import BalancedDataParallelError as BalancedDataParallelError
from .errors import BalanceWarning as BalanceWarning
from .errors import EmulationError as EmulationError
from .errors import GatherError as GatherError
from .errors import InfeasiblePlanError as InfeasiblePlanError
from .errors import ProbeError as ProbeError
from .errors import ReportError as ReportError
from .errors import ScatterError as ScatterError
from .errors import SymbolicValueError as SymbolicValueError
from .memory.breakdown import memory_breakdown as memory_breakdown
from .memory.peaks import MemoryLogger as MemoryLogger
from .memory.probe import MemoryProbe as MemoryProbe
from .parallel.criterion import BalancedCriterion as BalancedCriterion
from .parallel.data_parallel import BalancedDataParallel as BalancedDataParallel
from .parallel.functional import balanced_data_parallel as balanced_data_parallel
from .parallel.per_device import PerDevice as PerDevice
from .split import split_batch as split_batch
from .split import split_by_weights as split_by_weights
from .tuning.options import Option as Option
from .tuning.report import Report as Report
from .tuning.tuner import tune as tune
from .tuning.workload import Workload as Workload
