"""Test that options are ranked by their measured memory and speed."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp.search import utilizations
from balanced_dp.split import EQUAL
from balanced_dp.tuning.options import Goal, largest_batch, ranked

from ..laws import Law, alike, laws, unlike
from .measured import option, options

GOALS = typing.get_args(Goal)


@given(laws(), alike | unlike, st.integers(1, 60), st.sampled_from(GOALS))
def test_the_first_is_the_best_in_its_goal(law, budgets, batch_size, goal):
    measured = options(law.peaks, batch_size, len(budgets))
    measured += options(law.peaks, 2 * batch_size, len(budgets))
    best = ranked(measured, batch_size, budgets, goal)
    fitting = [o for o in measured if max(utilizations(o.peak_bytes, budgets)) <= 1]
    if goal == "batch":
        assert not fitting or best[0].batch_size == max(o.batch_size for o in fitting)
        return
    fitting = [o for o in fitting if o.batch_size == batch_size]
    assert bool(best) == bool(fitting)
    if best and goal == "speed":
        assert round(best[0].speed, 2) == max(round(o.speed, 2) for o in fitting)
    elif best:
        lowest = min(o.utilization(budgets) for o in fitting)
        assert best[0].utilization(budgets) <= lowest * (1 + EQUAL) + 0.01


def peaks(extra, own=10, whole=0):
    return Law(((100 + extra, own, whole),), ((100, own),)).peaks


APART = [*options(peaks(0), 40, 4, gather=False), *options(peaks(0, whole=5), 40, 4)]


@pytest.mark.parametrize(
    ("measured", "budget", "goal", "found"),
    [
        # The even split is the fastest, and another value leaves more memory free.
        (options(peaks(400), 40, 4), 1000, "speed", [(None, True), (0, True)]),
        (options(peaks(400), 40, 4), 1000, "headroom", [(0, True), (None, True)]),
        # Device 0 may hold 450, which is 5 samples, where it holds least with none.
        (options(peaks(300), 40, 4), 450, "speed", [(5, True), (0, True)]),
        # With the loss on each device, more is free at the same speed, but it takes a change.
        (APART, 1000, "speed", [(None, True), (None, False), (0, True)]),
    ],
)
def test_which_options_are_listed(measured, budget, goal, found):
    assert [(o.gpu0_bsz, o.gather) for o in ranked(measured, 40, [budget] * 4, goal)] == found


def test_memory_that_ran_out_does_not_fit():
    ran = option((2, 2), (5, 5))
    out = option((4, 4), (5, 5), out_of_memory="CUDA out of memory", ran_out=0, seconds=1.0)
    assert [o.fits([10, 10]) for o in (ran, out)] == [True, False]
    assert out.samples_per_s == 0
    assert largest_batch(ran, [ran, out], [10, 10]) is ran
    assert ranked([out], 8, [10, 10], "batch") == []
