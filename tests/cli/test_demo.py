from __future__ import annotations

import json
from dataclasses import replace

import pytest

from balanced_dp import ArgumentError
from balanced_dp.cli.demo import (
    LOSS_TOLERANCE,
    DemoRun,
    DemoSettings,
    loss_difference,
    run_demo,
)
from balanced_dp.tuning.workload import encoded_text

from ..processes import python
from ..tuning.measured import option

SMALL = DemoSettings(num_devices=3, batch_size=7, steps=3, emulate=True)


@pytest.fixture(scope="module")
def small_runs() -> tuple[list[DemoRun], int]:
    steps = []
    _, runs = run_demo(SMALL, on_step=lambda: steps.append(1))
    return runs, len(steps)


def test_the_text_has_half_a_megabyte():
    encoded, num_characters = encoded_text()
    assert 400_000 < len(encoded) < 800_000
    assert 50 < num_characters < 200


def test_three_runs_of_the_same_training(small_runs):
    runs, num_steps = small_runs
    assert [run.name for run in runs] == ["one device", "even split", "balanced"]
    assert [run.measured.chunk_sizes for run in runs[:2]] == [(7,), (3, 3, 1)]
    assert [len(run.losses) for run in runs] == [3, 3, 3]
    assert all(run.losses[-1] < run.losses[0] for run in runs)
    assert loss_difference(runs) < LOSS_TOLERANCE
    assert num_steps == 3 * SMALL.steps


def test_the_balanced_split_needs_least_of_all_values(small_runs):
    _, even, balanced = (run.measured for run in small_runs[0])
    peaks = {SMALL.even_share: max(even.peak_bytes)}
    for gpu0_bsz in range(SMALL.even_share):
        settings = replace(SMALL, steps=2, gpu0_bsz=gpu0_bsz)
        peaks[gpu0_bsz] = max(run_demo(settings)[1][2].measured.peak_bytes)
    assert max(balanced.peak_bytes) == min(peaks.values())
    best = [value for value, peak in peaks.items() if peak == min(peaks.values())]
    assert balanced.chunk_sizes[0] == max(best)  # the fastest


def test_loss_difference_finds_the_step_where_curves_part():
    def run(*losses, error=None):
        return DemoRun("", option((1,), (1,), out_of_memory=error), losses)

    assert loss_difference([run(1.0, 2.0, 3.0), run(1.0, 2.5, 3.0)]) == 0.5
    assert loss_difference([run(1.0, 2.0), run(1.0, 2.0), run(9.0, error="out")]) == 0
    assert loss_difference([run(1.0, 2.0)]) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_devices": 1}, "num_devices must be at least 2, got 1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"gpu0_bsz": -1}, "gpu0_bsz must be at least 0, got -1"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        DemoSettings(**options)


# The command line.


def test_the_command_prints_a_table_and_writes_json(tmp_path):
    file = tmp_path / "demo.json"
    options = "--emulate --devices 3 --batch-size 9 --steps 2 --gpu0-bsz 2 --json"
    done = python("-m", "balanced_dp", "demo", *options.split(), str(file))
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert record["emulated"] is True
    assert [run["chunk_sizes"] for run in record["runs"]] == [[9], [3, 3, 3], [2, 4, 3]]
    for run in record["runs"]:
        assert " ".join(map(str, run["chunk_sizes"])) in done.stdout
        assert f" {run['peak_bytes'][0] / 2**20:.1f} " in done.stdout
    assert "The loss curves agree" in done.stdout
    assert "BalancedDataParallel(2, model)" in done.stdout


def test_the_command_says_where_memory_ran_out():
    options = "--emulate --steps 1 --gpu0-bsz 5 --memory"
    done = python("-m", "balanced_dp", "demo", *options.split(), "20 MB")
    assert done.returncode == 1, done.stderr
    assert "On 4 emulated devices of 20.00 MiB." in done.stdout
    assert "  out of memory" * 3 in done.stdout
    assert done.stdout.count("CUDA out of memory. Tried to allocate") == 3
    assert "no loss curves to compare" in done.stdout


def test_the_command_says_that_the_value_is_the_even_split():
    options = "--emulate --devices 3 --batch-size 8 --steps 2 --gpu0-bsz 40"
    done = python("-m", "balanced_dp", "demo", *options.split())
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "gpu0_bsz=40 is the even split" in text and "at most 3 of 8 samples" in text
    assert "BalancedDataParallel(" not in text
