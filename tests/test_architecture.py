"""The structure of the package: who may import whom, and what belongs to one place only."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import balanced_dp

ROOT = Path(balanced_dp.__file__).parent

# In the order of data flow: a file imports only from files above it.
ORDER = [
    "errors.py",
    "units.py",
    "split.py",
    "emulation/ledger.py",
    "emulation/machine.py",
    "emulation/symbolic.py",
    "emulation/tensor.py",
    "emulation/kernels.py",
    "emulation/autocast.py",
    "emulation/device_module.py",
    "emulation/context.py",
    "emulation/__init__.py",
    "devices.py",
    "containers.py",
    "arguments.py",
    "counted_losses.py",
    "loss_calls.py",
    "loss_terms.py",
    "loss_graph.py",
    "loss_weight.py",
    "losses.py",
    "scatter_gather.py",
    "arrivals.py",
    "buckets.py",
    "parameter_copies.py",
    "rebind.py",
    "written_state.py",
    "replicate.py",
    "parallel_apply.py",
    "per_device.py",
    "criterion.py",
    "memory/nvml.py",
    "memory/device_map.py",
    "memory/device_memory.py",
    "memory/sampler.py",
    "memory/step.py",
    "memory/breakdown.py",
    "memory/peaks.py",
    "memory/probe.py",
    "memory/logger.py",
    "memory/__init__.py",
    "memory_model.py",
    "plan.py",
    "auto.py",
    "auto_split.py",
    "data_parallel.py",
    "models.py",
    "workloads.py",
    "measurement.py",
    "tuning.py",
    "tuner.py",
    "__init__.py",
    "distributed/ranks.py",
    "distributed/sampler.py",
    "distributed/loss_scaling.py",
    "distributed/convert.py",
    "distributed/__init__.py",
    "integrations/__init__.py",
    "integrations/trainer_parallel.py",
    "integrations/transformers.py",
    "report/tables.py",
    "report/plots.py",
    "report/html.py",
    "report/markdown.py",
    "report/compare.py",
    "report/file.py",
    "report/__init__.py",
    "demo.py",
    "terminal.py",
    "cli.py",
    "__main__.py",
]
WITHOUT_TORCH = {
    "errors.py",
    "units.py",
    "emulation/ledger.py",
    "split.py",
    "arguments.py",
    "memory/nvml.py",
    "memory/device_map.py",
    "memory/device_memory.py",
    "memory/sampler.py",
    "memory/step.py",
}
PRINTS = {"cli.py"}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8"))
        for path in sorted(ROOT.rglob("*.py"))
    }


def imported_files(name: str, tree: ast.Module) -> set[str]:
    """The files of the package that a file imports from."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        folder = Path(name).parent
        for _ in range(node.level - 1):
            folder = folder.parent
        parts = node.module.split(".") if node.module else []
        for alias in node.names:
            for candidate in ([*parts, alias.name], parts):
                base = folder.joinpath(*candidate)
                for file in (f"{base.as_posix()}.py", (base / "__init__.py").as_posix()):
                    if (ROOT / file).is_file() and candidate:
                        found.add(Path(file).as_posix())
                        break
                else:
                    continue
                break
    return found


def test_every_file_has_its_place():
    assert sorted(trees()) == sorted(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_file_imports_only_from_above(name):
    above = set(ORDER[: ORDER.index(name)])
    assert imported_files(name, trees()[name]) <= above


def test_the_test_above_sees_imports():
    tree = ast.parse("from .split import split_batch\nfrom .emulation import context")
    assert imported_files("errors.py", tree) == {"split.py", "emulation/context.py"}
    tree = ast.parse("from ..units import parse_bytes\nfrom .machine import Machine")
    assert imported_files("emulation/ledger.py", tree) == {"units.py", "emulation/machine.py"}


@pytest.mark.parametrize("name", sorted(WITHOUT_TORCH))
def test_pure_files_do_without_torch(name):
    imported = set()
    for node in ast.walk(trees()[name]):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(node.module.split(".")[0])
    assert "torch" not in imported


def test_nothing_but_the_command_line_prints():
    printing = {
        name
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print"
    }
    assert printing == PRINTS


def test_nothing_runs_at_import():
    """At the top of a file there are definitions and constants, no statements that do things."""
    for name, tree in trees().items():
        if name == "__main__.py":
            continue
        for node in tree.body:
            assert not isinstance(node, ast.With | ast.For | ast.While), (name, node.lineno)
            if isinstance(node, ast.Expr):
                assert isinstance(node.value, ast.Constant), (name, node.lineno)
