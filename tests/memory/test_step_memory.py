from __future__ import annotations

from dataclasses import replace

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


def of_peaks(*peaks: int, capacities: list[int] | None = None) -> StepMemory:
    capacities = capacities or [80 * GIB] * len(peaks)
    devices = (
        DevicePeak(f"cuda:{i}", capacity, 0, peak)
        for i, (peak, capacity) in enumerate(zip(peaks, capacities, strict=True))
    )
    return StepMemory(tuple(devices), elapsed_s=1.0, valid=True, reason=None)


def linear_step(gpu0_bsz, fixed, per_sample, batch_size=32, num_devices=4, capacities=None):
    """Return a step with ``fixed`` bytes on device 0, 100 MiB on others, and linear in samples."""
    chunks = split_batch(batch_size, num_devices, gpu0_bsz)
    peaks = [(100 * MIB if i else fixed) + per_sample * size for i, size in enumerate(chunks)]
    usage = of_peaks(*peaks, capacities=capacities)
    usage.devices = tuple(
        replace(peak, chunk_size=size, replica_bytes=100 * MIB if i and size else 0)
        for i, (peak, size) in enumerate(zip(usage.devices, chunks, strict=True))
    )
    return usage


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
    best = min(bottleneck_bytes(value, fixed, per_sample) for value in range(9))  # 8 is even
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


@pytest.mark.parametrize(
    ("step", "advice"),
    [
        (
            linear_step(8, 4 * GIB, 256 * MIB),
            "cuda:0 peaks at 6.00 GiB and cuda:1 peaks at 2.10 GiB, 65% apart: lower gpu0_bsz by "
            "about 8, from 8 to 0 (a sample takes about 256.00 MiB); without any samples cuda:0 "
            "holds about 4.00 GiB, which memory_breakdown lists by use. Return the loss from "
            "forward to avoid gathered outputs",
        ),
        (
            linear_step(8, GIB, 256 * MIB),
            "cuda:0 peaks at 3.00 GiB and cuda:1 peaks at 2.10 GiB, 30% apart: lower gpu0_bsz by "
            "about 3, from 8 to 5 (a sample takes about 256.00 MiB)",
        ),
        (
            linear_step(2, GIB, 256 * MIB),
            "cuda:1 peaks at 2.60 GiB and cuda:0 peaks at 1.50 GiB, 42% apart: raise gpu0_bsz by "
            "about 3, from 2 to 5 (a sample takes about 256.00 MiB)",
        ),
        (
            linear_step(0, 8 * GIB, 256 * MIB),
            "…no other gpu0_bsz than 0 would be better, since a sample takes about 256.00 MiB; "
            "without any samples cuda:0 holds about 8.00 GiB, which memory_breakdown lists by use. "
            "Return the loss from forward to avoid gathered outputs",
        ),
        (
            linear_step(8, 0, 256 * MIB, capacities=[80 * GIB, GIB * 20, GIB * 20, GIB * 20]),
            "cuda:1 peaks at 2.10 GiB of 20.00 GiB and cuda:0 peaks at 2.00 GiB of 80.00 GiB, 76% "
            "apart: no other gpu0_bsz than 8 would be better, since a sample takes about "
            "256.00 MiB",
        ),
        (of_peaks(4 * GIB, 2 * GIB), "…2.00 GiB, 50% apart: lower gpu0_bsz"),
        (of_peaks(2 * GIB, 4 * GIB), "…2.00 GiB, 50% apart: raise gpu0_bsz"),
        (
            of_peaks(4 * GIB, 2 * GIB, 4 * GIB),
            "cuda:0 peaks at 4.00 GiB and cuda:1 peaks at 2.00 GiB, 50% apart: gpu0_bsz cannot "
            "change that; check what else is on the devices",
        ),
        (of_peaks(20 * GIB, 9 * GIB, capacities=[24 * GIB, 11 * GIB]), None),
        (of_peaks(9 * GIB, 9 * GIB, capacities=[24 * GIB, 11 * GIB]), "…raise gpu0_bsz"),
        (of_peaks(GIB), None),
    ],
)
def test_the_advice(step, advice):
    said = step.check_split()
    if advice is not None and advice.startswith("…"):
        assert said.endswith(advice[1:])
    else:
        assert said == advice


def test_a_step_finer_than_a_sample_cannot_be_better():
    advice = linear_step(1, 300 * MIB, GIB, batch_size=4).check_split(0.01)
    assert "no other gpu0_bsz than 1 would be better, since a sample takes about 1.00" in advice


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
    assert usage.check_split() == f"the measurement is not valid: {usage.reason}"
