"""A language model with the shapes of OLMo2 in plain torch: the machine with the GPU may lack transformers."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """width: of the hidden state. inner: of the feed-forward. tokens: in the vocabulary."""

    width: int
    layers: int
    inner: int
    tokens: int
    heads: int


SHAPES = {
    "tiny": Shape(64, 2, 128, 256, 4),
    "30M": Shape(384, 12, 1536, 256, 6),
    "125M": Shape(768, 10, 2048, 35_072, 12),
    "1.2B": Shape(2048, 16, 8192, 32_000, 16),
}


class Attention(nn.Module):
    """Causal attention with normalised queries and keys, and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q, self.k, self.v, self.o = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )
        self.q_norm, self.k_norm = (
            nn.RMSNorm(shape.width, eps=1e-6),
            nn.RMSNorm(shape.width, eps=1e-6),
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:  # [batch, length, width] -> the same
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        def turned(y: Tensor) -> Tensor:
            first, second = y.chunk(2, dim=-1)
            return y * cos + torch.cat([-second, first], dim=-1) * sin

        q, k = turned(split(self.q_norm(self.q(x)))), turned(split(self.k_norm(self.k(x))))
        mixed = functional.scaled_dot_product_attention(q, k, split(self.v(x)), is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """One layer: the norms stand after attention and feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.gate, self.up = (nn.Linear(shape.width, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.width, bias=False)
        self.attention_norm, self.feed_norm = (
            nn.RMSNorm(shape.width, eps=1e-6),
            nn.RMSNorm(shape.width, eps=1e-6),
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:  # [batch, length, width] -> the same
        x = x + self.attention_norm(self.attention(x, cos, sin))
        return x + self.feed_norm(self.down(functional.silu(self.gate(x)) * self.up(x)))


class OLMo2(nn.Module):
    """The model; its forward is the mean cross-entropy of the next token."""

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.tokens, shape.width)
        self.layers = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.head = nn.Linear(shape.width, shape.tokens, bias=False)
        half = shape.width // shape.heads // 2
        angles = torch.outer(
            torch.arange(length), 500_000.0 ** (-torch.arange(half) / half)
        ).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length + 1] int64 -> []
        x = self.embedding(tokens[:, :-1])
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
