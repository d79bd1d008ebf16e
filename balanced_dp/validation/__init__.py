"""Check on this machine's devices what the tests check on stand-ins for them."""

from .checks import Check, Validation, validate

__all__ = ["Check", "Validation", "validate"]
