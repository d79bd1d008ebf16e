"""The search chooses splits that a model can train on, and learns from its own choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import emulate_devices
from balanced_dp.split import even_share
from balanced_dp.tuning.split_search import SplitSearch

from .measurements import measurement


def search_for(wanted: Any, capacity: int, is_free: bool) -> SplitSearch:
    """Return a search on emulated devices, or on others, which are only named."""
    with emulate_devices(4) as devices:
        others = [torch.device("meta", index) for index in range(4)]
        return SplitSearch(wanted, list(devices) if is_free else others, [capacity] * 4)


@given(
    wanted=st.sampled_from(["auto", None, 0, 1, 5, 1000]),
    batch_size=st.integers(1, 100),
    smallest=st.sampled_from([1, 2]),
    own=st.integers(1, 50),
    whole=st.integers(0, 50),
    fixed=st.integers(0, 5000),
)
def test_chosen_values_are_chunks_that_can_be_trained_on(
    wanted, batch_size, smallest, own, whole, fixed
):
    search = search_for(wanted, 10**6, is_free=True)
    search._balance.smallest = smallest
    even = even_share(batch_size, 4)
    values = []
    for _ in range(12):
        sizes = search.split(batch_size)
        values.append(sizes[0])
        first = fixed + own * sizes[0] + whole * batch_size
        peaks = (first, *(fixed // 2 + own * size for size in sizes[1:]))
        search.observe(measurement(sizes, peaks), (fixed, 0), fixed // 2)
    assert all(0 <= value <= even for value in values)
    assert values[:2] == [even, even]
    if isinstance(wanted, int):
        assert values[3:] == [min(even, wanted)] * 9
    elif wanted is None:
        assert values == [even] * 12
    else:
        assert not {value for value in values if 0 < value < min(smallest, even)}
        assert len(set(values)) > 1 or even < 2


@pytest.mark.parametrize("is_free", [True, False])
def test_accelerators_get_the_given_value_at_once(is_free):
    search = search_for(3, 1, is_free)
    values = []
    for _ in range(4):
        sizes = search.split(32)
        values.append(sizes[0])
        search.observe(measurement(sizes, (4, 3, 3, 3)), (1, 0), 1)
    assert values == ([8, 8, 4, 3] if is_free else [3] * 4)


def test_on_accelerators_the_first_iteration_after_a_change_is_not_learned_from():
    search = search_for("auto", 100, is_free=False)
    values = []
    for _ in range(4):
        sizes = search.split(32)
        values.append(sizes[0])
        peaks = (40 + sizes[0], *(10 + size for size in sizes[1:]))
        search.observe(measurement(sizes, peaks), (40, 0), 5)
    assert values[:2] == [8, 8] and values[2] == values[3] < 8
