"""Measure the time of ``balanced-dp plan``, and how it grows with the batch and the layers.

Each plan is made in a process of its own. The times are divided by the time of a plan for GPT-2
small (12 layers) and batches of 32, which is made in the same run of this benchmark.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from balanced_dp import Workload
from balanced_dp.tuning.models import TokenTransformer
from balanced_dp.tuning.workload import gpt2_small

KIB, GIB = 2**10, 2**30


def deeper() -> Workload:
    """Return the workload GPT-2 small, but with 24 layers instead of 12."""
    return replace(
        gpt2_small(), model=lambda: TokenTransformer(50257, 1024, causal=True, num_layers=24)
    )


def plan(target: str, batch_size: int) -> tuple[float, int]:
    """Return the seconds and the peak resident memory, in bytes, of a process that makes a plan."""
    command = ["-m", "balanced_dp", "plan", target, "--batch-size", str(batch_size)]
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command, "--memory", f"{max(11, batch_size)}GiB"],
        cwd=Path(__file__).parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return time.perf_counter() - start, usage.ru_maxrss * KIB


@pytest.fixture(scope="module")
def reference() -> float:
    return min(plan("gpt2-small", 32)[0] for _ in range(3))


@pytest.mark.parametrize(
    ("target", "batch_size"),
    [("gpt2-small", 32), ("gpt2-small", 1024), ("test_plan:deeper", 32)],
)
def test_plan(benchmark, reference, target, batch_size):
    resident = []

    def run() -> None:
        resident.append(plan(target, batch_size)[1])

    benchmark.pedantic(run, rounds=3)
    ratio = benchmark.stats.stats.min / reference
    benchmark.extra_info.update(ratio_to_reference=ratio, resident_bytes=max(resident))
    print(
        f"\n{target}, batches of {batch_size}: {benchmark.stats.stats.min:.1f} s, {ratio:.2f} of "
        f"12 layers with batches of 32; {max(resident) / GIB:.2f} GiB resident"
    )
