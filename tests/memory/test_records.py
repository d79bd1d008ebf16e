from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import ArgumentError, ProbeError
from balanced_dp.memory import DeviceMemory, StepMemory

GIB = 2**30


def of_peaks(*peaks: int, capacities: Sequence[int] = ()) -> StepMemory:
    """Return a measurement with these GiB."""
    pairs = zip(peaks, capacities or [80] * len(peaks), strict=True)
    devices = (
        DeviceMemory(f"cuda:{i}", total_bytes=capacity * GIB, peak_allocated_bytes=peak * GIB)
        for i, (peak, capacity) in enumerate(pairs)
    )
    return StepMemory(tuple(devices), reason=None)


@given(st.lists(st.integers(min_value=0, max_value=2**15), min_size=1))
def test_imbalance_is_from_0_to_1(peaks):
    assert 0 <= of_peaks(*peaks).imbalance <= 1


def test_imbalance_and_utilization():
    usage = of_peaks(10, 4, 8, capacities=(20, 5, 80))
    assert (usage.imbalance, usage.utilization) == (0.6, (0.5, 0.8, 0.1))
    assert usage.fullest.device == "cuda:1"


@pytest.mark.parametrize("figure", ["imbalance", "utilization", "fullest", "check_split"])
def test_no_figures_before_the_end(figure):
    with pytest.raises(ProbeError, match="there are no peaks: the block has not ended"):
        getattr(StepMemory(), figure)()


@pytest.mark.parametrize("tolerance", [5, -0.1, float("nan")])
def test_tolerance_out_of_range(tolerance):
    with pytest.raises(ArgumentError, match="tolerance must be from 0 to below 1"):
        of_peaks(1, 1).check_split(tolerance)


FULLER_FIRST = "cuda:0 peaks at 4.00 GiB of 80.00 GiB and cuda:1 peaks at 2.00 GiB of 80.00 GiB, "
FULLER_SECOND = "cuda:1 peaks at 2.00 GiB of 20.00 GiB and cuda:0 peaks at 2.00 GiB of 80.00 GiB, "
OTHER_REASON = "50% apart: gpu0_bsz cannot change that; check what else is on the devices"


@pytest.mark.parametrize(
    ("peaks", "capacities", "advice"),
    [
        (
            (4, 2),
            (),
            f"{FULLER_FIRST}50% apart: lower gpu0_bsz, or if it is 0, see memory_breakdown",
        ),
        ((2, 2), (80, 20), f"{FULLER_SECOND}75% apart: raise gpu0_bsz"),
        ((4, 2, 4), (), FULLER_FIRST + OTHER_REASON),
        ((20, 9), (24, 11), None),
        ((1,), (), None),
    ],
)
def test_advice(peaks, capacities, advice):
    assert of_peaks(*peaks, capacities=capacities).check_split() == advice


def test_invalid_blocks_get_no_advice():
    usage = of_peaks(4, 2)
    usage.reason = "x"
    assert usage.check_split() == "the measurement is not valid: x"
