"""Emulated devices: accelerators on the CPU whose memory is counted to the byte."""

from .context import EmulatedDevices, emulate_devices
from .ledger import MemoryBreakdown

__all__ = ["EmulatedDevices", "MemoryBreakdown", "emulate_devices"]
