"""What forward writes to parameters and buffers is kept, or warned of."""

from __future__ import annotations

import copy
from functools import cached_property

import pytest
import torch
from torch import nn

from balanced_dp import BalancedDataParallel, BalanceWarning

from ..devices import DISTINCT
from ..modules import Lambda


@pytest.mark.parametrize("gpu0_bsz", [0, 2])
def test_what_is_only_read_keeps_its_version(emulated, gpu0_bsz):
    """With gpu0_bsz=0 it was written back at each call, which graphs that use it do not allow."""
    module = Lambda(lambda self, x: self.layer(x) * self.scale, layer=nn.Linear(4, 2))
    module.unused = nn.Parameter(torch.full((2,), float("nan")))  # which is not equal to itself
    module.register_buffer("scale", torch.ones(2))
    module.register_buffer("edges", torch.eye(2).to_sparse())
    module = module.to(emulated[0])
    parallel = BalancedDataParallel(gpu0_bsz, module, emulated[:3])
    x = torch.randn(8, 4)
    (parallel(x) * module.scale + parallel(x)).sum().backward()
    module.scale = torch.ones(1, device=emulated[0]).expand(2)
    parallel(x)


WRITES = {
    "in place": lambda self: self.weight.mul_(0.5),
    "data assigned": lambda self: setattr(self.weight, "data", self.weight.data * 0.5),
    "detached": lambda self: self.weight.detach().mul_(0.5),
    "resized": lambda self: self.seen.resize_(len(self.seen) + 1).fill_(len(self.seen)),
}


def writes(how, trained):
    """Returns a module that writes to a parameter in forward, in one of the ways that are about."""

    def forward(self, x):
        with torch.no_grad():
            WRITES[how](self)
        return x * self.weight * self.seen.sum().clamp(1)

    weight = nn.Parameter(torch.ones(2, dtype=torch.double), requires_grad=trained)
    module = Lambda(forward, weight=weight)
    module.register_buffer("seen", torch.zeros(1))
    return module


@pytest.mark.parametrize("kind", DISTINCT)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("gpu0_bsz", [0, 2])
@pytest.mark.parametrize("how", WRITES)
def test_what_forward_writes_is_kept_though_device_0_runs_nothing(devices, how, gpu0_bsz, trained):
    """Encoders that follow others, normalized weights and first statistics were lost."""
    reference = writes(how, trained)
    module = copy.deepcopy(reference).to(devices[0])
    model = BalancedDataParallel(gpu0_bsz, module, devices[:3])
    x = torch.randn(8, 2, dtype=torch.double)
    for has_gradients in (True, False, True, True, False):
        with torch.set_grad_enabled(has_gradients):
            torch.testing.assert_close(model(x).cpu(), reference(x))
        torch.testing.assert_close(module.weight.cpu(), reference.weight)
        torch.testing.assert_close(module.seen.cpu(), reference.seen)


@pytest.mark.parametrize("gpu0_bsz", [0, 2])
def test_batch_norm_keeps_its_statistics(devices, gpu0_bsz):
    """They live in the buffers of the replica on device 0; without one they were lost. Now the
    first replica that runs gives them back, so they are those of its chunk.
    """
    module = nn.BatchNorm1d(4).to(devices[0])
    expected = copy.deepcopy(module)
    parallel = BalancedDataParallel(gpu0_bsz, module, device_ids=devices[:3])
    for _ in range(3):
        x = torch.randn(8, 4)
        parallel(x)
        expected(x[: next(filter(None, parallel.chunk_sizes))].to(devices[0]))
    torch.testing.assert_close(dict(module.named_buffers()), dict(expected.named_buffers()))


# What is lost or mixed is said, and what each replica makes again is not.


class Stateful(nn.Module):
    """A layer and state of many kinds, which a given function changes in forward."""

    def __init__(self, change):
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.current, self.again = self.layer, nn.Sequential(self.layer)
        self.entries, self.found, self.kept, self.step, self._step = [0], {"it": 0}, {}, 0, 0
        self.table, self.length = None, 0
        self.register_buffer("bank", torch.zeros(16, 4))
        self.register_buffer("count", torch.zeros(()))
        self.layer.register_forward_hook(self.keep)
        self.change = change
        self.kept["a"] = None

    def keep(self, module, args, output):
        if self.change == "hook":
            self.kept["a"] = output.detach()
        elif self.change == "hook by device":
            self.kept[output.device] = self.kept[str(output.device)] = output

    @cached_property
    def doubled(self):
        return 2 * self.layer.weight

    def forward(self, x):
        if callable(self.change):
            self.change(self, x)
        return self.again(x)


def caches_a_table(self, x):
    if self.length < len(x[0]):
        self.length = len(x[0])
        self.table = torch.arange(self.length, device=x.device).float().cos()


def adds_to(name, key):
    def change(self, x):
        getattr(self, name)[key] += 1

    return change


def sets(name, value_of):
    return lambda self, x: setattr(self, name, value_of(self, x))


LOST = {
    "a hook": ("hook", "sets kept in"),
    "an entry of a list": (adds_to("entries", 0), "sets entries in"),
    "an entry of a dictionary": (adds_to("found", "it"), "sets found in"),
    "a list": (lambda self, x: self.entries.append(x), "sets entries in"),
    "a number": (sets("step", lambda self, x: self.step + 1), "sets step in"),
    "a private number": (sets("_step", lambda self, x: self._step + 1), "sets _step in"),
    "features": (sets("table", lambda self, x: self.layer(x)), "sets table in"),
    "a mean": (sets("aux", lambda self, x: x.mean()), "sets aux in forward.*return it"),
    "a parameter": (sets("weight", lambda self, x: nn.Parameter(x[0])), "sets weight in"),
    "a child": (sets("child", lambda self, x: nn.Linear(1, 1)), "sets child in"),
    "of a child": (
        lambda self, x: setattr(self.layer, "a", nn.Parameter(x[0])),
        r"sets layer\.a in",
    ),
    "a buffer": (sets("bank", lambda self, x: self.bank + x.mean()), "sets bank in"),
    "a memory bank": (
        lambda self, x: self.bank[: len(x)].copy_(x),
        "writes bank in .* differently on",
    ),
}
MADE_AGAIN = {
    "a cache that grows": caches_a_table,
    "a cached property": lambda self, x: self.doubled,
    "by device": "hook by device",
    "a second path": lambda self, x: setattr(self, "current", self.other),
    "a list of tensors": lambda self, x: setattr(self, "entries", [x.detach() + 1]),
    "a list in place of None": lambda self, x: setattr(self, "table", [len(x), 2.0]),
    "a count": lambda self, x: self.count.add_(1),
    "a flag": lambda self, x: setattr(self, "_is_prepared", True),
    "a mode": lambda self, x: self.eval(),
}


@pytest.mark.parametrize("kind", ["cpu", "emulated"])
@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("gpu0_bsz", [0, 2])
@pytest.mark.parametrize("case", LOST)
def test_state_that_is_lost_is_said_once(devices, case, gpu0_bsz, first):
    """Entries had those of another replica, counts were lost, banks had the rows of a chunk."""
    change, message = LOST[case]
    module = Stateful(None).to(devices[0])
    model = BalancedDataParallel(gpu0_bsz, module, devices[:4])
    for _ in range(1, first):  # it may begin in a later call
        model(torch.randn(12, 4))
    module.change = change
    with pytest.warns(BalanceWarning, match=f"Stateful {message}") as seen:
        for _ in range(4):
            model(torch.randn(12, 4))
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["cpu", "emulated"])
@pytest.mark.parametrize("gpu0_bsz", [0, 2])
@pytest.mark.parametrize("case", MADE_AGAIN)
def test_state_that_is_made_again_is_not_warned_of(devices, case, gpu0_bsz):
    module = Stateful(MADE_AGAIN[case]).to(devices[0])
    model = BalancedDataParallel(gpu0_bsz, module, devices[:4])
    for _ in range(4):
        model(torch.randn(12, 4)).sum().backward()


def test_a_closure_may_set_an_attribute(devices):
    module = nn.Sequential(Stateful(None)).to(devices[0])
    module.register_forward_hook(lambda m, args, output: setattr(module[0], "table", output))
    model = BalancedDataParallel(1, module, devices[:4])
    with pytest.warns(BalanceWarning, match=r"Sequential sets 0\.table in forward"):
        model(torch.randn(12, 4))


@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize("kind", ["cpu", "emulated"])
def test_a_wrapped_module_may_hold_another_one(devices):
    """Replicas that share a device may be wrapped again; others find their weights elsewhere."""
    inner = BalancedDataParallel(1, nn.Linear(4, 4).to(devices[0]), devices[:2])
    model, x = BalancedDataParallel(1, nn.Sequential(inner), devices[:2]), torch.randn(12, 4)
    if devices[0] != devices[1]:
        with pytest.raises(RuntimeError, match=r"found one .* on device: lazy:1; .* only once"):
            model(x)
        model = BalancedDataParallel(1, nn.Sequential(inner.module), devices[:2])
    for _ in range(2):
        torch.testing.assert_close(model(x), inner.module(x.to(devices[0])))
    inner.close()
