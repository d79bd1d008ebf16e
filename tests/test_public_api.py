"""Test that the public names are listed, documented and quick to import."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import balanced_dp
from balanced_dp import api
from balanced_dp.free_threading import is_free_threaded_build

from .conftest import MISSING
from .processes import python

NEEDS_AN_EXTRA = ("balanced_dp.cli.", "balanced_dp.report", "balanced_dp.integrations.")
MODULES = [
    importlib.import_module(info.name)
    for info in pkgutil.walk_packages(
        balanced_dp.__path__, "balanced_dp.", onerror=lambda name: None
    )
    if not info.name.endswith("__main__") and not (MISSING and info.name.startswith(NEEDS_AN_EXTRA))
]


def test_names_are_few_and_in_the_guide():
    assert len(balanced_dp.__all__) <= 26
    guide = (Path(__file__).parent.parent / "docs" / "api.md").read_text("utf-8")
    listed = re.findall(r"`(\w+)`", guide.partition("## balanced_dp.distributed")[0])
    assert sorted(listed) == balanced_dp.__all__
    offered = {name for name in vars(api) if not name.startswith("_")} - {"annotations"}
    assert offered == set(balanced_dp.__all__) < set(dir(balanced_dp))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_in_docstrings_are_true(module):
    failed, _ = doctest.testmod(module, extraglobs={"torch": torch, **vars(api)})
    assert failed == 0


IMPORTS = f"""
import sys, {"balanced_dp" if MISSING else "balanced_dp.cli.commands"}
assert 'torch' not in sys.modules
import torch, torch.distributed as dist
import torch._dynamo  # as a first call does
before = set(dir(torch)), torch.random._seed_custom_device
from balanced_dp import *
BalancedDataParallel(1, torch.nn.Linear(2, 2), ['cpu', 'cpu'])(torch.ones(4, 2))
assert (set(dir(torch)), torch.random._seed_custom_device) == before
assert not torch.cuda.is_initialized()

from balanced_dp.distributed import scale_loss
names_threads = sys.platform == "linux" and torch.__version__ >= "2.13"
if names_threads:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with emulate_devices(2, as_cuda=True):
    torch.optim.Adam([torch.nn.Parameter(torch.ones(2, device="cuda"))])
def gloo():
    from pathlib import Path
    return [p for p in Path("/proc/self/task").glob("*/comm") if "gloo" in p.read_text()]
if names_threads:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    scale_loss(model(torch.ones(2, 3)).sum(), 2).backward()
    assert gloo()
    del model
    dist.destroy_process_group()
    assert not gloo()
"""


@pytest.mark.slow
def test_imports_of_a_new_process():
    """The command line answers without delay, since it does not import torch or Dynamo.

    Importing Dynamo takes seconds, and on free-threaded builds for CUDA it turns Python's lock on.
    Dynamo imports functions of CUDA by name, and so does the first optimizer of a process, which
    may be on emulated devices. If this was the first import of torch.distributed.nn, gloo's threads
    outlived the process group, and Python sometimes aborted.
    """
    subprocess.run([sys.executable, "-W", "error", "-c", IMPORTS], check=True)


EXTRAS = [
    ("cli.commands", "typer", "cli"),
    ("report", "pydantic", "report"),
    ("integrations.transformers", "transformers", "hf"),
    ("integrations.transformers", "accelerate", "hf"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "package", "extra"), EXTRAS)
def test_a_missing_extra_is_named(module, package, extra):
    if package == "transformers":
        pytest.importorskip("accelerate")  # else that is named
    done = python("-c", f"import sys; sys.modules['{package}'] = None; import balanced_dp.{module}")
    assert done.returncode == 1
    told = done.stderr.strip().splitlines()[-1]
    assert f"needs {package}" in told
    assert f"pip install '.[{extra}]' in a clone" in told


@pytest.mark.skipif(not is_free_threaded_build(), reason="this Python always has its lock")
def test_no_module_turns_the_lock_on():
    environ = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    names = ", ".join(module.__name__ for module in MODULES)
    command = [sys.executable, "-c", f"import sys, {names}; print(sys._is_gil_enabled())"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")
