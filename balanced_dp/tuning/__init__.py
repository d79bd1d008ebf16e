"""Measure training steps of a workload, choose its split, and report both."""

from .measurement import Measurement
from .report_types import Alternative, Provenance, Report
from .step_benchmark import measure_step
from .tuner import tune
from .workloads import Workload

__all__ = [
    "Alternative",
    "Measurement",
    "Provenance",
    "Report",
    "Workload",
    "measure_step",
    "tune",
]
