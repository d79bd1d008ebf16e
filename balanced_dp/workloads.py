"""What is trained: a model, its batches, its loss and its optimizer, and nothing of devices."""

from __future__ import annotations

import functools
import importlib
import pydoc_data.topics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .errors import ArgumentError, ArgumentTypeError

Batch = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Positional and keyword arguments of the model, and the target."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that a training step needs but the devices.

    Attributes:
        model: makes the module, on torch's default device, so that a model larger than this
            machine's memory can be made on emulated ones.
        make_batch: gives the arguments of the model and the target for a batch of that many
            samples, on the CPU.
        loss: gives the 0-dim loss of the model's output and the target.
        make_optimizer: gives the optimizer of the parameters.
        name: what reports call it.
        batch_size: a batch size that is usual for it.
    """

    model: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]
    loss: Callable[[Any, Any], torch.Tensor]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW
    name: str = "workload"
    batch_size: int = 32


def find_workload(target: str) -> Workload:
    """Returns the built-in workload of that name, or what ``package.module:function`` gives.

    Raises:
        ArgumentError: there is none.
        ArgumentTypeError: the function gives something else.
    """
    if target in BUILT_IN:
        return BUILT_IN[target]()
    module_name, _, function_name = target.partition(":")
    if not function_name:
        raise ArgumentError(
            f"there is no workload {target!r}; built in are {', '.join(BUILT_IN)}, and your own is "
            "named package.module:function"
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"workload {target!r} cannot be loaded: {error}") from error
    workload = function() if callable(function) else function
    if not isinstance(workload, Workload):
        raise ArgumentTypeError(
            f"{target} must give a balanced_dp.Workload, but gave {type(workload).__name__}"
        )
    return workload


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class CharTransformer(nn.Module):
    """A causal transformer over characters.

    Shape:
        - Input: character indices, :math:`(N, T)`, with T at most ``context``.
        - Output: logits, :math:`(N, T, vocabulary)`.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int = 64,
        width: int = 128,
        num_heads: int = 4,
        num_layers: int = 4,
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width,
            num_heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the next character at each position."""
        length = characters.size(1)
        positions = torch.arange(length, device=characters.device)
        future = torch.ones(length, length, dtype=torch.bool, device=characters.device).triu(1)
        x = self.characters(characters) + self.positions(positions)
        x = self.layers(x, mask=future, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def load_text() -> str:
    """Returns about 0.5 MB of English: the language reference that comes with every Python."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


@functools.cache
def encoded_text() -> tuple[torch.Tensor, int]:
    """Returns the text as indices of its characters, and how many different ones there are."""
    text = load_text()
    index = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([index[character] for character in text]), len(index)


def char_lm() -> Workload:
    """The demo's: a transformer over characters of real text, T=64."""
    encoded, vocabulary = encoded_text()

    def make_batch(batch_size: int) -> Batch:
        starts = torch.arange(batch_size)[:, None] * 67 % (len(encoded) - 65)
        samples = encoded[starts + torch.arange(65)]
        return (samples[:, :-1],), {}, samples[:, 1:]

    return Workload(lambda: CharTransformer(vocabulary), make_batch, _token_loss, name="char-lm")


class Block(nn.Module):
    """A transformer layer as in GPT-2 (norm first) or BERT (norm last).

    Shape:
        - Input and output: :math:`(N, T, width)`.
    """

    def __init__(self, width: int, num_heads: int, causal: bool, dropout: float = 0.1) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output."""
        if self.causal:
            x = x + self._attend(self.norm1(x))
            return x + self._feed_forward(self.norm2(x))
        x = self.norm1(x + self._attend(x))
        normed: torch.Tensor = self.norm2(x + self._feed_forward(x))
        return normed

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        n, t, width = x.shape
        heads = self.qkv(x).view(n, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            heads[0],
            heads[1],
            heads[2],
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        out = self.out(attended.transpose(1, 2).reshape(n, t, width))
        return functional.dropout(out, self.dropout, self.training)

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(
            self.down(functional.gelu(self.up(x))), self.dropout, self.training
        )


class TokenTransformer(nn.Module):
    """Token and position embeddings, layers, and a head that is tied to the embeddings.

    Shape:
        - Input: token indices, :math:`(N, T)`.
        - Output: logits, :math:`(N, T, vocabulary)`.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        causal: bool,
        width: int = 768,
        num_heads: int = 12,
        num_layers: int = 12,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Block(width, num_heads, causal) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        # BERT's masked LM head has a layer of its own before the logits.
        self.transform = (
            nn.Identity()
            if causal
            else nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        )
        self.head = nn.Linear(width, vocabulary, bias=not causal)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits at each position."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.size(1)]
        x = functional.dropout(self.norm(x) if not self.layers[0].causal else x, 0.1, self.training)
        for layer in self.layers:
            x = layer(x)
        if self.layers[0].causal:
            x = self.norm(x)
        logits: torch.Tensor = self.head(self.transform(x))
        return logits


def _tokens(batch_size: int, length: int, vocabulary: int) -> torch.Tensor:
    """Returns tokens that are the same on each call; memory does not depend on which they are."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (batch_size, length), generator=generator)


def gpt2_small() -> Workload:
    """GPT-2 small (124M parameters, vocabulary 50257), T=256."""

    def make_batch(batch_size: int) -> Batch:
        tokens = _tokens(batch_size, 257, 50257)
        return (tokens[:, :-1],), {}, tokens[:, 1:]

    return Workload(
        lambda: TokenTransformer(50257, 1024, causal=True),
        make_batch,
        _token_loss,
        name="gpt2-small",
    )


def bert_base() -> Workload:
    """BERT-base with its masked LM head (110M parameters, vocabulary 30522), T=128."""

    def make_batch(batch_size: int) -> Batch:
        tokens = _tokens(batch_size, 128, 30522)
        labels = tokens.where(torch.arange(128) % 7 == 0, -100)
        return (tokens,), {}, labels

    return Workload(
        lambda: TokenTransformer(30522, 512, causal=False),
        make_batch,
        _token_loss,
        name="bert-base",
    )


class RelativeAttention(nn.Module):
    """Transformer-XL's attention over the memory and the segment, by relative position.

    Shape:
        - Input: x :math:`(N, T, D)`, memory :math:`(N, M, D)`, positions :math:`(M + T, D)`, the
          two biases :math:`(heads, D / heads)`; output :math:`(N, T, D)`.

    Source:
        Dai et al. 2019, https://arxiv.org/abs/1901.02860, section 3.3.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.position = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor,
        positions: torch.Tensor,
        content_bias: torch.Tensor,
        position_bias: torch.Tensor,
    ) -> torch.Tensor:
        """Returns what each position attends to."""
        n, t, width = x.shape
        m = memory.size(1)
        query = self.query(x).view(n, t, self.num_heads, -1)
        key, value = self.key_value(torch.cat([memory, x], 1)).chunk(2, -1)
        key = key.reshape(n, m + t, self.num_heads, -1)
        value = value.reshape(n, m + t, self.num_heads, -1)
        position = self.position(positions).view(m + t, self.num_heads, -1)
        by_content = torch.einsum("nihd,njhd->nhij", query + content_bias, key)
        by_position = torch.einsum("nihd,jhd->nhij", query + position_bias, position)
        scores = (by_content + _shifted(by_position)) * (width // self.num_heads) ** -0.5
        later = torch.ones(t, m + t, dtype=torch.bool, device=x.device).triu(m + 1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        attended = torch.einsum("nhij,njhd->nihd", weights, value)
        out: torch.Tensor = self.out(attended.reshape(n, t, width))
        return out


def _shifted(scores: torch.Tensor) -> torch.Tensor:
    """Moves row i of the scores by distance so that column j stands for key j."""
    n, h, t, k = scores.shape
    padded = functional.pad(scores, (1, 0)).view(n, h, k + 1, t)
    return padded[:, :, 1:].reshape(n, h, t, k)


class TransformerXL(nn.Module):
    """The base model of the recipe that ``gpu0_bsz`` comes from: adaptive softmax, tied, memory.

    It returns its loss for each token, and the memory for the next segment, as there.

    Shape:
        - Input: tokens and targets :math:`(N, T)`, and for each layer memory :math:`(N, M, width)`.
        - Output: losses :math:`(N, T)`, and the new memories.
    """

    def __init__(
        self,
        vocabulary: int = 267735,
        cutoffs: tuple[int, ...] = (20000, 40000, 200000),
        width: int = 410,
        num_heads: int = 10,
        inner: int = 2100,
        num_layers: int = 16,
    ) -> None:
        super().__init__()
        self.bounds = (0, *cutoffs, vocabulary)
        self.tokens = nn.Embedding(vocabulary, width)
        self.clusters = nn.Parameter(torch.zeros(len(cutoffs), width))
        self.content_bias = nn.Parameter(torch.zeros(num_heads, width // num_heads))
        self.position_bias = nn.Parameter(torch.zeros(num_heads, width // num_heads))
        self.attentions = nn.ModuleList(
            RelativeAttention(width, num_heads) for _ in range(num_layers)
        )
        self.feed_forwards = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, inner), nn.ReLU(), nn.Dropout(0.1), nn.Linear(inner, width)
            )
            for _ in range(num_layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * num_layers))

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, *memories: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns the loss of each token, and the memory of each layer."""
        embedded = self.tokens(tokens) * self.tokens.embedding_dim**0.5
        x = functional.dropout(embedded, 0.1, self.training)
        distances = torch.arange(memories[0].size(1) + x.size(1) - 1, -1, -1, device=x.device)
        positions = self._positions(distances)
        kept = []
        for i, (attention, feed_forward) in enumerate(
            zip(self.attentions, self.feed_forwards, strict=True)
        ):
            kept.append(x.detach())
            biases = (self.content_bias, self.position_bias)
            attended = attention(x, memories[i], positions, *biases)
            x = self.norms[2 * i](x + functional.dropout(attended, 0.1, self.training))
            x = self.norms[2 * i + 1](x + functional.dropout(feed_forward(x), 0.1, self.training))
        losses = self._losses(x.flatten(0, 1), targets.flatten()).view_as(targets)
        return losses, *kept

    def _positions(self, distances: torch.Tensor) -> torch.Tensor:
        width = self.tokens.embedding_dim
        steps = torch.arange(0, width, 2, device=distances.device)
        angles = distances[:, None] / 10000 ** (steps / width)
        return torch.cat([angles.sin(), angles.cos()], -1)

    def _losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        weight = self.tokens.weight
        first = self.bounds[1]
        head = functional.linear(hidden, torch.cat([weight[:first], self.clusters]))
        head = head.log_softmax(-1)
        losses = hidden.new_zeros(len(targets))
        for i, (low, high) in enumerate(pairwise(self.bounds)):
            rows = ((targets >= low) & (targets < high)).nonzero().squeeze(1)
            if not len(rows):
                continue
            inside = (targets[rows] - low)[:, None]
            if i:
                tail = functional.linear(hidden[rows], weight[low:high]).log_softmax(-1)
                found = head[rows, first + i - 1] + tail.gather(1, inside).squeeze(1)
            else:
                found = head[rows].gather(1, inside).squeeze(1)
            losses = losses.index_copy(0, rows, -found)
        return losses


def transformer_xl_base() -> Workload:
    """Transformer-XL base on WikiText-103's vocabulary, T=150, memory 150 (151M parameters)."""

    def make_batch(batch_size: int) -> Batch:
        # Word frequencies fall as 1 / rank: each order of magnitude has as many tokens.
        ranks = (267735 ** torch.linspace(0, 0.9999, 151)).long()
        tokens = ranks[torch.arange(151) * 67 % 151].expand(batch_size, -1)
        memories = [torch.zeros(1, 150, 410).expand(batch_size, -1, -1) for _ in range(16)]
        return (tokens[:, :-1], tokens[:, 1:], *memories), {}, None

    return Workload(
        TransformerXL,
        make_batch,
        lambda output, _: output[0].mean(),
        functools.partial(torch.optim.Adam, lr=0.00025),
        name="transformer-xl-base",
        batch_size=60,
    )


class Bottleneck(nn.Module):
    """ResNet's bottleneck block.

    Shape:
        - Input: :math:`(N, C, H, W)`; output: :math:`(N, 4 width, H/stride, W/stride)`.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut = (
            nn.Identity()
            if channels == 4 * width and stride == 1
            else nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the block's output."""
        return functional.relu(self.layers(x) + self.shortcut(x), inplace=True)


def _resnet50() -> nn.Module:
    stages: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for index, num_blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**index
        for block in range(num_blocks):
            stages.append(Bottleneck(channels, width, 2 if index and not block else 1))
            channels = 4 * width
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def resnet50_shaped() -> Workload:
    """ResNet-50's layers (25.6M parameters) on images of 224 x 224, SGD with momentum."""

    def make_batch(batch_size: int) -> Batch:
        images = torch.zeros(1, 3, 224, 224).expand(batch_size, -1, -1, -1)
        return (images,), {}, torch.arange(batch_size) % 1000

    return Workload(
        _resnet50,
        make_batch,
        functional.cross_entropy,
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        name="resnet50-shaped",
        batch_size=64,
    )


BUILT_IN: dict[str, Callable[[], Workload]] = {
    "char-lm": char_lm,
    "gpt2-small": gpt2_small,
    "bert-base": bert_base,
    "transformer-xl-base": transformer_xl_base,
    "resnet50-shaped": resnet50_shaped,
}
"""The built-in workloads by name."""
