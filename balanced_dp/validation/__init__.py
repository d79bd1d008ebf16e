"""Check on the real devices of this machine what the tests check on substitutes for devices."""

from .checks import Check, Validation, validate

__all__ = ["Check", "Validation", "validate"]
