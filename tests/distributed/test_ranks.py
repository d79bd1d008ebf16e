"""Test the chunk sizes of ranks, and the batch sampler that uses them."""

from __future__ import annotations

import math
from itertools import chain, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from balanced_dp import ArgumentError, split_batch, split_by_weights
from balanced_dp.distributed import BalancedBatchSampler, EmptyBatches, split_ranks


def test_the_same_split_as_on_one_machine():
    assert split_ranks(32, 4, rank0_bsz=2) == split_batch(32, 4, 2)
    assert split_ranks(32, weights=[1, 2, 2]) == split_by_weights(32, [1, 2, 2])
    assert split_ranks(32, weights=[1, 1, 1], rank0_bsz=2) == (2, 15, 15)
    assert split_ranks(32, 3, weights=[21, 8, 8], rank0_bsz=4) == (4, 14, 14)


@st.composite
def splits(draw):
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
    return {
        "num_samples": draw(st.integers(0, 200)),
        "sizes": tuple(sizes),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**40)),
        "drop_last": draw(st.booleans()),
    }


def samplers(num_samples, sizes, **options):
    return [
        BalancedBatchSampler(
            range(num_samples), sum(sizes), sizes, rank=rank, world_size=len(sizes), **options
        )
        for rank in range(len(sizes))
    ]


def epoch_of(made, epoch=0):
    for sampler in made:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in made]


@given(split=splits(), epoch=st.integers(0, 2**40))
def test_each_sample_comes_once_an_epoch(split, epoch):
    made = samplers(**split)
    batches = epoch_of(made, epoch)
    num_samples, sizes = split["num_samples"], split["sizes"]
    seen = list(chain.from_iterable(chain.from_iterable(batches)))
    assert len(set(seen)) == len(seen)
    if not split["drop_last"]:
        assert sorted(seen) == list(range(num_samples))
    assert {len(own) for own in batches} == {len(made[0])}
    exact = num_samples / sum(sizes)
    assert len(made[0]) == (math.floor if split["drop_last"] else math.ceil)(exact)


@given(split=splits())
def test_batches_are_split_by_the_shares(split):
    """The whole batches do not depend on them, so that loss curves can be compared."""
    sizes = split["sizes"]
    [whole] = epoch_of(samplers(**{**split, "sizes": (sum(sizes),)}), 1)
    batches = list(zip(*epoch_of(samplers(**split), 1), strict=True))
    assert [list(chain.from_iterable(batch)) for batch in batches] == whole
    for batch in batches:  # the last one may be smaller
        for own, share in zip(batch, sizes, strict=True):
            assert len(own) <= share
            assert abs(len(own) - sum(map(len, batch)) * share / sum(sizes)) < 1


def test_epochs_and_seeds_differ():
    settings = ((0, 0), (0, 1), (2, 0))
    one, other, third = (epoch_of(samplers(99, (9,), seed=s), epoch) for s, epoch in settings)
    assert one != other != third != one
    assert epoch_of(samplers(5, (2,), shuffle=False), 7) == [[[0, 1], [2, 3], [4]]]


@given(split=splits(), epoch=st.integers(0, 9), data=st.data())
def test_a_state_resumes_with_other_ranks(split, epoch, data):
    made = samplers(**split)
    for sampler in made:
        sampler.set_epoch(epoch)
    num_batches = data.draw(st.integers(0, len(made[0])))
    ahead = data.draw(st.integers(0, 3))
    before = [list(islice(iter(sampler), num_batches + ahead))[:num_batches] for sampler in made]
    states = [sampler.state_dict(num_batches) for sampler in made]
    assert all(state == states[0] for state in states)

    other = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
    options = {**split, "sizes": tuple(other), "drop_last": False}
    resumed = samplers(**options)
    for sampler in resumed:
        sampler.load_state_dict(states[0])
    again = data.draw(st.booleans())
    rest = epoch_of(resumed, epoch) if again else [list(sampler) for sampler in resumed]
    seen = list(chain.from_iterable(chain.from_iterable(before + rest)))
    assert sorted(seen) == list(range(split["num_samples"]))
    assert len({len(own) for own in rest}) == 1
    # The epoch after it is a whole one.
    assert epoch_of(resumed, epoch + 1) == epoch_of(samplers(**options), epoch + 1)


def test_states_at_every_moment():
    [sampler] = samplers(10, (4,), shuffle=False)
    num_done = [sampler.state_dict()["num_samples_done"]]
    for batch in sampler:
        num_done.append(sampler.state_dict()["num_samples_done"])
        if batch == [0, 1, 2, 3]:
            state = sampler.state_dict()
    assert num_done == [0, 4, 8, 10]
    sampler.load_state_dict(state)
    resumed = iter(sampler)
    assert sampler.state_dict() == state
    assert next(resumed) == [4, 5, 6, 7]
    assert sampler.state_dict()["num_samples_done"] == 8
    # It begins again, instead of resuming twice.
    assert list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    sampler.load_state_dict(sampler.state_dict())  # a finished epoch
    assert list(sampler) == []
    sampler.set_epoch(1)
    assert len(list(sampler)) == 3


def test_states_that_do_not_fit_are_refused():
    [sampler] = samplers(10, (4,))
    state = sampler.state_dict()
    for name, value, other in (
        ("num_samples", 11, samplers(11, (4,))),
        ("seed", 1, samplers(10, (4,), seed=1)),
        ("shuffle", False, samplers(10, (4,), shuffle=False)),
    ):
        with pytest.raises(ArgumentError, match=f"{name}=.*, but this sampler has {name}={value}"):
            other[0].load_state_dict(state)
    with pytest.raises(ArgumentError, match=r"num_batches must be from 0 to 0"):
        sampler.state_dict(1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_a_data_loader(num_workers):
    """The state counts the batches used in training, not those that workers have fetched."""
    data = TensorDataset(torch.arange(23), torch.randn(23, 3, 2))
    seen = []
    for rank, sampler in enumerate(samplers(23, (1, 0, 7))):
        loader = DataLoader(
            data, batch_sampler=sampler, collate_fn=EmptyBatches(data), num_workers=num_workers
        )
        assert len(loader) == 3
        for num_batches, (index, x) in enumerate(loader, 1):
            assert (x.shape, x.dtype) == ((len(index), 3, 2), torch.float32)
            assert (index.dtype, len(index) == 0) == (torch.int64, rank == 1)
            seen += index.tolist()
            if num_batches == 2:
                state = sampler.state_dict(num_batches)
                break
        assert state["num_samples_done"] == 16
        sampler.load_state_dict(state)
        for index, _ in loader:
            seen += index.tolist()
    assert sorted(seen) == list(range(23))


def test_empty_batches_of_other_kinds():
    class Data:
        def __getitem__(self, index):
            return {"x": torch.ones(3), "y": (1, 2.5), "text": "a"}

    empty = EmptyBatches(Data())([])
    assert empty["x"].shape == (0, 3)
    assert [part.shape for part in empty["y"]] == [(0,), (0,)]
    own = EmptyBatches([torch.ones(2), torch.ones(5)], torch.nn.utils.rnn.pad_sequence)
    assert own([]).shape == (0, 1)
