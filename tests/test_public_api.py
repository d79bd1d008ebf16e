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

NEEDS_AN_EXTRA = ("cli.", "report", "integrations.")
"""What of the package cannot be imported without one."""


def can_be_imported(name: str) -> bool:
    if name.endswith("__main__"):
        return False
    needs = name.removeprefix("balanced_dp.").startswith(NEEDS_AN_EXTRA)
    return not needs or not MISSING


MODULES = [
    importlib.import_module(info.name)
    for info in pkgutil.walk_packages(
        balanced_dp.__path__, "balanced_dp.", onerror=lambda name: None
    )
    if can_be_imported(info.name)
]
PUBLIC = [
    *(getattr(balanced_dp, name) for name in balanced_dp.__all__),
    *(getattr(distributed, name) for name in distributed.__all__),
    *(getattr(memory, name) for name in memory.__all__),
]


def test_the_names_are_few_and_listed_in_the_guide():
    assert len(balanced_dp.__all__) <= 26
    guide = (Path(__file__).parent.parent / "docs" / "api.md").read_text("utf-8")
    listed = re.findall(r"`(\w+)`", guide.partition("## balanced_dp.distributed")[0])
    assert sorted(listed) == balanced_dp.__all__


def test_all_is_sorted_and_holds_what_the_package_offers():
    assert balanced_dp.__all__ == sorted(balanced_dp.__all__)
    offered = {name for name in vars(api) if not name.startswith("_")} - {"annotations"}
    assert offered == set(balanced_dp.__all__)
    assert set(dir(balanced_dp)) > offered


def test_the_package_alone_does_without_torch_and_a_call_without_dynamo():
    """So that the command line answers at once; and Dynamo takes seconds to import.

    On free-threaded builds for CUDA, Dynamo turns Python's lock on.
    """
    script = (
        f"import sys, {'balanced_dp' if MISSING else 'balanced_dp.cli.commands'}\n"
        "assert 'torch' not in sys.modules\n"
        "from balanced_dp import *; BalancedDataParallel, balanced_dp.emulation.ledger\n"
        "import torch\n"
        "BalancedDataParallel(1, torch.nn.Linear(2, 2), ['cpu', 'cpu'])(torch.ones(4, 2))\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


RECORDS = [item for item in PUBLIC if dataclasses.is_dataclass(item)]
CALLABLE = [
    item
    for item in PUBLIC
    if not dataclasses.is_dataclass(item)
    and not (inspect.isclass(item) and issubclass(item, Exception))
]
"""What users call; ruff sees the arguments of functions only, and only where some are listed."""
UNRAISING = [distributed.EmptyBatches]


def documents(item, name):
    """Whether a line of the docstring has the name, alone or as one of several, and what it is."""
    return re.search(rf"^ +[\w*, ]*\b{name}\b[\w, ]*: ", inspect.getdoc(item), re.MULTILINE)


def test_every_field_of_a_record_is_documented():
    fields = [(record, field.name) for record in RECORDS for field in dataclasses.fields(record)]
    assert len(fields) > 50
    assert [(item.__name__, name) for item, name in fields if not documents(item, name)] == []


def test_every_parameter_is_documented():
    parameters = [(item, name) for item in CALLABLE for name in inspect.signature(item).parameters]
    assert len(parameters) > 50
    assert [(item.__name__, name) for item, name in parameters if not documents(item, name)] == []


def test_what_callables_raise_is_documented():
    raising = [item for item in CALLABLE if item not in UNRAISING]
    assert [item.__name__ for item in raising if "Raises:" not in inspect.getdoc(item)] == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_in_docstrings_are_true(module):
    failed, _ = doctest.testmod(module, extraglobs={"torch": torch, **vars(api)})
    assert failed == 0


def test_there_are_examples_in_docstrings():
    finder = doctest.DocTestFinder()
    tests = [test for module in MODULES for test in finder.find(module) if test.examples]
    assert len(tests) >= 5


PROBE = """
import sys, torch

before = set(sys.modules)
for statement in sys.argv[1:]:
    exec(statement)
    imported = {"pynvml", "typer", "rich", "transformers"} & set(sys.modules) - before
    print(sorted(imported), hasattr(torch, "lazy"), torch.cuda.is_initialized())
"""


def test_importing_costs_nothing():
    """Other statements show that the test can fail."""
    opening = "balanced_dp.emulate_devices(1).__enter__()"
    statements = ("import balanced_dp", opening, "sys.modules['rich'] = sys")
    command = [sys.executable, "-c", PROBE, *statements]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert found == ["[] False False", "[] True False", "['rich'] True False"]


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("cli.commands", "typer", "cli"),
        ("report", "pydantic", "report"),
        ("integrations.transformers", "transformers", "hf"),
        ("integrations.transformers", "accelerate", "hf"),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(module, package, extra):
    if package == "transformers":
        pytest.importorskip("accelerate")  # else that is named
    done = python("-c", f"import sys; sys.modules['{package}'] = None; import balanced_dp.{module}")
    assert done.returncode == 1
    told = done.stderr.strip().splitlines()[-1]
    assert f"needs {package}" in told
    assert f"extra '{extra}': pip install '.[{extra}]' in a clone" in told
