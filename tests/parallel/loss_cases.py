"""Losses as people write them, each a function of a module, its output and what it is given."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..versions import has_torch

BATCH, WIDTH, CLASSES, LENGTH = 13, 6, 5, 4


class Net(nn.Module):
    """One row of ``CLASSES`` numbers a sample, ``LENGTH`` such rows by ``tokens``, and a loss."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.token_head = nn.Linear(WIDTH, LENGTH * CLASSES)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.ones = nn.Parameter(torch.ones(12))
        self.register_buffer("temperature", torch.tensor(0.7))
        self.loss = loss

    def tokens(self, x: Tensor) -> Tensor:
        return self.token_head(x).view(-1, LENGTH, CLASSES)

    def forward(self, x: Tensor, **given: Any) -> Any:
        return self.loss(self, x, self.head(x), **given)


@dataclass(frozen=True)
class Case:
    """A loss and its inputs for the whole batch."""

    loss: Callable[..., Any]
    given: dict[str, Any] = field(default_factory=dict)


_generator = torch.Generator().manual_seed(0)
X = torch.randn(BATCH, WIDTH, generator=_generator, dtype=torch.double)
Y = torch.randint(0, CLASSES, (BATCH,), generator=_generator)
IGNORED = Y.clone()
IGNORED[0] = -100
IGNORED[5:9] = -100  # all of a chunk
NONE_IN_A_CHUNK = Y.clone()
NONE_IN_A_CHUNK[1:6] = -100
TOKENS = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=_generator)
TOKENS[0] = -100
TOKENS[5:7] = -100
TOKENS[:, 2] = -100
REAL = torch.randn(BATCH, CLASSES, generator=_generator, dtype=torch.double)
PART = torch.rand(BATCH, CLASSES, generator=_generator, dtype=torch.double)
SIGN = torch.where(PART > 0.5, 1.0, -1.0).double()
WEIGHT = torch.rand(BATCH, generator=_generator, dtype=torch.double)
MASK = (torch.arange(BATCH) % 3 == 1).double()
HOLES = MASK.clone()
HOLES[1:5] = 0  # nothing of a chunk counts
UNLIKE = (WEIGHT > 0.4).double()
"""A mask with another count in each chunk."""
TOKEN_MASK = (torch.rand(BATCH, LENGTH, generator=_generator) > 0.4).double()
TOKEN_MASK[1] = 0
CLASS_WEIGHT = torch.tensor([0.5, 0.0, 0.0, 2.0, 1.0], dtype=torch.double)


def rows(output: Tensor) -> Tensor:
    """A number for each sample."""
    return output.square().mean(1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def cross_entropy_of_tokens(net: Net, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(net.tokens(x).flatten(0, 1), y.flatten(), **options)


class Smoothed(nn.CrossEntropyLoss):
    """A subclass that adds a term."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) + 0.1 * input.square().mean()


class Masked(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        return super().forward(input[mask > 0], target[mask > 0])


def focal(net: Net, x: Tensor, o: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(o, y, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def in_place(net: Net, x: Tensor, o: Tensor, y: Tensor, r: Tensor) -> Tensor:
    loss = F.cross_entropy(o, y)
    loss += 0.5 * F.mse_loss(o, r)
    return loss


def not_trained(net: Net, x: Tensor, o: Tensor, r: Tensor) -> Tensor:
    with torch.no_grad():
        factor = net.scale * o.abs().mean()
    return F.mse_loss(o, r) * factor


def updated(net: Net, x: Tensor, o: Tensor, r: Tensor) -> Tensor:
    losses = [F.mse_loss(o, r), F.l1_loss(o, r)]
    vector = torch.zeros(2).to(o)
    vector[0] = losses[0]
    vector[1] = losses[1]
    vector *= 2
    return vector.sum() + losses[0].clamp_(max=10)


def logged(net: Net, x: Tensor, o: Tensor, r: Tensor) -> Tensor:
    """What else is done with a loss asks for its class."""
    loss = F.mse_loss(o, r)
    assert f"{loss.detach():.3f}" == format(loss.item(), ".3f")
    copies = [copy.deepcopy(loss.detach()), pickle.loads(pickle.dumps(loss.detach()))]
    assert type(copies[0]) is type(o) and float(copies[0]) == float(copies[1]) == loss.item()
    return loss


class Halved(torch.autograd.Function):
    """Its gradient is not that of its value."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


def hooked(net: Net, x: Tensor, o: Tensor) -> Tensor:
    loss = 2 * rows(o).mean()
    loss.register_hook(lambda grad: grad / 2)
    return loss


def written_through_a_view(net: Net, x: Tensor, o: Tensor) -> Tensor:
    both = torch.stack([rows(o).mean(), o.abs().mean()])
    both[0].mul_(2)
    return both.sum()


def over_all(net: Net, x: Tensor, o: Tensor, y: Tensor, r: Tensor) -> dict[str, Tensor]:
    class_loss, box_loss = F.cross_entropy(o, y), F.smooth_l1_loss(o, r)
    return {"loss": class_loss + 2 * box_loss, "class": class_loss, "box": box_loss.detach()}


WEIGHTED_HUBER_LOSS = {
    "huber loss with weights": Case(
        lambda n, x, o, r, w: F.huber_loss(o, r, weight=w), {"r": REAL, "w": PART}
    )
}
if not has_torch("2.6"):
    WEIGHTED_HUBER_LOSS = {}

EXACT: dict[str, Case] = {
    # Means over entries.
    "mse": Case(lambda n, x, o, r: F.mse_loss(o, r), {"r": REAL}),
    "l1": Case(lambda n, x, o, r: F.l1_loss(o, r), {"r": REAL}),
    "smooth l1": Case(lambda n, x, o, r: F.smooth_l1_loss(o, r), {"r": REAL}),
    "huber": Case(lambda n, x, o, r: F.huber_loss(o, r, delta=0.5), {"r": REAL}),
    "bce": Case(lambda n, x, o, p: F.binary_cross_entropy(o.sigmoid(), p), {"p": PART}),
    "bce with logits": Case(
        lambda n, x, o, p: F.binary_cross_entropy_with_logits(o, p), {"p": PART}
    ),
    "kl batchmean": Case(
        lambda n, x, o, p: F.kl_div(o.log_softmax(1), p.softmax(1), reduction="batchmean"),
        {"p": PART},
    ),
    "kl sum": Case(
        lambda n, x, o, p: nn.KLDivLoss(reduction="sum")(o.log_softmax(1), p), {"p": PART}
    ),
    "poisson": Case(lambda n, x, o, p: F.poisson_nll_loss(o, p), {"p": PART}),
    "gaussian": Case(lambda n, x, o, r: F.gaussian_nll_loss(o, r, o.exp()), {"r": REAL}),
    "soft margin": Case(lambda n, x, o, s: F.soft_margin_loss(o, s), {"s": SIGN}),
    "multi margin": Case(lambda n, x, o, y: F.multi_margin_loss(o, y), {"y": Y}),
    "hinge embedding": Case(lambda n, x, o, s: F.hinge_embedding_loss(o, s), {"s": SIGN}),
    "multilabel soft margin": Case(
        lambda n, x, o, p: F.multilabel_soft_margin_loss(o, p.round()), {"p": PART}
    ),
    "margin ranking": Case(
        lambda n, x, o, s: F.margin_ranking_loss(o, o.roll(1, 1), s, margin=0.1), {"s": SIGN}
    ),
    "cosine embedding": Case(
        lambda n, x, o, r, s: F.cosine_embedding_loss(o, r, s[:, 0]), {"r": REAL, "s": SIGN}
    ),
    "triplet": Case(lambda n, x, o, r: F.triplet_margin_loss(o, r, r.flip(1)), {"r": REAL}),
    "cosine similarity": Case(lambda n, x, o, r: 1 - F.cosine_similarity(o, r).mean(), {"r": REAL}),
    "quantile": Case(
        lambda n, x, o, r: torch.maximum(0.9 * (r - o), -0.1 * (r - o)).mean(), {"r": REAL}
    ),
    "mean of sums": Case(lambda n, x, o: o.square().sum(1).mean()),
    "sum of means": Case(lambda n, x, o: o.square().mean(0).sum()),
    "mean along the batch": Case(
        lambda n, x, o: torch.mean(-0.5 * torch.sum(1 + o - o**2 - o.exp(), dim=1), dim=0)
    ),
    "mean of means": Case(lambda n, x, o: o.square().mean(1).mean()),
    "focal": Case(focal, {"y": Y}),
    "distillation": Case(
        lambda n, x, o, y, r: (
            0.5 * F.cross_entropy(o, y)
            + 2 * F.kl_div((o / 2).log_softmax(1), r.softmax(1), reduction="batchmean")
        ),
        {"y": Y, "r": REAL},
    ),
    "gan": Case(lambda n, x, o: F.softplus(-o[:, 0]).mean() + F.softplus(o[:, 1]).mean()),
    "mixup": Case(
        lambda n, x, o, y, z: 0.3 * F.cross_entropy(o, y) + 0.7 * F.cross_entropy(o, z),
        {"y": Y, "z": Y.flip(0)},
    ),
    "soft targets": Case(lambda n, x, o, p: F.cross_entropy(o, p.softmax(1)), {"p": PART}),
    "uncertainty": Case(
        lambda n, x, o, y, r: (
            (-n.scale).exp() * F.cross_entropy(o, y)
            + F.mse_loss(o, r) / (2 * n.scale.exp())
            + n.scale
        ),
        {"y": Y, "r": REAL},
    ),
    "penalty": Case(
        lambda n, x, o, r: F.mse_loss(o, r) + 0.01 * sum(p.square().sum() for p in n.parameters()),
        {"r": REAL},
    ),
    "norms of weights": Case(
        lambda n, x, o, r: F.mse_loss(o, r) + 0.01 * sum(p.norm() for p in n.parameters()),
        {"r": REAL},
    ),
    "orthogonality": Case(
        lambda n, x, o, r: (
            F.mse_loss(o, r)
            + (n.head.weight @ n.head.weight.T - torch.eye(CLASSES).to(o)).square().sum()
        ),
        {"r": REAL},
    ),
    "perceptual": Case(
        lambda n, x, o, r: (
            F.mse_loss(o, r) + 0.1 * F.l1_loss(n.head.weight @ x.T, n.head.weight @ x.T + 1)
        ),
        {"r": REAL},
    ),
    "total variation": Case(lambda n, x, o: (o[:, 1:] - o[:, :-1]).abs().mean()),
    "stacked": Case(
        lambda n, x, o, r: torch.stack([F.mse_loss(o, r), F.l1_loss(o, r)]).mean(), {"r": REAL}
    ),
    "logits regularised": Case(
        lambda n, x, o, y: F.cross_entropy(o, y) + 1e-3 * o.logsumexp(1).square().mean(), {"y": Y}
    ),
    "mean times length": Case(lambda n, x, o, r: F.mse_loss(o, r) * len(x), {"r": REAL}),
    # Sums.
    "sum": Case(lambda n, x, o, r: F.mse_loss(o, r, reduction="sum"), {"r": REAL}),
    "half a sum": Case(lambda n, x, o, r: 0.5 * (o - r).square().sum(), {"r": REAL}),
    "variational": Case(
        lambda n, x, o, p: (
            F.binary_cross_entropy(o.sigmoid(), p, reduction="sum")
            - 0.5 * torch.sum(1 + o - o.square() - o.exp())
        ),
        {"p": PART},
    ),
    "sum by length": Case(lambda n, x, o, r: (o - r).square().sum() / len(x), {"r": REAL}),
    "sum by size": Case(lambda n, x, o, r: (o - r).square().sum() / o.numel(), {"r": REAL}),
    "sum times 1 / length": Case(
        lambda n, x, o, r: (o - r).square().sum() * (1 / x.size(0)), {"r": REAL}
    ),
    "sum by a number": Case(
        lambda n, x, o, y, n_items: F.cross_entropy(o, y, reduction="sum") / n_items,
        {"y": IGNORED, "n_items": 8},
    ),
    "sum by a tensor": Case(
        lambda n, x, o, y, n_items: F.cross_entropy(o, y, reduction="sum") / n_items,
        {"y": IGNORED, "n_items": torch.tensor(8)},
    ),
    "dot product": Case(lambda n, x, o, w: w @ rows(o) / w.sum(), {"w": WEIGHT}),
    "sum by a buffer": Case(
        lambda n, x, o, r: (o - r).square().sum() / (2 * n.temperature**2), {"r": REAL}
    ),
    "mean by a buffer": Case(lambda n, x, o, r: F.mse_loss(o, r) / n.temperature, {"r": REAL}),
    "sum by a tensor, floored": Case(
        lambda n, x, o, y, n_items: (
            F.cross_entropy(o, y, reduction="sum") / n_items.clamp(min=1).double()
        ),
        {"y": IGNORED, "n_items": torch.tensor(8)},
    ),
    # Means over what counts.
    "cross entropy": Case(lambda n, x, o, y: F.cross_entropy(o, y), {"y": Y}),
    "ignored": Case(lambda n, x, o, y: F.cross_entropy(o, y), {"y": IGNORED}),
    "nll": Case(lambda n, x, o, y: F.nll_loss(o.log_softmax(1), y), {"y": IGNORED}),
    "tokens": Case(lambda n, x, o, y: cross_entropy_of_tokens(n, x, y), {"y": TOKENS}),
    "all options": Case(
        lambda n, x, o, y: cross_entropy_of_tokens(
            n, x, y, weight=CLASS_WEIGHT.to(o.device), label_smoothing=0.1, ignore_index=3
        ),
        {"y": TOKENS.where(TOKENS >= 0, 3)},
    ),
    "images": Case(
        lambda n, x, o, y: nn.NLLLoss(weight=CLASS_WEIGHT.to(o.device))(
            n.tokens(x).transpose(1, 2)[..., None].log_softmax(1), y[..., None]
        ),
        {"y": TOKENS},
    ),
    "scaled": Case(lambda n, x, o, y: (2 * F.cross_entropy(o, y) - 1) / 4, {"y": IGNORED}),
    "subclass": Case(lambda n, x, o, y: Smoothed()(o, y), {"y": IGNORED}),
    "in place": Case(in_place, {"y": IGNORED, "r": REAL}),
    "two counts": Case(
        lambda n, x, o, y, t: (F.cross_entropy(o, y) + cross_entropy_of_tokens(n, x, t)) / 2,
        {"y": IGNORED, "t": TOKENS},
    ),
    "two counts, stacked": Case(
        lambda n, x, o, y, t: torch.stack(
            [F.cross_entropy(o, y), cross_entropy_of_tokens(n, x, t)]
        ).sum(),
        {"y": IGNORED, "t": TOKENS},
    ),
    "count and mean": Case(
        lambda n, x, o, y, r: 2 * F.mse_loss(o, r) - (F.cross_entropy(o, y) + 1) / 3,
        {"y": IGNORED, "r": REAL},
    ),
    "count and sum": Case(
        lambda n, x, o, y, r: F.cross_entropy(o, y) + F.mse_loss(o, r, reduction="sum"),
        {"y": IGNORED, "r": REAL},
    ),
    "count and masked mean": Case(
        lambda n, x, o, y, m: F.cross_entropy(o, y) + masked_mean(rows(o), m),
        {"y": IGNORED, "m": WEIGHT},
    ),
    "count and penalty": Case(
        lambda n, x, o, y: F.cross_entropy(o, y) + 0.1 * n.head.weight.abs().sum(), {"y": IGNORED}
    ),
    "counts of unlike weights": Case(
        lambda n, x, o, y, t: (
            (-n.scale).exp() * F.cross_entropy(o, y) + n.scale * cross_entropy_of_tokens(n, x, t)
        ),
        {"y": IGNORED, "t": TOKENS},
    ),
    "several outputs": Case(over_all, {"y": IGNORED, "r": REAL}),
    "checkpointed": Case(
        lambda n, x, o, y: checkpoint(F.cross_entropy, o, y, use_reentrant=False), {"y": IGNORED}
    ),
    "checkpointed, reentrant": Case(
        lambda n, x, o, y: (
            checkpoint(F.cross_entropy, o, y, use_reentrant=True)
            if o.requires_grad
            else F.cross_entropy(o, y)
        ),
        {"y": IGNORED},
    ),
    "masked": Case(lambda n, x, o, m: masked_mean(rows(o), m), {"m": MASK}),
    "masked, holes": Case(lambda n, x, o, m: masked_mean(rows(o), m), {"m": HOLES}),
    "masked, twice": Case(
        lambda n, x, o, m: masked_mean(rows(o), m) + 0.1 * masked_mean(o.abs().mean(1), m),
        {"m": MASK},
    ),
    "masked bce": Case(
        lambda n, x, o, p, m: masked_mean(
            F.binary_cross_entropy_with_logits(o, p, reduction="none").sum(1), m
        ),
        {"p": PART, "m": MASK},
    ),
    "masked tokens": Case(
        lambda n, x, o, m: masked_mean(n.tokens(x).square().mean(-1), m), {"m": TOKEN_MASK}
    ),
    "masked by sample": Case(
        lambda n, x, o, m: ((n.tokens(x).square().mean(-1) * m).sum(1) / (m.sum(1) + 1)).mean(),
        {"m": TOKEN_MASK},
    ),
    "mean of masked by mean": Case(lambda n, x, o, m: (rows(o) * m).mean() / m.mean(), {"m": MASK}),
    "clamped count": Case(
        lambda n, x, o, m: (rows(o) * m).sum() / m.sum().clamp(min=1), {"m": HOLES}
    ),
    "smoothed count": Case(lambda n, x, o, m: (rows(o) * m).sum() / (m.sum() + 1), {"m": HOLES}),
    **{
        f"count plus {tiny}": Case(
            lambda n, x, o, m, tiny=tiny: (rows(o) * m).sum() / (m.sum() + tiny), {"m": HOLES}
        )
        for tiny in (1e-8, 1e-6)
    },
    "number before the count": Case(
        lambda n, x, o, m: (rows(o) * m).sum() / (1e-8 + m.sum().clone()), {"m": HOLES}
    ),
    "larger of a count and 1": Case(
        lambda n, x, o, m: (rows(o) * m).sum() / torch.maximum(m.sum(), torch.ones(()).to(m)),
        {"m": HOLES},
    ),
    "mean of masked by mean plus a number": Case(
        lambda n, x, o, m: (rows(o) * m).mean() / (m.mean() + 1e-4), {"m": HOLES}
    ),
    "mean of masked by clamped mean": Case(
        lambda n, x, o, m: (rows(o) * m).mean() / m.mean().clamp(min=1e-6), {"m": HOLES}
    ),
    "clamped count plus 1": Case(
        lambda n, x, o, m: (rows(o) * m).sum() / (m.sum().clamp(min=1) + 1), {"m": HOLES}
    ),
    "clamped count and penalty": Case(
        lambda n, x, o, m: (
            (rows(o) * m).sum() / m.sum().clamp(min=1) + n.head.weight.square().sum()
        ),
        {"m": HOLES},
    ),
    "one less a masked mean": Case(
        lambda n, x, o, m: 1 - (rows(o) * m).sum() / m.sum().clamp(min=1), {"m": HOLES}
    ),
    "weights of classes that add up to a constant": Case(
        lambda n, x, o: (o.square() * CLASS_WEIGHT.to(o)).mean() / CLASS_WEIGHT.to(o).sum()
    ),
    "sum by the weights of classes": Case(
        lambda n, x, o: (o.square() * CLASS_WEIGHT.to(o)).sum() / CLASS_WEIGHT.to(o).sum()
    ),
    "added to a vector": Case(
        lambda n, x, o, m: (torch.zeros(1).to(o) + masked_mean(rows(o), m)).squeeze(), {"m": MASK}
    ),
    "concatenated": Case(
        lambda n, x, o, m: torch.cat(
            [masked_mean(rows(o), m).view(1), masked_mean(o.abs().mean(1), m).view(1)]
        ).sum(),
        {"m": MASK},
    ),
    "concatenated by an index": Case(
        lambda n, x, o, m: torch.cat(
            [masked_mean(rows(o), m)[None], masked_mean(o.abs().mean(1), m)[None]]
        ).sum(),
        {"m": MASK},
    ),
    "count in bfloat16": Case(
        lambda n, x, o, m: (rows(o) * m).sum() / (m.bfloat16().sum() + 1), {"m": HOLES}
    ),
    **WEIGHTED_HUBER_LOSS,
    "smoothed count, twice": Case(
        lambda n, x, o, m: (rows(o) * m).sum() / torch.add(m.sum(), 1, alpha=2), {"m": HOLES}
    ),
    "selected": Case(lambda n, x, o, r, m: F.mse_loss(o[m > 0], r[m > 0]), {"r": REAL, "m": MASK}),
    "selected, holes": Case(lambda n, x, o, r, m: Masked()(o, r, m), {"r": REAL, "m": HOLES}),
    "selected by index": Case(lambda n, x, o, m: rows(o)[m.nonzero()[:, 0]].mean(), {"m": MASK}),
    "mean of selected": Case(lambda n, x, o, m: rows(o)[m > 0].mean(), {"m": MASK}),
    "sum of selected by number": Case(
        lambda n, x, o, m: rows(o)[m > 0].sum() / (m > 0).sum().item(), {"m": MASK}
    ),
    "summed cross entropy, clamped count": Case(
        lambda n, x, o, y: F.cross_entropy(o, y, reduction="sum") / (y != -100).sum().clamp(min=1),
        {"y": NONE_IN_A_CHUNK},
    ),
    "summed cross entropy, count": Case(
        lambda n, x, o, y: F.cross_entropy(o, y, reduction="sum") / (y != -100).sum(),
        {"y": NONE_IN_A_CHUNK},
    ),
    "where": Case(
        lambda n, x, o, m: torch.where(m > 0, rows(o), 0).sum() / (m > 0).sum(), {"m": MASK}
    ),
    "weighted": Case(lambda n, x, o, w: (w * rows(o)).sum() / w.sum(), {"w": WEIGHT}),
    "focal over positives": Case(
        lambda n, x, o, m: (((1 - o.sigmoid()) ** 2 * F.softplus(-o)).sum(1) * m).sum() / m.sum(),
        {"m": HOLES},
    ),
    "not trained": Case(not_trained, {"r": REAL}),
    "updated in place": Case(updated, {"r": REAL}),
    "logged": Case(logged, {"r": REAL}),
    "penalty on selected weights": Case(
        lambda n, x, o, r: F.mse_loss(o, r) + n.head.weight[[0, 1]].square().sum(), {"r": REAL}
    ),
    "orthogonality of selected pairs": Case(
        lambda n, x, o, r: (
            F.mse_loss(o, r)
            + (n.head.weight @ n.head.weight.T)[~torch.eye(CLASSES, dtype=torch.bool)]
            .square()
            .sum()
        ),
        {"r": REAL},
    ),
    "penalty on ones": Case(
        lambda n, x, o, r: F.mse_loss(o, r) + (n.ones * 2).abs().sum(), {"r": REAL}
    ),
    "distance to weights that were": Case(
        lambda n, x, o, r: (
            F.mse_loss(o, r) + (n.head.weight - n.head.weight.detach()).square().sum()
        ),
        {"r": REAL},
    ),
    "balance of experts": Case(
        lambda n, x, o: (
            torch.histc(o.detach().argmax(1).double(), CLASSES, 0, CLASSES)
            / o.argmax(1).numel()
            * o.softmax(1).mean(0)
        ).sum()
    ),
    # Not linear in means and sums.
    "dice": Case(
        lambda n, x, o, m: (
            1 - 2 * (o[:, 0].sigmoid() * m).sum() / (o[:, 0].sigmoid().sum() + m.sum())
        ),
        {"m": MASK},
    ),
    "rmse": Case(lambda n, x, o, r: F.mse_loss(o, r).sqrt(), {"r": REAL}),
    "perplexity": Case(lambda n, x, o, y: F.cross_entropy(o, y).exp(), {"y": Y}),
    "product": Case(lambda n, x, o, r: F.mse_loss(o, r) * o.abs().mean(), {"r": REAL}),
    "statistics": Case(lambda n, x, o: o.mean(0).square().sum()),
    "two masks": Case(
        lambda n, x, o, m, w: masked_mean(rows(o), m) + masked_mean(rows(o), w),
        {"m": MASK, "w": WEIGHT},
    ),
    "sum and mean": Case(
        lambda n, x, o, r: F.mse_loss(o, r, reduction="sum") + o.mean(), {"r": REAL}
    ),
    "sum and penalty": Case(lambda n, x, o: o.square().sum() + n.head.weight.square().sum()),
    "where of a count": Case(
        lambda n, x, o, m: (rows(o) * m).sum() / m.sum().where(m.sum() > 0, 1), {"m": HOLES}
    ),
    "largest entry plus 1": Case(
        lambda n, x, o, m: (rows(o) * m).sum() / (m.max() + 1), {"m": HOLES}
    ),
    "clamped largest entry": Case(
        lambda n, x, o, m: (rows(o) * m).sum() / m.max().clamp(min=1), {"m": HOLES}
    ),
    "larger of 1 and a count": Case(
        lambda n, x, o, m: (rows(o) * m).sum() / torch.maximum(torch.ones(()).to(m), m.sum()),
        {"m": HOLES},
    ),
    "count minus a number": Case(
        lambda n, x, o, m: (rows(o) * m).sum() / (m.sum() - 0.5), {"m": HOLES}
    ),
    "count plus the number of samples": Case(
        lambda n, x, o, m: (rows(o) * m).sum() / (m.sum() + len(x)), {"m": HOLES}
    ),
    "larger of two counts": Case(
        lambda n, x, o, m, w: (rows(o) * m).sum() / torch.maximum(m.sum(), w.sum()),
        {"m": HOLES, "w": UNLIKE},
    ),
    "number of positions with a token": Case(
        lambda n, x, o, m: (n.tokens(x).square().mean(-1) * m).sum() / (m.sum(0) > 0).sum(),
        {"m": TOKEN_MASK},
    ),
    "mean by a mean of others": Case(
        lambda n, x, o, y, w: F.cross_entropy(o, y) / w.mean(), {"y": IGNORED, "w": WEIGHT}
    ),
    "smoothed count and penalty": Case(
        lambda n, x, o, m: (rows(o) * m).sum() / (m.sum() + 1) + n.head.weight.square().sum(),
        {"m": HOLES},
    ),
    "mean of a mask": Case(lambda n, x, o, m: (rows(o) * m).sum() / m.mean(), {"m": MASK}),
    "means of columns with masks": Case(
        lambda n, x, o, m: ((o.square() * m).sum(0) / m.sum(0).clamp(min=1)).mean(),
        {"m": (PART > 0.4).double()},
    ),
    "masked mean in a checkpoint": Case(
        lambda n, x, o, m: checkpoint(
            lambda o: masked_mean(rows(o), m), o, use_reentrant=False, preserve_rng_state=False
        ),
        {"m": MASK},
    ),
}
"""Their values and gradients are those of the whole batch, and nothing is warned of."""

UNCLEAR: dict[str, tuple[Case, str]] = {
    "norm": (
        Case(lambda n, x, o, r: (o - r).norm(), {"r": REAL}),
        "uses a LinalgVectorNorm",
    ),
    "where of any": (
        Case(lambda n, x, o, m: (rows(o) * m).sum() / m.sum().where(m.any(), 1), {"m": HOLES}),
        "it has a part that is no mean or sum over samples",
    ),
    "count made a tensor": (
        Case(lambda n, x, o, m: (rows(o) * m).sum() / torch.tensor(int(m.sum())), {"m": UNLIKE}),
        "taken for counts that add up|number of entries plus",
    ),
    "largest integer": (
        Case(lambda n, x, o, y: rows(o).sum() / (y.max() + 1), {"y": Y.cumsum(0)}),
        "taken for counts that add up",
    ),
    "flag": (
        Case(lambda n, x, o: rows(o).mean() * (2.0 if rows(o).mean() > 0.35 else 1.0)),
        "taken for counts that add up",
    ),
    "smaller of two": (
        Case(
            lambda n, x, o, r: min([(o - r).square().mean(), (o + r).square().mean()]), {"r": REAL}
        ),
        "in different ways",
    ),
    "a count or 1": (
        Case(lambda n, x, o, m: (rows(o) * m).sum() / max(m.sum(), torch.tensor(1)), {"m": HOLES}),
        "in different ways",
    ),
    "sum by the number of samples less one": (
        Case(lambda n, x, o: rows(o).sum() / (len(x) - 1)),
        "its number of entries plus -1",
    ),
    "contrastive": (
        Case(
            lambda n, x, o, r: F.cross_entropy(o @ r.T, torch.arange(len(x), device=x.device)),
            {"r": REAL},
        ),
        "classes of its cross entropy are the samples of each chunk",
    ),
    "sum by a deviation": (
        Case(lambda n, x, o, r: (o - r).square().sum() / r.std().item(), {"r": REAL}),
        "that differs between the replicas and is no count",
    ),
    "one sample": (
        Case(lambda n, x, o: rows(o)[0]),
        "uses a Select that is no mean",
    ),
    "halved gradient": (Case(lambda n, x, o: Halved.apply(rows(o).mean())), "computed by Halved"),
    "hooked": (Case(hooked), "uses a Mul that is no mean"),
    "written through a view": (
        Case(written_through_a_view),
        "has no entry for each sample|along another dimension|combined with samples",
    ),
    "balanced cross entropy": (
        Case(
            lambda n, x, o, y: F.cross_entropy(
                o, y, weight=1 / F.one_hot(y, CLASSES).double().sum(0).clamp(min=1)
            ),
            {"y": Y},
        ),
        "over each chunk is combined with samples",
    ),
    "branch": (
        Case(lambda n, x, o: o.mean() if len(x) < 4 else o.square().mean().mul(2)),
        "in different ways",
    ),
}
"""Their values are not known; with each, a part of the warning."""
