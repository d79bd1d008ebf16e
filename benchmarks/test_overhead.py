"""What a step costs beside the model's own work, next to the same steps of ``nn.DataParallel``.

The module trees are those of BERT-base, of a GPT with 48 layers and of ResNet-50, with tensors so
small that nothing takes time but the way there. The model's forward pass is one autograd function
that uses every parameter. Both sides take turns in one process; a figure is the median of each, and
their ratio.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import parallel
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    ResNetConfig,
    ResNetModel,
)

from balanced_dp import BalancedDataParallel
from balanced_dp.parallel import copies, shared_weights
from balanced_dp.parallel import replicate as replicate_module
from balanced_dp.parallel.replicate import Replicas, Replicator

from .stock_on_cpu import broadcast, stock_on_cpu, stock_steps

NOTES = {
    "overhead": "Milliseconds; median of rounds in which both sides take turns. Weights and "
    "gradients are handed on instead of copied, on both sides.",
    "overhead-growth": "Milliseconds of a training step, medians; copies are those of tiny CPU "
    "tensors.",
}


def bert() -> nn.Module:
    return BertModel(
        BertConfig(
            hidden_size=8,
            num_attention_heads=2,
            intermediate_size=16,
            vocab_size=16,
            max_position_embeddings=16,
        )
    )


def gpt(num_layers: int = 48) -> nn.Module:
    return GPT2Model(
        GPT2Config(
            n_layer=num_layers,
            n_embd=8,
            n_head=2,
            vocab_size=16,
            n_positions=16,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def resnet() -> nn.Module:
    return ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[8, 8, 8, 8]))


TREES = {"BERT-base": bert, "GPT, 48 layers": gpt, "ResNet-50": resnet}


class UsesAll(torch.autograd.Function):
    """Hands on its input, and gives every parameter a gradient that was made before."""

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
    """A module tree without its work."""

    def __init__(self, tree: nn.Module) -> None:
        super().__init__()
        self.tree = tree
        self.zeros = [torch.zeros_like(p) for p in self._parameters_of_all()]

    def _parameters_of_all(self) -> list[torch.Tensor]:
        modules: list[nn.Module] = [self]
        for module in modules:
            modules += module.__dict__["_modules"].values()
        attributes = [module.__dict__ for module in modules]
        # Torch's replicas have no parameters, but remember them.
        own = [a.get("_former_parameters") or a["_parameters"] for a in attributes]
        return [p for p in chain.from_iterable(map(dict.values, own)) if p is not None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return UsesAll.apply(x, self.zeros, *self._parameters_of_all())


def on_cpus(module: nn.Module, num_devices: int) -> BalancedDataParallel:
    """Wraps the module for devices that differ in name only: ``cpu:1`` and so on copy from ``cpu``.

    Such names are no devices to :class:`BalancedDataParallel`, which takes them for one.
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
    """What stands for copies, as on torch's side."""
    return dict(zip(devices, broadcast(tensors, range(len(devices))), strict=True))


def in_turns(
    benchmark: Any,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    afterwards: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Runs both in turns, each with something untimed afterwards; returns medians and ratio."""
    times: list[tuple[float, float]] = []

    def both() -> None:
        own = seconds(ours)
        afterwards()
        with stock_on_cpu():
            times.append((own, seconds(theirs)))
        afterwards()

    benchmark.pedantic(both, rounds=40, warmup_rounds=3)
    own, other = (1e3 * statistics.median(side) for side in zip(*times, strict=True))
    figures = {"ours": own, "torch": other, "ratio": own / other}
    benchmark.extra_info.update(figures)
    return figures


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_replicas", [2, 4, 8])
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("what", ["replicate", "replicate and let go", "replicate anew"])
def test_replicate(benchmark, monkeypatch, tables, what, name, num_replicas):
    """Letting go means to recycle the replicas, or to deallocate them, as torch always does.

    Replicas are made anew if the last ones are still referred to.
    """
    module, replicator = TREES[name](), Replicator()
    devices = [torch.device("cpu")] * num_replicas
    # Nothing is copied on either side: tensors are handed on.
    monkeypatch.setattr(replicate_module, "copy_to", handed_on)
    monkeypatch.setattr(replicate_module, "move", lambda tensor, device, copy: tensor)
    torch_replicate = parallel.replicate.__globals__
    monkeypatch.setitem(
        torch_replicate,
        "_broadcast_coalesced_reshape",
        lambda tensors, devices, detach=False: [tensors] * len(devices),
    )
    made: list[Any] = []  # what has been replicated and is let go later

    def ours() -> None:
        made.append(replicator.replicate(module, devices))
        if what == "replicate and let go":
            made.pop().recycle()
        elif what == "replicate anew":
            made.clear()

    def theirs() -> None:
        made.append(torch_replicate["replicate"](module, list(range(num_replicas))))
        if what != "replicate":
            made.clear()

    def let_go() -> None:
        while made:
            replicas = made.pop()
            if isinstance(replicas, Replicas):
                replicas.recycle()

    figures = in_turns(benchmark, ours, theirs, afterwards=let_go)
    tables["overhead"].append({"what": what, "tree": name, "devices": str(num_replicas), **figures})


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("what", ["training step", "evaluation"])
def test_step(benchmark, monkeypatch, tables, what, name, num_devices):
    """Weights and gradients are handed on instead of copied, on both sides."""
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
    model.close()
    tables["overhead"].append({"what": what, "tree": name, "devices": str(num_devices), **figures})


# How it grows.


def of_devices(count: int) -> tuple[nn.Module, int, int]:
    return Overhead(bert()), count, 2 * count


def of_modules(count: int) -> tuple[nn.Module, int, int]:
    """Modules without parameters, but for one."""
    return Overhead(nn.Sequential(nn.Linear(1, 1), *(nn.Identity() for _ in range(count)))), 4, 8


def of_parameters(count: int) -> tuple[nn.Module, int, int]:
    """Parameters of a single module."""
    tensors = [nn.Parameter(torch.zeros(8)) for _ in range(count)]
    return Overhead(nn.ParameterList(tensors)), 4, 8


def of_batch_size(count: int) -> tuple[nn.Module, int, int]:
    return Overhead(bert()), 4, count


@pytest.mark.parametrize(
    ("make", "counts"),
    [
        (of_devices, [2, 3, 4, 5, 6, 7, 8]),
        (of_modules, [250, 500, 750, 1000, 1500, 2000]),
        (of_parameters, [100, 200, 300, 400, 600, 800]),
        (of_batch_size, [8, 64, 512, 2048, 4096, 8192]),
    ],
    ids=["devices", "modules", "parameters", "batch size"],
)
def test_growth(benchmark, tables, request, make, counts):
    """A line through the medians of training steps, and how much of their variance it explains."""
    times: dict[int, list[float]] = {count: [] for count in counts}
    steps = {}
    for count in counts:
        module, num_devices, batch_size = make(count)
        model, x = on_cpus(module, num_devices), torch.ones(batch_size, 2)
        steps[count] = (module, model, x)

    def step(module: nn.Module, model: nn.Module, x: torch.Tensor) -> None:
        module.zero_grad()
        model(x).sum().backward()

    def round_of_all() -> None:
        for count, arguments in steps.items():
            times[count].append(seconds(lambda arguments=arguments: step(*arguments)))

    benchmark.pedantic(round_of_all, rounds=40, warmup_rounds=3)
    for _, model, _ in steps.values():
        model.close()
    medians = [1e3 * statistics.median(times[count]) for count in counts]
    slope, intercept = statistics.linear_regression(counts, medians)
    figures = {
        "step at the least": medians[0],
        "at the most": medians[-1],
        "line, ms": f"{intercept:.2f} + {slope:.2g} n",
        "R2": statistics.correlation(counts, medians) ** 2,
    }
    benchmark.extra_info.update(figures)
    what = request.node.callspec.id
    tables["overhead-growth"].append(
        {"n": what, "from": str(counts[0]), "to": str(counts[-1]), **figures}
    )
