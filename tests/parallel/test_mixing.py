"""Test that a warning is given if, and only if, samples of a chunk are mixed with each other."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from balanced_dp import BalancedDataParallel, BalanceWarning

from ..modules import Lambda

BATCH, WIDTH, LENGTH = 13, 6, 5
MIXES = ("pair of samples", "reduces the samples", "runs along the samples")

torch.manual_seed(0)  # for what follows, weights included


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


GIVEN: dict[str, Tensor] = {
    "row": torch.randn(BATCH, WIDTH),
    "kind": whole(3, BATCH),
    "image": torch.randn(BATCH, 3, 8, 8),
    "sequence": torch.randn(BATCH, LENGTH, WIDTH),
    "words": whole(9, BATCH, LENGTH),
    "lengths": torch.tensor([2, 5, 3, 1, 5, 5, 4, 2, 3, 1, 4, 5, 2]),
    "boxes": whole(2, BATCH, LENGTH),
    "edges": whole(2, BATCH, LENGTH, LENGTH),
    "chosen": torch.tensor([1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1]),
    "ends": torch.tensor([3, 1, 2, 5, 6, 1, 1, 2, 4, 3, 5, 3, 2]),
}
GIVEN["long"] = GIVEN["sequence"].transpose(0, 1)
"""The arguments of models, by the names of the parameters of ``forward``."""


def mixes(found: str) -> bool:
    return any(how in found for how in MIXES)


def first_call(module: nn.Module, gpu0_bsz: int, dim: int = 0, **given: Any) -> str:
    """Call a module in training mode on four devices; return the texts of ``BalanceWarning``s."""
    model = BalancedDataParallel(gpu0_bsz, module.train(), ["cpu"] * 4, dim=dim)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(**given)
    return "\n".join(str(w.message) for w in caught if w.category is BalanceWarning)


def net(forward: Callable[..., Any], **members: Any) -> nn.Module:
    """Return a module with the layers ``a`` and ``b``, further members, and the given forward."""
    layers = {"a": nn.Linear(WIDTH, 8), "b": nn.Linear(8, 3)}
    return Lambda(forward, **(layers | members))


# What mixes samples.


def hardest(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z, same = F.normalize(m.a(x)), y[:, None] == y
    distances = torch.cdist(z, z)
    near = distances.masked_fill(same, 9.0).min(1).values
    return F.relu(distances.masked_fill(~same, 0).max(1).values - near + 0.2)


def contrasted(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z, same = F.normalize(m.a(x)), (y[:, None] == y).float()
    shares = (z @ z.T / 0.1).log_softmax(1)
    return -(same * shares).sum(1) / same.sum(1)


def normalized(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0) + 1e-5)


def barlow_twins(m: Any, x: Tensor, y: Tensor) -> Tensor:
    one, other = normalized(m.a(x)), normalized(m.a(x + 0.1))
    return (one.T @ other / len(x) - torch.eye(8)).square().sum()


def mixed_up(m: Any, x: Tensor, order: Callable[[Tensor], Tensor]) -> Tensor:
    hidden = m.a(x).relu()
    return m.b(0.7 * hidden + 0.3 * order(hidden))


ROWS: dict[str, Callable[..., Tensor]] = {
    "triplets": hardest,
    "mixup by flip": lambda m, x, y: mixed_up(m, x, lambda h: h.flip(0)),
    "mixup by roll": lambda m, x, y: mixed_up(m, x, lambda h: h.roll(1, 0)),
    "mixup by cumsum": lambda m, x, y: mixed_up(m, x, lambda h: h.cumsum(0)),
    "mixup by sort": lambda m, x, y: mixed_up(m, x, lambda h: h.sort(0).values),
    "normalization": lambda m, x, y: m.b(normalized(m.a(x))),
    "supervised contrast": contrasted,
    "softmax": lambda m, x, y: m.b(m.a(x).softmax(0)),
    "attention": lambda m, x, y: m.b(attend(*[m.a(x)[None, None]] * 3)[0, 0]),
    "sums of groups": lambda m, x, y: m.b(m.a(x) - torch.zeros(3, 8).index_add(0, y, m.a(x))[y]),
}
LOSSES: dict[str, Callable[..., Tensor]] = {
    f"{name}, loss": lambda m, x, y, rows=rows: rows(m, x, y).square().mean()
    for name, rows in ROWS.items()
}
LOSSES["correlations"] = barlow_twins
LOSSES["distances"] = lambda m, x, y: F.cross_entropy(m.b(m.a(x)), y) + torch.pdist(m.a(x)).mean()
MIXING = ROWS | LOSSES


@pytest.mark.parametrize("gpu0_bsz", [1, 3])
@pytest.mark.parametrize("name", MIXING)
def test_samples_that_are_computed_from_each_other_are_warned_of(name, gpu0_bsz):
    found = first_call(net(MIXING[name]), gpu0_bsz, x=GIVEN["row"], y=GIVEN["kind"])
    assert found if name == "correlations" else mixes(found), found


# What does not.


def convolutional(*layers: nn.Module) -> nn.Module:
    """Return a convolutional network from an image to three numbers, with ``layers`` inside."""
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    layers = nn.Conv2d(3, 8, 3, padding=1), *layers, nn.ReLU(), *head
    return net(lambda m, image: m.all(image), all=nn.Sequential(*layers))


def residual() -> nn.Module:
    layers = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
    return Lambda(lambda m, x: x + m.all(x), all=nn.Sequential(*layers))


def squeezed() -> nn.Module:
    layers = nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 2, 1), nn.ReLU(), nn.Conv2d(2, 8, 1)
    return Lambda(lambda m, x: x * m.gate(x).sigmoid(), gate=nn.Sequential(*layers))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def packed(m: Any, sequence: Tensor, lengths: Tensor) -> Tensor:
    rows = pack_padded_sequence(sequence, lengths.cpu(), batch_first=True, enforce_sorted=False)
    return m.b(pad_packed_sequence(m.rnn(rows)[0], True, total_length=LENGTH)[0])


def u_net(m: Any, image: Tensor) -> Tensor:
    first = m.down(image).relu()
    deep = m.deep(F.max_pool2d(first, 2)).relu()
    return m.up(torch.cat([F.interpolate(deep, scale_factor=2.0), first], 1))


def graph_attention(m: Any, sequence: Tensor, edges: Tensor) -> Tensor:
    h = m.a(sequence)
    scores = F.leaky_relu((h @ m.one)[:, :, None] + (h @ m.other)[:, None])
    return m.b(scores.masked_fill(edges == 0, -1e9).softmax(-1) @ h).mean(1)


def experts(m: Any, sequence: Tensor) -> Tensor:
    tokens = m.a(sequence).flatten(0, 1)
    weights, chosen = m.gate(tokens).softmax(-1).topk(2)
    found = torch.zeros_like(tokens)
    for i, expert in enumerate(m.experts):
        index, slot = (chosen == i).nonzero(as_tuple=True)
        found = found.index_add(0, index, weights[index, slot, None] * expert(tokens[index]))
    return m.b(found.view(len(sequence), -1, 8))


def detector(m: Any, sequence: Tensor, boxes: Tensor) -> dict[str, Tensor]:
    """Compute a loss in a loop over the samples, each of which has another number of boxes."""
    kept = [own[box > 0] for own, box in zip(m.a(sequence), boxes, strict=True)]
    return {"box": torch.stack([m.b(k).square().sum() / max(1, len(k)) for k in kept]).mean()}


def decoded(m: Any, sequence: Tensor, words: Tensor) -> Tensor:
    keys, state = m.rnn(sequence)
    state, found = state[0], []
    for word in m.words(words).unbind(1):
        weights = torch.bmm(keys, state[:, :, None]).softmax(1)
        state = m.cell(torch.cat([word, (weights * keys).sum(1)], 1), state)
        found.append(m.b(state))
    return F.cross_entropy(torch.stack(found, 2), words % 3)


def ctc(m: Any, sequence: Tensor, words: Tensor) -> Tensor:
    shares = m.b(m.a(sequence)).log_softmax(-1).transpose(0, 1)
    lengths = [torch.full((len(words),), n) for n in (LENGTH, 2)]
    return F.ctc_loss(shares, 1 + words[:, :2] % 2, *lengths, zero_infinity=True)


def pooled(m: Any, sequence: Tensor, boxes: Tensor) -> Tensor:
    h, kept = m.a(sequence), boxes[..., None]
    return m.b((h * kept).sum(1) / (1 + kept.sum(1)) + (m.q(h).softmax(1) * h).sum(1))


words, rnn = {"words": nn.Embedding(9, 8)}, {"rnn": nn.GRU(WIDTH, 8, batch_first=True)}
image = {"down": nn.Conv2d(3, 8, 3, padding=1)}

MODELS: dict[str, nn.Module] = {
    "resnet": convolutional(residual(), nn.MaxPool2d(2), residual()),
    "squeeze and excite": convolutional(squeezed()),
    "group norm": convolutional(nn.GroupNorm(2, 8)),
    "instance norm": convolutional(nn.InstanceNorm2d(8)),
    "spectral norm": convolutional(nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 1))),
    "conv3d": net(lambda m, image: m.c(image[:, None]).relu().mean((2, 3)), c=nn.Conv3d(1, 4, 3)),
    "u-net": net(u_net, **image, deep=nn.Conv2d(8, 8, 3, padding=1), up=nn.Conv2d(16, 2, 1)),
    "lstm, packed": net(packed, rnn=nn.LSTM(WIDTH, 8, 2, batch_first=True)),
    "decoder, length first": net(
        lambda m, long: m.all(long[1:], long), all=nn.TransformerDecoderLayer(WIDTH, 2, 8)
    ),
    "mixer": net(lambda m, sequence: m.b(m.a(sequence + m.t(sequence.mT).mT)), t=nn.Linear(5, 5)),
    "fourier": net(lambda m, sequence: m.b(torch.fft.fft2(m.a(sequence)).real).mean(1)),
    "scan": net(lambda m, sequence: m.b(m.a(sequence).cumsum(1).flip(1).roll(1, 1))),
    "pooling": net(pooled, q=nn.Linear(8, 1)),
    "points": net(lambda m, sequence: m.b(m.a(sequence).max(1).values)),
    "bags": net(lambda m, words: m.b(m.t(words)), t=nn.EmbeddingBag(9, 8)),
    "sequence to sequence": net(decoded, **rnn, **words, cell=nn.GRUCell(16, 8)),
    "ctc": net(ctc),
    "graph attention": net(graph_attention, one=parameter(8), other=parameter(8)),
    "experts": net(experts, gate=nn.Linear(8, 4), experts=nn.ModuleList(4 * [nn.Linear(8, 8)])),
    "detector": net(detector),
    "towers": net(lambda m, row, words: (m.a(row) * m.words(words).mean(1)).sum(1), **words),
    "triplets": net(lambda m, sequence: F.triplet_margin_loss(*m.a(sequence).unbind(1)[:3])),
    "pairs of fields": net(lambda m, sequence: m.a(sequence) @ m.a(sequence).mT @ m.a(sequence)),
    "a softmax of one number": net(lambda m, row: m.a(row) * m.t.sum().softmax(0), t=parameter(8)),
    "gumbel": net(lambda m, row: m.b(F.gumbel_softmax(m.a(row), hard=True))),
    "chosen samples": net(lambda m, row, chosen: m.a(row[chosen > 0]).tanh().square().mean()),
    # 3 and 6 words for 3 and 4 samples, which have 3 and 6 pairs. It was warned of, as was DrQA.
    "cut": net(lambda m, sequence, ends: m.a(sequence.repeat(1, 2, 1)[:, : max(ends)]).sum(1)),
    "squares": net(lambda m, row: m.a(row)[torch.arange(8).repeat(len(row), 1) < len(row)].mean()),
    "chosen words": net(lambda m, sequence, boxes: m.a(sequence)[boxes > 0].tanh().square().mean()),
}


def of_this_file(name: str) -> tuple[nn.Module, dict[str, Any]]:
    names = inspect.signature(MODELS[name].function).parameters
    return copy.deepcopy(MODELS[name]), {key: GIVEN[key] for key in GIVEN if key in names}


TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 16}
OTHERS: dict[str, dict[str, Any]] = {
    "MambaForCausalLM": TINY,
    "Qwen3ForCausalLM": {"head_dim": 8, "num_key_value_heads": 2, **TINY},
    "XLNetLMHeadModel": {"d_model": 16, "n_head": 2, "n_layer": 2},
    "BartForConditionalGeneration": {"encoder_layers": 1, "decoder_layers": 1, **HEADS},
    "SwinModel": {"image_size": 32, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2]},
    "ConvNextModel": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
}
FAMILIES = ["gpt2", "llama", "mixtral", "t5", "vit", "whisper", "bert masked", "bert answers"]


def of_transformers(name: str) -> tuple[nn.Module, dict[str, Any]]:
    hf = pytest.importorskip("transformers")
    if name in FAMILIES:
        from ..integrations import families

        family = families.FAMILIES[name]
        samples = [family.sample(i) for i in range(BATCH)]
        return family.make_model().double(), hf.default_data_collator(samples)
    model_class = getattr(hf, name)
    is_of_images = model_class.main_input_name == "pixel_values"
    size = {"window_size": 2} if is_of_images else {"vocab_size": 99}
    model = model_class(model_class.config_class(**size, **OTHERS[name]))
    if is_of_images:
        return model, {"pixel_values": torch.randn(BATCH, 3, 32, 32)}
    return model, dict.fromkeys(("input_ids", "labels"), whole(99, BATCH, 7))


@pytest.mark.parametrize("gpu0_bsz", [1, 3])
@pytest.mark.parametrize("name", [*MODELS, *FAMILIES, *OTHERS])
def test_usual_models_do_not_mix_samples(name, gpu0_bsz):
    module, given = of_this_file(name) if name in MODELS else of_transformers(name)
    found = first_call(module, gpu0_bsz, int("long" in given), **given)
    assert not mixes(found), found
