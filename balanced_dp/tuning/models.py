"""Define the transformers that the built-in workloads train.

A workload is a model with its batches, its loss and its optimizer.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Apply a transformer layer as in GPT-2 (norm first) or BERT (norm last).

    Shape:
        - Input and output: ``(N, T, width)``.
    """

    def __init__(self, width: int, num_heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer."""
        if self.causal:
            x = x + self._attend(self.norm1(x))
            x = x + self.feed_forward(self.norm2(x))
        else:
            x = self.norm1(x + self._attend(x))
            x = self.norm2(x + self.feed_forward(x))
        return x

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


class TokenTransformer(nn.Module):
    """Apply embeddings, transformer layers, and a linear head to token indices.

    The head shares its weight with the token embeddings.

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
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        # The head gets this initial weight, too, because it shares the weight of the tokens.
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        norm = () if causal else (nn.LayerNorm(width),)
        blocks = (Block(width, num_heads, causal, dropout) for _ in range(num_layers))
        # BERT's masked LM head has a layer of its own before the logits.
        last = () if causal else (nn.Linear(width, width), nn.GELU())
        self.layers = nn.Sequential(*norm, nn.Dropout(dropout), *blocks, *last, nn.LayerNorm(width))
        self.head = nn.Linear(width, vocabulary, bias=not causal)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the vocabulary at each position."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.size(1)]
        logits: torch.Tensor = self.head(self.layers(x))
        return logits
