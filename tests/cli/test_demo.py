"""The demo trains the same three times, and shows it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from balanced_dp.cli.demo import LOSS_TOLERANCE, loss_difference, run_demo
from balanced_dp.tuning.workload import encoded_text

from ..processes import python


@pytest.fixture(scope="module")
def demo():
    steps = []
    report, runs = run_demo(3, 3, emulate=True, on_step=lambda: steps.append(1))
    assert len(steps) == 9
    return report, runs


def test_three_runs_of_the_same_training(demo):
    encoded, num_characters = encoded_text()
    assert 400_000 < len(encoded) < 800_000 and 50 < num_characters < 200
    _, runs = demo
    assert [run.name for run in runs] == ["one device", "even split", "balanced"]
    assert [run.measured.chunk_sizes for run in runs[:2]] == [(32,), (11, 11, 10)]
    assert all(run.losses[-1] < run.losses[0] for run in runs)
    assert loss_difference(runs) < LOSS_TOLERANCE
    apart = [*runs[:2], replace(runs[2], losses=(runs[0].losses[0], 0.0, runs[0].losses[2]))]
    assert loss_difference(apart) == max(run.losses[1] for run in runs[:2])


def test_the_balanced_run_needs_the_least(demo):
    report, (_, even, balanced) = demo
    assert balanced.measured.chunk_sizes == report.best.chunk_sizes
    assert max(balanced.measured.peak_bytes) < max(even.measured.peak_bytes)


def test_the_command_prints_and_writes_runs(tmp_path):
    file = tmp_path / "demo.json"
    options = "--emulate --devices 3 --steps 2 --gpu0-bsz 2 --json"
    done = python("-m", "balanced_dp", "demo", *options.split(), str(file))
    assert done.returncode == 0, done.stderr
    runs = json.loads(file.read_text())["runs"]
    assert [run["chunk_sizes"] for run in runs] == [[32], [11, 11, 10], [2, 15, 15]]
    for run in runs:
        assert " ".join(map(str, run["chunk_sizes"])) in done.stdout
        assert f" {run['peak_bytes'][0] / 2**20:.1f} " in done.stdout
    assert "The loss curves agree" in done.stdout
