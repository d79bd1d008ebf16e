"""Test that random losses are exact, or that a warning says that they may not be.

Each loss is made of expressions that people write, by a grammar. A word in angle brackets stands
for one of the alternatives that the grammar lists for the word. A loss is called silent if it is
not exact and gives no warning.
"""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections import Counter
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from balanced_dp import BalancedDataParallel, BalanceWarning

from .loss_cases import CLASSES, LENGTH, WIDTH, Net

EXPRESSIONS = """
rows =
    (o - real).square().mean(1) | (o - real).abs().sum(1) | (o - real).norm(dim=1) |
    F.cross_entropy(o, y, reduction="none") | (1 - F.cosine_similarity(o, real)) |
    F.binary_cross_entropy_with_logits(o, part, reduction="none").mean(1) |
    -(o.softmax(1) * o.log_softmax(1)).sum(1) | torch.logsumexp(o, 1) |
    -o.log_softmax(1).gather(1, y[:, None]).squeeze(1) |
    (1 - o.softmax(1)[torch.arange(len(x)), y]).square() | F.relu(0.2 - o[:, 1] + o[:, 2]) |
    n.tokens(x).square().mean((1, 2)) |
    F.cross_entropy(n.tokens(x).transpose(1, 2), tokens, reduction="none").sum(1)
matrix =
    (o - real).square() | F.l1_loss(o, real, reduction="none") |
    F.binary_cross_entropy_with_logits(o, part, reduction="none") |
    F.kl_div(o.log_softmax(1), part.softmax(1), reduction="none") |
    (n.scale.exp() * (o - real) ** 2) | (1 + o - o.exp())
words =
    F.cross_entropy(n.tokens(x).transpose(1, 2), tokens, reduction="none") |
    n.tokens(x).square().mean(-1) | (n.tokens(x) - real[:, None]).abs().mean(-1)
mean =
    F.mse_loss(o, real) | F.l1_loss(o, real) | F.smooth_l1_loss(o, real) |
    F.binary_cross_entropy_with_logits(o, part) | F.binary_cross_entropy(o.sigmoid(), part) |
    F.cross_entropy(o, y) | F.cross_entropy(o, y, label_smoothing=0.1) |
    F.cross_entropy(o, y, weight=1 + torch.arange(5.0).double()) | F.cross_entropy(o, ignored) |
    F.nll_loss(o.log_softmax(1), ignored) |
    F.cross_entropy(n.tokens(x).flatten(0, 1), tokens.flatten()) |
    F.cross_entropy(n.tokens(x).transpose(1, 2), tokens) |
    F.kl_div(o.log_softmax(1), part.softmax(1), reduction="batchmean") |
    F.gaussian_nll_loss(o, real, torch.full_like(o, 0.5)) | <rows>.mean() | <matrix>.mean() |
    <words>.mean() | <matrix>.sum(1).mean() | <matrix>.mean(0).sum() | (weight * <rows>).mean() |
    (<sum> / len(x)) | (<matrix>.sum() / o.numel()) | (<words>.sum() / (len(x) * 4)) |
    (F.cross_entropy(o, ignored, reduction="sum") / (ignored != -100).sum())
sum =
    <rows>.sum() | <matrix>.sum() | F.mse_loss(o, real, reduction="sum") |
    F.cross_entropy(o, ignored, reduction="sum") |
    (F.cross_entropy(o, ignored, reduction="sum") / num_items) | (<rows>.sum() / num_items) |
    (-0.5 * <matrix>.sum())
mask =
    mask | mask | weight | (mask > 0).double() | (y != 2).double() | (y > 0) |
    (ignored != -100).double() | (ignored >= 0) | (real[:, 0] > 0).double() |
    (part[:, 0] > 0.3).double() | (o.detach().softmax(1).max(1).values > 0.3).double() |
    (o[:, 0] > o[:, 1]).double() | mask * weight | 1 - mask | (lengths > 1).double()
word mask =
    token_mask | (tokens != -100).double() | (tokens >= 0) |
    (torch.arange(4) < lengths[:, None]).double() | token_mask * mask[:, None]
count =
    m.sum() | m.sum() | m.sum().clamp(min=1) | torch.clamp(m.sum(), min=1.0) | (m.sum() + 1) |
    (m.sum() + 1e-8) | m.sum().item() | float(m.sum()) | max(1, int(m.sum())) |
    max(m.sum().item(), 1) | (m > 0).sum() | m.count_nonzero() | len(m) | x.shape[0] | m.numel() |
    num_items | (m.double().mean() + 1e-6)
masked =
    (<rows> * m).sum() / <count> | (<rows> * m).sum() / <count> | torch.sum(m * <rows>) / <count> |
    (<rows> * m).mean() | (<rows> * m).sum() | <rows>[m > 0].mean() |
    <rows>[m > 0].sum() / <count> | torch.where(m > 0, <rows>, 0).sum() / <count> |
    <rows>.masked_fill(m == 0, 0).sum() / <count> | (<matrix> * m[:, None]).sum() / (<count> * 5) |
    <matrix>[m > 0].mean() | F.mse_loss(o[m > 0], real[m > 0]) |
    F.cross_entropy(o[m > 0], y[m > 0], reduction="sum") / <count> |
    <rows>[m.nonzero()[:, 0]].mean() | <rows>[m > 0].mean() if m.any() else o.sum() * 0 |
    (<rows> * m / <count>).sum()
masked words =
    (<words> * m).sum() / <count> | (<words> * m).sum() / <count> |
    ((<words> * m).sum(1) / m.sum(1).clamp(min=1)).mean() |
    ((<words> * m).sum(1) / (m.sum(1) + 1e-8)).mean() | <words>[m > 0].mean() |
    <words>[m > 0].sum() / <count> | (<words> * m).mean()
sample =
    F.mse_loss(o[i], real[i]) | (o[i] - real[i]).square().sum() |
    F.cross_entropy(o[i : i + 1], y[i : i + 1]) | n.tokens(x)[i, : lengths[i]].square().mean() |
    (o[i, y[i]] - weight[i]).abs()
statistic =
    <mean>.sqrt() | (<sum> / len(x) + 2).abs().sqrt() | <mean>.exp() | <mean> * <mean> |
    <mean> / (<mean> + 1).detach() | <mean> / <mean>.detach() | <mean> / real.abs().mean() |
    <mean> / o.detach().abs().mean() | <sum> / real.abs().sum() | <rows>.sum() / <rows>.sum() |
    o.mean(0).square().sum() |
    (o.softmax(1).mean(0) * F.one_hot(o.argmax(1), 5).double().mean(0)).sum() * 5 |
    1 - 2 * (o.sigmoid() * part).sum() / (o.sigmoid().sum() + part.sum()) |
    1 - ((2 * (o.sigmoid() * part).sum(0) + 1) / ((o.sigmoid() + part).sum(0) + 1)).mean() |
    <rows>.max() | <rows>.topk(max(1, len(x) // 2))[0].mean() | <rows>.median() |
    torch.logsumexp(<rows>, 0) | (<rows> * <rows>.detach().softmax(0)).sum() | (o - real).norm() |
    o.var(0, correction=0).mean() |
    F.cross_entropy(o, y, weight=1 / (1 + F.one_hot(y, 5).double().sum(0))) |
    F.cross_entropy(o @ real.T, torch.arange(len(x))) | (o @ o.T).square().mean() |
    torch.stack([<rows>[y == c].mean() for c in y.unique()]).mean()
linear =
    0.5 * NAME | 1 - NAME | NAME + 0.1 | NAME / n.temperature | NAME * n.scale | NAME * len(x) |
    NAME / len(x) | NAME / 4 | torch.exp(-n.scale) * NAME + n.scale | NAME * weight.mean() |
    NAME + 0.01 * sum(p.square().sum() for p in n.parameters()) |
    NAME + 1e-3 * n.head.weight.abs().sum() | torch.nan_to_num(NAME) |
    NAME if torch.isfinite(NAME) else o.sum() * 0
curved =
    (NAME + 9).sqrt() | (0.1 * NAME).exp() | NAME.clamp(min=0) | F.relu(NAME - 0.2) |
    (NAME - 0.1).abs() | NAME.square() | -(-NAME).exp().log1p() |
    NAME * (0.5 if NAME.item() > 1 else 1.0) | NAME * NAME.detach()
joined =
    a + b | a + 0.5 * b | 0.7 * a + 0.3 * b | (a + b) / 2 | torch.stack([a, b]).mean() |
    sum([a, b]) | a + 0.1 * b / b.detach() | torch.exp(-n.scale) * a + torch.exp(n.scale) * b |
    n.ones[:2].softmax(0) @ torch.stack([a, b]) | a * b | torch.maximum(a, b)
returned =
    loss | loss | loss | loss | {"loss": loss, "first": a.detach()} | {"loss": loss, "logits": o} |
    loss, a | [loss, {"first": a, "hits": (o.argmax(1) == y).double().sum()}] |
    (loss, (o.argmax(1) == y).double().mean())
"""

GRAMMAR = {
    name: re.split(r"\s+\|\s+", alternatives.strip())
    for name, alternatives in re.findall(r"^([\w ]+) =\n((?: {4}.*\n)+)", EXPRESSIONS, re.M)
}
GRAMMAR["block"] = [
    *9 * ["NAME = <mean>"],
    *7 * ["m = <mask>\nNAME = <masked>"],
    *3 * ["m = <word mask>\nNAME = <masked words>", "NAME = <sum>", "<loop>", "NAME = <statistic>"],
]
GRAMMAR["adjusted"] = 13 * [""] + 5 * ["\nNAME = <linear>"] + 2 * ["\nNAME = <curved>"]
GRAMMAR["loop"] = [
    "NAME = 0\nfor i in range(len(x)):\n    NAME = NAME + <sample>\nNAME = NAME / len(x)",
    "NAME = 0\nfor i in range(len(x)):\n    NAME += <sample>",
    "NAME = torch.stack([<sample> for i in range(len(x))]).mean()",
    "NAME = 0\nfor row, goal in zip(o, real):\n    NAME += F.mse_loss(row, goal)\nNAME /= len(o)",
    "NAME = sum(<sample> * mask[i] for i in range(len(x))) / mask.sum()",
    "NAME = o.sum() * 0\nfor i in range(len(x)):\n    if mask[i] > 0:\n        NAME += <sample>\n"
    "NAME = NAME / max(1, int(mask.sum()))",
    "NAME = 0\nfor c in range(5):\n    m = (y == c).double()\n"
    "    NAME = NAME + (<rows> * m).sum() / m.sum().clamp(min=1) / 5",
    "NAME = torch.cat([n.tokens(x)[i, : lengths[i]] for i in range(len(x))]).square().mean()",
]


def expanded(rng: random.Random, text: str) -> str:
    """Replace each word in angle brackets by a random alternative, until no such word is left."""
    while found := re.search(r"<([a-z ]+)>", text):
        text = text[: found.start()] + rng.choice(GRAMMAR[found[1]]) + text[found.end() :]
    return text


def arguments(seed: int, size: int) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(seed)
    x, real = (torch.randn(size, width, generator=gen).double() for width in (WIDTH, CLASSES))
    part, weight = (torch.rand(*s, generator=gen).double() for s in ((size, CLASSES), (size,)))
    y, tokens = (torch.randint(CLASSES, s, generator=gen) for s in ((size,), (size, LENGTH)))
    mask, token_mask = ((torch.rand(t.shape, generator=gen) < 0.6).double() for t in (y, tokens))
    ignored = y.where(torch.rand(size, generator=gen) < 0.7, -100)
    tokens = tokens.where(token_mask > 0, -100)
    lengths = torch.randint(1, LENGTH + 1, (size,), generator=gen)
    num_items = int((ignored != -100).sum())
    return {name: value for name, value in locals().items() if name not in ("seed", "size", "gen")}


def program(seed: int) -> str:
    """Return the source code of a random loss function."""
    rng = random.Random(seed)
    heads = "abc"[: rng.choice([1, 1, 1, 2, 2, 3])]
    lines = [expanded(rng, "<block><adjusted>").replace("NAME", head) for head in heads]
    joined = rng.choice(GRAMMAR["joined"]) if len(heads) > 1 else "a"
    lines.append(f"loss = {joined}" + " + 0.2 * c" * (len(heads) > 2))
    body = "\n".join([*lines, "return " + rng.choice(GRAMMAR["returned"])])
    names = [name for name in [*arguments(0, 2)][1:] if re.search(rf"\b{name}\b", body)]
    return f"def loss({', '.join(['n', 'x', 'o', *names])}):\n    " + body.replace("\n", "\n    ")


def results(model: Any, given: dict[str, Any]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Call a model, and return its 0-dim outputs by name and the gradients of all parameters."""
    found = pytree.tree_flatten_with_path(model(**given))[0]
    named = {".".join(re.findall(r"\w+", pytree.keystr(path))): value for path, value in found}
    losses = {name: value for name, value in named.items() if not value.dim()}
    sum(v * (i + 1) for i, v in enumerate(losses.values()) if v.requires_grad).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return {name: value.detach() for name, value in losses.items()}, gradients


def is_near(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, 1e-6, 1e-6 * min(1.0, float(theirs.abs().max())))


def outcome(source: str, seed: int, gpu0_bsz: int | None, size: int) -> str:
    """Compare the first call of a model that has the loss ``source`` with its bare module.

    Return the outcome in words, such as "exact" or "silent". Return "" if the loss or a gradient of
    the bare module is not finite.
    """
    scope: dict[str, Any] = {"torch": torch, "F": F}
    exec(source, scope)
    torch.manual_seed(seed)
    bare, given = Net(scope["loss"]).double(), arguments(seed, size)
    given = {name: given[name] for name in signature(bare.loss).parameters if name in given}
    model = BalancedDataParallel(gpu0_bsz, copy.deepcopy(bare), ["cpu"] * 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expected, gradients = results(bare, given)
        if not all(tensor.isfinite().all() for tensor in [*expected.values(), *gradients]):
            return ""
        caught.clear()
        try:
            found, own = results(model, given)
        except Exception:
            return "raises"
    texts = [str(w.message) for w in caught if w.category is BalanceWarning]
    texts = [text for text in texts if "has no effect" not in text]
    wrong = [name for name, value in expected.items() if not is_near(found[name], value)]
    if not wrong and all(map(is_near, own, gradients)):
        return "exact" if not texts else "exact and warned of"
    is_of_all = any(text.startswith("the result of ") for text in texts)
    if any(tensor.isnan().any() for tensor in [*found.values(), *own]):
        return "0 / 0"  # of a chunk in which nothing counts, which nobody can overlook
    # A warning of one output says nothing of another one.
    named = [any(f"output {name or '(the whole)'} of" in text for text in texts) for name in wrong]
    return "warned of" if texts and (is_of_all or all(named)) else "silent"


def check(first: int, last: int, uneven: float, even: float) -> None:
    """Check that few of the losses with seeds from ``first`` to ``last`` are silent.

    ``uneven`` and ``even`` are the largest allowed shares of silent losses, for uneven and for even
    splits. If the check fails, it shows the source code of the silent losses.
    """
    splits = [(0, 13), (1, 13), (3, 13), (None, 12)]
    found = {split: Counter[str]() for split in splits}
    shown: list[str] = []
    for seed in range(first, last):
        for split in splits:
            result = outcome(source := program(seed), seed, *split)
            found[split][result] += 1
            if result in ("silent", "raises"):
                shown.append(f"{result}, gpu0_bsz={split[0]}, seed {seed}\n{source}")
    report = "\n\n".join([*shown, *(f"{split}: {dict(own)}" for split, own in found.items())])
    for (gpu0_bsz, _), own in found.items():
        limit = even if gpu0_bsz is None else uneven
        assert not own["raises"] and own["silent"] <= limit * (own.total() - own[""]), report


def test_random_losses_are_exact_or_warned_of():
    check(0, 80, uneven=0.03, even=0.07)  # the share varies in so few


@pytest.mark.slow
def test_many_random_losses_are_exact_or_warned_of():
    check(300, 3300, uneven=0.01, even=0.05)
