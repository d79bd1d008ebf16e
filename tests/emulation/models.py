"""Models of many kinds with their inputs, and a training loop that returns its losses and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from ..modules import CASES, Case, Lambda, tensors

exact = {"rtol": 0, "atol": 1e-10}


def _norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.ConvTranspose2d(8, 4, 3, 2),
        nn.InstanceNorm2d(4, affine=True),
        nn.AvgPool2d(2),
        nn.LeakyReLU(inplace=True),
        nn.MaxPool2d(2, 1),
        nn.AdaptiveAvgPool2d(3),
        nn.Upsample(scale_factor=2),
    )


def _checkpointed(use_reentrant: bool) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=use_reentrant)

    attention = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)
    return Lambda(forward, inner=nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), attention))


WITH_DROPOUT: dict[str, Case] = {
    **{name: CASES[name] for name in ("lstm", "transformer encoder with a padding mask")},
    "checkpoint": Case(lambda: _checkpointed(False), tensors((5, 6))),
    "reentrant checkpoint": Case(lambda: _checkpointed(True), tensors((5, 6))),
}
"""Models with dropout. Its probability is 0, unless ``train`` gets another one."""

MODELS: dict[str, Case] = {
    **WITH_DROPOUT,
    **{name: CASES[name] for name in ("mlp", "tied weights", "several inputs", "weight norm")},
    "conv and batch norm": CASES["conv with BatchNorm in eval mode"],
    "lists and complex": CASES["ParameterList, ParameterDict, complex and unused"],
    "other norms": Case(_norms, tensors((4, 9, 9))),
    "transformer": Case(
        lambda: nn.Transformer(16, 4, 1, 1, 32, 0.0, batch_first=True), tensors((5, 16), (6, 16))
    ),
}


class Trained(NamedTuple):
    """The result of a training run: its losses, and the model and the optimizer after it."""

    losses: list[Tensor]
    module: nn.Module
    optimizer: torch.optim.Optimizer


def train(case: Case, device: Any, *, num_steps: int = 3, dropout: float = 0.0) -> Trained:
    """Train on ``device`` with AdamW, with two backward passes per step and gradient clipping."""
    torch.manual_seed(0)
    module = case.make_module().double().train().to(device)
    for part in module.modules():
        for name in {"p", "dropout"} & vars(part).keys():
            setattr(part, name, dropout)
    args, kwargs = inputs_of(case, device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    for _ in range(num_steps):
        for _ in range(2):
            loss = module(*args, **kwargs).pow(2).mean()
            loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return Trained(losses, module, optimizer)


def inputs_of(case: Case, device: Any) -> Any:
    """Return positional and keyword arguments of a model on ``device``, for four samples."""

    def moved(x: Tensor) -> Tensor:
        return x.to(device, torch.float64 if x.is_floating_point() else x.dtype)

    return tree_map_only(Tensor, moved, case.make_inputs(4))


def outcome(program: Callable[[Any], Any], device: Any) -> list[Any]:
    """Run a program on a device; return strides, dtypes and values of all tensors it returns."""
    torch.manual_seed(0)
    results = program(device)
    results = list(results) if hasattr(results, "__next__") else results
    details = tree_map_only(Tensor, lambda x: (x.stride(), x.requires_grad, x.dtype), results)
    return [*tree_leaves(details), *tree_leaves(results)]


def assert_same_outcome(program: Callable[[Any], Any], device: torch.device) -> None:
    for actual, expected in zip(outcome(program, device), outcome(program, "cpu"), strict=True):
        if isinstance(actual, Tensor):
            torch.testing.assert_close(actual.detach().cpu(), expected.detach(), **exact)
        else:
            assert actual == expected
