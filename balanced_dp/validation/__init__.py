"""Validate the package on the devices of this machine.

The project's own tests use stand-ins for GPUs. The checks of this package use real GPUs, if any.
"""

from .checks import Check, Validation, validate

__all__ = ["Check", "Validation", "validate"]
