"""The memory of each device: measured, broken down by use, and logged."""

from .breakdown import DeviceBreakdown, memory_breakdown
from .logger import MemoryLogger
from .probe import DeviceMemory, MemoryProbe
from .step_memory import DevicePeak, StepMemory

__all__ = [
    "DeviceBreakdown",
    "DeviceMemory",
    "DevicePeak",
    "MemoryLogger",
    "MemoryProbe",
    "StepMemory",
    "memory_breakdown",
]
