from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import split_batch, split_by_weights
from balanced_dp.distributed import scale_loss, split_ranks

GiB = 2**30


@given(
    batch_size=st.integers(0, 10**6),
    capacities=st.lists(st.integers(2 * GiB, 80 * GiB), min_size=1, max_size=64),
    fixed_bytes=st.integers(0, 2 * GiB - 1),
)
def test_shares_fit_the_memory_left(batch_size, capacities, fixed_bytes):
    sizes = split_ranks(batch_size, capacities=capacities, fixed_bytes=fixed_bytes)
    room = [capacity - fixed_bytes for capacity in capacities]
    assert sum(sizes) == batch_size
    for size, share in zip(sizes, room, strict=True):
        assert abs(size - batch_size * share / sum(room)) < 1


def test_the_same_split_as_on_one_machine():
    assert split_ranks(32, 4, rank0_bsz=2) == split_batch(32, 4, 2)
    assert split_ranks(32, weights=[1, 2, 2]) == split_by_weights(32, [1, 2, 2])
    assert split_ranks(32, weights=[1, 1, 1], rank0_bsz=2) == (2, 15, 15)
    assert split_ranks(32, 3, capacities=[24 * GiB, 11 * GiB, 11 * GiB], rank0_bsz=4) == (4, 14, 14)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 2}, "give rank0_bsz, weights or capacities"),
        ({"rank0_bsz": 2}, "call init_process_group"),
        ({"weights": [1, 2], "capacities": [1, 2]}, "weights and capacities both determine"),
        ({"weights": [1, 2], "world_size": 3}, "world_size=3, but weights or capacities are given"),
        (
            {"capacities": [4 * GiB, 2 * GiB], "fixed_bytes": 3 * GiB},
            "rank 1 can hold 2.00 GiB, but needs 3.00 GiB without any samples",
        ),
        ({"capacities": [GiB, GiB], "fixed_bytes": GiB}, "rank 0 can hold 1.00 GiB, but needs 1.0"),
        ({"world_size": 4, "rank0_bsz": -1}, "rank0_bsz must be at least 0, got -1"),
        ({"world_size": 0, "rank0_bsz": 1}, "at least 1"),
    ],
)
def test_splits_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        split_ranks(32, **arguments)


def test_scaling_needs_a_process_group():
    with pytest.raises(ValueError, match="init_process_group"):
        scale_loss(torch.ones(()), 2)
