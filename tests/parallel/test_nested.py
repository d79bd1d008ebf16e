"""Containers are taken apart and rebuilt with other values."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import deque

import pytest
import torch
from torch import nn

from balanced_dp import BalancedDataParallel, BalanceWarning, ScatterError

from ..modules import Lambda


class AttributeDict(dict):
    """The old recipe: items are attributes, since the dictionary is its own ``__dict__``."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class MirroredDict(dict):
    """Each item is also an attribute, as those of transformers' ModelOutput are."""

    def __init__(self, **kwargs):
        super().__init__(kwargs)
        vars(self).update(kwargs)


@pytest.mark.parametrize("kind", [AttributeDict, MirroredDict])
def test_dictionaries_that_show_their_items_as_attributes(devices, kind):
    """The items were cut, and the attributes still held the whole batch; or one chunk, joined."""

    def forward(module, batch):
        assert batch.x is batch["x"]
        return kind(y=batch.x + 1)

    output = BalancedDataParallel(2, Lambda(forward), devices[:3])(kind(x=torch.zeros(8, 4)))
    assert type(output) is kind
    assert output.y is output["y"]
    assert output.y.shape == (8, 4)
    output.more = 1
    assert ("more" in output) == (kind is AttributeDict)


@dataclasses.dataclass
class Derived:
    """Holds more than its fields."""

    logits: torch.Tensor

    def __post_init__(self):
        self.probabilities = self.logits.softmax(-1)

    @functools.cached_property
    def labels(self):
        return self.logits.argmax(-1)


def test_what_a_dataclass_derives_from_its_fields_is_cut_and_joined():
    """It stayed what it was: the whole batch's in the replicas, one replica's in the output."""

    def forward(module, given):
        assert given.labels.shape == given.logits.shape[:1] == given.probabilities.shape[:1]
        output = Derived(given.logits * 2)
        assert output.labels.shape == given.labels.shape
        return output

    given = Derived(torch.randn(8, 3))
    assert given.labels.shape == (8,)  # kept by the cached property
    output = BalancedDataParallel(2, Lambda(forward), ["cpu", "cpu"])(given)
    torch.testing.assert_close(output.probabilities, output.logits.softmax(-1))
    assert torch.equal(output.labels, given.labels)


def test_a_dataclass_field_that_was_never_set():
    @dataclasses.dataclass
    class Partly:
        x: torch.Tensor
        later: torch.Tensor = dataclasses.field(init=False)

    output = BalancedDataParallel(2, nn.Identity(), ["cpu", "cpu"])(Partly(torch.ones(8)))
    assert output.x.shape == (8,)
    assert not hasattr(output, "later")


def test_a_cache_of_transformers_is_left_out_and_cannot_be_given():
    """use_cache is on by default in generating models, and their caches cannot be joined."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = BalancedDataParallel(2, transformers.GPT2LMHeadModel(config), ["cpu", "cpu"])
    ids = torch.randint(0, 50, (8, 6))
    with pytest.warns(BalanceWarning, match=r"past_key_values is left out: .*use_cache=False") as w:
        for _ in range(3):
            output = model(input_ids=ids, labels=ids)
            assert output.past_key_values is None and output.loss.isfinite()
    assert len(w) == 1
    with pytest.warns(BalanceWarning, match="output 1 is left out"):
        assert model(input_ids=ids, return_dict=False)[1] is None
    with pytest.raises(ScatterError, match=r"past_key_values is a DynamicCache.*use_cache=False"):
        model(input_ids=ids, past_key_values=transformers.DynamicCache())
    assert model(input_ids=ids, labels=ids, use_cache=False).logits.shape == (8, 6, 50)


@pytest.mark.parametrize(
    "container", [types.MappingProxyType, lambda x: {x["x"]}], ids=["proxy", "set"]
)
def test_tensors_in_containers_that_cannot_be_rebuilt_are_refused(container):
    """They went whole to each replica."""
    model = BalancedDataParallel(2, nn.Identity(), ["cpu", "cpu"])
    with pytest.raises(ScatterError, match=r"cannot be rebuilt with other tensors; use a dict"):
        model(container({"x": torch.ones(8)}))


def test_deques_and_lists_of_their_own_kind_are_cut():
    class Named(list):
        def __init__(self, values, name):
            super().__init__(values)
            self.name = name

    model = BalancedDataParallel(2, nn.Identity(), ["cpu", "cpu"])
    output = model(deque([torch.arange(8)], maxlen=3))
    assert output.maxlen == 3
    assert output[0].tolist() == list(range(8))
    output = model(Named([torch.arange(8)], "x"))
    assert (type(output), output.name, output[0].tolist()) == (Named, "x", list(range(8)))


def test_dictionaries_are_joined_by_name_whatever_their_order():
    def forward(module, x):
        pairs = [("a", x), ("b", x + 10)]
        return dict(pairs if len(x) == 2 else reversed(pairs))

    output = BalancedDataParallel(2, Lambda(forward), ["cpu", "cpu"])(torch.arange(8))
    assert output["b"].tolist() == list(range(10, 18))
