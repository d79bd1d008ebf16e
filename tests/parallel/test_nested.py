"""Containers are taken apart and rebuilt with other values."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict, UserDict, defaultdict, deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import BalancedDataParallel, BalanceWarning, ScatterError

from ..devices import KINDS, open_devices
from ..modules import Lambda
from .containers import AttributeDict, Frozen, MirroredDict, Named, Pair, Partly, Slotted, Titled

LEAVES = [None, 3, "text", True, 2.5, torch.float32, torch.Size([3, 4]), float("nan"), np.eye(2)]
CONTAINERS = [
    *(lambda a, b: [a, b], lambda a, b: (a, b), lambda a, b: {"a": a, 2: [b]}),
    *(lambda a, b: OrderedDict(b=a, a=b), lambda a, b: defaultdict(list, {"a": a, "b": b})),
    *(lambda a, b: UserDict(a=a, b=b), lambda a, b: AttributeDict(a=a, b=b)),
    *(Pair, Frozen, lambda a, b: [Slotted(a), Partly(b), [], {}]),
    *(lambda a, b: deque([a, b], maxlen=3), lambda a, b: Named([a, b], "x")),
    lambda a, b: Titled("y", a=a, b=b),
]
structures = st.recursive(
    st.just(lambda x: x) | st.sampled_from(LEAVES).map(lambda leaf: lambda x: leaf),
    lambda inner: st.builds(
        lambda make, a, b: lambda x: make(a(x), b(x)), st.sampled_from(CONTAINERS), inner, inner
    ),
    max_leaves=8,
)
"""Functions of a batch that nest it."""


def wrap(forward):
    return BalancedDataParallel(2, Lambda(forward), ["cpu", "cpu"])


@pytest.mark.filterwarnings("ignore:gpu0_bsz", "ignore:input", "ignore:.*as long as each chunk")
@given(
    *(st.sampled_from(KINDS), structures, structures),
    *(st.integers(1, 5), st.integers(1, 9), st.integers(0, 9), st.sampled_from([0, 1])),
)
def test_what_goes_in_comes_out(kind, first, second, num_devices, batch_size, gpu0_bsz, dim):
    x = torch.randn((batch_size, 2) if dim == 0 else (2, batch_size))
    args, kwargs = first(x), {"p": second(x)}
    with open_devices(kind, num_devices) as devices:
        echo = Lambda(lambda m, *args, **kwargs: (args, kwargs)).to(devices[0])
        parallel = BalancedDataParallel(gpu0_bsz, echo, devices, output_device="cpu", dim=dim)
        [found], found_kwargs = parallel(args, **kwargs)
        assert (type(found), repr(found)) == (type(args), repr(args))
        assert repr(found_kwargs) == repr(kwargs)
        del echo, parallel


@pytest.mark.parametrize("kind", [AttributeDict, MirroredDict])
def test_dictionaries_with_items_as_attributes(kind):
    """The items were cut, and the attributes still held the whole batch; or one chunk, joined."""

    def forward(module, batch):
        assert batch.x is batch["x"]
        return kind(y=batch.x + 1)

    output = wrap(forward)(kind(x=torch.zeros(8, 4)))
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


def test_what_a_dataclass_derives_from_fields():
    """It stayed what it was: the whole batch's in the replicas, one replica's in the output."""

    def forward(module, given):
        assert given.labels.shape == given.logits.shape[:1] == given.probabilities.shape[:1]
        output = Derived(given.logits * 2)
        assert output.labels.shape == given.labels.shape
        return output

    given = Derived(torch.randn(8, 3))
    assert given.labels.shape == (8,)  # kept by the cached property
    output = wrap(forward)(given)
    torch.testing.assert_close(output.probabilities, output.logits.softmax(-1))
    assert torch.equal(output.labels, given.labels)


def test_a_cache_of_transformers_is_left_out():
    """use_cache is on by default in generating models, and their caches cannot be joined."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = BalancedDataParallel(2, transformers.GPT2LMHeadModel(config), ["cpu", "cpu"])
    ids = torch.randint(0, 50, (8, 6))
    message = "past_key_values .* is left out. Call the model with use_cache=False"
    with pytest.warns(BalanceWarning, match=message) as told:
        for _ in range(3):
            output = model(input_ids=ids, labels=ids)
            assert output.past_key_values is None and output.loss.isfinite()
    assert len(told) == 1
    with pytest.raises(ScatterError, match=r"past_key_values is a DynamicCache.*use_cache=False"):
        model(input_ids=ids, past_key_values=transformers.DynamicCache())
    assert model(input_ids=ids, labels=ids, use_cache=False).logits.shape == (8, 6, 50)


@pytest.mark.parametrize("make", [types.MappingProxyType, lambda x: {x["x"]}], ids=["proxy", "set"])
def test_containers_that_cannot_be_rebuilt(make):
    """They went whole to each replica."""
    with pytest.raises(ScatterError, match=r"cannot be rebuilt with other tensors; use a dict"):
        wrap(lambda _, x: x)(make({"x": torch.ones(8)}))


def test_dictionaries_are_joined_by_name():
    def forward(module, x):
        pairs = [("a", x), ("b", x + 10)]
        return dict(pairs if len(x) == 2 else reversed(pairs))

    assert wrap(forward)(torch.arange(8))["b"].tolist() == list(range(10, 18))
