"""Loops of Lightning Fabric and accelerate, and plain ones, train as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.fabric import Fabric
from torch import Tensor, nn

from balanced_dp import BalancedCriterion, BalancedDataParallel

from ..modules import Lambda
from .families import FAMILIES, GPT2, text

NUM_STEPS = 10


class TokenLoss(nn.CrossEntropyLoss):
    def forward(self, output: Any, targets: Tensor) -> Tensor:
        return super().forward(output.logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def batches() -> list[tuple[Tensor, Tensor]]:
    """Make batches of 16, and of 5 for every fifth one; some labels are ignored."""
    found = []
    for step in range(NUM_STEPS):
        size = 5 if step % 5 == 4 else 16
        tokens = torch.stack([text(16 * step + index, 24) for index in range(size)])
        targets = tokens.where(torch.arange(24) > torch.arange(size)[:, None] % 20, -100)
        found.append((tokens, targets))
    return found


def with_loss(model: nn.Module) -> nn.Module:
    """A model that computes its loss, because Fabric processes the outputs of models."""
    return Lambda(lambda m, x, y: m.criterion(m.model(x), y), model=model, criterion=TokenLoss())


def with_fabric(model: nn.Module) -> list[float]:
    fabric = Fabric(accelerator="cpu", devices=1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    for tokens, targets in batches():
        optimizer.zero_grad()
        loss = model(tokens, targets)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_accelerate(model: nn.Module, criterion: Callable[..., Tensor]) -> list[float]:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for tokens, targets in batches():
        with accelerator.accumulate(model), accelerator.autocast():
            loss = criterion(model(tokens), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("gpu0_bsz", [0, 1])
@pytest.mark.parametrize("loop", ["fabric", "accelerate"])
def test_loops_have_the_curve_of_one_device(loop, gpu0_bsz):
    one = GPT2()
    one.config.use_cache = False
    several = copy.deepcopy(one)
    if loop == "fabric":
        parallel = BalancedDataParallel(gpu0_bsz, with_loss(several), ["cpu"] * 4)
        found, expected = with_fabric(parallel), with_fabric(with_loss(one))
    else:
        parallel = BalancedDataParallel(gpu0_bsz, several, ["cpu"] * 4, gather=False)
        found = with_accelerate(parallel, BalancedCriterion(TokenLoss()))
        expected = with_accelerate(one, TokenLoss())
    assert parallel.chunk_sizes == ((0, 2, 2, 1) if gpu0_bsz == 0 else (1, 2, 1, 1))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert sum(expected[-5:]) < sum(expected[:5])


@pytest.mark.parametrize("gpu0_bsz", [0, 1])
@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, None) for name in ("gpt2", "bert masked", "bert answers", "t5")),
        *((name, count) for name in ("gpt2", "t5") for count in (int, torch.as_tensor)),
    ],
)
def test_models_in_a_plain_loop_with_padding(name, count, gpu0_bsz, monkeypatch):
    """Steps with and without gradients, in which all labels of some chunks are ignored."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # their losses would be in float32
    family = FAMILIES[name]
    bare = family.make_model().double()
    samples = [family.sample(index) for index in range(13)]
    batch = {key: torch.stack([torch.as_tensor(s[key]) for s in samples]) for key in samples[0]}
    if count is not None:
        batch["num_items_in_batch"] = count(batch["labels"].ne(-100).sum())
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
