"""Define the models of the built-in workloads, in plain PyTorch without devices."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional


class CharTransformer(nn.Module):
    """Apply a causal transformer to characters.

    Shape:
        - Input: character indices, ``(N, T)``, with T at most ``context``.
        - Output: logits, ``(N, T, vocabulary)``.
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
        """Return the logits of the next character at each position."""
        length = characters.size(1)
        positions = torch.arange(length, device=characters.device)
        future = torch.ones(length, length, dtype=torch.bool, device=characters.device).triu(1)
        x = self.characters(characters) + self.positions(positions)
        x = self.layers(x, mask=future, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Apply a transformer layer as in GPT-2 (norm first) or BERT (norm last).

    Shape:
        - Input and output: ``(N, T, width)``.
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
        """Return the layer's output."""
        if self.causal:
            x = x + self._attend(self.norm1(x))
            return x + self._feed_forward(self.norm2(x))
        x = self.norm1(x + self._attend(x))
        normed: torch.Tensor = self.norm2(x + self._feed_forward(x))
        return normed

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        n, t, width = x.shape
        heads = self.qkv(x).view(n, t, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=self.causal
        )
        out = self.out(attended.transpose(1, 2).reshape(n, t, width))
        return functional.dropout(out, self.dropout, self.training)

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(
            self.down(functional.gelu(self.up(x))), self.dropout, self.training
        )


class TokenTransformer(nn.Module):
    """Apply embeddings, layers, and a head that is tied to the token embeddings.

    Shape:
        - Input: token indices, ``(N, T)``.
        - Output: logits, ``(N, T, vocabulary)``.
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
        self.embedding_norm = nn.Identity() if causal else nn.LayerNorm(width)
        self.layers = nn.Sequential(*(Block(width, num_heads, causal) for _ in range(num_layers)))
        # BERT's masked LM head has a layer of its own before the logits.
        self.transform = nn.Sequential(
            *(() if causal else (nn.Linear(width, width), nn.GELU())), nn.LayerNorm(width)
        )
        self.head = nn.Linear(width, vocabulary, bias=not causal)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits at each position."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.size(1)]
        x = functional.dropout(self.embedding_norm(x), 0.1, self.training)
        logits: torch.Tensor = self.head(self.transform(self.layers(x)))
        return logits


class RelativeAttention(nn.Module):
    """Apply Transformer-XL's attention to the memory and the segment, by relative position.

    Shape:
        - Input: x ``(N, T, D)``, memory ``(N, M, D)``, positions ``(M + T, D)``, the
          two biases ``(heads, D / heads)``; output ``(N, T, D)``.

    Source:
        Dai et al. 2019, https://arxiv.org/abs/1901.02860, section 3.3.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.position = nn.Linear(width, width, bias=False)
        self.out = nn.Sequential(nn.Linear(width, width, bias=False), nn.Dropout(0.1))

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor,
        positions: torch.Tensor,
        content_bias: torch.Tensor,
        position_bias: torch.Tensor,
    ) -> torch.Tensor:
        """Return the attended values of each position."""
        n, t, width = x.shape
        m = memory.size(1)
        query = self.query(x).view(n, t, self.num_heads, -1)
        both = self.key_value(torch.cat([memory, x], 1))
        key, value = both.view(n, m + t, 2, self.num_heads, -1).unbind(2)
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
    """Shift row i of the scores by distance, so that column j belongs to key j."""
    n, h, t, k = scores.shape
    padded = functional.pad(scores, (1, 0)).view(n, h, k + 1, t)
    return padded[:, :, 1:].reshape(n, h, t, k)


class TransformerXL(nn.Module):
    """Apply Transformer-XL with a tied adaptive softmax.

    Like the original, for which ``gpu0_bsz`` was introduced, it returns the loss of each token and
    the memory for the next segment.

    Shape:
        - Input: tokens and targets ``(N, T)``, and for each layer memory ``(N, M, width)``.
        - Output: losses ``(N, T)``, and the new memories.
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
                nn.Linear(width, inner),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(inner, width),
                nn.Dropout(0.1),
            )
            for _ in range(num_layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * num_layers))

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, *memories: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the loss of each token, and the memory of each layer."""
        embedded = self.tokens(tokens) * self.tokens.embedding_dim**0.5
        x = functional.dropout(embedded, 0.1, self.training)
        distances = torch.arange(memories[0].size(1) + x.size(1) - 1, -1, -1, device=x.device)
        positions = self._positions(distances)
        kept = []
        for i, memory in enumerate(memories):
            kept.append(x.detach())
            biases = (self.content_bias, self.position_bias)
            x = self.norms[2 * i](x + self.attentions[i](x, memory, positions, *biases))
            x = self.norms[2 * i + 1](x + self.feed_forwards[i](x))
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


def _normed_conv(channels: int, width: int, size: int, stride: int = 1) -> nn.Module:
    conv = nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width))


class Bottleneck(nn.Module):
    """Apply ResNet's bottleneck block.

    Shape:
        - Input: ``(N, C, H, W)``; output: ``(N, 4 width, H/stride, W/stride)``.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _normed_conv(channels, width, 1),
            nn.ReLU(inplace=True),
            _normed_conv(width, width, 3, stride),
            nn.ReLU(inplace=True),
            _normed_conv(width, 4 * width, 1),
        )
        self.shortcut = (
            nn.Identity()
            if channels == 4 * width and stride == 1
            else _normed_conv(channels, 4 * width, 1, stride)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        return functional.relu(self.layers(x) + self.shortcut(x), inplace=True)


def resnet50() -> nn.Module:
    """Return ResNet-50's layers; images ``(N, 3, H, W)`` to logits ``(N, 1000)``."""
    stages: list[nn.Module] = [
        _normed_conv(3, 64, 7, 2),
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
