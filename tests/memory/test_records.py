from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import ArgumentError, ArgumentTypeError, BalanceWarning, ProbeError
from balanced_dp.memory import DeviceMemory, StepMemory

GIB = 2**30
sizes = st.integers(min_value=0, max_value=2**45)


def of_peaks(*peaks: int, capacities: list[int] | None = None) -> StepMemory:
    capacities = capacities or [80 * GIB] * len(peaks)
    devices = (
        DeviceMemory(f"cuda:{i}", total_bytes=capacity, peak_allocated_bytes=peak)
        for i, (peak, capacity) in enumerate(zip(peaks, capacities, strict=True))
    )
    return StepMemory(tuple(devices), elapsed_s=1.0, valid=True, reason=None)


@given(st.lists(sizes, min_size=1))
def test_imbalance_is_from_0_to_1(peaks):
    assert 0 <= of_peaks(*peaks, capacities=[GIB] * len(peaks)).imbalance <= 1


def test_imbalance_and_utilization():
    usage = of_peaks(10 * GIB, 4 * GIB, 8 * GIB, capacities=[20 * GIB, 5 * GIB, 80 * GIB])
    assert usage.imbalance == 0.6
    assert usage.utilization == (0.5, 0.8, 0.1)
    assert usage.fullest.device == "cuda:1"


def test_before_the_end_there_are_no_figures():
    for question in ("imbalance", "utilization", "fullest"):
        with pytest.raises(ProbeError, match="there are no peaks: the block has not ended"):
            getattr(StepMemory(), question)
    with pytest.raises(ProbeError):
        StepMemory().check_split()


def test_a_device_without_capacity_has_no_utilization():
    with pytest.raises(ProbeError, match="the capacity of cuda:0 is not known"):
        _ = of_peaks(1, capacities=[0]).utilization


@pytest.mark.parametrize(
    ("tolerance", "error"),
    [
        (5, ArgumentError),
        (-0.1, ArgumentError),
        (float("nan"), ArgumentError),
        ("5%", ArgumentTypeError),
        (True, ArgumentTypeError),
    ],
)
def test_a_tolerance_is_a_part(tolerance, error):
    with pytest.raises(error, match="tolerance must be"):
        of_peaks(GIB, GIB).check_split(tolerance)


TUNE = " (balanced-dp tune finds the best value)"


@pytest.mark.parametrize(
    ("step", "advice"),
    [
        (
            of_peaks(4 * GIB, 2 * GIB),
            "cuda:0 peaks at 4.00 GiB and cuda:1 peaks at 2.00 GiB, 50% apart: lower gpu0_bsz"
            + TUNE,
        ),
        (
            of_peaks(2 * GIB, 2 * GIB, capacities=[80 * GIB, 20 * GIB]),
            "cuda:1 peaks at 2.00 GiB of 20.00 GiB and cuda:0 peaks at 2.00 GiB of 80.00 GiB, 75% "
            "apart: raise gpu0_bsz" + TUNE,
        ),
        (
            of_peaks(4 * GIB, 2 * GIB, 4 * GIB),
            "cuda:0 peaks at 4.00 GiB and cuda:1 peaks at 2.00 GiB, 50% apart: gpu0_bsz cannot "
            "change that; check what else is on the devices",
        ),
        (of_peaks(20 * GIB, 9 * GIB, capacities=[24 * GIB, 11 * GIB]), None),
        (of_peaks(GIB), None),
    ],
)
def test_the_advice(step, advice):
    assert step.check_split() == advice


def test_a_device_without_samples_that_is_the_fullest():
    usage = of_peaks(4 * GIB, 2 * GIB)
    usage.devices = (replace(usage.devices[0], chunk_size=0), usage.devices[1])
    assert "gpu0_bsz is 0 already; see memory_breakdown" in usage.check_split()


def test_warn_gives_the_sentence_where_it_was_asked_for():
    usage = of_peaks(4 * GIB, 2 * GIB)
    with pytest.warns(BalanceWarning, match="lower gpu0_bsz") as warned:
        said = usage.check_split(warn=True)
    assert str(warned[0].message) == said
    assert warned[0].filename == __file__
    assert of_peaks(GIB, GIB).check_split(warn=True) is None


def test_a_block_that_was_disturbed_gets_no_advice():
    usage = of_peaks(4 * GIB, 2 * GIB)
    usage.valid, usage.reason = False, "the block ended with ValueError: x"
    assert usage.check_split() == f"the measurement is not valid: {usage.reason}"
