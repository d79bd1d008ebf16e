"""Marks for tests that need a version of torch."""

from __future__ import annotations

import pytest
import torch


def has_torch(version: str) -> bool:
    return torch.__version__ >= version


def since_torch(version: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if torch is older than ``version``."""
    return pytest.mark.skipif(not has_torch(version), reason=f"torch has it from {version} on")
