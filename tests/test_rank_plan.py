from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import ArgumentError, InfeasiblePlanError, Law
from balanced_dp.rank_plan import RankModel, plan_ranks

laws = st.builds(
    Law,
    fixed_bytes=st.integers(0, 5000).map(float),
    own_bytes_per_sample=st.integers(0, 500).map(float),
)
models = st.builds(
    RankModel, st.tuples(laws, laws.filter(lambda law: law.own_bytes_per_sample)), st.just(5)
)
capacities = st.lists(st.integers(1, 20_000), min_size=2, max_size=3)


def shares(batch_size, num_ranks):
    """All ways to share a batch."""
    for cuts in itertools.combinations(range(batch_size + num_ranks - 1), num_ranks - 1):
        edges = [-1, *cuts, batch_size + num_ranks - 1]
        yield tuple(b - a - 1 for a, b in itertools.pairwise(edges))


def fullest(model, sizes, capacities):
    return max(model.predict(n) / c for n, c in zip(sizes, capacities, strict=True))


@given(model=models, capacities=capacities, batch_size=st.integers(1, 12))
def test_no_other_shares_are_less_full(model, capacities, batch_size):
    best = min(shares(batch_size, len(capacities)), key=lambda s: fullest(model, s, capacities))
    limit = fullest(model, best, capacities)
    if limit > 1:
        with pytest.raises(InfeasiblePlanError):
            plan_ranks(model, batch_size, capacities)
        return
    found = plan_ranks(model, batch_size, capacities)
    assert sum(found.chunk_sizes) == batch_size
    assert fullest(model, found.chunk_sizes, capacities) <= limit * (1 + 1e-9)
    assert found.predicted_bytes == tuple(map(model.predict, found.chunk_sizes))


@given(model=models, capacities=capacities, reserve=st.integers(0, 100))
def test_the_largest_batch_fits_and_no_larger_one(model, capacities, reserve):
    capacities = [capacity + reserve for capacity in capacities]
    try:
        found = plan_ranks(model, 1, capacities, reserve)
    except InfeasiblePlanError:
        return
    budgets = found.budgets
    assert sum(found.max_batch_chunk_sizes) == found.max_batch_size
    assert fullest(model, found.max_batch_chunk_sizes, budgets) <= 1
    for rank, size in enumerate(found.max_batch_chunk_sizes):
        if size < 2**24:
            assert model.predict(size + 1) > budgets[rank]
    even = found.even_max_batch_size // len(budgets)
    assert even == min(found.max_batch_chunk_sizes)


def test_what_does_not_fit_is_said():
    model = RankModel((Law(2.0 * 2**30, 2.0**30),), 5)
    with pytest.raises(
        InfeasiblePlanError,
        match=r"rank 1 needs 2\.00 GiB whatever its share, and "
        r"its device can hold 1\.00 GiB: .*fully_shard divides them",
    ):
        plan_ranks(model, 4, [8 * 2**30, 2 * 2**30], 2**30)
    with pytest.raises(
        InfeasiblePlanError,
        match=r"a batch of 9 does not fit: the ranks can hold "
        r"\(6, 1\) samples, in all 7",
    ):
        plan_ranks(model, 9, [8 * 2**30, 3 * 2**30])
    with pytest.raises(ArgumentError, match="batch_size must be at least 1"):
        plan_ranks(model, 0, [8 * 2**30] * 2)
