"""A recycled replica is what a fresh replication would give, whatever has changed."""

from __future__ import annotations

import copy
import operator
import types
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from balanced_dp import BalancedDataParallel
from balanced_dp.parallel.replica import Blueprint
from balanced_dp.parallel.replicate import Replicator

from ..modules import Lambda, assert_same_gradients

CPU = torch.device("cpu")
OTHER = torch.device("cpu", 1)  # another name for the same memory: copies are real


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.0)
        self.scale = 1.0
        self.note: Any = None
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x  # attributes of a replica are its own, and gone after the call
        return self.drop(self.norm(self.linear(x))) * self.scale + self.offset


class Net(nn.Module):
    def __new__(cls, name: str) -> Net:
        """A class may have a constructor of its own, which copies cannot call."""
        return super().__new__(cls)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        self.head.calls = getattr(self.head, "calls", 0) + 1
        return self.head(x)


OF_REPLICAS = ("_is_replica", "zero_grad", "register_parameter")


def describe(module: nn.Module) -> Any:
    """All that replicas have in common with it, and a number for the identity of each object."""
    numbers: dict[int, int] = {}
    kept: list[Any] = []

    def shown(value: Any) -> Any:
        kept.append(value)
        number = numbers.setdefault(id(value), len(numbers))
        if isinstance(value, torch.Tensor):
            requires_grad = torch.is_grad_enabled() and value.requires_grad
            return number, value.tolist(), value.dtype, requires_grad
        if isinstance(value, nn.Module):
            return number, type(value), parts(value)
        return value if isinstance(value, int | float | str | None) else type(value)

    def parts(module: nn.Module) -> Any:
        attributes = {n: v for n, v in vars(module).items() if n not in OF_REPLICAS}
        return {
            name: [(key, shown(item)) for key, item in value.items()]
            if isinstance(value, dict)
            else shown(value)
            for name, value in attributes.items()
        }

    return shown(module)


def renamed_attribute(net, i):
    layer = net.layers[i].__dict__
    if "note" in layer:
        layer["remark"] = layer.pop("note")
    else:
        layer["note"] = layer.pop("remark", None)


def hook_of_a_module(net, i):
    add_offset = types.MethodType(
        lambda self, module, args: (args[0] + self.offset,), net.layers[0]
    )
    net.layers[i].register_forward_pre_hook(add_offset)


def own_forward(net, i):
    layer = net.layers[i]
    layer.forward = types.MethodType(lambda self, x: self.linear(x) * self.scale, layer)


def requires_grad(net, i):
    weight = net.layers[i].linear.weight
    weight.requires_grad_(not weight.requires_grad)


def moved_parameter(net, i):
    first, second = net.layers[i].linear, net.layers[(i + 1) % 3].linear
    first._parameters, second._parameters = second._parameters, first._parameters


def swapped_layers(net, i):
    net.layers[0], net.layers[i] = net.layers[i], net.layers[0]


def shared_layer(net, i):
    net.layers[i] = net.layers[0]


def more_layers(net, i):
    if len(net.layers) < 6:
        net.layers.append(Layer())


def other_class(net, i):
    layer = net.layers[i]
    layer.__class__ = Layer if type(layer) is not Layer else type("Other", (Layer,), {})


def no_buffer(net, i):
    net.layers[i]._buffers.pop("offset", None)
    net.layers[i].__dict__["offset"] = 0.0


CHANGES = [
    lambda net, i: net.layers[i].train(),
    lambda net, i: net.layers[i].eval(),
    lambda net, i: setattr(net.layers[i], "scale", net.layers[i].scale + 1.0),
    lambda net, i: setattr(net.layers[i], f"extra{i}", i),
    lambda net, i: net.layers[i].__dict__.pop(f"extra{i}", None),
    renamed_attribute,
    lambda net, i: net.layers[i].register_forward_hook(lambda module, args, output: output + 1),
    lambda net, i: net.layers[i]._forward_hooks.clear(),
    hook_of_a_module,
    own_forward,
    lambda net, i: net.layers[i].__dict__.pop("forward", None),
    lambda net, i: net.head.half().float(),
    requires_grad,
    lambda net, i: net.layers[i].linear.weight.data.add_(1),
    lambda net, i: setattr(net.layers[i].linear.weight, "data", torch.randn(3, 3)),
    lambda net, i: setattr(net.layers[i].linear, "weight", net.layers[0].linear.weight),
    lambda net, i: setattr(net.layers[i].linear, "weight", nn.Parameter(torch.randn(3, 3))),
    moved_parameter,
    lambda net, i: net.layers[i].linear.register_parameter("bias", None),
    lambda net, i: setattr(net.layers, str(i), Layer()),
    swapped_layers,
    shared_layer,
    more_layers,
    lambda net, i: setattr(net.layers[i], "drop", nn.Identity()),
    other_class,
    lambda net, i: net.layers[i].norm.running_mean.add_(1),
    lambda net, i: setattr(net.layers[i], "offset", torch.full((3,), float(i))),
    no_buffer,
]
"""Changes of a net, at one of its layers, between two calls."""


@given(st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 2)), max_size=12), st.booleans())
@settings(max_examples=2 * settings.default.max_examples)
def test_every_change_between_two_calls_is_seen(changes, grad):
    torch.manual_seed(0)
    net, replicator = Net("net").eval(), Replicator()
    for change, i in [(lambda net, i: None, 0)] * 2 + changes:
        change(net, i)
        with torch.set_grad_enabled(grad):
            ours = replicator.replicate(net, [CPU, OTHER, OTHER])
            fresh = Replicator().replicate(net, [CPU, OTHER, OTHER])
            assert [describe(replica) for replica in ours] == [describe(net)] * 3
            for pair in ((net, ours[0]), (ours[1], ours[2])):  # on one device
                assert all(map(operator.is_, *(module.parameters() for module in pair)))
            x = torch.randn(4, 3)
            for mine, theirs in zip(ours, fresh, strict=True):
                torch.testing.assert_close(mine(x), theirs(x))
        del mine, theirs, pair
        ours.recycle()


def bound_forward():
    module = nn.Linear(3, 2)
    module.forward = types.MethodType(nn.Linear.forward, module)
    return module


def hooks_on_outputs():
    def forward(self, x):
        output = self.layer(x)
        output.register_hook(lambda gradient: None)
        return output

    return Lambda(forward, layer=nn.Linear(3, 2))


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(3, 2), bound_forward, hooks_on_outputs, lambda: nn.GRU(3, 2)]
)
def test_a_call_leaves_its_replicas_to_the_next(make):
    module = Lambda(lambda self, x: tree_leaves(self.layers(x))[0], layers=make())
    model = BalancedDataParallel(1, module, ["cpu"] * 3, dim=-2)
    for _ in range(3):
        model(torch.randn(1, 7, 3)).sum().backward()
        assert len(model._replicator._pool[1]) == 3


@pytest.mark.parametrize("keeps", ["children", "parameters", "a weak reference"])
def test_a_replica_whose_members_somebody_keeps_is_not_used_again(emulated, keeps):
    """Checkpoints over values() or items() found None there in backward; a cache was stale."""

    def forward(self, x):
        layers = self.layers.values()
        key = self.layers["a"]
        cached = self.cache.setdefault(key, (key.weight._version, key.weight.detach().clone()))
        if cached[0] == key.weight._version:
            assert cached[1].equal(key.weight)

        members = [layer._parameters for layer in layers]

        def run(x):
            if keeps != "parameters":
                for layer in layers:
                    x = layer(x)
            else:
                for member in members:
                    x = nn.functional.linear(x, member["weight"], member["bias"])
            return x

        return run(x) if keeps == "a weak reference" else checkpoint(run, x, use_reentrant=False)

    layers = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
    reference = Lambda(forward, layers=layers).double()
    reference.cache = weakref.WeakKeyDictionary()
    module = copy.deepcopy(reference).to(emulated[0])
    model = BalancedDataParallel(1, module, emulated[:3])
    for _ in range(3):
        with torch.no_grad():
            for net in (module, reference):
                net.layers["a"].weight.add_(1)
        x = torch.randn(7, 2, dtype=torch.double)
        for call in (model, reference):
            call(x).sum().backward()
        assert_same_gradients(module, reference)


def test_flat_weights_of_an_rnn_are_those_of_the_replica(devices):
    """flatten_parameters() in forward, as advised, was of the original's, by all threads."""

    def forward(self, x):
        self.rnn.flatten_parameters()
        seen.append(all(map(operator.is_, self.rnn._flat_weights, self.rnn.parameters())))
        return self.rnn(x)[0]

    seen = []
    plain = Lambda(forward, rnn=nn.LSTM(2, 3, 2, batch_first=True)).double()
    module = copy.deepcopy(plain).to(devices[0])
    model = BalancedDataParallel(1, module, devices[:3])
    x = torch.randn(7, 4, 2).double()
    for _ in range(2):
        for call in (plain, model):
            call(x).sum().backward()
    assert seen == [True] * 8
    assert_same_gradients(module, plain)


class Changes(nn.Module):
    """Changes, in forward, what it holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.full((3,), 1.0))
        self.register_buffer("second", torch.full((3,), 2.0))
        self.register_buffer("cache", None)
        self.layer, self.other, self.unused = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.layer.register_forward_hook(lambda module, args, output: 2 * output)

    def forward(self, x, how):
        if how is not None:
            CHANGES_IN_FORWARD[how](self, x)
        output = (self.layer(x) - 2 * self.other(x)) * self.first
        return output if self.cache is None else output + self.cache


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def registers_a_buffer_again(self, x):
    first = self.first
    del self.first
    self.register_buffer("first", first)


def registers_another_hook(self, x):
    self.layer._forward_hooks.clear()
    self.layer.register_forward_hook(lambda module, args, output: 3 * output)


def exchanges_children(self, x):
    self.layer, self.other = self.other, self.layer


CHANGES_IN_FORWARD = {
    "new buffer": lambda self, x: self.register_buffer("late", x),
    "new parameter": lambda self, x: setattr(self, "late", nn.Parameter(x)),
    "new child": lambda self, x: setattr(self, "late", nn.Linear(2, 2)),
    "no child": lambda self, x: delattr(self, "unused"),
    "children exchanged": exchanges_children,
    "buffer registered again": registers_a_buffer_again,
    "buffer filled": lambda self, x: setattr(self, "cache", self.layer.weight.detach().sum()),
    "class": lambda self, x: setattr(self.layer, "__class__", Doubled),
    "first hook": lambda self, x: self.other.register_forward_hook(lambda m, args, y: 2 * y),
    "another hook": registers_another_hook,
}


@pytest.mark.filterwarnings("ignore:Changes sets")
@pytest.mark.parametrize("gpu0_bsz", [0, 1])
@pytest.mark.parametrize("how", CHANGES_IN_FORWARD)
def test_what_forward_changes_of_its_module_is_gone_in_the_next_call(emulated, how, gpu0_bsz):
    """Replicas that were used again kept it; a buffer even had the values of another.

    At first they had the module's own dictionaries: one hook more in each call, or a race.
    """
    module = Changes().to(emulated[0])
    model = BalancedDataParallel(gpu0_bsz, module, emulated[:3])
    x = torch.randn(8, 3, device=emulated[0])
    for change in (how, None, None, how, how, None):
        torch.testing.assert_close(model(x, change), copy.deepcopy(module)(x, change))
        assert (module.first[0].item(), module.second[0].item()) == (1, 2)
        assert [len(child._forward_hooks) for child in module.children()] == [1, 0, 0]
        with torch.no_grad():
            module.layer.weight.mul_(0.5)


def test_parameters_that_were_registered_together_are_copied_together():
    """Not all norms of all layers: such a bucket is complete when backward is over."""
    network = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3)))
    parameters = Blueprint(network).tensors
    assert [id(p) for p in parameters] == [id(p) for p in network.parameters()]
