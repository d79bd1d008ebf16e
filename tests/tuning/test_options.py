"""Test which ways to train a batch are found, and how they are ranked."""

from __future__ import annotations

import typing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import LinearTerm, MemoryModel
from balanced_dp.planning.split_planner import Goal, Planner, utilizations
from balanced_dp.split import even_share, split_batch, split_by_weights
from balanced_dp.tuning.options import find_options, ranked

from .measurements import measurement

GOALS = typing.get_args(Goal)


def with_value(model, batch_size, num_devices, value):
    sizes = split_batch(batch_size, num_devices, value)
    return measurement(sizes, model.predict(sizes), gpu0_bsz=value)


def memory_model(extra_bytes=0, own=10, whole=0.0):
    """A model whose device 0 holds ``extra_bytes`` and ``whole`` for each sample of the batch."""
    first = LinearTerm(100 + extra_bytes, own, whole)
    idle = LinearTerm(100 + extra_bytes, 0, whole)
    return MemoryModel((first,), (idle,), (LinearTerm(100, own),), 3, 0.0)


def options_of(model, batch_size, budgets, gather=True, spread=False):
    planner = Planner(model, budgets)
    values = [(batch_size, value) for value in range(planner.even_share(batch_size) + 1)]
    for choose in (planner.even_share, planner.balanced_gpu0_bsz):
        if largest := planner.max_batch_size(choose):
            values.append((largest, choose(largest)))
    measured = [with_value(model, size, len(budgets), value) for size, value in values]
    if len(set(budgets)) > 1:
        weighted = planner.weighted_split(batch_size)
        for sizes in (weighted.chunk_sizes, weighted.max_batch_chunk_sizes):
            if any(sizes):
                measured.append(measurement(sizes, model.predict(sizes), gpu0_bsz=None))
    return find_options(model, measured, batch_size, budgets, gather, spread)


models = st.builds(
    memory_model, st.integers(0, 500), st.integers(1, 30), st.floats(0, 20, allow_nan=False)
)


@given(
    models,
    st.integers(1, 60),
    st.lists(st.integers(200, 2000), min_size=2, max_size=5),
    st.sampled_from(GOALS),
)
def test_the_best_one_is_the_best_in_its_goal(model, batch_size, budgets, goal):
    found = options_of(model, batch_size, budgets)
    best = ranked(found, batch_size, budgets, goal)
    for option in found:
        if option.device_weights is None:
            value = option.batch_size if option.gpu0_bsz is None else option.gpu0_bsz
            assert option.chunk_sizes == split_batch(option.batch_size, len(budgets), value)
        else:
            assert option.chunk_sizes == split_by_weights(option.batch_size, option.device_weights)
    assert all(option.fits(budgets) for option in best)
    values = {split_batch(batch_size, len(budgets), v) for v in range(batch_size + 1)}
    fitting = [s for s in values if max(utilizations(model.predict(s), budgets)) <= 1]
    if goal == "batch" or not fitting:
        return
    assert all(option.batch_size == batch_size for option in best)
    if goal == "speed":
        assert max(best[0].chunk_sizes) <= min(map(max, fitting))
    else:
        lowest = min(max(utilizations(model.predict(sizes), budgets)) for sizes in fitting)
        assert best[0].utilization(budgets) <= lowest * 1.002 + 0.01


@given(models, st.integers(1, 60), st.integers(300, 2000))
def test_the_largest_batch_is_the_largest_with_this_line(model, batch_size, budget):
    budgets = [budget] * 3
    for option in options_of(model, batch_size, budgets):

        def fits(size, option=option):
            value = size if option.gpu0_bsz is None else option.gpu0_bsz
            return max(model.predict(split_batch(size, 3, value))) <= budget

        largest = option.max_batch_size
        assert not any(map(fits, range(largest + 1, largest + 5)))
        assert largest == 0 or fits(largest)


def test_what_fits_as_it_is_comes_first_unless_memory_is_the_goal():
    budgets = [1000] * 4
    found = options_of(memory_model(extra_bytes=400), 40, budgets)
    by_goal = {goal: ranked(found, 40, budgets, goal) for goal in GOALS}
    assert by_goal["speed"][0].line == "nn.DataParallel(model)"
    assert by_goal["speed"][0].chunk_sizes == (10, 10, 10, 10)
    headroom = by_goal["headroom"][0]
    assert headroom.line == f"BalancedDataParallel({headroom.gpu0_bsz}, model)"
    assert headroom.utilization(budgets) < 0.55
    assert by_goal["batch"][0].max_batch_size > 3 * 40
    assert by_goal["batch"][0].batch_size == by_goal["batch"][0].max_batch_size


def test_weights_are_a_line_that_can_be_pasted():
    budgets = [2400, 1100, 1100]
    best, *_ = ranked(options_of(memory_model(), 30, budgets), 30, budgets, "batch")
    assert best.line == (
        f"BalancedDataParallel(None, model, device_weights={list(best.chunk_sizes)})"
    )
    assert best.max_batch_size == 230 + 100 + 100


@given(models, st.integers(1, 60), st.lists(st.integers(200, 2000), min_size=2, max_size=5))
def test_the_fastest_split_fits_and_no_other_has_a_smaller_largest_chunk(
    model, batch_size, budgets
):
    planner = Planner(model, budgets)
    found = planner.fastest_split(batch_size)
    limits = planner.largest_chunks(batch_size)
    if limits is None or sum(limits) < batch_size:
        assert found is None
        return
    assert sum(found) == batch_size
    assert all(0 <= size <= limit for size, limit in zip(found, limits, strict=True))
    assert sum(min(limit, max(found) - 1) for limit in limits) < batch_size


def test_what_another_one_without_other_features_exceeds_is_left_out():
    """The loss on each device holds more with the same chunks, but it takes a change of its own."""
    budgets = [1000] * 4
    apart = options_of(memory_model(), 40, budgets, gather=False)
    gathered = options_of(memory_model(whole=5), 40, budgets)
    lines = [option.line for option in ranked((*apart, *gathered), 40, budgets, "speed")]
    assert lines == [
        "nn.DataParallel(model)",
        "BalancedDataParallel(None, model, gather=False)",
        "BalancedDataParallel(0, model)",
    ]
    # Without gathered outputs device 0 holds what the others hold, so no uneven split is better.
    assert len(apart) > 1


@pytest.mark.parametrize("goal", GOALS)
def test_what_a_measurement_refutes_is_replaced_by_what_was_measured_to_fit(goal):
    """The largest predicted batch takes a little more than it was predicted to."""
    budgets, model = [1000] * 4, memory_model()
    sizes = (40, 200, 355, 360, 365, 370)
    measured = [with_value(model, size, 4, even_share(size, 4)) for size in sizes]
    measured[3:] = [
        replace(m, backward_peak_bytes=tuple(round(1.02 * b) for b in m.backward_peak_bytes))
        for m in measured[3:]
    ]
    best, *_ = ranked(find_options(model, measured, 40, budgets, True, False), 40, budgets, goal)
    assert best.fits(budgets)
    assert best.batch_size == (355 if goal == "batch" else 40)


def test_a_value_and_weights_may_have_the_same_chunks():
    """Weights are offered if they were measured: the model may refuse to train on a chunk."""
    budgets, model, sizes = [170, 500, 500], memory_model(), (4, 10, 10)
    measured = [with_value(model, 24, 3, value) for value in (8, 4, 0)]
    found = find_options(model, measured, 24, budgets, gather=True, spread=False)
    assert all(option.device_weights is None for option in found)
    measured.append(measurement(sizes, model.predict(sizes), gpu0_bsz=None))
    found = find_options(model, measured, 24, budgets, gather=True, spread=False)
    lines = {option.line: option.chunk_sizes for option in found}
    assert lines["BalancedDataParallel(4, model)"] == sizes
    assert lines["BalancedDataParallel(None, model, device_weights=[4, 10, 10])"] == sizes
