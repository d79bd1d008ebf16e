"""Losses as people write them, each a function of a module, its inputs and its outputs.

A loss may have further parameters. Their names are keys of ``GIVEN``, which has the values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

BATCH, WIDTH, CLASSES, LENGTH = 13, 6, 5, 4


class Net(nn.Module):
    """A module that computes ``CLASSES`` numbers for each sample, and returns a loss of these.

    The method ``tokens`` computes ``LENGTH`` rows of ``CLASSES`` numbers for each sample.
    """

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


_generator = torch.Generator().manual_seed(0)


def _random(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=_generator, dtype=torch.double)


X = torch.randn(BATCH, WIDTH, generator=_generator, dtype=torch.double)
Y = torch.randint(0, CLASSES, (BATCH,), generator=_generator)
REAL = torch.randn(BATCH, CLASSES, generator=_generator, dtype=torch.double)
PART, WEIGHT = _random(BATCH, CLASSES), _random(BATCH)
INDEX = torch.arange(BATCH)
MASK = (WEIGHT > 0.4).double()  # the number of ones differs between chunks
HOLES = MASK.where(INDEX > 4, 0)
IGNORED = Y.where((INDEX > 0) & (INDEX < 5) | (INDEX > 8), -100)
TOKENS = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=_generator)
TOKENS[[0, 5, 6]] = TOKENS[:, 2] = -100

GIVEN: dict[str, Any] = {
    "y": Y,
    "growing": Y.cumsum(0),
    "ids": INDEX % 9,  # 0 to 3 occur in two chunks
    "ignored": IGNORED,  # with gpu0_bsz=0 or 1, all labels of a chunk are ignored
    "ignored_chunk": Y.where((INDEX < 1) | (INDEX > 5), -100),
    "tokens": TOKENS,
    "real": REAL,
    "part": PART,
    "weight": WEIGHT,
    "mask": MASK,
    "holes": HOLES,  # 0 for all samples of a chunk
    "token_mask": (_random(BATCH, LENGTH) > 0.4).double() * (INDEX != 1)[:, None],
    "num_items": 8,
    "lengths": 1 + Y.clamp(max=LENGTH - 1),
    "items": torch.tensor(7),
}
"""The arguments of losses, by the names of the parameters of losses."""

WHOLE = dict.fromkeys(["ignored", "ignored_chunk"], Y) | {
    "tokens": TOKENS.clamp(0),
    **dict.fromkeys(["mask", "holes"], torch.ones(BATCH).double()),
    "token_mask": torch.ones(BATCH, LENGTH).double(),
}
"""Arguments that replace those of ``GIVEN``, so that no sample or token is left out."""


def given_to(loss: Callable[..., Any], count: int = BATCH) -> dict[str, Any]:
    """Return the arguments of a loss for the first ``count`` samples, including the input ``x``."""
    given = {n: GIVEN[n] for n in inspect.signature(loss).parameters if n in GIVEN} | {"x": X}
    return {n: v[:count] if isinstance(v, Tensor) and v.dim() else v for n, v in given.items()}


def rarity(y: Tensor) -> Tensor:
    """Return a weight for each sample: 1 over the number of samples of its class."""
    _, inverse, counts = torch.unique(y, return_inverse=True, return_counts=True)
    return 1 / counts[inverse].double()


def rows(output: Tensor) -> Tensor:
    """Return a number for each sample: the mean square of its outputs."""
    return output.square().mean(1)


def masked_mean(values: Tensor, mask: Tensor, least: int = 0) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=least)


def summed(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels, reduction="sum")


def cross_entropy_of_tokens(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net.tokens(x).flatten(0, 1), y.flatten())


def updated(net: Net, x: Tensor, o: Tensor, real: Tensor) -> Tensor:
    losses = [F.mse_loss(o, real), F.l1_loss(o, real)]
    vector = torch.zeros(2).to(o)
    vector[0], vector[1] = losses
    vector *= 2
    return vector.sum() + losses[0].clamp_(max=10)


class Halved(torch.autograd.Function):
    """The identity, but with a backward pass that halves the gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


class Scaled(Tensor):
    """A tensor subclass whose addition multiplies instead."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        is_add = function in (Tensor.add, Tensor.__add__)
        return super().__torch_function__(torch.mul if is_add else function, types, args, kwargs)


def over_all(net: Net, x: Tensor, o: Tensor, ignored: Tensor, real: Tensor) -> dict[str, Tensor]:
    class_loss, box_loss = F.cross_entropy(o, ignored), F.smooth_l1_loss(o, real)
    return {"loss": class_loss + 2 * box_loss, "class": class_loss, "box": box_loss.detach()}


def hits(net: Net, x: Tensor, o: Tensor, y: Tensor) -> Any:
    """Return a cross entropy, the number of right predictions, and their share.

    For the whole batch, the numbers of the chunks add up, and the shares are averaged.
    """
    is_right = (o.argmax(1) == y).double()
    return F.cross_entropy(o, y), is_right.sum(), is_right.mean()


def gram(net: Net) -> Tensor:
    return net.head.weight @ net.head.weight.T


@torch.enable_grad()
def gradient(net: Net, x: Tensor) -> Tensor:
    """Return the gradients of the outputs' sum of squares with respect to the inputs.

    The gradient of a sum over samples consists of one gradient for each sample.
    """
    x = x.detach().requires_grad_()
    return torch.autograd.grad(net.head(x).square().sum(), x, create_graph=True)[0]


PENALTIES: dict[str, Callable[[Net], Any]] = {
    "penalty": lambda n: sum(p.square().sum() for p in n.parameters()),
    "singular values": lambda n: torch.linalg.svdvals(n.head.weight).std(),
    "half a norm": lambda n: (n.head.weight / 2).norm(),
    "softplus by hand": lambda n: n.ones.exp().log1p().sum(),
    "nothing": lambda n: 0.0 * sum(p.sum() for p in n.parameters()),
    "as many weights as samples": lambda n: n.token_head.weight.abs().sum(),
    "orthogonality": lambda n: (gram(n) - torch.eye(CLASSES).to(gram(n))).square().sum(),
    "orthogonality of pairs": lambda n: gram(n)[~torch.eye(CLASSES).bool()].square().sum(),
    "penalty on selected weights": lambda n: n.head.weight[[0, 1]].square().sum(),
    "distance to as many old weights": lambda n: (n.ones * n.ones.detach() - 2).square().sum(),
    "orthogonality of as many": lambda n: (n.ones.outer(n.ones) - torch.eye(12).to(n.ones)).sum(),
    "similar rows": lambda n: (F.normalize(gram(n)) @ F.normalize(gram(n)).T).triu(1).sum(),
    "distance to old weights": lambda n: (n.head.weight - n.head.weight.detach()).square().sum(),
}
"""Terms of a module's weights that are added to a mean loss, by name."""

DIVISORS: dict[str, Callable[[Tensor], Tensor]] = {
    "a count": lambda m: m.sum(),
    "a clamped count": lambda m: m.sum().clamp(min=1),
    "a count plus 1e-12": lambda m: m.sum() + 1e-12,
    "a count plus the number of samples": lambda m: m.sum() + len(m),
    "the clamped largest entry": lambda m: m.max().clamp(min=1),
    "a mean": lambda m: m.mean() + 1e-4,
}
"""Functions of a mask that return the divisor of a masked sum, by name."""

EXACT: dict[str, Callable[..., Any]] = {
    # Means over entries.
    **{
        name: lambda n, x, o, real, name=name: getattr(F, f"{name}_loss")(o, real)
        for name in ("mse", "l1", "smooth_l1", "huber", "soft_margin", "poisson_nll")
    },
    "two columns of rows": lambda n, x, o: torch.stack([rows(o), o.abs().sum(1)], 1).mean(),
    "a number less a mean": lambda n, x, o, real: 3 - 2 * F.mse_loss(o, real),
    "cosine similarity": lambda n, x, o, real: 1 - F.cosine_similarity(o, real).mean(),
    "sorted by length": lambda n, x, o, growing: rows(o[growing.sort(descending=True)[1]]).mean(),
    "entries in order": lambda n, x, o: o.sort(1).values[:, 0].mean() + o.median(1).values.mean(),
    # Sums.
    "sum of sums": lambda n, x, o, real: sum([o.square().sum(), (o - real).abs().sum()]),
    "minus a sum": lambda n, x, o: -1 * o.square().sum() + torch.zeros(1).to(o).squeeze(),
    "variational": lambda n, x, o, part: (
        F.binary_cross_entropy(o.sigmoid(), part, reduction="sum")
        - 0.5 * torch.sum(1 + o - o.square() - o.exp())
    ),
    "sum by length": lambda n, x, o, real: (o - real).square().sum() / len(x),
    "sum by a number": lambda n, x, o, ignored, num_items: summed(o, ignored) / num_items,
    "by a tensor, and a mean": lambda n, x, o, y, items: summed(o, y) / items + rows(o).mean(),
    # Means over what counts.
    "cross entropy": lambda n, x, o, y: F.cross_entropy(o, y),
    "ignored": lambda n, x, o, ignored: F.cross_entropy(o, ignored),
    "smoothed": lambda n, x, o, ignored: F.cross_entropy(o, ignored, label_smoothing=0.1),
    "tokens": lambda n, x, o, tokens: cross_entropy_of_tokens(n, x, tokens),
    "scaled": lambda n, x, o, ignored: (2 * F.cross_entropy(o, ignored) - 1) / 4,
    "in place": lambda n, x, o, ignored: F.cross_entropy(o, ignored).add_(o.square().mean()),
    "count and sum": lambda n, x, o, ignored, real: (
        F.cross_entropy(o, ignored) + F.mse_loss(o, real, reduction="sum")
    ),
    "checkpointed, reentrant": lambda n, x, o, ignored: (
        checkpoint(F.cross_entropy, o, ignored, use_reentrant=True)
        if o.requires_grad
        else F.cross_entropy(o, ignored)
    ),
    "rows by a tensor, by length": lambda n, x, o, items: (rows(o) / items).sum() / len(x),
    "entries by a buffer": lambda n, x, o: (rows(o) / n.temperature).mean(),
    "minus half a sum": lambda n, x, o: -0.5 * o.square().sum(),
    "masked, by an argument": lambda n, x, o, mask, items: (rows(o) * mask).sum() / items,
    "masked": lambda n, x, o, mask: masked_mean(rows(o), mask),
    "masked, none in a chunk": lambda n, x, o, holes: masked_mean(rows(o), holes == 1).view(1),
    "masked, by length": lambda n, x, o, mask: (rows(o) * mask).sum() / len(x),
    "masked, all empty": lambda n, x, o, mask: masked_mean(rows(o), 0 * mask, 1),
    "masked tokens": lambda n, x, o, token_mask: masked_mean(rows(o)[:, None], token_mask, 1),
    # Others.
    "mean in a checkpoint": lambda n, x, o, real: checkpoint(
        lambda o: 2 * F.mse_loss(o, real), o, use_reentrant=False, preserve_rng_state=False
    ),
    "samples in a stack": lambda n, x, o, real: torch.stack(
        [F.mse_loss(*pair) for pair in zip(o, real, strict=True)]
    ).mean(),
    "learned, sum by length": lambda n, x, o: n.ones[1].exp() * rows(o).sum() / len(x) + n.ones[2],
    "moved": lambda n, x, o, real: F.mse_loss(o, real).cpu().to(o.device) * 2,
    "gradient penalty": lambda n, x, o: (
        gradient(n, x).square().sum(1).sqrt().sub(1).square().mean()
    ),
}
"""Losses that are means and sums over samples, or computed from these."""

UNCLEAR: dict[str, Callable[..., Any]] = {
    **{
        f"{name}, alone": lambda n, x, o, penalty=penalty: (rows(o).sum(), penalty(n))
        for name, penalty in PENALTIES.items()
        if "as many" in name
    },
    **{
        name: lambda n, x, o, real, penalty=penalty: F.mse_loss(o, real) + 0.01 * penalty(n)
        for name, penalty in PENALTIES.items()
    },
    **{
        f"sum by {name}": lambda n, x, o, holes, count=count: (rows(o) * holes).sum() / count(holes)
        for name, count in DIVISORS.items()
    },
    "half a masked mean": lambda n, x, o, holes: (
        masked_mean(rows(o), holes) / 2 + rows(o).new_ones(())
    ),
    "summed cross entropy, count": lambda n, x, o, ignored_chunk: (
        summed(o, ignored_chunk) / (ignored_chunk != -100).sum()
    ),
    # Losses that were once silently wrong or raised an error. Some of them are exact.
    "a tensor that is no count": lambda n, x, o: rows(o).sum() / torch.tensor(13.0),
    "sum by an entry": lambda n, x, o, weight: rows(o).sum() / weight[0],
    "mean by an entry": lambda n, x, o, weight: rows(o).mean() * weight[0],
    "penalty by length": lambda n, x, o: rows(o).mean() + n.scale.square() / len(x),
    "learned factor by length": lambda n, x, o: n.scale.exp() / len(x) * rows(o).sum(),
    "root of a penalty by length": lambda n, x, o: (
        rows(o).mean() + (n.head.weight.square().sum() / len(x)).sqrt()
    ),
    "a factor by length": lambda n, x, o: (0.3 / len(x)) * o.square().sum(),
    "weight less data": lambda n, x, o: (x[:, 0] - n.scale).square().sum(),
    "sum times a tensor": lambda n, x, o: rows(o).sum() * torch.tensor(0.5),
    "learned weight of a count": lambda n, x, o, ignored: n.scale * F.cross_entropy(o, ignored),
    "cross entropy times a tensor": lambda n, x, o, y: F.cross_entropy(o, y) * torch.tensor(2.0),
    "cross entropy times its count by length": lambda n, x, o, y: (
        F.cross_entropy(o, y) * (y >= 0).sum() / len(x)
    ),
    "learned factors of a stack": lambda n, x, o, real: (
        torch.stack([F.mse_loss(o, real), F.l1_loss(o, real)]) * n.ones[:2].exp()
    ).sum(),
    "sum and penalty by length": lambda n, x, o: (rows(o).sum() + n.scale.square()) / len(x),
    "empty mask and penalty": lambda n, x, o, holes: (
        (rows(o) * holes).sum() / holes.sum().clamp(min=1) + n.scale.square()
    ),
    "all by a count next to 0": lambda n, x, o, holes: rows(o).sum() / (holes.sum() + 1e-8),
    "vector of means": lambda n, x, o, ignored: (F.cross_entropy(o, ignored) + n.head.bias).mean(),
    "norm of a leaf": lambda n, x, o: rows(o).mean() + x.detach().requires_grad_().norm(),
    "weight times a statistic": lambda n, x, o: rows(o).mean() * (n.scale * x.mean()),
    "penalty of a statistic": lambda n, x, o: (
        rows(o).mean() + (n.head.weight.mean(0) - x.mean(0)).square().sum()
    ),
    "scales that are not 0-dim": lambda n, x, o, ignored, real: (
        torch.stack([F.cross_entropy(o, ignored), *4 * [F.mse_loss(o, real)]]) * n.ones[:5].exp()
    ).sum(),
    "zeros in a stack": lambda n, x, o: torch.stack(
        [rows(o).mean(), n.scale.abs(), torch.zeros(()).to(o)]
    ).sum(),
    "tensor subclass": lambda n, x, o: (o.as_subclass(Scaled) + 2.0).as_subclass(Tensor).sum(),
    "a tenth by length": lambda n, x, o, y: 0.1 * summed(o, y) / len(y),
    "time first": lambda n, x, o: (
        n.tokens(x).transpose(0, 1).square().mean(0).sum()
        + torch.einsum("nc,n->c", o, x[:, 0]).square().mean()
    ),
    # Most of these losses are exact, or become exact with loss_weight or scalar_outputs.
    "weights alone": lambda n, x, o: (n.token_head.weight.abs().sum(), 2 * n.scale.exp()),
    "selected": lambda n, x, o, real, holes: F.mse_loss(o[holes > 0], real[holes > 0]),
    "packed": lambda n, x, o, lengths: (
        pack_padded_sequence(n.tokens(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        .data.square()
        .mean()
    ),
    "selected sum": lambda n, x, o, y: rows(o)[y > 1].sum(),
    "stacked by sample": lambda n, x, o, y: torch.stack(
        [F.cross_entropy(row, label) for row, label in zip(o, y, strict=True)]
    ).mean(dim=0, keepdim=True),
    "by tensors": lambda n, x, o, y, items: 0.9 * summed(o, y) / items + items * o.sum(),
    "counts of unlike weights": lambda n, x, o, ignored, tokens: (
        (-n.scale).exp() * F.cross_entropy(o, ignored)
        + n.scale * cross_entropy_of_tokens(n, x, tokens)
    ),
    "divided by a learned variance": lambda n, x, o, real: (
        F.mse_loss(o, real) / (2 * n.scale.square()) + n.scale.log()
    ),
    "entries by their number": lambda n, x, o: (o.square() / o.numel()).sum(),
    "rows by length, in parts": lambda n, x, o: (rows(o) / len(x) + o.sum(1) / len(x)).sum(),
    "expanded": lambda n, x, o, ignored: F.cross_entropy(o, ignored).expand(len(x)).mean(),
    "expanded, alone": lambda n, x, o, y: rows(o)[y > 1].mean().expand(len(x)).mean(),
    "pairs of selected": lambda n, x, o, y: F.normalize(o[y > 0] @ o[y > 0].T).mean(),
    "scaled entries": lambda n, x, o: (0.3 * o.square()).sum(),
    "summed twice": lambda n, x, o, mask: (o * mask[:, None] / (5 * mask.sum())).sum(1).sum(),
    # Others.
    "masked mean by a statistic": lambda n, x, o, mask: masked_mean(rows(o), mask) / x.abs().mean(),
    "masked sum times its count": lambda n, x, o, mask: (rows(o) * mask).sum() * mask.sum(),
    "sum by its length, times length": lambda n, x, o: (
        rows(o).sum() / torch.tensor(float(len(x))) * len(x)
    ),
    "mean times length": lambda n, x, o, real: F.mse_loss(o, real) * len(x),
    "sum by a buffer": lambda n, x, o, real: (o - real).square().sum() / (2 * n.temperature**2),
    "several outputs": over_all,
    "hits": hits,
    "sum by a sum of weights": lambda n, x, o: (
        (o[:, :4].square() * n.ones[None, :4].detach()).sum() / n.ones[:4].detach().sum()
    ),
    "updated in place": updated,
    "balance of experts": lambda n, x, o: (
        torch.histc(o.detach().argmax(1).double(), CLASSES, 0, CLASSES)
        / o.argmax(1).numel()
        * o.softmax(1).mean(0)
    ).sum(),
    "dice": lambda n, x, o, mask: (
        1 - 2 * (o[:, 0].sigmoid() * mask).sum() / (o[:, 0].sigmoid().sum() + mask.sum())
    ),
    "perplexity": lambda n, x, o, y: F.cross_entropy(o, y).exp(),
    "statistics": lambda n, x, o: o.mean(0).square().sum(),
    "sum and mean": lambda n, x, o, real: F.mse_loss(o, real, reduction="sum") + o.mean(),
    "sum and penalty": lambda n, x, o: o.square().sum() + n.token_head.weight.abs().sum(),
    "means of columns with masks": lambda n, x, o, part: (
        (o.square() * (part > 0.4).double()).sum(0) / (part > 0.4).double().sum(0).clamp(min=1)
    ).mean(),
    "norm": (lambda n, x, o, real: (o - real).norm()),
    "sum by the number of samples less one": (lambda n, x, o: rows(o).sum() / (len(x) - 1)),
    "sum by a deviation": (lambda n, x, o, real: (o - real).square().sum() / real.std().item()),
    "halved gradient": (lambda n, x, o: Halved.apply(rows(o).mean())),
    "classes in a loop": (lambda n, x, o, y: sum(masked_mean(rows(o), y == c) for c in y.unique())),
    "branch": (lambda n, x, o: o.mean() if len(x) < 4 else o.square().mean().mul(2)),
    "trimmed to the longest": lambda n, x, o, growing: (
        n.tokens(x)[:, : 1 + int(growing.max()) % LENGTH].square().mean()
    ),
    "trimmed and flattened": lambda n, x, o, growing: (
        n.tokens(x)[:, : 1 + int(growing.max()) % LENGTH].flatten().square().mean()
    ),
    "normalized weights": lambda n, x, o, weight: (rows(o) * (weight / weight.sum())).sum(),
    "means of steps": lambda n, x, o, growing: (
        n.tokens(x)[:, : 1 + int(growing.max()) % LENGTH].mean((0, 2)).square().sum()
    ),
    "row of one sample": lambda n, x, o, y: n.head.weight[y[:1]].sum(),
}
"""Losses that are not known to be means or sums. They give a warning, even if they are exact."""

UNSEEN: dict[str, Callable[..., Any]] = {
    "mean of rows times length": lambda n, x, o: (rows(o) * len(x)).mean(),
    "balanced cross entropy": (
        lambda n, x, o, y: F.cross_entropy(
            o, y, weight=1 / F.one_hot(y, CLASSES).double().sum(0).clamp(min=1)
        )
    ),
    "weights of mean 1": lambda n, x, o, weight: (rows(o) * (weight / weight.mean())).mean(),
    "samples above their median": lambda n, x, o: rows(o)[rows(o) >= rows(o).median()].mean(),
    "the hardest samples": (lambda n, x, o: rows(o).topk(len(o) - len(o) // 3)[0].mean()),
    "largest of each class": (lambda n, x, o: (o / o.abs().max(0).values.detach()).square().mean()),
    "smaller of two": (
        lambda n, x, o, real: min([(o - real).square().mean(), (o + real).square().mean()])
    ),
    "parameters of each user": (
        lambda n, x, o, ids: torch.outer(n.ones, n.ones)[ids.unique()].sum()
    ),
    "mean times the share of some": (
        lambda n, x, o, real: F.mse_loss(o[1:], real[1:]) * ((len(x) - 1) / len(x))
    ),
    "trimmed, by sample": lambda n, x, o, growing: (
        n.tokens(x)[:, : 1 + int(growing.max()) % LENGTH].square().mean((1, 2)).sqrt().mean()
    ),
    "rare classes": lambda n, x, o, y: masked_mean(rows(o), rarity(y)),
    "a learned number less a statistic": lambda n, x, o: (
        rows(o).mean() + (n.scale.exp() - x.std()).square()
    ),
    "rows beside a mean of selected ones": lambda n, x, o, y: (
        rows(o)[y > 1].mean() + rows(o)
    ).mean(),
    "sum plus a number": lambda n, x, o: o.square().sum() + 1,
    "mixup of the inputs": lambda n, x, o, real: F.mse_loss(n.head((x + x.flip(0)) / 2), real),
}
"""Losses that differ from the whole batch's in a way that the autograd graph does not show.

docs/loss.md describes each of them. ``model.check`` finds the difference.
"""
