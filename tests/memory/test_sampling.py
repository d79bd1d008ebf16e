"""Blocks measured while a thread samples NVML; the thread ends with the block in any case."""

from __future__ import annotations

import pytest

from .driver import GIB, GTX, USED, Driver


@pytest.fixture(scope="module")
def measured(builds, tmp_path_factory):
    driver = Driver(builds[0], tmp_path_factory.mktemp("measured") / "state")
    return driver.run("measured")


def test_blocks_end_as_they_would_alone_and_leave_nothing_behind(measured):
    raised = {
        "fail": "ValueError('in the block')",
        "press_ctrl_c": "KeyboardInterrupt()",
        "break_the_device": "RuntimeError('CUDA error: device-side assert triggered')",
    }
    caught = {block: record["caught"] for block, record in measured.items()}
    assert caught == dict.fromkeys(measured) | raised
    assert {block: record["left"] for block, record in measured.items() if record["left"]} == {}


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


def test_what_is_in_use_at_the_end_of_the_block_is_seen_and_what_was_before_is_not(measured):
    assert used(measured["end_high"])[0] == 60 * GIB
    assert used(measured["begin_low"])[0] == 3 * GIB


def test_a_fork_leaves_its_parents_sampler_alone(driver):
    record = driver.run("forked")
    assert used(record) == [50 * GIB]
    assert record["left"] == []


def test_devices_without_a_context_are_not_given_one(driver):
    assert driver.run("untouched_devices_are_not_waited_for") == []
