"""Calls from eight threads, on one model each time: what they share leaves results exact.

Without Python's lock they do run at the same time.
"""

from __future__ import annotations

import copy
import time
import types
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

from balanced_dp import BalancedDataParallel
from balanced_dp.memory.peaks import Peaks
from balanced_dp.parallel import copies
from balanced_dp.parallel.auto import AutoSplit

from ..at_once import at_once
from ..modules import Lambda, assert_same_gradients


def forward(self, x, y):
    output = self.head(self.layers(x))
    return [functional.cross_entropy(output, y), functional.cross_entropy(output, y % 2), output]


def batch(number):
    """Samples and padded targets, different for each thread."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(9 + number, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 5, (9 + number,), generator=generator)
    y[1 : 2 + number % 4] = -100
    return x, y


def held(devices):
    return [torch.lazy.memory_allocated(d) for d in devices if d.type == "lazy"]


@pytest.mark.parametrize(
    ("has_gradients", "block", "is_bound"),
    [
        *((False, None, False), (False, "shared_weights", False)),
        *((True, None, False), (True, "accumulate", False)),
        *((True, None, True), (False, None, True)),  # replicas made for each call
    ],
)
def test_steps_of_many_threads(devices, has_gradients, block, is_bound, monkeypatch):
    """Gradients of all threads are added up in the same parameters. In a block, one makes the
    copies for all.
    """
    fill_buckets = copies.fill_buckets
    monkeypatch.setattr(  # so that the other threads come while the first one makes them
        copies, "fill_buckets", lambda *args, **kw: time.sleep(0.02) or fill_buckets(*args, **kw)
    )
    layers = [nn.Linear(4, 8), nn.LayerNorm(8), *(nn.Linear(8, 8) for _ in range(5))]
    bare = Lambda(forward, layers=nn.Sequential(*layers), head=nn.Linear(8, 5)).double()
    module = copy.deepcopy(bare).to(devices[0])
    if is_bound:
        module.head.forward = types.MethodType(nn.Linear.forward, module.head)
    model, before = BalancedDataParallel(1, module, devices[:3]), held(devices)
    cross_entropy_loss = torch._C._nn.cross_entropy_loss

    def total(found):
        return found[0] + 2 * found[1] + found[2].square().mean()

    def step(number):
        with torch.set_grad_enabled(has_gradients):
            found = model(*batch(number))
        if has_gradients:
            total(found).backward()
        return [tensor.detach().cpu() for tensor in found]

    with getattr(model, block)() if block else nullcontext():
        found = at_once(lambda number: [step(number) for _ in range(3)])
    for number, outputs in enumerate(found):
        expected = bare(*batch(number))
        torch.testing.assert_close(outputs, [expected] * 3, rtol=1e-10, atol=1e-12)
        if has_gradients:
            (3 * total(expected)).backward()
    assert_same_gradients(module, bare)
    assert torch._C._nn.cross_entropy_loss is cross_entropy_loss
    model.zero_grad()
    assert held(devices) == before


def test_loops_and_measurements_of_threads(emulated):
    """Optimizers step while models begin to watch, and peaks of measurements overlap."""

    def train(number):
        module = nn.Linear(4, 4, device=emulated[0])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        splits = [AutoSplit(emulated[:3]) for _ in range(10)]
        for split in splits:
            split.begin_call(module, 8)
            module(torch.ones(2, 4, device=emulated[0])).sum().backward()
            optimizer.step()
        return all(split._peaks is None for split in splits)

    def measure(size):
        peaks = Peaks(emulated[:1])
        tensor = torch.empty((1 + size) * 2**10, device=emulated[0])
        return peaks.of(emulated[0])[0] >= tensor.nbytes

    assert all(at_once(train))
    assert all(at_once(lambda _: all(map(measure, range(20)))))
