"""Test ``split_batch`` and ``split_by_weights``."""

import math
from fractions import Fraction

import numpy
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from balanced_dp import split_batch, split_by_weights

batch_sizes = st.integers(0, 500)
device_counts = st.integers(1, 16)
caps = st.integers(0, 600)


@given(batch_sizes, device_counts, caps)
def test_chunks_cover_the_batch(batch_size, num_devices, gpu0_bsz):
    """Chunks add up to the batch, and device 0 gets at most gpu0_bsz.

    Either the split is that of ``torch.chunk``, or the other chunks differ by at most 1.
    """
    sizes = split_batch(batch_size, num_devices, gpu0_bsz)
    assert len(sizes) == num_devices and sum(sizes) == batch_size
    assert all(type(size) is int and size >= 0 for size in sizes)
    even = math.ceil(batch_size / num_devices)
    if num_devices > 1:
        assert sizes[0] == min(gpu0_bsz, even)
    if gpu0_bsz >= even and batch_size:
        chunks = [chunk.numel() for chunk in torch.arange(batch_size).chunk(num_devices)]
        assert list(sizes) == chunks + [0] * (num_devices - len(chunks))
    elif num_devices > 1:
        assert max(sizes[1:]) - min(sizes[1:]) <= 1
        assert list(sizes[1:]) == sorted(sizes[1:], reverse=True)


@pytest.mark.parametrize(
    ("split", "arguments", "expected"),
    [
        (split_batch, (10, 1, 3), (10,)),
        # Forks gave device 0 more than asked, or replicas without samples.
        (split_batch, (4, 3, 1), (1, 2, 1)),
        (split_batch, (9, 4, 2), (2, 3, 2, 2)),
        (split_batch, (1, 4, 0), (0, 1, 0, 0)),
        (split_batch, (0, 4, 2), (0, 0, 0, 0)),
        (split_batch, (numpy.int64(32), numpy.int32(4), numpy.int8(2)), (2, 10, 10, 10)),
        (split_by_weights, (10, [1, 1, 1, 1]), (2, 3, 3, 2)),
        (split_by_weights, (11, [1, 1, 1, 1]), (2, 3, 3, 3)),
    ],
)
def test_examples(split, arguments, expected):
    assert split(*arguments) == expected


weights = st.lists(st.floats(0, 1e6) | st.integers(0, 10**6), min_size=1, max_size=8).filter(any)


@given(batch_sizes, weights)
def test_shares_are_rounded_up_or_down(batch_size, device_weights):
    sizes = split_by_weights(batch_size, device_weights)
    assert sum(sizes) == batch_size
    total = sum(map(Fraction, device_weights))
    for size, weight in zip(sizes, device_weights, strict=True):
        assert abs(size - batch_size * Fraction(weight) / total) < 1
        assert weight or not size


@given(batch_sizes, weights, caps)
def test_a_cap_keeps_the_others_proportions(batch_size, device_weights, cap):
    assume(any(device_weights[1:]))
    free = split_by_weights(batch_size, device_weights)
    sizes = split_by_weights(batch_size, device_weights, cap)
    assert sizes[0] == min(cap, free[0])
    rest = split_by_weights(batch_size - cap, [0, *device_weights[1:]]) if free[0] > cap else free
    assert sizes[1:] == rest[1:]
