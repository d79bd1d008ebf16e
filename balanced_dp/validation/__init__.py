"""Validate the package on the devices of this machine. The tests use stand-ins for devices."""

from .checks import Check, Validation, validate

__all__ = ["Check", "Validation", "validate"]
