"""Check on the devices of this machine what the tests check on stand-ins."""

from .all_checks import ValidationSettings, validate
from .check import Check, ValidationReport

__all__ = ["Check", "ValidationReport", "ValidationSettings", "validate"]
