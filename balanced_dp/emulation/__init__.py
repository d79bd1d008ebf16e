"""Emulated devices: accelerators on the CPU that count their memory to the byte."""
