"""Check on the devices of this machine what the tests check on stand-ins."""

from .checks import Check, Validation, validate

__all__ = ["Check", "Validation", "validate"]
