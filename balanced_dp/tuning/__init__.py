"""Measure training steps of a workload, choose its split, and report all that was measured."""

from .options import Option
from .report import Report
from .tuner import tune
from .workload import Workload

__all__ = ["Option", "Report", "Workload", "tune"]
