"""What each device's memory holds: measured, explained, logged."""

from .breakdown import DeviceBreakdown, memory_breakdown
from .device_memory import DeviceMemory
from .logger import MemoryLogger
from .probe import MemoryProbe
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
