"""Models of many kinds with their inputs, and a training loop that returns its losses and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from ..modules import Lambda, tied

Made = tuple[nn.Module, tuple[Tensor, ...]]
exact = {"rtol": 0, "atol": 1e-10}


def _conv() -> Made:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 4),
    )
    return module, (torch.randn(4, 3, 8, 8),)


def _norms() -> Made:
    module = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.ConvTranspose2d(8, 4, 3, 2),
        nn.InstanceNorm2d(4, affine=True),
        nn.AvgPool2d(2),
        nn.LeakyReLU(inplace=True),
        nn.AdaptiveAvgPool2d(3),
        nn.Upsample(scale_factor=2),
    )
    return module, (torch.randn(2, 4, 9, 9),)


def _recurrent(module: nn.RNNBase) -> Made:
    return Lambda(lambda self, x: self.rnn(x)[0], rnn=module), (torch.randn(5, 3, 6),)


def _padded_encoder(dropout: float) -> Made:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    return (
        Lambda(
            lambda self, x, mask: self.encoder(x, src_key_padding_mask=mask),
            encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        ),
        (torch.randn(6, 2, 16), padding),
    )


def _transformer() -> Made:
    module = nn.Transformer(16, 4, 1, 1, 32, 0.0, batch_first=True)
    return module, (torch.randn(2, 5, 16), torch.randn(2, 6, 16))


def _checkpointed(use_reentrant: bool, dropout: float) -> Made:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=use_reentrant)

    inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(dropout), nn.GELU(), nn.Linear(6, 6))
    return Lambda(forward, inner=inner), (torch.randn(4, 6),)


MODELS: dict[str, Callable[[], Made]] = {
    "conv and batch norm": _conv,
    "other norms": _norms,
    "lstm": lambda: _recurrent(nn.LSTM(6, 8, 2)),
    "bidirectional gru": lambda: _recurrent(nn.GRU(6, 8, bidirectional=True)),
    "padded encoder": lambda: _padded_encoder(0.0),
    "transformer": _transformer,
    "tied embedding": lambda: (tied(), (torch.randint(7, (4, 5)),)),
    "checkpoint": lambda: _checkpointed(False, 0.0),
    "reentrant checkpoint": lambda: _checkpointed(True, 0.0),
}
"""Models without dropout, so that the CPU's numbers are theirs."""

DROPOUT_MODELS: dict[str, Callable[[], Made]] = {
    "padded encoder": lambda: _padded_encoder(0.1),
    "lstm": lambda: _recurrent(nn.LSTM(6, 8, 2, dropout=0.3)),
    "checkpoint": lambda: _checkpointed(False, 0.3),
    "reentrant checkpoint": lambda: _checkpointed(True, 0.3),
}


class Trained(NamedTuple):
    """The losses and final state of a training run, with its model and optimizer."""

    losses: list[Tensor]
    module: nn.Module
    optimizer: torch.optim.Optimizer


def train(
    make: Callable[[], Made],
    device: torch.device,
    dtype: torch.dtype = torch.float64,
    num_steps: int = 3,
) -> Trained:
    """Train with AdamW, two backward passes per step and gradient clipping."""
    torch.manual_seed(0)
    module, inputs = make()
    module.to(device, dtype)
    inputs = tuple(x.to(device, dtype if x.is_floating_point() else x.dtype) for x in inputs)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    for _ in range(num_steps):
        for _ in range(2):
            loss = module(*inputs).pow(2).mean()
            loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return Trained(losses, module, optimizer)


def outcome(program: Callable[[Any], Any], device: Any) -> list[Any]:
    """Return what a program computes on a device, with the layouts of all tensors."""
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
