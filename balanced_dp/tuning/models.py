"""Define the models of the built-in workloads, in plain PyTorch without devices."""

from __future__ import annotations

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
