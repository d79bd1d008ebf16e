"""Measure the time that ``scale_loss`` takes.

Torchrun runs ``ranks.py`` in two processes of one thread each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import balanced_dp

NOTES = {
    "ranks-scaling": "A transformer with 3.7M parameters, 16 samples of T=64, two ranks on gloo "
    "with shares 4 and 12, forward and backward pass of one model. All steps take turns in 120 "
    "rounds, and a ratio is the median of the rounds' ratios. The step 'plain again' shows how "
    "precise the ratios are."
}


def test_ranks(benchmark, tables, tmp_path):
    path = tmp_path / "rows.json"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(balanced_dp.__file__).parents[1]),
        # Freed memory stays with the process, so that no step waits for the kernel to clear it.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(Path(__file__).with_name("ranks.py")), str(path)]
    options = {"check": True, "env": environment}
    benchmark.pedantic(subprocess.run, (command,), options, rounds=1)
    tables["ranks-scaling"] = json.loads(path.read_text())
