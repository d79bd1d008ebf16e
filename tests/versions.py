"""Which torch a test needs."""

from __future__ import annotations

import pytest
import torch


def has_torch(version: str) -> bool:
    return torch.__version__ >= version


def since_torch(version: str) -> pytest.MarkDecorator:
    """Marks tests of what torch has from this version on."""
    return pytest.mark.skipif(not has_torch(version), reason=f"torch has it from {version} on")
