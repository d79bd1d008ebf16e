"""From measured peaks to a split: arithmetic, which asks no device."""

from .memory_model import Law, MemoryModel
from .split_planner import Plan, WeightedSplit, plan

__all__ = ["Law", "MemoryModel", "Plan", "WeightedSplit", "plan"]
