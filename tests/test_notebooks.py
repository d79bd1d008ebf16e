"""The notebooks as they are stored. `make notebooks` executes them."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def source_of(cell):
    return "".join(cell["source"])


def test_there_are_six():
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]


@each_notebook
def test_it_ends_with_its_point(path):
    last = ast.parse(source_of(code_cells(path)[-1])).body[-1]
    assert isinstance(last, ast.Assert)


@each_notebook
def test_it_uses_public_names_only(path):
    nodes = [node for cell in code_cells(path) for node in ast.walk(ast.parse(source_of(cell)))]
    imported = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    used = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    assert used
    assert [name for name in used if name[0] == "_" and name[:2] != "__"] == []
    assert [name for name in imported if "._" in name] == []


@each_notebook
def test_its_outputs_are_kept(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]


def test_stored_outputs_are_small():
    """`notebooks/matplotlibrc` keeps plots small; tables and pages of HTML are not stored."""
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 500_000


@each_notebook
def test_the_list_of_notebooks_has_it(path):
    listed = (FOLDER / "README.md").read_text("utf-8")
    assert f"| [{path.stem}]({path.name}) |" in listed
