"""Compare plans with trying every value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import InfeasiblePlanError, MemoryModel, plan, split_batch
from balanced_dp import LinearTerm as Term
from balanced_dp.planning.split_planner import Planner, describe
from balanced_dp.split import EQUAL, is_better

GIB = 2**30
amounts = st.integers(0, GIB)
terms = st.builds(Term, amounts, st.integers(2**14, 2**24), st.integers(0, 2**24))


@st.composite
def models(draw):
    """Draw models in which an idle device needs no more than one with samples."""
    first = tuple(draw(st.lists(terms, min_size=1, max_size=3)))
    idle = tuple(Term(term.fixed_bytes, 0, term.whole_bytes_per_sample) for term in first)
    others = draw(st.lists(terms, min_size=1, max_size=2))
    other = tuple(Term(term.fixed_bytes, term.own_bytes_per_sample) for term in others)
    return MemoryModel(first, idle, other, num_points=9, residual=0.0)


budgets = st.lists(st.integers(GIB // 8, 16 * GIB), min_size=2, max_size=5)


@given(models(), budgets, st.integers(1, 200))
def test_the_best_value_is_that_of_trying_all(model, capacities, batch_size):
    planner = Planner(model, capacities)
    even = -(-batch_size // len(capacities))
    full = [planner.utilization(batch_size, g) for g in range(even + 1)]
    assert full[planner.balanced_gpu0_bsz(batch_size)] == min(full)
    best = planner.best_gpu0_bsz(batch_size)
    assert not is_better(min(full), full[best])
    assert all(is_better(min(full), worse) for worse in full[best + 1 :])


@given(models(), budgets)
def test_the_largest_batch_fits_and_the_next_does_not(model, capacities):
    planner = Planner(model, capacities)
    largest = planner.max_batch_size(planner.even_share)
    if largest:
        assert planner.utilization(largest, planner.even_share(largest)) <= 1
    assert planner.utilization(largest + 1, planner.even_share(largest + 1)) > 1
    assert planner.max_batch_size(planner.balanced_gpu0_bsz) >= largest


@given(models(), budgets, st.integers(1, 200), st.integers(0, GIB // 16))
def test_a_plan_adds_up_or_says_what_is_lacking(model, capacities, batch_size, reserve):
    try:
        found = plan(model, batch_size, capacities, reserve)
    except InfeasiblePlanError as error:
        assert f"a batch of {batch_size} does not fit with any gpu0_bsz" in str(error)
        assert "lacks" in str(error)
        return
    assert sum(found.chunk_sizes) == batch_size
    assert found.chunk_sizes == split_batch(batch_size, len(capacities), found.gpu0_bsz)
    assert found.predicted_bytes == model.predict(found.chunk_sizes)
    for need, budget, capacity in zip(
        found.predicted_bytes, found.budgets, capacities, strict=True
    ):
        assert need <= budget == capacity - reserve
    idle = split_batch(batch_size, len(capacities), 0)
    assert model.predict(idle)[0] <= found.predicted_bytes[0]
    assert found.max_batch_size >= batch_size * (1 - 2 * EQUAL) - 1


def test_a_batch_that_fits_is_not_larger_than_the_largest_that_does():
    """Plan 166 samples, which leave 30 for the last device, unlike 163 to 165."""
    model = MemoryModel((Term(0, 16384, 0),), (Term(0, 0, 0),), (Term(0, 6932734, 0),), 9, 0.0)
    found = plan(model, 166, [134217728, 259279118, 235712956, 235712956, 207982020], 0)
    assert found.chunk_sizes == (34, 34, 34, 34, 30)
    assert (found.max_batch_size, found.max_batch_gpu0_bsz) == (166, 34)


def test_a_given_value_is_described_and_not_chosen():
    model = MemoryModel((Term(100, 10, 1),), (Term(100, 0, 1),), (Term(0, 10),), 3, 0.0)
    assert plan(model, 40, [10**6] * 4, 0).gpu0_bsz != 3
    assert describe(model, 40, [10**6] * 4, 0, 3).chunk_sizes == (3, 13, 12, 12)
    too_large = describe(model, 40, [10] * 4, 0, 3)
    assert too_large.predicted_bytes[0] > too_large.budgets[0]


def test_advice_is_for_what_no_value_balances():
    balanced = MemoryModel((Term(100, 10, 1),), (Term(100, 0, 1),), (Term(90, 10),), 3, 0.0)
    assert plan(balanced, 40, [10**6] * 4, 0).advice == ()
    gathered = MemoryModel((Term(100, 10, 1000),), (Term(100, 0, 1000),), (Term(90, 10),), 3, 0.0)
    [sentence] = plan(gathered, 40, [10**6] * 4, 0).advice
    assert "costs device 0 39.06 KiB (1000 B a sample)" in sentence
    with pytest.raises(InfeasiblePlanError, match=r"the largest batch that fits is 9$"):
        plan(gathered, 40, [10**4] * 4, 0)


@given(models(), budgets, st.integers(1, 60))
def test_the_weighted_split_is_that_of_giving_samples_one_by_one(model, capacities, batch_size):
    planner = Planner(model, capacities)
    weighted = planner.weighted_split(batch_size)

    def bottleneck(sizes):
        needs = model.predict(sizes)
        return max(need / budget for need, budget in zip(needs, capacities, strict=True))

    assert sum(weighted.chunk_sizes) == batch_size
    assert weighted.predicted_bytes == model.predict(weighted.chunk_sizes)
    sizes = [0] * len(capacities)
    for _ in range(batch_size):
        # A term of the whole batch counts for each device that gets the sample.
        def with_one_more(index, sizes=sizes):
            larger = [size + (i == index) for i, size in enumerate(sizes)]
            padded = [larger[0], *larger[1:], batch_size - sum(larger)]
            needs = model.predict(padded)[: len(sizes)]
            return needs[index] / capacities[index]

        sizes[min(range(len(sizes)), key=with_one_more)] += 1
    assert bottleneck(weighted.chunk_sizes) <= bottleneck(sizes) * (1 + 1e-6)
    best = planner.balanced_gpu0_bsz(batch_size)
    assert bottleneck(weighted.chunk_sizes) <= planner.utilization(batch_size, best) * (1 + 1e-6)


@given(models(), budgets)
def test_the_largest_weighted_batch_fits_and_the_next_does_not(model, capacities):
    planner = Planner(model, capacities)
    weighted = planner.weighted_split(10)
    largest = weighted.max_batch_size
    assert sum(weighted.max_batch_chunk_sizes) == largest
    if largest:
        needs = model.predict(weighted.max_batch_chunk_sizes)
        assert all(need <= budget for need, budget in zip(needs, capacities, strict=True))
    beyond = planner.weighted_split(largest + 1)
    needs = model.predict(beyond.chunk_sizes)
    assert any(need > budget for need, budget in zip(needs, capacities, strict=True))
    assert largest >= planner.max_batch_size(planner.balanced_gpu0_bsz)


def test_unlike_devices_get_a_list_of_chunk_sizes_and_like_ones_do_not():
    model = MemoryModel((Term(100, 10, 1),), (Term(100, 0, 1),), (Term(0, 10),), 3, 0.0)
    assert plan(model, 40, [10**6] * 4, 0).weighted is None
    found = plan(model, 40, [2000, 1000, 500], 0).weighted
    assert found.chunk_sizes[0] > found.chunk_sizes[1] > found.chunk_sizes[2] > 0
    with pytest.raises(InfeasiblePlanError, match=r"or \d+ with device_weights=\["):
        plan(model, 200, [2000, 1000, 500], 0)
