"""Test the searches for the largest batch and for weights under random laws of memory.

They must find what trying everything finds.
"""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from balanced_dp.search import MAX_SPLITS, utilizations
from balanced_dp.split import even_share, split_batch
from balanced_dp.tuning.workload_search import WorkloadSearch, fill_alike

from ..laws import GIB, Law, alike, all_values, ask, laws


def test_peaks_of_zero_end_the_search():
    """A script that left the devices empty ended in a ZeroDivisionError."""
    search = WorkloadSearch(64, [GIB] * 4, largest=100)
    assert len(ask(search, lambda split: [0] * 4)) < 20


def largest_batches(peaks, batch_size, budgets) -> tuple[int, int]:
    """Return the sizes of the largest batch that fits with the even split and with any split."""
    search = WorkloadSearch(batch_size, budgets, largest=2000)
    ask(search, peaks)
    fitting = [split for split, full in search.told.items() if max(full) <= 1]
    even = [split for split in fitting if split[0] == even_share(sum(split), len(split))]
    return max(map(sum, even), default=0), max(map(sum, fitting), default=0)


@given(law=laws(), budgets=alike, batch_size=st.integers(1, 200))
@example(Law(((0, 16384, 32203), (0, 3730677, 0)), ((0, 67753),)), [134217728] * 2, 1)
@example(Law(((0, 10, 30),), ((1000, 10),)), [3000] * 4, 8)
@example(Law(((0, 16384, 0),), ((11735370, 6134801),)), [1275504370] * 2, 1)
@example(Law(((29128, 1677, 943),), ((74, 13),)), [51865] * 6, 1)
def test_the_largest_batch(law, budgets, batch_size):
    found = largest_batches(law.peaks, batch_size, budgets)
    for is_even, size in zip((True, False), found, strict=True):
        more = size + math.ceil((size + 1) * 0.005)
        values = all_values(law, more, budgets)
        assert more > 2000 or (values[max(values)] if is_even else min(values.values())) > 1


def test_batches_are_halved_until_one_runs():
    def peaks(split):
        return [math.inf if sum(split) > 5 else 1.0, *split[1:]]

    assert largest_batches(peaks, 64, [100] * 4)[1] == 5


def fill(law, budgets, batch_size, values) -> list[tuple[int, ...]]:
    told = {}
    for value in values:
        split = split_batch(batch_size or 12, len(budgets), value)
        told[split] = utilizations(law.peaks(split), budgets)
    asked = []
    while len(asked) < MAX_SPLITS and (split := fill_alike(told, batch_size)) not in (None, *told):
        asked.append(split)
        told[split] = utilizations(law.peaks(split), budgets)
    return asked


@given(laws(max_terms=1), st.integers(400, 4000), st.lists(st.integers(4, 16), min_size=2))
def test_weights_fill_all_devices_alike(law, batch_size, sizes):
    budgets = [size * 4 * GIB for size in sizes[:5]]
    values = (0, even_share(batch_size, len(budgets)) // 2, batch_size)
    asked = fill(law, budgets, batch_size, values)
    known = min(all_values(law, batch_size, budgets).values())
    found = min((max(utilizations(law.peaks(s), budgets)) for s in asked), default=known)
    assert all(sum(split) == batch_size for split in asked)
    a_sample = max(own for _, own, *_ in law.first + law.others) / min(budgets)
    assert found <= known * 1.01 + a_sample


def test_weights_of_the_largest_batch():
    law, budgets = Law(((100, 10, 0),), ((100, 10),)), [2400, 1100, 600]
    assert fill(law, budgets, None, (0, 2, 4))[-1] == (230, 100, 50)
