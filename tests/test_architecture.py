"""Test the structure of the package: which file may import from which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import balanced_dp

ROOT = Path(balanced_dp.__file__).parent

# In the order of data flow: a file imports only from files above it.
ORDER = """
errors split search torch_versions free_threading
memory/ units
emulation/ ledger machine symbolic tensor kernels autocast device_module
emulation/ cuda_functions as_cuda patches context __init__
devices
emulation/ fallback
memory/ records nvml
memory/ out_of_memory breakdown peaks probe __init__
parallel/ nested scatter copies homes shared_weights
parallel/losses/ cross_entropy weights graph join __init__
parallel/ replica replicate parallel_apply
parallel/ gather per_device criterion auto check data_parallel
parallel/ functional __init__
tuning/ models workload options step report workload_search tuner loop __init__
api __init__
validation/ checks __init__
distributed/ ranks loss_scaling to_ddp __init__
integrations/ __init__ transformers replacements
report/ tables plots documents compare json_file __init__
cli/ __init__ arguments console script run demo commands
__main__
"""


def files(text: str) -> list[str]:
    """Return the paths of the files in a text like ``ORDER``, which lists packages and modules."""
    found = []
    for line in text.splitlines():
        package, *names = line.split() if "/" in line else ["", *line.split()]
        found += [f"{package}{name}.py" for name in names]
    return found


TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8"))
    for path in sorted(ROOT.rglob("*.py"))
}


def imports(name: str) -> set[str]:
    """Return the files of the package that a file imports from."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = node.module.split(".") if node.module else []
            package = Path(name).parents[node.level - 1].joinpath(*parts)
            for alias in node.names:
                paths = (package / alias.name, package)
                files = [Path(f"{p}{end}") for p in paths for end in (".py", "/__init__.py")]
                found |= {next(f.as_posix() for f in files if (ROOT / f).is_file())}
    return found


def test_every_file_has_its_place():
    assert sorted(TREES) == sorted(files(ORDER))


@pytest.mark.parametrize("name", files(ORDER))
def test_a_file_imports_only_from_above(name):
    assert imports(name) <= set(files(ORDER)[: files(ORDER).index(name)])
