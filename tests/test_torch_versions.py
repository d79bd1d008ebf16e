"""Test that all private names of torch in use are listed, and what happens if torch lacks some."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import balanced_dp
from balanced_dp import EmulationError, emulate_devices
from balanced_dp import torch_versions as versions
from balanced_dp.emulation import context, cuda_functions

from .processes import python

ROOT = Path(balanced_dp.__file__).parent
NEEDED, FOR_EMULATION = versions.NEEDED.split(), context.FOR_EMULATION.split()


def test_all_names_exist():
    assert [name for name in (*NEEDED, *FOR_EMULATION) if not versions.exists(name)] == []


def test_a_missing_name_is_named(monkeypatch):
    message = r"does not have torch.Tensor._a, torch.b._c; install a torch from 2"
    with pytest.raises(ImportError, match=message):
        versions.require("Tensor._a Tensor._version b._c", "balanced_dp", ImportError)
    monkeypatch.delattr("torch.random._seed_custom_device")
    with pytest.raises(EmulationError, match=r"torch\.random\._seed_custom_device;"):
        emulate_devices(2).__enter__()


TRAIN = """
import copy
from contextlib import nullcontext

import balanced_dp
import torch
from tests.modules import assert_same_gradients

module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).double()
twin, x = copy.deepcopy(module), torch.randn(7, 3).double()
model = balanced_dp.BalancedDataParallel(1, module, ["cpu"] * 3)
for context in (nullcontext, model.shared_weights):
    with context():
        for each in (model, model, twin, twin):
            each(x).square().mean().backward()
assert_same_gradients(module, twin)
"""


def run_without(names: Iterable[str], script: str) -> str:
    """Run a script in a process where torch lacks ``names``.

    Return the output of the script, or an empty string if the script succeeds.
    """
    prelude = "from pkgutil import resolve_name"
    for owner, _, name in (name.rpartition(".") for name in names):
        prelude += f"\ndelattr(resolve_name('torch.{owner}'.rstrip('.')), '{name}')"
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(ROOT.parent)])
    done = python("-c", f"{prelude}\n{script}", environ={**os.environ, "PYTHONPATH": path})
    return done.stdout + done.stderr if done.returncode else ""


def test_an_import_without_a_needed_name():
    output = run_without(["_C._functorch.peek_interpreter_stack"], "import balanced_dp.api")
    assert "ImportError: balanced_dp cannot be used with torch" in output
    assert "does not have torch._C._functorch.peek_interpreter_stack" in output


# Torch itself calls these when it imports and trains.
OF_TORCH = {
    *("nn.Module._apply", "autograd._engine_run_backward"),
    *("jit._builtins._get_builtin_table", "random._seed_custom_device"),
    *("_C._dispatch_has_kernel_for_dispatch_key", "_C._is_autocast_available"),
    "cuda._cached_device_count",
}


def test_training_without_optional_names():
    of_types = ("ops.", "Tensor.", "_C.DispatchKey.")  # written in C, and cannot be deleted
    names = {name for name in FOR_EMULATION if not name.startswith(of_types)} - OF_TORCH
    assert run_without(names, TRAIN) == ""


ELSEWHERE = {
    # Python's, transformers' and our own.
    *("_getframe", "_fields", "_move_model_to_device", "_n_gpu", "_setup_devices"),
    # By these torch recognizes replicas, and we the module that torch.compile returns.
    *("_orig_mod", "_initialize", "_is_replica"),
    # Read of an RNN, which has them.
    *("_flat_weights", "_flat_weights_names"),
    # Of nodes of autograd, which have them, or lack them as others do.
    *("_saved_dim", "_saved_dims", "_saved_ignore_index"),
    *("_saved_alpha", "_raw_saved_", "_saved_"),
    # Names that emulate_devices gives to functions of its own, and registers kernels for.
    *("_copy_from", "_local_scalar_dense"),
    *("_get_device_properties", "_allocation"),
    "_enabled",  # of a GradScaler, which has it
    # Of torch 2.5.
    *("_streambase", "_StreamBase", "_EventBase"),
    # Of sparse tensors and state dicts, which have them, and in annotations only.
    *("_indices", "_metadata", "_ops"),
    "_bytes",  # part of a name
}


def private_names() -> set[str]:
    """Return the private names that the package uses and does not define itself."""
    trees = [ast.parse(path.read_text("utf-8")) for path in ROOT.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = [node for node in nodes if not isinstance(node, ast.alias)]
    own = {getattr(node, field, None) for node in named for field in ("name", "id", "arg")}
    used = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            is_own = ast.unparse(node.value) in ("self", "cls", "super()")
            (own if is_own and isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.add(node.value)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            is_private = "._" in node.module or node.module.endswith("_")
            used |= {a.name for a in node.names if is_private or a.name.startswith("_")}
    own |= cuda_functions.ANSWERS.keys()  # names that emulated devices give to their functions
    return {name for name in used - own if re.fullmatch(r"_[A-Za-z]\w*", name)}


def test_all_private_names_are_listed():
    listed = {part for name in (*NEEDED, *FOR_EMULATION) for part in name.split(".")}
    assert private_names() - listed - ELSEWHERE == set()
    assert ELSEWHERE - private_names() == set()


def test_nothing_listed_is_unused():
    """Each listed name occurs in the sources outside the list, too."""
    sources = "".join(path.read_text("utf-8") for path in ROOT.rglob("*.py"))
    names = [name.removesuffix("._schema").split(".")[-1] for name in (*NEEDED, *FOR_EMULATION)]
    assert [name for name in names if sources.count(name) <= names.count(name)] == []


def test_the_range_is_documented():
    root = Path(__file__).parents[1]
    rows = re.findall(r"^\| (2\.\d+\.\d+) ", (root / "docs/versions.md").read_text(), re.MULTILINE)
    tested = sorted(rows, key=lambda version: [int(part) for part in version.split(".")])
    assert (tested[0], tested[-1]) == versions.TESTED
    oldest = versions.TESTED[0].rpartition(".")[0]
    assert f'"torch>={oldest}"' in (root / "pyproject.toml").read_text()
    assert all(f"torch {oldest} " in path.read_text("utf-8") for path in root.glob("README*.md"))
