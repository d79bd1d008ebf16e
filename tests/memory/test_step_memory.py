from __future__ import annotations

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from balanced_dp import (
    ArgumentError,
    ArgumentTypeError,
    DevicePeak,
    ImbalanceWarning,
    ProbeError,
    StepMemory,
    split_batch,
)

GIB, MIB = 2**30, 2**20
sizes = st.integers(min_value=0, max_value=2**45)


def ended(*devices: DevicePeak) -> StepMemory:
    return StepMemory(devices=devices, elapsed_s=1.0, valid=True, reason=None)


def of_peaks(*peaks: int, capacities: list[int] | None = None) -> StepMemory:
    return ended(
        *(
            DevicePeak(f"cuda:{i}", capacities[i] if capacities else 80 * GIB, 0, peak)
            for i, peak in enumerate(peaks)
        )
    )


def linear_step(gpu0_bsz, fixed, per_sample, batch_size=32, num_devices=4, capacities=None):
    """Return a step with ``fixed`` bytes on device 0, 100 MiB on others, and linear in samples."""
    chunks = split_batch(batch_size, num_devices, gpu0_bsz)
    return ended(
        *(
            DevicePeak(
                device=f"cuda:{i}",
                capacity_bytes=capacities[i] if capacities else 80 * GIB,
                start_allocated_bytes=0,
                peak_allocated_bytes=(100 * MIB if i else fixed) + per_sample * chunk,
                chunk_size=chunk,
                replica_bytes=100 * MIB if i and chunk else 0,
            )
            for i, chunk in enumerate(chunks)
        )
    )


@given(st.lists(sizes, min_size=1))
def test_imbalance_is_from_0_to_1(peaks):
    assert 0 <= of_peaks(*peaks, capacities=[GIB] * len(peaks)).imbalance <= 1


def test_imbalance_and_utilization():
    usage = of_peaks(10 * GIB, 4 * GIB, 8 * GIB, capacities=[20 * GIB, 5 * GIB, 80 * GIB])
    assert usage.imbalance == 0.6
    assert usage.utilization == (0.5, 0.8, 0.1)
    assert usage.fullest.device == "cuda:1"


def test_before_the_end_there_are_no_figures():
    for question in ("imbalance", "utilization", "fullest", "bytes_per_sample", "floor_bytes"):
        with pytest.raises(ProbeError, match="there are no peaks: the block has not ended"):
            getattr(StepMemory(), question)
    with pytest.raises(ProbeError):
        StepMemory().check_split()


def test_a_device_without_capacity_has_no_utilization():
    with pytest.raises(ProbeError, match="the capacity of cuda:0 is not known"):
        _ = of_peaks(1, capacities=[0]).utilization


@given(st.integers(0, 32), st.integers(1, 2**33), st.integers(1, 2**30))
def test_bytes_per_sample_and_floor_of_a_linear_step(gpu0_bsz, fixed, per_sample):
    usage = linear_step(gpu0_bsz, fixed, per_sample)
    assert usage.bytes_per_sample == pytest.approx(per_sample)
    assert usage.floor_bytes == pytest.approx(fixed, rel=1e-6, abs=1)


def test_what_is_not_known_is_none():
    unknown = of_peaks(2 * GIB, GIB)
    assert unknown.bytes_per_sample is unknown.floor_bytes is None
    one = linear_step(8, GIB, MIB, num_devices=1)
    assert one.bytes_per_sample is one.floor_bytes is None


def bottleneck_bytes(*args, **kwargs):
    return linear_step(*args, **kwargs).fullest.peak_allocated_bytes


@given(st.integers(0, 8), st.integers(2**26, 2**33), st.integers(2**20, 2**28))
def test_the_advised_split_is_the_best_there_is(gpu0_bsz, fixed, per_sample):
    advice = linear_step(gpu0_bsz, fixed, per_sample).check_split(0.02)
    if advice and ", from " in advice:
        old, _, new = advice.partition(", from ")[2].split()[:3]
        assert (int(new) > int(old)) == ("raise gpu0_bsz" in advice)
        assert (int(new) < int(old)) == ("lower gpu0_bsz" in advice)
        gpu0_bsz = int(new)
    elif advice is None:
        event("balanced")
        return
    elif "gpu0_bsz cannot change that" in advice:
        event("others differ")
        return
    best = min(
        bottleneck_bytes(value, fixed, per_sample) for value in range(9)
    )  # 8 is the even share
    assert bottleneck_bytes(gpu0_bsz, fixed, per_sample) <= best * 1.006


def test_of_values_as_good_the_one_in_use_or_the_largest_is_best():
    """With 18 samples on 4 devices, the bottleneck device holds 700 MiB for 0, 1, 2 and 3."""
    for gpu0_bsz in range(4):
        assert bottleneck_bytes(gpu0_bsz, 400 * MIB, 100 * MIB, batch_size=18) == 700 * MIB
    assert "from 5 to 3" in linear_step(5, 400 * MIB, 100 * MIB, batch_size=18).check_split(0.05)
    in_use = linear_step(2, 400 * MIB, 100 * MIB, batch_size=18).check_split(0.05)
    assert "no other gpu0_bsz than 2 would be better" in in_use


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


def test_the_advice_to_lower():
    assert linear_step(8, 4 * GIB, 256 * MIB).check_split() == (
        "cuda:0 peaks at 6.00 GiB and cuda:1 peaks at 2.10 GiB, 65% apart: lower gpu0_bsz by about "
        "8, from 8 to 0 (a sample takes about 256.00 MiB); without any samples cuda:0 holds about "
        "4.00 GiB, which memory_breakdown lists by use. Return the loss from forward to avoid "
        "gathered outputs"
    )
    assert linear_step(8, GIB, 256 * MIB).check_split() == (
        "cuda:0 peaks at 3.00 GiB and cuda:1 peaks at 2.10 GiB, 30% apart: lower gpu0_bsz by about "
        "3, from 8 to 5 (a sample takes about 256.00 MiB)"
    )


def test_the_sentence_to_raise():
    assert linear_step(2, GIB, 256 * MIB).check_split() == (
        "cuda:1 peaks at 2.60 GiB and cuda:0 peaks at 1.50 GiB, 42% apart: raise gpu0_bsz by about "
        "3, from 2 to 5 (a sample takes about 256.00 MiB)"
    )


def test_the_sentence_at_the_ends():
    at_zero = linear_step(0, 8 * GIB, 256 * MIB).check_split()
    assert "no other gpu0_bsz than 0 would be better" in at_zero
    assert "without any samples cuda:0 holds about 8.00 GiB" in at_zero
    at_even = linear_step(8, 0, 256 * MIB, capacities=[80 * GIB, GIB * 20, GIB * 20, GIB * 20])
    assert at_even.check_split().endswith(
        "no other gpu0_bsz than 8 would be better, since a sample takes about 256.00 MiB"
    )
    coarse = linear_step(1, 300 * MIB, GIB, batch_size=4)
    assert coarse.check_split(0.01).endswith(
        "no other gpu0_bsz than 1 would be better, since a sample takes about 1.00 GiB"
    )


def test_without_chunk_sizes_the_direction_is_what_is_said():
    assert of_peaks(4 * GIB, 2 * GIB).check_split().endswith("50% apart: lower gpu0_bsz")
    assert of_peaks(2 * GIB, 4 * GIB).check_split().endswith("50% apart: raise gpu0_bsz")


def test_others_that_differ_among_themselves_are_no_matter_of_gpu0_bsz():
    advice = of_peaks(4 * GIB, 2 * GIB, 4 * GIB).check_split()
    assert advice.startswith("cuda:0 peaks at 4.00 GiB and cuda:1 peaks at 2.00 GiB, 50% apart")
    assert "gpu0_bsz cannot change that" in advice


def test_devices_of_unlike_capacity_are_compared_by_utilization():
    capacities = [24 * GIB, 11 * GIB]
    assert of_peaks(20 * GIB, 9 * GIB, capacities=capacities).check_split() is None
    advice = of_peaks(9 * GIB, 9 * GIB, capacities=capacities).check_split()
    assert advice.startswith("cuda:1 peaks at 9.00 GiB of 11.00 GiB and cuda:0 peaks at 9.00 GiB")
    assert advice.endswith("raise gpu0_bsz")


def test_one_device_has_no_split():
    assert of_peaks(GIB).check_split() is None


def test_warn_gives_the_sentence_where_it_was_asked_for():
    usage = of_peaks(4 * GIB, 2 * GIB)
    with pytest.warns(ImbalanceWarning, match="lower gpu0_bsz") as warned:
        said = usage.check_split(warn=True)
    assert str(warned[0].message) == said
    assert warned[0].filename == __file__
    assert of_peaks(GIB, GIB).check_split(warn=True) is None


def test_a_block_that_was_disturbed_gets_no_advice():
    usage = of_peaks(4 * GIB, 2 * GIB)
    usage.valid, usage.reason = False, "the block ended with ValueError: x"
    assert usage.check_split() == (
        "the measurement is not valid: the block ended with ValueError: x"
    )
