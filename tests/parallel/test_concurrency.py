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
from ..modules import assert_same_gradients

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def two_terms(output, y):
    losses = functional.cross_entropy(output, y), functional.cross_entropy(output, y % 2)
    return {"first": losses[0], "second": losses[1], "output": output}


class Net(nn.Module):
    """Layers of several kinds, and two losses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.LayerNorm(8), *(nn.Sequential(nn.Linear(8, 8)) for _ in range(5))
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x, y):
        return two_terms(self.head(self.layers(x)), y)


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
        *((False, nullcontext, False), (False, "shared_weights", False)),
        *((True, nullcontext, False), (True, "accumulate", False)),
        *((True, nullcontext, True), (False, nullcontext, True)),  # replicas made for each call
    ],
)
def test_steps_of_many_threads(devices, has_gradients, block, is_bound, monkeypatch):
    """The first calls find out what losses are means over, and later ones rely on it. Gradients of
    all threads are added up in the same parameters. In a block, one makes the copies for all.
    """
    fill_buckets = copies.fill_buckets
    monkeypatch.setattr(  # so that the other threads come while the first one makes them
        copies, "fill_buckets", lambda *args, **kw: time.sleep(0.02) or fill_buckets(*args, **kw)
    )
    bare = Net().double()
    module = copy.deepcopy(bare).to(devices[0])
    if is_bound:
        module.head.forward = types.MethodType(nn.Linear.forward, module.head)
    model, before = BalancedDataParallel(1, module, devices[:3]), held(devices)
    cross_entropy_loss = torch._C._nn.cross_entropy_loss

    def total(found):
        return found["first"] + 2 * found["second"] + found["output"].square().mean()

    def step(number):
        with torch.set_grad_enabled(has_gradients):
            found = model(*batch(number))
        if has_gradients:
            total(found).backward()
        return {name: tensor.detach().cpu() for name, tensor in found.items()}

    with nullcontext() if block is nullcontext else getattr(model, block)():
        found = at_once(lambda number: [step(number) for _ in range(3)])
    for number, outputs in enumerate(found):
        expected = bare(*batch(number))
        torch.testing.assert_close(outputs, [expected] * 3, **EXACT)
        if has_gradients:
            (3 * total(expected)).backward()
    assert_same_gradients(module, bare)
    assert torch._C._nn.cross_entropy_loss is cross_entropy_loss
    model.zero_grad()
    assert held(devices) == before


def test_optimizers_step_while_models_begin_to_watch(emulated):
    def train(number):
        module = nn.Linear(4, 4, device=emulated[0])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        splits = [AutoSplit(emulated[:3]) for _ in range(10)]
        for split in splits:
            split.begin_call(module, 8)
            module(torch.ones(2, 4, device=emulated[0])).sum().backward()
            optimizer.step()
        return all(split._peaks is None for split in splits)

    assert all(at_once(train))


def test_peaks_of_measurements_that_overlap(emulated):
    def measure(number):
        for size in range(1, 20):
            peaks = Peaks(emulated[:1])
            tensor = torch.empty(size * 2**10, device=emulated[0])
            if peaks.of(emulated[0])[0] < tensor.nbytes:
                return False
        return True

    assert all(at_once(measure))
