"""Each notebook's code runs from top to bottom, and the assert at its end holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code[-1].splitlines()[-1].startswith("assert ")
    namespace = {"__name__": path.stem}
    for number, source in enumerate(code, start=1):
        exec(compile(source, f"{path.name}, code cell {number}", "exec"), namespace)


def test_there_are_notebooks():
    assert NOTEBOOKS
