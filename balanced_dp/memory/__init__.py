"""The memory of each device: measured, broken down by use, and logged."""

from .breakdown import memory_breakdown
from .peaks import MemoryLogger
from .probe import MemoryProbe
from .records import DeviceMemory, StepMemory

__all__ = [
    "DeviceMemory",
    "MemoryLogger",
    "MemoryProbe",
    "StepMemory",
    "memory_breakdown",
]
