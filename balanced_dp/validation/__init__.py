"""Validate the package on the devices of this machine.

The project's tests use stand-ins for real devices.
"""

from .checks import Check, Validation, validate

__all__ = ["Check", "Validation", "validate"]
