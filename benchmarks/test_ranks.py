"""What ranks cost: a scaled loss, and one process next to several.

``ranks.py`` runs under torchrun with two processes of one thread each; all sides of a comparison
take turns there, in one run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import balanced_dp

NOTES = {
    "ranks-scaling": "A transformer with 3.7M parameters, 16 samples of T=64, two ranks on gloo "
    "with shares 4 and 12, forward and backward pass of one model. All steps take turns in 120 "
    "rounds, and a ratio is the median of those of the rounds, each to the mean of its two plain "
    "steps (theirs: the one to the other). The interval is that of rounds drawn again.",
    "ranks-engines": "A transformer with 3.7M parameters, 16 samples of T=64, shares 7 and 9; "
    "forward and backward pass, medians of rounds in which all take turns. Two threads of one "
    "process (the first three) or two processes on gloo. nn.DataParallel's own steps hand weights "
    "on instead of copying them; the others copy.",
    "ranks-state": "GPT-2 small and AdamW on two ranks, after a step: the bytes of each rank's "
    "tensors.",
}


@pytest.mark.parametrize("question", NOTES)
def test_ranks(benchmark, tables, tmp_path, question):
    what = question.removeprefix("ranks-")
    tables[question] = benchmark.pedantic(measured, (what, tmp_path / "rows.json"), rounds=1)
    benchmark.extra_info["rows"] = tables[question]


def measured(what, path):
    """Returns the rows of a part."""
    package = str(Path(balanced_dp.__file__).parents[1])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": package,
        # Freed memory stays with the process, so that no step waits for the kernel to clear it.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(Path(__file__).with_name("ranks.py"))]
    subprocess.run([*command, what, str(path)], check=True, env=environment)
    return json.loads(path.read_text())
