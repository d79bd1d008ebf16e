"""Python without its lock: what the guide says of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from balanced_dp.free_threading import is_free_threaded_build

IMPORTS_ALL = """
import importlib, pkgutil, sys
import balanced_dp

for module in pkgutil.walk_packages(balanced_dp.__path__, "balanced_dp."):
    if module.name != "balanced_dp.__main__":
        try:
            importlib.import_module(module.name)
        except ImportError:  # of an extra that is not installed
            assert module.name.split(".")[1] in ("cli", "report", "integrations")
print(sys._is_gil_enabled())
"""


@pytest.mark.skipif(not is_free_threaded_build(), reason="this Python always has its lock")
def test_no_module_turns_the_lock_on():
    environ = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    command = [sys.executable, "-c", IMPORTS_ALL]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")
