"""The public names: listed, documented, and cheap to import."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import balanced_dp
from balanced_dp import api, distributed, memory

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
PUBLIC = [getattr(m, name) for m in (balanced_dp, distributed, memory) for name in m.__all__]


def test_the_names_are_few_and_listed_in_the_guide():
    assert len(balanced_dp.__all__) <= 26
    guide = (Path(__file__).parent.parent / "docs" / "api.md").read_text("utf-8")
    listed = re.findall(r"`(\w+)`", guide.partition("## balanced_dp.distributed")[0])
    assert sorted(listed) == balanced_dp.__all__
    offered = {name for name in vars(api) if not name.startswith("_")} - {"annotations"}
    assert offered == set(balanced_dp.__all__) < set(dir(balanced_dp))


def test_fields_and_parameters_are_documented():
    """A line of the docstring has the name, alone or as one of several, and its meaning."""
    records = [item for item in PUBLIC if dataclasses.is_dataclass(item)]
    named = [(record, field.name) for record in records for field in dataclasses.fields(record)]
    for item in PUBLIC:
        is_error = inspect.isclass(item) and issubclass(item, Exception)
        if item not in records and not is_error:
            named += [(item, name) for name in inspect.signature(item).parameters]
    assert len(named) > 100
    for item, name in named:
        documented = rf"^ +[\w*, ]*\b{name}\b[\w, ]*: "
        assert re.search(documented, inspect.getdoc(item), re.MULTILINE), (item, name)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_in_docstrings_are_true(module):
    failed, _ = doctest.testmod(module, extraglobs={"torch": torch, **vars(api)})
    assert failed == 0


def test_no_import_of_torch_or_dynamo_before_use():
    """The command line answers at once; Dynamo takes seconds to import.

    On free-threaded builds for CUDA, Dynamo turns Python's lock on.
    """
    script = (
        f"import sys, {'balanced_dp' if MISSING else 'balanced_dp.cli.commands'}\n"
        "assert 'torch' not in sys.modules\n"
        "from balanced_dp import *; BalancedDataParallel, balanced_dp.emulation.ledger\n"
        "import torch\n"
        "BalancedDataParallel(1, torch.nn.Linear(2, 2), ['cpu', 'cpu'])(torch.ones(4, 2))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert not hasattr(torch, 'lazy')\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("cli.commands", "typer", "cli"),
        ("report", "pydantic", "report"),
        ("integrations.transformers", "transformers", "hf"),
        ("integrations.transformers", "accelerate", "hf"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(module, package, extra):
    if package == "transformers":
        pytest.importorskip("accelerate")  # else that is named
    done = python("-c", f"import sys; sys.modules['{package}'] = None; import balanced_dp.{module}")
    assert done.returncode == 1
    told = done.stderr.strip().splitlines()[-1]
    assert f"needs {package}" in told
    assert f"extra '{extra}': pip install '.[{extra}]' in a clone" in told
