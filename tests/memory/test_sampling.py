"""Blocks measured while a thread samples NVML; the thread ends with the block in any case."""

from __future__ import annotations

import pytest

from .driver import GIB, GTX, USED, Driver


@pytest.fixture(scope="module")
def measured(builds, tmp_path_factory):
    driver = Driver(builds[0], tmp_path_factory.mktemp("measured") / "state")
    return driver.run("measured")


def used(record):
    return [device["peak_used_bytes"] for device in record["devices"]]


def test_no_thread_is_left_behind(measured):
    assert all(record["threads"] == ["MainThread"] for record in measured.values())


@pytest.mark.parametrize(
    ("block", "peak"),
    [
        ("raise_and_lower", 70 * GIB),
        ("end_high", 60 * GIB),
        ("begin_low", 3 * GIB),
        ("lose_a_board", None),
    ],
)
def test_peaks_of_used_memory(measured, block, peak):
    assert used(measured[block]) == [peak, USED[GTX]]
    assert measured[block]["valid"]


def test_a_block_that_raises_has_no_figures(measured):
    assert not measured["fail"]["valid"] and not measured["fail"]["devices"]
    assert "has raised" in measured["fail"]["reason"]


def test_an_allocator_that_retried(measured):
    record = measured["retry"]
    assert not record["valid"]
    assert record["reason"].startswith("on cuda:0, cuda:1 the allocator had to empty its cache")
