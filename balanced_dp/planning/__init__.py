"""Predict peaks from measured ones and plan a split. Pure arithmetic, no devices."""

from .memory_model import LinearTerm, MemoryModel
from .split_planner import Plan, WeightedSplit, plan

__all__ = ["LinearTerm", "MemoryModel", "Plan", "WeightedSplit", "plan"]
