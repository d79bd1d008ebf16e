from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp.distributed.permutation import _NUM_ROUNDS, Permutation

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
    assert Permutation(10, 0, 0)(torch.arange(10)).tolist() == [1, 3, 6, 7, 2, 5, 9, 0, 4, 8]
    large = Permutation(10**7, 3, 2)(torch.arange(5)).tolist()
    assert large == [4984496, 8886141, 1644913, 5463398, 1435944]


def test_shapes_are_kept():
    order = Permutation(100, 1)
    positions = torch.arange(60).view(3, 4, 5)
    assert order(positions).equal(order(positions.flatten()).view(3, 4, 5))


def deviations(num_rounds: int, num_trials: int = 200_000, size: int = 8) -> float:
    """How far the frequencies of all orders are off, by chi squared, in standard deviations."""
    order = Permutation(size)
    assert order.num_rows * order.num_columns == size  # so that one pass is all
    generator = torch.Generator().manual_seed(1)
    order._keys = [
        torch.randint(2**62, (num_trials, 1), generator=generator) for _ in range(2 * num_rounds)
    ]
    found = order._in_table(torch.arange(size).expand(num_trials, size))
    counts = (found * size ** torch.arange(size)).sum(1).unique(return_counts=True)[1]
    num_orders = math.factorial(size)
    expected = num_trials / num_orders
    missing = (num_orders - len(counts)) * expected
    chi_squared = float(((counts - expected) ** 2 / expected).sum()) + missing
    return (chi_squared - (num_orders - 1)) / math.sqrt(2 * (num_orders - 1))


def test_all_orders_of_a_few_are_equally_frequent():
    assert abs(deviations(_NUM_ROUNDS)) < 4
    assert deviations(_NUM_ROUNDS - 2) > 5  # and the test can tell


def test_neighbours_are_far_apart_and_epochs_unlike():
    size = 100_000
    first, second = (
        Permutation(size, 0, epoch)(torch.arange(size)).double() / size for epoch in range(2)
    )
    for a, b in ((first[1:], first[:-1]), (first, second), (first, torch.arange(size) / size)):
        assert abs(float((a - b).abs().mean()) - 1 / 3) < 0.005  # of independent places
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.015
