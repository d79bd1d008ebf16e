"""Test that a reused replica equals a newly made one, whatever has changed in the module."""

from __future__ import annotations

import copy
import functools
import operator
import types
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from balanced_dp import BalancedDataParallel
from balanced_dp.free_threading import is_free_threaded_build
from balanced_dp.parallel.replica import Blueprint
from balanced_dp.parallel.replicate import Replicator

from ..devices import KINDS
from ..modules import Lambda, assert_same_gradients
from .test_no_growth import MODULES

CPU = torch.device("cpu")
OTHER = torch.device("cpu", 1)  # another name for the same memory: copies are real

# Changes between two calls and in forward.


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.drop, self.unused = nn.Dropout(0.0), nn.Linear(3, 3)
        self.scale, self.note = 1.0, None
        self.register_buffer("offset", torch.ones(3))
        self.register_buffer("cache", None)

    def forward(self, x):
        self.seen = x  # attributes of a replica are its own, and gone after the call
        y = self.drop(self.norm(self.linear(x))) * self.scale + self.offset
        return y if self.cache is None else y + self.cache


class Net(nn.Module):
    def __new__(cls, name):
        """Require an argument, so that a copy cannot be made by calling ``__new__`` without it."""
        return super().__new__(cls)

    def __init__(self, name):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
        self.head = nn.Linear(3, 2)

    def forward(self, x, change, i):
        change(self, i)
        for layer in self.layers:
            x = layer(x)
        self.head.calls = getattr(self.head, "calls", 0) + 1
        return self.head(x)


OF_REPLICAS = ("_is_replica", "zero_grad", "register_parameter")


def describe(module, has_values=True):
    """Return a description of a module, which is equal for all replicas of the module.

    It has a number for the identity of each object, which shows which objects are the same.
    """
    numbers, grad = {}, torch.is_grad_enabled()

    def shown(value):
        number = numbers.setdefault(id(value), len(numbers))
        if isinstance(value, torch.Tensor):
            values = value.tolist() if has_values else None
            return number, values, value.dtype, grad and value.requires_grad
        return value if isinstance(value, int | float | str | None) else type(value)

    def part(module):
        own = vars(module) | module._parameters | module._buffers
        hooks = [*module._forward_hooks, *module._forward_pre_hooks]
        return hooks, {n: shown(v) for n, v in own.items() if n not in OF_REPLICAS}

    parts = module.named_modules(remove_duplicate=False)
    return {name: (shown(module), part(module)) for name, module in parts}


def renames_an_attribute(net, i):
    own = vars(net.layers[i])
    old, new = ("note", "remark") if "note" in own else ("remark", "note")
    own[new] = own.pop(old, None)


def has_another_hook(net, i):
    net.layers[i]._forward_hooks.clear()
    net.layers[i].register_forward_hook(lambda module, args, output: 2 * output)


def hooks_into_another(net, i):
    def hook(self, module, args):
        return (args[0] + self.offset,)

    net.layers[i].register_forward_pre_hook(types.MethodType(hook, net.layers[0]))


def has_its_own_forward(net, i):
    layer = net.layers[i]
    layer.forward = types.MethodType(lambda self, x: self.linear(x) * self.scale, layer)


def exchanges_layers(net, i):
    net.layers[0], net.layers[i] = net.layers[i], net.layers[0]


def has_another_class(net, i):
    layer = net.layers[i]
    layer.__class__ = Layer if type(layer) is not Layer else type("Other", (Layer,), {})


OF_STRUCTURE = [
    lambda net, i: None,
    lambda net, i: net.layers[i].train(),
    lambda net, i: net.layers[i].eval(),
    lambda net, i: setattr(net.layers[i], "scale", net.layers[i].scale + 1.0),
    lambda net, i: setattr(net.layers[i], f"extra{i}", i),
    lambda net, i: net.layers[i].__dict__.pop(f"extra{i}", None),
    renames_an_attribute,
    lambda net, i: net.layers[i].register_forward_hook(lambda module, args, output: output + 1),
    has_another_hook,
    hooks_into_another,
    has_its_own_forward,
    lambda net, i: setattr(net.layers[i], "forward", torch.tanh),
    lambda net, i: net.layers[i].__dict__.pop("forward", None),
    lambda net, i: setattr(net.layers[i].linear, "weight", net.layers[0].linear.weight),
    lambda net, i: setattr(net.layers[i].linear, "weight", nn.Parameter(torch.full((3, 3), 0.5))),
    lambda net, i: net.layers[i].linear.register_parameter("bias", None),
    lambda net, i: setattr(net.layers, str(i), Layer().eval().requires_grad_(False)),
    exchanges_layers,
    lambda net, i: setattr(net.layers, str(i), net.layers[0]),
    lambda net, i: len(net.layers) < 6 and net.layers.append(nn.Identity()),
    lambda net, i: setattr(net.layers[i], "drop", nn.Identity()),
    lambda net, i: net.layers[i]._modules.pop("unused", None),
    has_another_class,
    lambda net, i: setattr(net.layers[i], "offset", torch.full((3,), float(i))),
    lambda net, i: setattr(net.layers[i], "cache", net.layers[i].linear.weight.detach().sum()),
    lambda net, i: net.layers[i].register_buffer("late", torch.zeros(3)),
]
BETWEEN_CALLS = [
    lambda net, i: net.layers[i]._forward_hooks.clear(),
    lambda net, i: net.head.half().float(),
    lambda net, i: (w := net.layers[i].linear.weight).requires_grad_(not w.requires_grad),
    lambda net, i: net.layers[i].linear.weight.data.add_(1),
    lambda net, i: setattr(net.layers[i].linear.weight, "data", torch.randn(3, 3)),
    lambda net, i: net.layers[i].norm.running_mean.add_(1),
]
changes = st.tuples(
    st.sampled_from(OF_STRUCTURE + BETWEEN_CALLS), st.sampled_from(OF_STRUCTURE), st.integers(0, 2)
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Net sets", "ignore:Net writes")
@given(st.lists(changes, max_size=6), st.booleans())
def test_every_change_of_a_module_is_seen(drawn, grad):
    """One in forward is gone in the next call. Replicas kept it: one hook more in each call, or a
    buffer with the values of another.
    """
    torch.manual_seed(0)
    net, replicator, nothing = Net("net").eval(), Replicator(), OF_STRUCTURE[0]
    for between, inside, i in [(nothing, nothing, 0)] * 2 + drawn + [(nothing, nothing, 0)]:
        between(net, i)
        with torch.set_grad_enabled(grad):
            ours = replicator.replicate(net, [CPU, OTHER, OTHER])
            fresh = Replicator().replicate(net, [CPU, OTHER, OTHER])
            assert [describe(replica) for replica in ours] == [describe(net)] * 3
            for pair in ((net, ours[0]), (ours[1], ours[2])):  # on one device
                assert all(map(operator.is_, *(module.parameters() for module in pair)))
            x = torch.randn(4, 3)
            before = describe(net, has_values=False)
            with ours.running():
                for mine, theirs in zip(ours, fresh, strict=True):
                    torch.manual_seed(1)
                    found = mine(x, inside, i)
                    torch.manual_seed(1)
                    torch.testing.assert_close(found, theirs(x, inside, i))
                del mine, theirs, pair
            assert describe(net, has_values=False) == before


@pytest.mark.skipif(is_free_threaded_build(), reason="each call makes new replicas")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "emulated"])
@pytest.mark.parametrize("name", ["plain", "method", "partial", "hook", "rnn"])
def test_a_call_leaves_its_replicas_to_the_next(devices, name):
    def forward(self, x):
        output = tree_leaves(self.layers(x))[0]
        output.register_hook(lambda gradient: None)
        return output

    layers = (MODULES | {"rnn": lambda: nn.GRU(8, 8)})[name]()
    module = Lambda(forward, layers=layers).to(devices[0])
    model = BalancedDataParallel(1, module, devices[:3], dim=-2)
    for _ in range(3):
        model(torch.randn(1, 7, 8)).sum().backward()
        assert len(model._replicator._pool[1]) == 3


def test_a_partial_without_modules_is_shared():
    """Replicas kept the keywords that it had when they were made."""
    module = Lambda(torch.tanh, curve=functools.partial(torch.clamp, max=1))
    assert Replicator().replicate(module, [OTHER])[0].curve is module.curve


def test_neighbors_are_copied_together():
    """Not all norms of all layers: such a bucket is complete when backward is over."""
    network = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3)))
    assert all(map(operator.is_, Blueprint(network).tensors, network.parameters()))


def linear_of(parameters, x):
    return nn.functional.linear(x, **parameters)


@pytest.mark.parametrize("keeps", ["children", "parameters", "a weak reference"])
def test_replicas_whose_members_somebody_keeps(emulated, keeps):
    """Checkpoints over values() or items() found None there in backward; a cache was stale."""

    def forward(self, x):
        layers, first = self.layers.values(), self.layers["a"]
        version, weight = cache.setdefault(first, (first.weight._version, first.weight.clone()))
        assert version != first.weight._version or weight.equal(first.weight)
        parameters = [functools.partial(linear_of, layer._parameters) for layer in layers]

        def run(x):
            for step in layers if keeps == "children" else parameters:
                x = step(x)
            return x

        return first(x) if keeps == "a weak reference" else checkpoint(run, x, use_reentrant=False)

    cache = weakref.WeakKeyDictionary()
    layers = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
    reference = Lambda(forward, layers=layers).double()
    module = copy.deepcopy(reference).to(emulated[0])
    model = BalancedDataParallel(1, module, emulated[:3])
    for _ in range(3):
        x = torch.randn(7, 2, dtype=torch.double)
        for call, net in ((model, module), (reference, reference)):
            net.layers["a"].weight.detach().add_(1)
            call(x).sum().backward()
        assert_same_gradients(module, reference)


@pytest.mark.filterwarnings("ignore:Calling .zero_grad")
def test_zero_grad_in_forward_has_no_effect(devices):
    """The first replica has the module's own parameters: their gradients were erased."""

    def forward(self, x):
        self.zero_grad()
        self.layer.zero_grad(set_to_none=False)
        return self.layer(x)

    module = Lambda(forward, layer=nn.Linear(2, 1)).to(devices[0])
    model = BalancedDataParallel(1, module, devices)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"zero_grad\(\) from a module .* has no effect"):
            model(torch.ones(32, 2, device=devices[0])).sum().backward()
    assert model.module.layer.bias.grad.item() == 64
    model.zero_grad()
    assert model.module.layer.bias.grad is None


# Weights that forward takes out, replaces or shares; nn.DataParallel is exact for all of them.


class WeightDrop(nn.Module):
    """An LSTM, one weight of which is computed in forward and set as a plain attribute.

    Source: https://github.com/salesforce/awd-lstm-lm/blob/master/weight_drop.py
    """

    def __init__(self):
        super().__init__()
        self.module = nn.LSTM(4, 4, batch_first=True)
        self.module.flatten_parameters = self.nothing
        weight = self.module._parameters.pop("weight_hh_l0")
        self.module.register_parameter("weight_hh_l0_raw", nn.Parameter(weight.data))

    def nothing(self):
        return

    def forward(self, x):
        self.module.weight_hh_l0 = nn.functional.dropout(self.module.weight_hh_l0_raw, p=0.0)
        return self.module.forward(x)[0]


def ties_again(self, x):
    self.other.weight = self.layer.weight
    return self.other(self.layer(x))


def takes_out_and_restores(self, x):
    weight = self.layer.weight
    del self.layer.weight
    self.layer.weight = 2 * weight
    doubled = self.layer(x)
    del self.layer.weight
    self.layer.register_parameter("weight", weight)
    return doubled + self.layer(x)


def stores(self, x):
    """For backward, the method was stored again when the replica was dropped."""
    self.curve = torch.tanh
    return checkpoint(lambda x: self.curve(self.layer(x)), x, use_reentrant=False)


def two_layers(forward):
    return Lambda(forward, layer=nn.Linear(4, 4), other=nn.Linear(4, 4))


def flattens(self, x):
    """Call ``flatten_parameters`` in forward, as torch advises.

    The flat weights of replicas were once those of the original module.
    """
    self.layer.flatten_parameters()
    assert all(map(operator.is_, self.layer._flat_weights, self.layer.parameters()))
    return self.layer(x)[0]


class CopiesItself(nn.Linear):
    """Gives each replica a new list in each call, as a language model gives it a memory."""

    memory = None

    def _replicate_for_data_parallel(self):
        replica = super()._replicate_for_data_parallel()
        replica.memory = []
        return replica

    def forward(self, x):
        if hasattr(self, "_is_replica"):
            self.memory.append(x)
            assert len(self.memory) == 1
        return super().forward(x)


CHANGED_WEIGHTS = {
    "dropped": WeightDrop,
    "tied again": lambda: two_layers(ties_again),
    "restored": lambda: two_layers(takes_out_and_restores),
    "stored": lambda: Lambda(stores, layer=nn.Linear(4, 4), own=(m := nn.ReLU()), curve=m.forward),
    "flattened": lambda: Lambda(flattens, layer=nn.LSTM(4, 4, 2, batch_first=True)),
    "of a class that copies itself": lambda: CopiesItself(4, 4),
}


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single")  # cuDNN's
@pytest.mark.parametrize("gpu0_bsz", [0, 2])
@pytest.mark.parametrize("name", CHANGED_WEIGHTS)
def test_weights_that_forward_replaces(devices, name, gpu0_bsz):
    """They were an AttributeError, a ValueError or a TypeError, or on another device."""
    plain = CHANGED_WEIGHTS[name]().double()
    module = copy.deepcopy(plain).to(devices[0])
    model = BalancedDataParallel(gpu0_bsz, module, devices[:4])
    x = torch.randn(12, 3, 4).double()
    for has_gradients in (True, False, True):
        with torch.set_grad_enabled(has_gradients):
            outputs = [model(x).cpu(), plain(x)]
        torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-10)
        for output in outputs if has_gradients else ():
            output.square().sum().backward()
    if name != "tied again":  # then the plain module has one parameter less
        named = dict(plain.named_parameters())  # in another order if they were restored
        for key, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, named[key].grad, check_device=False)


# Errors.

TRACE = functools.partial(torch.jit.trace, example_inputs=torch.ones(1, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    "change", [TRACE, lambda m: m.compile(backend="eager") or m, lambda m: nn.LazyLinear(2)]
)
def test_what_cannot_be_replicated(change):
    module, message = change(nn.Linear(2, 2)), r"; wrap torch.compile\(module\)|uninitialized"
    with pytest.raises(RuntimeError, match=message):
        BalancedDataParallel(1, module, ["cpu"] * 2)(torch.ones(4, 2))
