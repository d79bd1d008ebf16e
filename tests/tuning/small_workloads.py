"""Workloads that are quickly measured, and whose memory is used in different ways.

Their layers are wide, so that the allocator's rounding does not matter. On devices that keep only
the shapes of tensors, wide layers take no more time.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional

from balanced_dp import Workload
from balanced_dp.tuning.models import TokenTransformer

from ..modules import Lambda

SMALL = {}
"""Functions that return a ``Workload``, by the names of the workloads."""


def small(make_model, make_batch, loss=functional.cross_entropy, **options):
    """Add a workload to ``SMALL`` under the name of ``make_model``, which returns its model."""
    name = make_model.__name__.replace("_", "-")

    def make() -> Workload:
        return Workload(make_model, make_batch, loss, name=name, **options)

    SMALL[make_model.__name__] = make
    return make


def zeros(*shape: int) -> torch.Tensor:
    """Return zeros that all share one element in memory, since large batches have gigabytes."""
    return torch.zeros(1).expand(shape)


def classes(num_classes: int, *shape: int):
    """Return a ``make_batch`` function whose inputs are zeros and whose targets are classes."""
    return lambda n: ((zeros(n, *shape),), {}, torch.arange(n) % num_classes)


def tokens(vocabulary: int, length: int):
    """Return a ``make_batch`` function whose inputs are tokens and whose targets are the same."""

    def make_batch(n):
        found = (torch.arange(length) % vocabulary).expand(n, length)
        return (found,), {}, found

    return make_batch


def token_loss(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def mlp():  # more memory for weights than for activations
    return nn.Sequential(nn.Linear(1024, 8192), nn.ReLU(), nn.Linear(8192, 1000))


def wide_output():  # most memory for gathered outputs, so no value of gpu0_bsz balances it
    return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 400_000))


def convolutions():
    first = nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
    second = nn.MaxPool2d(2), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(inplace=True)
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def char_transformer():  # of PyTorch's own layers, with a causal mask
    def forward(self, x):
        future = torch.ones(64, 64, dtype=torch.bool, device=x.device).triu(1)
        return self.head(self.layers(self.embedding(x), mask=future, is_causal=True))

    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True, norm_first=True)
    layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    embedding, head = nn.Embedding(60, 256), nn.Linear(256, 60)
    return Lambda(forward, embedding=embedding, layers=layers, head=head)


def tied_transformer():
    return TokenTransformer(5000, 64, causal=True, width=256, num_heads=4, num_layers=1)


def loss_inside():  # nothing large is gathered
    return Lambda(lambda self, x: token_loss(self.inner(x), x), inner=char_transformer())


def mixture_of_experts():  # experts hold most of the parameters, and a gate weighs their outputs
    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return self.head((outputs * gates[..., None, :]).sum(-1))

    experts = [
        nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
    ]
    gate, head = nn.Linear(256, 4), nn.Linear(256, 1000)
    return Lambda(forward, gate=gate, experts=nn.ModuleList(experts), head=head)


mlp = small(mlp, classes(1000, 1024))
wide_output = small(wide_output, classes(4000, 64))
small(convolutions, classes(10, 3, 64, 64), make_optimizer=SGD)
small(char_transformer, tokens(60, 64), token_loss)
small(tied_transformer, tokens(5000, 64), token_loss)
small(loss_inside, tokens(60, 64), lambda loss, _: loss)
small(
    mixture_of_experts,
    lambda n: ((zeros(n, 16, 256),), {}, torch.zeros(1, 16).long().expand(n, -1)),
    token_loss,
)
