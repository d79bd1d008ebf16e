"""Define workloads that are measured quickly and fill devices in different ways.

They are wide, which is free if devices keep shapes only, so that the allocator's rounding does not
matter.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional

from balanced_dp import Workload
from balanced_dp.tuning.models import CharTransformer, TokenTransformer

from ..modules import Lambda


def zeros(*shape: int) -> torch.Tensor:
    """Return zeros that share one element: the largest batches would take gigabytes."""
    return torch.zeros(1).expand(shape)


def tokens(vocabulary: int, length: int, batch_size: int) -> torch.Tensor:
    return (torch.arange(length) % vocabulary).expand(batch_size, length)


def token_loss(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def mlp() -> Workload:
    """Need more memory for weights than for activations."""
    return Workload(
        lambda: nn.Sequential(nn.Linear(1024, 8192), nn.ReLU(), nn.Linear(8192, 1000)),
        lambda n: ((zeros(n, 1024),), {}, torch.arange(n) % 1000),
        functional.cross_entropy,
        name="mlp",
    )


def wide_output() -> Workload:
    """Need most memory for gathered outputs, so that no value of gpu0_bsz balances it."""
    return Workload(
        lambda: nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 400_000)),
        lambda n: ((zeros(n, 64),), {}, torch.arange(n) % 4000),
        functional.cross_entropy,
        name="wide-output",
    )


def convolutions() -> Workload:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    return Workload(
        model,
        lambda n: ((zeros(n, 3, 64, 64),), {}, torch.arange(n) % 10),
        functional.cross_entropy,
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        name="convolutions",
    )


def recurrent() -> Workload:
    def model() -> nn.Module:
        return Lambda(
            lambda self, x: self.head(self.lstm(x)[0][:, -1]),
            lstm=nn.LSTM(256, 2048, batch_first=True),
            head=nn.Linear(2048, 5),
        )

    return Workload(
        model,
        lambda n: ((zeros(n, 2, 256),), {}, torch.arange(n) % 5),
        functional.cross_entropy,
        functools.partial(torch.optim.SGD, lr=0.1),
        name="recurrent",
    )


def char_transformer() -> Workload:
    return Workload(
        lambda: CharTransformer(60, context=64, width=256, num_heads=4, num_layers=1),
        lambda n: ((tokens(60, 64, n),), {}, tokens(60, 64, n)),
        token_loss,
        name="char-transformer",
    )


def tied_transformer() -> Workload:
    return Workload(
        lambda: TokenTransformer(5000, 64, causal=True, width=256, num_heads=4, num_layers=1),
        lambda n: ((tokens(5000, 64, n),), {}, tokens(5000, 64, n)),
        token_loss,
        name="tied-transformer",
    )


def loss_inside() -> Workload:
    """Return the loss from the module, so that nothing large is gathered."""
    return Workload(
        lambda: Lambda(
            lambda self, x, y: token_loss(self.inner(x), y),
            inner=CharTransformer(60, context=64, width=256, num_heads=4, num_layers=1),
        ),
        lambda n: ((tokens(60, 64, n), tokens(60, 64, n)), {}, None),
        lambda loss, _: loss,
        name="loss-inside",
    )


def gru_and_transformer() -> Workload:
    def model() -> nn.Module:
        layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
        return Lambda(
            lambda self, x: self.head(self.layer(self.gru(self.embedding(x))[0])),
            embedding=nn.Embedding(2000, 256),
            gru=nn.GRU(256, 256, batch_first=True),
            layer=layer,
            head=nn.Linear(256, 2000),
        )

    return Workload(
        model,
        lambda n: ((tokens(2000, 8, n),), {}, tokens(2000, 8, n)),
        token_loss,
        name="gru-and-transformer",
    )


def u_net() -> Workload:
    """Keep the activations of all resolutions, and return as many values as it gets."""

    def forward(self, x):
        fine = self.fine(x).relu()
        coarse = self.coarse(functional.max_pool2d(fine, 2)).relu()
        return self.out(torch.cat([fine, self.up(coarse)], 1))

    def model() -> nn.Module:
        return Lambda(
            forward,
            fine=nn.Conv2d(3, 32, 3, padding=1),
            coarse=nn.Conv2d(32, 64, 3, padding=1),
            up=nn.ConvTranspose2d(64, 32, 2, 2),
            out=nn.Conv2d(64, 8, 1),
        )

    return Workload(
        model,
        lambda n: ((zeros(n, 3, 64, 64),), {}, torch.zeros(1, 64, 64).long().expand(n, -1, -1)),
        functional.cross_entropy,
        functools.partial(torch.optim.SGD, lr=0.1),
        name="u-net",
    )


def mixture_of_experts() -> Workload:
    """Weigh the outputs of experts, which hold most of the parameters, by a gate."""

    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return self.head((outputs * gates[..., None, :]).sum(-1))

    def model() -> nn.Module:
        expert = lambda: nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))  # noqa: E731
        return Lambda(
            forward,
            gate=nn.Linear(256, 4),
            experts=nn.ModuleList(expert() for _ in range(4)),
            head=nn.Linear(256, 1000),
        )

    return Workload(
        model,
        lambda n: ((zeros(n, 16, 256),), {}, torch.zeros(1, 16).long().expand(n, -1)),
        token_loss,
        name="mixture-of-experts",
    )


SMALL = {
    make.__name__: make
    for make in (
        mlp,
        wide_output,
        convolutions,
        recurrent,
        char_transformer,
        tied_transformer,
        loss_inside,
        gru_and_transformer,
        u_net,
        mixture_of_experts,
    )
}
