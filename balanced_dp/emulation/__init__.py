"""Emulated devices: accelerators that run on the CPU, with memory counted to the byte."""

from .context import EmulatedDevices, emulate_devices
from .ledger import MemoryBreakdown

__all__ = ["EmulatedDevices", "MemoryBreakdown", "emulate_devices"]
