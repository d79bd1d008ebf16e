"""Test that searches find the same value as trying every value.

The peaks come from random laws of memory, and from tables of peaks of real models.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from balanced_dp.search import MAX_SPLITS, LoopSearch, Search, utilizations
from balanced_dp.split import EQUAL

from .laws import GIB, Law, alike, all_values, ask, laws, unlike

TABLES = json.loads(Path(__file__).with_name("peaks_by_gpu0_bsz.json").read_text("utf-8"))
"""The peaks of each device for gpu0_bsz = 0, 1, ..., as emulated devices counted them."""


@given(laws(), alike | unlike, st.integers(1, 300))
@example(Law(((0, 20, 0),), ((50, 10),)), [500, 1000, 500, 500], 17)  # the last device has less
def test_the_best_value(law, budgets, batch_size):
    search = Search(batch_size, budgets)
    ask(search, law.peaks)
    full = all_values(law, batch_size, budgets)
    assert full[search.best] <= min(full.values()) * 1.01


@given(laws(), alike, st.integers(8, 300))
def test_the_largest_value_that_fits(law, budgets, batch_size):
    full = all_values(law, batch_size, budgets)
    budgets = [round(budget * (min(full.values()) + full[max(full)]) / 2) for budget in budgets]
    full = all_values(law, batch_size, budgets)
    search = Search(batch_size, budgets, for_speed=True)
    ask(search, law.peaks)
    largest = max((value for value in full if full[value] <= 1), default=0)
    assert largest in {0, *(split[0] for split in search.told)}


@pytest.mark.parametrize("start", [None, 0, 1])
@pytest.mark.parametrize("name", TABLES)
def test_the_best_value_of_a_table(name, start):
    table = TABLES[name]
    search = Search(int(name.split(", ")[1].split()[0]), [max(map(max, table))] * len(table[0]))
    if start is not None:
        search.tell(search.split(start), table[start])
    asked = ask(search, lambda split: table[split[0]])
    full = dict(enumerate(map(max, table)))
    assert full[search.best] <= min(full.values()) * 1.001
    assert search.best >= max(v for v in full if full[v] <= min(full.values()) * (1 + EQUAL))
    assert len(asked) <= 6


@given(laws(), alike, st.integers(1, 300))
@example(Law(((0, 100, 0),), ((0, 50),)), [1000] * 2, 30)
@example(Law(((0, 1, 0),), ((1001, 0),)), [1000] * 2, 1)  # the last device was without samples
def test_a_careful_search_never_runs_out(law, budgets, batch_size):
    """After one split has run, the search measures no split that runs out of memory."""
    search = Search(batch_size, budgets, is_careful=True)
    has_run = False
    while (split := search.next()) is not None:
        full = utilizations(law.peaks(split), budgets)
        assert max(full) <= 1.000001 or not has_run
        peaks = [math.inf if f > 1 else f * b for f, b in zip(full, budgets, strict=True)]
        search.tell(split, peaks)
        has_run |= max(full) <= 1


# In a training loop.

LAW = Law(((300, 30, 5),), ((250, 30),))


def follow(search: LoopSearch, law: Law, batch_size: int, num_iterations: int = 20) -> list[int]:
    """Let a search follow iterations with peaks of ``law``; return the ``gpu0_bsz`` of each."""
    values = []
    for _ in range(num_iterations):
        split = search.split(batch_size)
        values.append(split[0])
        search.tell(split, law.peaks(split))
    return values


@pytest.mark.parametrize("is_careful", [True, False])
@given(law=laws(), budgets=alike, batch_size=st.integers(1, 300))
def test_a_loop_ends_no_worse_than_even(is_careful, law, budgets, batch_size):
    search = LoopSearch(budgets, is_careful=is_careful)
    values = follow(search, law, batch_size)
    assert search.is_over
    assert sum(a != b for a, b in itertools.pairwise(values)) <= MAX_SPLITS
    full = all_values(law, batch_size, budgets)
    assert full[values[-1]] <= full[max(full)] * 1.0011


def test_only_the_largest_iterations_count():
    """Smaller last batches once restarted the search in each epoch, so that it never ended."""
    search = LoopSearch([10**4] * 4, is_careful=False)
    values = follow(search, LAW, 64)
    assert search.is_over and values[-1] < 16
    search = LoopSearch([10**4] * 4, is_careful=False)
    for _ in range(10):
        follow(search, LAW, 5, 1)
        search.tell(search.split(64), LAW.peaks(search.split(64)), accumulates=True)
        search.tell(search.split(64), [9**9] * 4)  # the data ended: not compared
    assert search.is_over and search.split(64)[0] == values[-1]
    assert search.split(128)[0] == 2 * values[-1]
    assert search.split(1) == (1, 0, 0, 0)


def test_peaks_that_grow_reopen_the_search():
    """After a later step with the even split took more memory, the search must go on.

    It once ended with 0, although 2 had the same peak.
    """
    search = LoopSearch([1] * 4, is_careful=False, compares=True)
    for even in (200, 200, *[210] * 20):
        split = search.split(16)
        search.tell(split, [(200, 200, 200, 205, even)[split[0]], 90, 90, 90])
    assert search.is_over and search.split(16)[0] == 2


def test_a_peak_that_begins_to_grow_late():
    """The peak is constant for small values, for example if the optimizer's step is the peak.

    The search once tried 0, 1, 2, 3 and 4, and then ended.
    """
    search = LoopSearch([10**6] * 4, is_careful=False, compares=True)
    while not search.is_over:
        split = search.split(256)
        search.tell(split, [max(1000, 520 + 10 * split[0]), *[100 + 4 * n for n in split[1:]]])
    assert search.search.best == 48


def test_peaks_that_vary_are_compared_fairly():
    """All splits must be compared over equal numbers of iterations.

    The best split was once measured in most iterations. So its maximum was high, and another split
    was chosen.
    """
    law = Law(((900, 35, 0),), ((-10, 35),))
    named = []
    for seed in range(30):
        search, random = LoopSearch([1] * 2, is_careful=False, compares=True), Random(seed)
        for _ in range(40):
            split = search.split(32)
            factor = random.uniform(1, 1.05)
            peaks = [peak * factor for peak in law.peaks(split)]
            search.tell(split, peaks, record=split)
        named.append(min(search.highest, key=lambda split: max(search.highest[split][0])))
        assert search.is_over and search.highest[split][1] == split
    assert named == [(3, 29)] * 30


def test_running_out_changes_the_value():
    """The search changes ``gpu0_bsz`` after a device has run out of memory.

    If device 0 ran out, its samples are halved. If another device ran out, device 0 gets more. If
    a value has run before, the search goes back to it.
    """
    search = LoopSearch([GIB] * 4, is_careful=True)
    for index, before, after in ((0, 16, 8), (0, 8, 4), (2, 4, 6)):
        assert search.split(64)[0] == before
        assert search.ran_out(64, index)
        assert search.split(64)[0] == after
    assert (search.split(640)[0], search.split(32)[0]) == (60, 3)
    search = LoopSearch([10**4] * 4, is_careful=False)
    ran = follow(search, LAW, 64, 2)
    assert search.split(64)[0] < min(ran)
    search.ran_out(64, 1)
    assert search.split(64)[0] == min(ran)
    follow(search, LAW, 64)
    assert search.is_over


def test_running_out_is_not_forgotten():
    """Memory may run out before the search knows whether the loop accumulates gradients."""
    search, law = LoopSearch([10**4] * 4, is_careful=False), Law(((0, 10, 0),), ((250, 30),))
    search.ran_out(64, 0)
    for _ in range(MAX_SPLITS):
        split = search.split(64)
        assert split[0] < 16
        search.tell(split, law.peaks(split), accumulates=True)
    assert search.ran_out(64, 0) and split not in search.highest


@pytest.mark.parametrize(
    ("budgets", "finds", "is_over"),
    [([10**4] * 4, True, True), ([10**5] * 4, True, False), ([10**5] * 2, False, False)],
)
def test_a_checkpoint_is_taken_over(budgets, finds, is_over):
    search, loaded = LoopSearch([10**4] * 4, is_careful=True), LoopSearch(budgets, is_careful=True)
    follow(search, LAW, 64)
    loaded.load_state_dict(json.loads(json.dumps(search.state_dict(64))))
    assert search.split(64)[0] < 16
    assert loaded.split(64)[0] == (search.split(64)[0] if finds else 64 // len(budgets))
    assert loaded.is_over == is_over
