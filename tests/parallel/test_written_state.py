"""Test that what the first replica writes to parameters and buffers is kept in the module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from balanced_dp import BalancedDataParallel

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
