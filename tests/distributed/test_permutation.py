from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp.distributed.permutation import Permutation

sizes = st.integers(0, 3000)
seeds = st.integers(-(2**70), 2**70)


@given(size=sizes, seed=seeds, epoch=seeds)
def test_every_index_comes_once(size, seed, epoch):
    order = Permutation(size, seed, epoch)(torch.arange(size))
    assert sorted(order.tolist()) == list(range(size))


@given(size=st.integers(1, 2**50), seed=seeds, data=st.data())
def test_parts_are_those_of_the_whole(size, seed, data):
    order = Permutation(size, seed)
    places = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=20))
    together = order(torch.tensor(places, dtype=torch.int64))
    assert [int(order(torch.tensor(place))) for place in places] == together.tolist()
    assert len(set(together.tolist())) == len(places)
    assert all(0 <= index < size for index in together.tolist())


def test_the_order_is_the_same_everywhere():
    """A checkpoint that is resumed elsewhere, or with a later version, relies on it."""
    assert Permutation(10, 0, 0)(torch.arange(10)).tolist() == [5, 9, 8, 2, 6, 3, 1, 0, 7, 4]
    large = Permutation(10**7, 3, 2)(torch.arange(5)).tolist()
    assert large == [4568122, 4028818, 8394127, 4992314, 3022746]


def test_shapes_are_kept():
    order = Permutation(100, 1)
    positions = torch.arange(60).view(3, 4, 5)
    assert order(positions).equal(order(positions.flatten()).view(3, 4, 5))


@pytest.mark.parametrize("size", [3, 4, 5])
def test_all_orders_of_a_few_are_equally_frequent(size):
    """Chi squared: its mean is what can vary, its deviation the root of twice that."""
    num_orders, num_trials = math.factorial(size), 4_000
    places = torch.arange(size)
    counts = Counter(tuple(Permutation(size, 0, i)(places).tolist()) for i in range(num_trials))
    expected = num_trials / num_orders
    orders = itertools.permutations(range(size))
    chi_squared = sum((counts[order] - expected) ** 2 / expected for order in orders)
    deviation = math.sqrt(2 * (num_orders - 1))
    assert abs(chi_squared - (num_orders - 1)) < 4 * deviation


def test_neighbours_are_far_apart_and_epochs_unlike():
    size = 100_000
    first, second = (
        Permutation(size, 0, epoch)(torch.arange(size)).double() / size for epoch in range(2)
    )
    for a, b in ((first[1:], first[:-1]), (first, second), (first, torch.arange(size) / size)):
        assert abs(float((a - b).abs().mean()) - 1 / 3) < 0.005  # of independent places
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.015
