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


@pytest.mark.parametrize("kind", DISTINCT)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("gpu0_bsz", [0, 2])
@pytest.mark.parametrize("how", WRITES)
def test_writes_are_kept_if_device_0_is_idle(devices, how, gpu0_bsz, trained):
    """Encoders that follow others, normalized weights and first statistics were lost."""

    def forward(self, x):
        with torch.no_grad():
            WRITES[how](self)
        return x * self.weight * self.seen.sum().clamp(1)

    weight = nn.Parameter(torch.ones(2, dtype=torch.double), requires_grad=trained)
    reference = Lambda(forward, weight=weight)
    reference.register_buffer("seen", torch.zeros(1))
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

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.current, self.again = self.layer, nn.Sequential(self.layer)
        self.entries, self.found, self.kept, self.step, self._step = [0], {"it": 0}, {}, 0, 0
        self.table, self.length, self.change, self.hook = None, 0, None, None
        self.register_buffer("bank", torch.zeros(16, 4))
        self.register_buffer("count", torch.zeros(()))
        self.layer.register_forward_hook(self.call_hook)
        self.kept["a"] = None

    def call_hook(self, module, args, output):
        if self.hook:
            self.hook(self, output.detach())

    @cached_property
    def doubled(self):
        return 2 * self.layer.weight

    def forward(self, x):
        if self.change:
            self.change(self, x)
        return self.again(x)


def caches_a_table(self, x):
    if self.length < len(x[0]):
        self.length = len(x[0])
        self.table = torch.arange(self.length, device=x.device).float().cos()


def sets(name, value_of):
    return lambda self, x: setattr(self, name, value_of(self, x))


LOST = {
    "an entry of a list": (lambda m, x: m.entries.__setitem__(0, m.entries[0] + 1), "entries"),
    "an entry of a dictionary": (lambda m, x: m.found.update(it=m.found["it"] + 1), "found"),
    "a list": (lambda m, x: m.entries.append(x), "entries"),
    "a number": (sets("step", lambda m, x: m.step + 1), "step"),
    "a private number": (sets("_step", lambda m, x: m._step + 1), "_step"),
    "features": (sets("table", lambda m, x: m.layer(x)), "table"),
    "a mean": (sets("aux", lambda m, x: x.mean()), "aux"),
    "a parameter": (sets("weight", lambda m, x: nn.Parameter(x[0])), "weight"),
    "a child": (sets("child", lambda m, x: nn.Linear(1, 1)), "child"),
    "of a child": (lambda m, x: setattr(m.layer, "a", nn.Parameter(x[0])), r"layer\.a"),
    "a buffer": (sets("bank", lambda m, x: m.bank + x.mean()), "bank"),
    "a memory bank": (lambda m, x: m.bank[: len(x)].copy_(x), "bank"),
    "a hook": (lambda m, x: m.kept.update(a=x), "kept"),
}
MADE_AGAIN = {
    "a cache that grows": caches_a_table,
    "a cached property": lambda m, x: m.doubled,
    "a hook by device": lambda m, x: m.kept.update({x.device: x, str(x.device): x}),
    "a second path": lambda m, x: setattr(m, "current", m.other),
    "a list of tensors": lambda m, x: setattr(m, "entries", [x.detach() + 1]),
    "a list in place of None": lambda m, x: setattr(m, "table", [len(x), 2.0]),
    "a count": lambda m, x: m.count.add_(1),
    "a flag": lambda m, x: setattr(m, "_is_prepared", True),
    "a mode": lambda m, x: m.eval(),
}


@pytest.mark.parametrize("kind", ["cpu", "emulated"])
@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("gpu0_bsz", [0, 2])
@pytest.mark.parametrize("case", LOST)
def test_state_that_is_lost_is_said_once(devices, case, gpu0_bsz, first):
    """Entries had those of another replica, counts were lost, banks had the rows of a chunk."""
    change, name = LOST[case]
    module = Stateful().to(devices[0])
    model = BalancedDataParallel(gpu0_bsz, module, devices[:4])
    for _ in range(1, first):  # it may begin in a later call
        model(torch.randn(12, 4))
    setattr(module, "hook" if case == "a hook" else "change", change)
    fact = "writes {} in .* differently on" if case == "a memory bank" else "sets {} in .*return it"
    with pytest.warns(BalanceWarning, match=f"Stateful {fact.format(name)}") as seen:
        for _ in range(4):
            model(torch.randn(12, 4))
    assert len(seen) == 1
    assert seen[0].filename == __file__  # it was contextlib's


@pytest.mark.parametrize("kind", ["cpu", "emulated"])
@pytest.mark.parametrize("gpu0_bsz", [0, 2])
@pytest.mark.parametrize("case", MADE_AGAIN)
def test_state_that_is_made_again_is_not_said(devices, case, gpu0_bsz):
    module = Stateful().to(devices[0])
    setattr(module, "hook" if "hook" in case else "change", MADE_AGAIN[case])
    model = BalancedDataParallel(gpu0_bsz, module, devices[:4])
    for _ in range(4):
        model(torch.randn(12, 4)).sum().backward()


def test_a_closure_may_set_an_attribute(devices):
    module = nn.Sequential(Stateful()).to(devices[0])
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
