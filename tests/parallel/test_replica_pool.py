"""A recycled replica is what a fresh replication would give, whatever has changed."""

from __future__ import annotations

import copy
import gc
import operator
import types
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from balanced_dp import BalancedDataParallel, BalanceWarning
from balanced_dp.parallel.replicate import Replicator

from ..modules import Lambda

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
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        self.head.calls = getattr(self.head, "calls", 0) + 1
        return self.head(x)


def describe(replica: nn.Module) -> Any:
    """All that can be seen of a replica, with a number for the identity of each object in it."""
    numbers: dict[int, int] = {}
    kept: list[Any] = []

    def number(value: object) -> int:
        kept.append(value)
        return numbers.setdefault(id(value), len(numbers))

    def tensor(t: torch.Tensor | None) -> Any:
        if t is None:
            return None
        return number(t), t.tolist(), t.dtype, t.requires_grad, type(t).__name__

    return [
        (
            name,
            number(module),
            type(module).__name__,
            [(key, tensor(t)) for key, t in module._parameters.items()],
            [(key, tensor(t)) for key, t in module._buffers.items()],
            [(key, number(child)) for key, child in module._modules.items()],
            [len(getattr(module, hooks)) for hooks in ("_forward_hooks", "_forward_pre_hooks")],
            {
                key: value if isinstance(value, int | float | str | bool | None) else type(value)
                for key, value in module.__dict__.items()
            },
        )
        for name, module in replica.named_modules(remove_duplicate=False)
    ]


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
    net, replicator = Net().eval(), Replicator()
    for change, i in [(lambda net, i: None, 0)] * 2 + changes:
        change(net, i)
        with torch.set_grad_enabled(grad):
            ours = replicator.replicate(net, [CPU, OTHER, OTHER])
            fresh = Replicator().replicate(net, [CPU, OTHER, OTHER])
            assert [describe(replica) for replica in ours] == [
                describe(replica) for replica in fresh
            ]
            x = torch.randn(4, 3)
            for mine, theirs in zip(ours, fresh, strict=True):
                torch.testing.assert_close(mine(x), theirs(x))
        del mine, theirs
        ours.recycle()


def test_replicas_are_recycled_with_nothing_left_of_the_last_call():
    net, replicator, x = Net().eval(), Replicator(), torch.randn(4, 3)
    first = replicator.replicate(net, [CPU, OTHER])
    ids = [{id(module) for module in replica.modules()} for replica in first]
    for replica in first:
        replica(x)
        assert replica.layers[0].seen is not None
        assert replica.head.calls == 1
    del replica
    seen = weakref.ref(first[1].layers[0].seen)
    del x
    first.recycle()
    assert first == []
    assert seen() is None  # replica 0 has none of it either
    # The last one to be recycled is the first one to be taken.
    second = replicator.replicate(net, [CPU, OTHER])
    assert [{id(module) for module in replica.modules()} for replica in second] == ids
    assert not hasattr(second[0].head, "calls")
    assert not hasattr(second[0].layers[0], "seen")


@pytest.mark.parametrize("what", ["buffer", "parameter", "child", "other child", "no child"])
def test_what_forward_adds_or_takes_is_gone_in_the_next_call(what):
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            if what == "buffer":
                self.register_buffer("late", x)
            elif what == "parameter":
                self.late = nn.Parameter(x)
            elif what == "child":
                self.late = nn.Linear(2, 2)
            elif what == "other child":
                self.first, self.second = self.second, self.first
            else:
                del self.second
            return x

    net, replicator = Changes(), Replicator()
    for _ in range(3):
        replicas = replicator.replicate(net, [CPU, OTHER])
        fresh = Replicator().replicate(net, [CPU, OTHER])
        assert [describe(replica) for replica in replicas] == [describe(r) for r in fresh]
        for replica in replicas:
            replica(torch.ones(1, 2))
        del replica
        replicas.recycle()


def test_a_module_that_somebody_keeps_is_left_alone():
    net, replicator = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Replicator()
    replicas = replicator.replicate(net, [CPU, OTHER])
    kept, weight = replicas[1][1], replicas[1][1].weight
    replicas.recycle()
    again = replicator.replicate(net, [CPU, OTHER])
    assert kept not in (again[0][1], again[1][1])
    assert kept.weight is weight


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_calls_replicas_in_backward(emulated, use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    module = Checkpointed().double()
    expected = torch.zeros(4, 3, dtype=torch.double)
    model = BalancedDataParallel(1, module.to(emulated[0]), emulated[:4])
    for _ in range(3):
        x = torch.randn(9, 3, dtype=torch.double)
        module(x.to(emulated[0]).requires_grad_()).square().sum().backward()
        expected += module.inner[0].weight.grad.cpu()
        module.zero_grad()
        outputs = [model(x.requires_grad_()) for _ in range(2)]  # before the first goes back
        sum(output.square().sum() for output in outputs).backward()
        torch.testing.assert_close(module.inner[0].weight.grad.cpu() / 2, expected)
        module.zero_grad()
        expected.zero_()
    del outputs, model, module


@pytest.mark.filterwarnings("ignore:Remembers sets memory in forward")
def test_a_call_leaves_no_activations_behind(emulated):
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            self.memory = x * self.weight
            return self.memory.sum()

    gc.collect()
    gc.disable()
    try:
        model = BalancedDataParallel(1, Remembers().to(emulated[0]), emulated[:3])
        for _ in range(2):
            with torch.no_grad():
                model(torch.ones(9, 1000))
            held = [torch.lazy.memory_allocated(device) for device in emulated[:3]]
            assert held == [512, 0, 0]  # the weight
        del model
    finally:
        gc.enable()


def test_wrappers_are_copied_and_pickled_without_what_they_keep(devices):
    import copy
    import pickle

    model = BalancedDataParallel(1, nn.Linear(3, 2).to(devices[0]), devices[:3])
    x = torch.randn(7, 3)
    with torch.no_grad():
        expected = model(x).cpu()
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            if (
                twin.module.weight.device != devices[0]
            ):  # a pickle of emulated tensors is on the CPU
                twin.module.to(devices[0])
            torch.testing.assert_close(twin(x).cpu(), expected)
    del twin, model


def test_hooks_that_forward_registers_are_of_one_replica(emulated):
    """Replicas had the module's own dictionaries: 0.24 off, or a race."""

    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2).double()

        def forward(self, x):
            self.layer.register_forward_hook(lambda module, inputs, output: 2 * output)
            return self.layer(x)

    module = Hooked().to(emulated[0])
    reference = copy.deepcopy(module)
    model = BalancedDataParallel(0, module, emulated[:3])
    x = torch.randn(6, 2, dtype=torch.double)
    expected = reference(x.to(emulated[0]))
    for _ in range(8):  # also in calls that are not checked for other changes
        torch.testing.assert_close(model(x), expected)
    assert not module.layer._forward_hooks
    del expected


@pytest.mark.parametrize("keeps", ["children", "parameters"])
def test_a_replica_whose_members_somebody_keeps_is_not_used_again(emulated, keeps):
    """Checkpoints over values() or items() found None there in backward; a cache was stale."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
            self.cache = weakref.WeakKeyDictionary()

        def forward(self, x):
            layers = self.layers.values()
            key = self.layers["a"]
            cached = self.cache.setdefault(key, (key.weight._version, key.weight.detach().clone()))
            if cached[0] == key.weight._version:
                assert cached[1].equal(key.weight)

            members = [layer._parameters for layer in layers]

            def run(x):
                for layer in layers:
                    x = layer(x)
                return x

            def run_with_parameters(x):
                for member in members:
                    x = torch.nn.functional.linear(x, member["weight"], member["bias"])
                return x

            return checkpoint(
                run if keeps == "children" else run_with_parameters, x, use_reentrant=False
            )

    module = Checkpointed().to(emulated[0])
    reference = copy.deepcopy(module)
    model = BalancedDataParallel(1, module, emulated[:3])
    for _ in range(3):
        with torch.no_grad():
            for net in (module, reference):
                net.layers["a"].weight.add_(1)
        x = torch.randn(7, 2)
        losses = [model(x).sum(), reference(x.to(emulated[0])).sum()]
        for loss in losses:
            loss.backward()
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    del losses, loss


def test_flat_weights_of_an_rnn_are_those_of_the_replica(emulated):
    """flatten_parameters() in forward, as advised, was of the original's, by all threads."""

    def forward(self, x):
        self.rnn.flatten_parameters()
        seen.append(all(map(operator.is_, self.rnn._flat_weights, self.rnn.parameters())))
        return self.rnn(x)[0]

    seen = []
    module = Lambda(forward, rnn=nn.GRU(2, 3, batch_first=True)).to(emulated[0])
    model = BalancedDataParallel(1, module, emulated[:3])
    for _ in range(2):
        model(torch.randn(7, 4, 2)).sum().backward()
    assert seen == [True] * 6


class Refills(nn.Module):
    """Changes, in forward, what it holds."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("first", torch.full((3,), 1.0))
        self.register_buffer("second", torch.full((3,), 2.0))
        self.register_buffer("cache", None)
        self.layer = nn.Linear(3, 3)
        self.layer.register_forward_hook(lambda module, args, output: 2 * output)

    def forward(self, x):
        if self.how == "registered again":
            first = self.first
            del self.first
            self.register_buffer("first", first)
        elif self.how == "filled" and self.cache is None:
            self.cache = self.layer.weight.detach().sum()
        elif self.how == "class":
            self.layer.__class__ = type("Other", (nn.Linear,), {"forward": lambda self, x: x})
        elif self.how == "hooks":
            self.layer._forward_hooks.clear()
            self.layer.register_forward_hook(lambda module, args, output: 3 * output)
        self.how = "done"
        return self.layer(x) * self.first + (0 if self.cache is None else self.cache)


@pytest.mark.filterwarnings("ignore:Refills sets")
@pytest.mark.parametrize("gpu0_bsz", [0, 1])
@pytest.mark.parametrize("how", ["registered again", "filled", "class", "hooks"])
def test_what_forward_changes_of_its_module_is_gone_in_the_next_call(emulated, how, gpu0_bsz):
    """Replicas that were used again kept it; a buffer even had the values of another."""
    module = Refills(how).to(emulated[0])
    model = BalancedDataParallel(gpu0_bsz, module, emulated[:2])
    x = torch.randn(8, 3, device=emulated[0])
    for _ in range(4):
        fresh = BalancedDataParallel(gpu0_bsz, copy.deepcopy(module), emulated[:2])
        torch.testing.assert_close(model(x), fresh(x))
        assert (module.first[0].item(), module.second[0].item()) == (1, 2)
        with torch.no_grad():
            module.layer.weight.mul_(0.5)


def swap_parameters(module: nn.Module) -> None:
    first, second = module.first, module.second
    first._parameters, second._parameters = second._parameters, first._parameters


def copy_parameters(module: nn.Module) -> None:
    KEPT.append(module.first._parameters)
    module.first._parameters = dict(module.first._parameters)


def replace_hooks(module: nn.Module) -> None:
    module.first._forward_hooks = OrderedDict()


KEPT: list[Any] = []


@pytest.mark.filterwarnings("ignore:.* sets ")
@pytest.mark.parametrize("change", [swap_parameters, copy_parameters, replace_hooks])
def test_a_dictionary_that_forward_replaces_is_there_again_in_the_next_call(change):
    def forward(self: Lambda, x: torch.Tensor, changes: bool) -> torch.Tensor:
        if changes:
            change(self)
        return self.first(x) - 2 * self.second(x)

    layers = {name: nn.Linear(1, 1, bias=False) for name in ("first", "second")}
    module = Lambda(forward, **layers)
    module.first.register_forward_hook(lambda module, args, output: 3 * output)
    model = BalancedDataParallel(1, module, ["cpu"] * 3)
    for value in range(1, 5):
        with torch.no_grad():
            module.first.weight.fill_(value)
            module.second.weight.fill_(10)
        found = model(torch.ones(6, 1), value == 1)
        if value > 1:
            assert found.flatten().tolist() == [3 * value - 20] * 6


def test_a_class_may_have_a_constructor_of_its_own():
    class Named(nn.Linear):
        def __new__(cls, name: str) -> Named:
            return super().__new__(cls)

        def __init__(self, name: str) -> None:
            super().__init__(2, 1)

    module = Named("any")
    x = torch.ones(4, 2)
    torch.testing.assert_close(BalancedDataParallel(1, module, ["cpu"] * 2)(x), module(x))


@pytest.mark.parametrize("call", [1, 4])
@pytest.mark.parametrize("what", ["parameter", "submodule", "parameter of a submodule", "number"])
def test_what_forward_sets_is_warned_of_though_it_may_begin_later(what, call):
    def forward(self: Lambda, x: torch.Tensor, sets: bool) -> torch.Tensor:
        if sets and what == "parameter":
            self.extra = nn.Parameter(torch.ones(1))
        elif sets and what == "submodule":
            self.extra = nn.Linear(1, 1)
        elif sets and what == "number":
            self.extra = 1
        elif sets:
            self.layer.weight = nn.Parameter(torch.ones(1, 1))
        return self.layer(x)

    module = Lambda(forward, layer=nn.Linear(1, 1))
    model = BalancedDataParallel(1, module, ["cpu"] * 2)
    for _ in range(1, call):
        model(torch.ones(4, 1), False)
    name = "layer.weight" if what == "parameter of a submodule" else "extra"
    with pytest.warns(BalanceWarning, match=rf"Lambda sets {name} in forward"):
        model(torch.ones(4, 1), True)
