"""A GPT as small as it can be written, in PyTorch's own modules: the peer of the 124M models in training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2's architecture (Radford et al. 2019): learned positions, LayerNorm before each part, GELU, a tied head."""

    def __init__(self, vocab_size: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.width, self.layers = width, layers
        self.embedding, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T) -> logits (B, T, V)."""
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return F.linear(self.norm(self.blocks(x)), self.embedding.weight)

    def training_flops(self, length: int) -> float:
        """Per token of a training step, counted as in glissando.flops: all `length` keys at every position."""
        maps = sum(module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear))
        forward = 2.0 * (maps + self.embedding.weight.numel()) + 4.0 * length * self.width * self.layers
        return 3.0 * forward
