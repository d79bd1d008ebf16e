"""Which torch a test needs."""

from __future__ import annotations

import sysconfig

import pytest
import torch

IS_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
"""Whether this is a free-threaded build of Python, whether or not its lock is on."""


def has_torch(version: str) -> bool:
    return torch.__version__ >= version


def since_torch(version: str) -> pytest.MarkDecorator:
    """Marks tests of what torch has from this version on."""
    return pytest.mark.skipif(not has_torch(version), reason=f"torch has it from {version} on")
