"""Blocks measured while a process samples NVML: whatever happens, nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .driver import GIB, GTX, H100, ROOT, USED, Driver


@pytest.fixture(scope="module")
def measured(builds, tmp_path_factory):
    driver = Driver(builds["newest"], tmp_path_factory.mktemp("measured") / "state")
    return driver.run("measured")


BLOCKS = [
    "raise_and_lower",
    "end_high",
    "begin_low",
    "fail",
    "press_ctrl_c",
    "kill_the_sampler",
    "stop_the_sampler",
    "lose_a_board",
    "retry",
    "break_the_device",
]


@pytest.mark.parametrize("block", BLOCKS)
def test_nothing_is_left_behind(measured, block):
    assert measured[block]["left"] == []


@pytest.mark.parametrize("block", BLOCKS)
def test_the_block_ends_as_it_would_alone(measured, block):
    expected = {
        "fail": ["ValueError('in the block')", None],
        "press_ctrl_c": ["KeyboardInterrupt()", None],
        "break_the_device": ["RuntimeError('CUDA error: device-side assert triggered')", 42],
    }.get(block, [None, 42])
    assert [measured[block]["caught"], measured[block]["result"]] == expected


def used(record):
    return [device["peak_used_bytes"] for device in record["devices"]]


@pytest.mark.parametrize("block", ["raise_and_lower", "fail", "press_ctrl_c"])
def test_a_peak_between_the_ends_of_the_block_is_seen(measured, block):
    assert used(measured[block]) == [70 * GIB, USED[GTX]]
    assert measured[block]["num_samples"] >= 4
    assert measured[block]["sampling_error"] is None


def test_after_an_exception_the_figures_are_there_but_not_valid(measured):
    assert measured["raise_and_lower"]["valid"]
    assert not measured["fail"]["valid"]
    assert measured["fail"]["reason"] == "the block ended with ValueError: in the block"
    assert "KeyboardInterrupt" in measured["press_ctrl_c"]["reason"]


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("kill_the_sampler", "the sampling process ended with -9"),
        ("stop_the_sampler", "the sampling process did not end within 2 s"),
    ],
)
def test_a_killed_sampler_leaves_the_rest(measured, block, reason):
    record = measured[block]
    assert used(record) == [None, None]
    assert record["valid"]
    assert record["elapsed_s"] > 0
    assert record["sampling_error"] == reason


def test_a_board_that_fails_half_way_has_no_peak(measured):
    record = measured["lose_a_board"]
    assert used(record) == [None, USED[GTX]]
    assert record["valid"]
    assert record["sampling_error"].startswith("gpu:2: ")
    assert "lost" in record["sampling_error"].lower()


def test_an_allocator_that_had_to_retry_makes_it_invalid(measured):
    record = measured["retry"]
    assert not record["valid"]
    assert record["reason"].startswith("on cuda:0, cuda:1 the allocator had to empty its cache")
    assert [device["num_alloc_retries"] for device in record["devices"]] == [2, 2]
    assert measured["raise_and_lower"]["devices"][0]["num_alloc_retries"] == 0


def test_what_is_in_use_at_the_end_of_the_block_is_seen(measured):
    assert used(measured["end_high"])[0] == 60 * GIB


def test_what_was_in_use_before_the_block_is_not(measured):
    assert used(measured["begin_low"])[0] == 3 * GIB


WRAPPERS = {
    "/no/such/python": "the sampling process did not start: ",
    "": "there is no Python interpreter to sample with: this program brings its own",
    "exit 3": "the sampling process ended with 3",
    "echo hello": "the sampling process ended with 0",
    "sleep 60": "the sampling process was not ready in 1 s",
    f"echo hello; {sys.executable} $*; exit": None,  # chatty, and no exec
}


@pytest.fixture(scope="module")
def started(builds, tmp_path_factory):
    """What came of measuring with each of the interpreters above."""
    folder = tmp_path_factory.mktemp("started")
    executables = []
    for i, script in enumerate(WRAPPERS):
        if not script or script.startswith("/"):
            executables.append(script)
        else:
            executables.append(str(folder / f"python{i}"))
            Path(executables[-1]).write_text(f"#!/bin/sh\n{script}\n")
            Path(executables[-1]).chmod(0o755)
    driver = Driver(builds["newest"], folder / "state")
    return driver.run("failing_to_start", *executables)


@pytest.mark.parametrize("index", range(len(WRAPPERS)))
def test_a_sampler_that_cannot_start_is_told(started, index):
    record, reason = started[index], list(WRAPPERS.values())[index]
    assert record["valid"]
    assert record["left"] == []
    if reason is None:
        assert (used(record), record["sampling_error"]) == ([USED[H100]], None)
    else:
        assert used(record) == [None]
        assert record["sampling_error"].startswith(reason)


def test_a_driver_that_has_gone_is_told(driver):
    record = driver.run("without_a_driver_any_more")
    assert used(record) == [None]
    assert record["sampling_error"].startswith("NVIDIA's driver is not loaded")
    assert record["valid"]


def test_a_frozen_program_does_not_start_itself(driver):
    record = driver.run("frozen")
    assert record["sampling_error"].startswith("there is no Python interpreter to sample with")
    assert driver.run("frozen", BALANCED_DP_SAMPLING="1")["sampling_error"] == (
        "this process samples for another"
    )


def test_a_fork_leaves_its_parents_sampler_alone(driver):
    record = driver.run("forked")
    assert used(record) == [50 * GIB]
    assert record["left"] == []


def test_devices_without_a_context_are_not_given_one(driver):
    assert driver.run("untouched_devices_are_not_waited_for") == []


def test_the_sampler_ends_when_its_parent_is_killed(driver):
    """Also where a forked child of the parent, a data loader's worker, keeps its stdin open."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.memory.in_process", "die_while_measuring"],
        env=driver.environ(),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    output, _ = process.communicate()
    try:
        sampler = int(output)
        deadline = time.monotonic() + 30
        while is_running(sampler):
            assert time.monotonic() < deadline, "the sampler outlives its parent"
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, 9)  # the forked child


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
