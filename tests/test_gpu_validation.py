"""benchmarks/gpu_validation.py, as far as it goes without a GPU."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_validation.py"


@pytest.fixture(scope="module")
def validation():
    spec = importlib.util.spec_from_file_location("gpu_validation", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_a_line():
    done = run()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "gpu_validation: torch sees no NVIDIA GPU here\n"


def test_an_unknown_part_is_refused():
    done = run("nonsense")
    assert done.returncode == 2
    assert "there is no part nonsense; parts: probe" in done.stderr


@pytest.mark.parametrize(
    ("measured", "reference", "allowed", "outcome"),
    [
        (10, 10, 0, "ok"),
        (10, 12, 2, "ok"),
        (10, 13, 2, "FAILED"),
        (None, 10, 100, "FAILED"),
        (10, None, 0, "not run"),
    ],
)
def test_outcomes(validation, measured, reference, allowed, outcome):
    assert validation.Check("", measured, reference, allowed).outcome == outcome


def test_reports_say_where_and_how_they_came_about(validation, tmp_path):
    checks = [validation.Check("one", 1000, 1000, 0), validation.Check("two", 5, None, 0, "note")]
    written = validation.write_report("probe", checks, "NVIDIA Some-GPU 80GB", tmp_path)
    assert [re.sub(r"\d{4}-\d\d-\d\d", "DATE", path.name) for path in written] == [
        "probe_nvidia-some-gpu-80gb_DATE.md",
        "probe_nvidia-some-gpu-80gb_DATE.json",
    ]
    text = written[0].read_text()
    assert "| one | 1,000 | 1,000 | 0 | ok |  |" in text
    assert "| two | 5 |  | 0 | not run | note |" in text
    record = json.loads(written[1].read_text())
    assert record["hardware"] == "NVIDIA Some-GPU 80GB"
    assert record["versions"]["torch"] == torch.__version__
    assert record["command"].startswith("python benchmarks/gpu_validation.py")
    assert [check["outcome"] for check in record["checks"]] == ["ok", "not run"]
