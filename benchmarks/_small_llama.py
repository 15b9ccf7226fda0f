"""A transformer of Llama's shape, in any size: what the distributed benchmark trains, and what the formulas count.

Rotary positions are left out: they have no parameters, and what they keep for the backward is one small table.
"""

from __future__ import annotations

import torch
from _scaling_model import Shape
from torch import nn


class Attention(nn.Module):
    """Causal attention of `heads` heads, without biases."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_width = hidden // heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        # -1: under tensor parallelism a process has some of the heads only.
        query, key, value = (
            layer(x_BTH).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x_BTH)) * self.up(x_BTH))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and beside the residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape.hidden, shape.heads)
        self.feed_forward = FeedForward(shape.hidden, shape.inner)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        x_BTH = x_BTH + self.attention(self.attention_norm(x_BTH))
        return x_BTH + self.feed_forward(self.feed_forward_norm(x_BTH))


class SmallLlama(nn.Module):
    """Embedding, layers, norm and an untied head: (batch, time) token numbers to (batch, time, tokens) logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.tokens, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.tokens, bias=False)

    def forward(self, numbers_BT: torch.Tensor) -> torch.Tensor:
        x_BTH = self.embedding(numbers_BT)
        for block in self.blocks:
            x_BTH = block(x_BTH)
        return self.head(self.norm(x_BTH))
