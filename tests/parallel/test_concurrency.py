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

from ..at_once import NUM_THREADS, at_once
from ..modules import assert_same_gradients

EXACT = {"rtol": 1e-10, "atol": 1e-12}


class Net(nn.Module):
    """Layers of several kinds, and the losses that ``loss`` names."""

    def __init__(self, loss=None):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.LayerNorm(8), *(nn.Sequential(nn.Linear(8, 8)) for _ in range(5))
        )
        self.head = nn.Linear(8, 5)
        self.loss = loss

    def forward(self, x, y=None):
        output = self.head(self.layers(x))
        return output if self.loss is None else self.loss(output, y)


def batch(number):
    """Samples and padded targets, different for each thread."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(9 + number, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 5, (9 + number,), generator=generator)
    y[1 : 2 + number % 4] = -100
    return x, y


def make(devices, loss=None, **options):
    torch.manual_seed(0)
    bare = Net(loss).double()
    model = BalancedDataParallel(1, copy.deepcopy(bare).to(devices[0]), devices[:3], **options)
    return model, bare


def held(devices):
    return [torch.lazy.memory_allocated(d) for d in devices if d.type == "lazy"]


@pytest.mark.parametrize("is_bound", [False, True], ids=["recycled", "with a bound method"])
def test_outputs(devices, is_bound):
    model, bare = make(devices)
    if is_bound:  # such replicas are made for each call
        linear = model.module.head
        linear.forward = types.MethodType(nn.Linear.forward, linear)
    before = held(devices)

    def evaluate(number):
        with torch.no_grad():
            return [model(batch(number)[0]).cpu() for _ in range(4)]

    for number, outputs in enumerate(at_once(evaluate)):
        for output in outputs:
            torch.testing.assert_close(output, bare(batch(number)[0]).detach(), **EXACT)
        del output, outputs
    assert held(devices) == before


@pytest.mark.parametrize("is_shared", [False, True])
def test_training_steps(devices, is_shared, monkeypatch):
    """Gradients of all threads are added up in the same parameters.

    If calls share the weights, one of the threads makes the copies for all.
    """
    fill_buckets = copies.fill_buckets
    monkeypatch.setattr(  # so that the other threads come while the first one makes them
        copies, "fill_buckets", lambda *args, **kw: time.sleep(0.02) or fill_buckets(*args, **kw)
    )
    model, bare = make(devices)
    before = held(devices)

    def train(number):
        for _ in range(2):
            model(batch(number)[0]).square().mean().backward()

    with model.accumulate() if is_shared else nullcontext():
        at_once(train)
    for number in range(NUM_THREADS):
        (2 * bare(batch(number)[0]).square().mean()).backward()
    assert_same_gradients(model.module, bare)
    model.zero_grad()
    assert held(devices) == before


def two_terms(output, y):
    losses = functional.cross_entropy(output, y), functional.cross_entropy(output, y % 2)
    return {"first": losses[0], "second": losses[1]}


@pytest.mark.parametrize("has_gradients", [True, False], ids=["training", "evaluation"])
def test_losses_of_a_model_s_first_calls(devices, has_gradients):
    """The first calls find out what losses are means over, and later ones rely on it."""
    model, bare = make(devices, two_terms)
    cross_entropy_loss = torch._C._nn.cross_entropy_loss

    def compute(number):
        x, y = batch(number)
        with torch.set_grad_enabled(has_gradients):
            found = [model(x, y) for _ in range(3)]
        return [torch.utils._pytree.tree_map(lambda t: t.detach().cpu(), each) for each in found]

    for number, found in enumerate(at_once(compute)):
        with torch.no_grad():
            expected = bare(*batch(number))
        torch.testing.assert_close(found, [expected] * 3, **EXACT)
    assert torch._C._nn.cross_entropy_loss is cross_entropy_loss


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
