from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import ArgumentError, ProbeError
from balanced_dp.memory import DeviceMemory, StepMemory

GIB = 2**30


def of_peaks(*peaks: int, capacities: tuple[int, ...] = ()) -> StepMemory:
    devices = (
        DeviceMemory(f"cuda:{i}", total_bytes=capacity, peak_allocated_bytes=peak)
        for i, (peak, capacity) in enumerate(
            zip(peaks, capacities or [80 * GIB] * len(peaks), strict=True)
        )
    )
    return StepMemory(tuple(devices), reason=None)


@given(st.lists(st.integers(min_value=0, max_value=2**45), min_size=1))
def test_imbalance_is_from_0_to_1(peaks):
    assert 0 <= of_peaks(*peaks).imbalance <= 1


def test_imbalance_and_utilization():
    usage = of_peaks(10 * GIB, 4 * GIB, 8 * GIB, capacities=(20 * GIB, 5 * GIB, 80 * GIB))
    assert usage.imbalance == 0.6
    assert usage.utilization == (0.5, 0.8, 0.1)
    assert usage.fullest.device == "cuda:1"


def test_no_figures_before_the_end():
    for question in ("imbalance", "utilization", "fullest"):
        with pytest.raises(ProbeError, match="there are no peaks: the block has not ended"):
            getattr(StepMemory(), question)
    with pytest.raises(ProbeError):
        StepMemory().check_split()


@pytest.mark.parametrize("tolerance", [5, -0.1, float("nan")])
def test_tolerance_out_of_range(tolerance):
    with pytest.raises(ArgumentError, match="tolerance must be from 0 to below 1"):
        of_peaks(GIB, GIB).check_split(tolerance)


@pytest.mark.parametrize(
    ("step", "advice"),
    [
        (
            of_peaks(4 * GIB, 2 * GIB),
            "cuda:0 peaks at 4.00 GiB of 80.00 GiB and cuda:1 peaks at 2.00 GiB of 80.00 GiB, "
            "50% apart: lower gpu0_bsz, or if it is 0, see memory_breakdown",
        ),
        (
            of_peaks(2 * GIB, 2 * GIB, capacities=(80 * GIB, 20 * GIB)),
            "cuda:1 peaks at 2.00 GiB of 20.00 GiB and cuda:0 peaks at 2.00 GiB of 80.00 GiB, "
            "75% apart: raise gpu0_bsz",
        ),
        (
            of_peaks(4 * GIB, 2 * GIB, 4 * GIB),
            "cuda:0 peaks at 4.00 GiB of 80.00 GiB and cuda:1 peaks at 2.00 GiB of 80.00 GiB, "
            "50% apart: gpu0_bsz cannot change that; check what else is on the devices",
        ),
        (of_peaks(20 * GIB, 9 * GIB, capacities=(24 * GIB, 11 * GIB)), None),
        (of_peaks(GIB), None),
    ],
)
def test_advice(step, advice):
    assert step.check_split() == advice


def test_invalid_blocks_get_no_advice():
    usage = of_peaks(4 * GIB, 2 * GIB)
    usage.reason = "x"
    assert usage.check_split() == "the measurement is not valid: x"
