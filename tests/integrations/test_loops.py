"""Test that loops of Lightning Fabric, of accelerate and plain ones train as on one device."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.fabric import Fabric
from torch import Tensor, nn

from balanced_dp import BalancedDataParallel

from ..modules import Lambda
from .families import FAMILIES

NUM_STEPS = 10


def batch_of(name: str, indices: Iterable[int]) -> dict[str, Tensor]:
    samples = [FAMILIES[name].sample(index) for index in indices]
    return {key: torch.stack([torch.as_tensor(s[key]) for s in samples]) for key in samples[0]}


def batches() -> list[dict[str, Tensor]]:
    """Return batches of 16 samples, but of 5 in every fifth step. Some labels are ignored."""
    sizes = [5 if step % 5 == 4 else 16 for step in range(NUM_STEPS)]
    return [batch_of("gpt2", range(16 * i, 16 * i + size)) for i, size in enumerate(sizes)]


def with_fabric(model: nn.Module) -> Iterator[float]:
    fabric = Fabric(accelerator="cpu", devices=1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    for batch in batches():
        optimizer.zero_grad()
        loss = model(**batch)
        fabric.backward(loss)
        optimizer.step()
        yield loss.item()


def with_accelerate(model: nn.Module) -> Iterator[float]:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for batch in batches():
        with accelerator.accumulate(model), accelerator.autocast():
            loss = model(**batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


@pytest.mark.parametrize("gpu0_bsz", [0, 1])
@pytest.mark.parametrize("loop", [with_fabric, with_accelerate])
def test_loops_have_the_curve_of_one_device(loop, gpu0_bsz):
    """The module returns its loss: Fabric processes the outputs of models."""
    gpt2 = FAMILIES["gpt2"].make_model()
    gpt2.config.use_cache = False
    one = Lambda(lambda self, **batch: self.model(**batch).loss, model=gpt2)
    parallel = BalancedDataParallel(gpu0_bsz, copy.deepcopy(one), ["cpu"] * 4)
    found, expected = [*loop(parallel)], [*loop(one)]
    assert parallel.chunk_sizes == ((0, 2, 2, 1) if gpu0_bsz == 0 else (1, 2, 1, 1))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert sum(expected[-5:]) < sum(expected[:5])


@pytest.mark.parametrize("gpu0_bsz", [0, 1])
@pytest.mark.parametrize("name", ["gpt2", "bert masked", "bert answers", "t5"])
def test_models_in_a_plain_loop_with_padding(name, gpu0_bsz, monkeypatch):
    """Steps with and without gradients, in which all labels of some chunks are ignored."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # their losses would be in float32
    bare, batch = FAMILIES[name].make_model().double(), batch_of(name, range(13))
    if "bert" not in name:
        batch["use_cache"] = False
    model = BalancedDataParallel(gpu0_bsz, copy.deepcopy(bare), ["cpu"] * 4)
    for has_gradients in (True, False, True):
        found = []
        for each in (model, bare):
            each.zero_grad()
            with torch.set_grad_enabled(has_gradients):
                loss = each(**batch).loss
            if has_gradients:
                loss.backward()
            gradients = [p.grad for p in each.parameters() if p.grad is not None]
            found.append([loss.detach(), *gradients])
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
