from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import split_batch, split_by_weights
from balanced_dp.distributed import split_ranks

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
