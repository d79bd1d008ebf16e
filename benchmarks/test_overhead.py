"""Measure the time that the wrapper adds to a model's step, compared with ``nn.DataParallel``.

The modules have the structure of BERT-base, of a GPT with 48 layers and of ResNet-50, with tensors
so small that computing takes almost no time. The model's forward pass is one autograd function that
uses every parameter. Steps of ``BalancedDataParallel`` and of ``nn.DataParallel`` take turns in one
process. The figures are the median time of each class and the ratio of the medians. The ratio of
the means includes garbage collection, which medians hide.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, ResNetConfig, ResNetModel

from balanced_dp import BalancedDataParallel
from balanced_dp.parallel import copies, shared_weights
from balanced_dp.parallel import replicate as replicate_module

from .stock_on_cpu import broadcast, stock_on_cpu, stock_steps

NOTES = {
    "overhead": "Milliseconds: the medians over rounds in which both sides take turns. The ratio "
    "of the means includes the garbage collector's time. On both sides, weights and gradients are "
    "passed on instead of copied."
}


def bert() -> nn.Module:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 16}
    return BertModel(BertConfig(**sizes, max_position_embeddings=16))


def gpt() -> nn.Module:
    sizes = {"n_layer": 48, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 16}
    return GPT2Model(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def resnet() -> nn.Module:
    return ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[8, 8, 8, 8]))


TREES = {"BERT-base": bert, "GPT, 48 layers": gpt, "ResNet-50": resnet}


class UsesAll(torch.autograd.Function):
    """Return ``x``; in backward, return ``zeros`` as the gradients of ``parameters``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, zeros: Sequence[torch.Tensor], *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.zeros = zeros
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, None, *ctx.zeros


class Overhead(nn.Module):
    """A module that contains ``tree`` but does no work, so that only the overhead is measured.

    The forward pass returns its input without running ``tree``. The backward pass returns a
    gradient of zeros for every parameter of ``tree``.
    """

    def __init__(self, tree: nn.Module) -> None:
        super().__init__()
        self.tree = tree
        self.zeros = [torch.zeros_like(p) for p in self._parameters_of_all()]

    def _parameters_of_all(self) -> list[torch.Tensor]:
        modules: list[nn.Module] = [self]
        for module in modules:
            modules += module.__dict__["_modules"].values()
        attributes = [module.__dict__ for module in modules]
        # Torch's replicas have no parameters, but keep tensors in ``_former_parameters``.
        own = [a.get("_former_parameters") or a["_parameters"] for a in attributes]
        return [p for p in chain.from_iterable(map(dict.values, own)) if p is not None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return UsesAll.apply(x, self.zeros, *self._parameters_of_all())


def on_cpus(module: nn.Module, num_devices: int) -> BalancedDataParallel:
    """Wrap the module for the devices ``cpu``, ``cpu:1`` and so on, which differ only in name.

    The constructor of ``BalancedDataParallel`` treats such names as one device, so this function
    sets them after the model has been made.
    """
    model = BalancedDataParallel(1, module, ["cpu"] * num_devices)
    model.device_ids[1:] = [torch.device("cpu", i) for i in range(1, num_devices)]
    return model


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = function()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def handed_on(
    devices: Sequence[torch.device], tensors: Sequence[torch.Tensor], arrivals: object = None
) -> dict[torch.device, list[torch.Tensor]]:
    """Return detached tensors in place of copies, as ``stock_on_cpu`` does for nn.DataParallel."""
    return dict(zip(devices, broadcast(tensors, range(len(devices))), strict=True))


def in_turns(
    benchmark: Any,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    afterwards: Callable[[], Any],
) -> dict[str, Any]:
    """Time ``ours`` and ``theirs`` in turns, and return medians in milliseconds and ratios.

    ``afterwards`` is called after each of the two and is not timed.
    """
    times: list[tuple[float, float]] = []

    def both() -> None:
        own = seconds(ours)
        afterwards()
        with stock_on_cpu():
            times.append((own, seconds(theirs)))
        afterwards()

    benchmark.pedantic(both, rounds=40, warmup_rounds=3)
    sides = list(zip(*times, strict=True))
    own, other = (1e3 * statistics.median(side) for side in sides)
    means = sum(sides[0]) / sum(sides[1])
    figures = {"ours": own, "torch": other, "ratio": own / other, "ratio of means": means}
    benchmark.extra_info.update(figures)
    return figures


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("what", ["training step", "evaluation"])
def test_step(benchmark, monkeypatch, tables, what, name, num_devices):
    """In both classes, weights and gradients are passed on instead of copied."""
    torch.set_num_threads(1)
    for module_with_copies in (replicate_module, shared_weights):
        monkeypatch.setattr(module_with_copies, "copy_to", handed_on)
    monkeypatch.setattr(copies, "bring_to", lambda device, gradients: gradients)
    module, x = Overhead(TREES[name]()), torch.ones(2 * num_devices, 2)
    model, stock = on_cpus(module, num_devices), stock_steps(module, num_devices)

    def step(forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if what == "evaluation":
            with torch.no_grad():
                forward(x)
        else:
            forward(x).sum().backward()

    with model.shared_weights() if what == "evaluation" else contextlib.nullcontext():
        figures = in_turns(benchmark, lambda: step(model), lambda: step(stock), module.zero_grad)
    tables["overhead"].append({"what": what, "tree": name, "devices": str(num_devices), **figures})
