"""The Tauformer as published: attention by the distance of one number a head, and the GPT that it was made from.

    x    = E[id]
    per layer:  x <- x + Wo attn(norm(x));   x <- x + W2 relu(W1 norm(x))^2      norm: RMS, without parameters
    attn:  q, k, v = Wq x, Wk x, Wv x;   q, k <- norm(rope(q)), norm(rope(k))
           lambda = E / (E + tau),   E(x) = x'Lx / (x'x + eps)            L over the K features of a head
           o_i = sum_{j <= i} softmax_j( -|lambda^q_i - lambda^k_j| / T ) v_j
    logits = W norm(x)

6 layers, 6 heads of 64, 30,522 words, untied: 34,057,728 parameters. T = 1, eps = 1e-6. tau is one number, calibrated
at the start as the median energy of the first layer's keys. The cache holds v and lambda_k.

The article has lambda, the logits, the sizes and the calibration, and no program. The rest is of its author's crate
`tauformer` (github.com/tuned-org-uk/tauformer): norms, the MLP, eps, T, the chain, and that the sparse path is out of
the graph of gradients, where the article says that gradients flow through lambda. Of the crate are left out: clamps of
q, k and v to +-5 and of logits to +-50, a soft cap of 15 where it generates, its Kaiming start (N(0, 0.02) here), and
that its sparse path takes the median of each vector's own entries for tau.

Its defects, kept:

* the sparse path computes E outside the graph of gradients, so that Wq and Wk get none and never learn (`detached`);
* with T = 1 and lambda in [0, 1) no weight is more than e times another: attention is an average;
* causal attention costs N x N, although the logit is a distance of two numbers;
* whoever gives a Laplacian gives one of the head's size, whatever the width of the domain's vectors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.mixers.tau.laplacian import chain

EPS = 1e-6


class PublishedTauformer(nn.Module):
    """ids (B, T) -> logits (B, T, V); see the module's docstring.

    softmax    attention by products of q and k instead: the GPT beside it
    detached   False to let gradients through E, which the sparse path does not
    """

    tau: Tensor

    def __init__(
        self,
        vocab_size: int = 30522,
        hidden_size: int = 384,
        heads: int = 6,
        layers: int = 6,
        *,
        laplacian: Tensor | None = None,
        temperature: float = 1.0,
        softmax: bool = False,
        detached: bool = True,
    ) -> None:
        super().__init__()
        self.register_buffer("tau", torch.tensor(1.0))
        with torch.device("cpu"):  # a model without memory has a graph with values all the same
            graph = chain(hidden_size // heads) if laplacian is None else laplacian
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList(
            Block(hidden_size, heads, graph.float(), temperature, softmax, detached) for _ in range(layers)
        )
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.tau)
        return self.head(norm(x))

    @torch.no_grad()
    def key_energies(self, ids: Tensor) -> Tensor:
        """E (B, H, T) of the first layer's keys."""
        block = self.blocks[0]
        assert isinstance(block, Block)
        _, k, _ = block.projected(norm(self.embedding(ids)))
        return energy(k, block.laplacian)

    def calibrate(self, ids: Tensor) -> float:
        """tau becomes the median energy of the first layer's keys."""
        self.tau.fill_(self.key_energies(ids).median())
        return float(self.tau)

    @torch.no_grad()
    def cache(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What decoding keeps of ids, per layer: v (B, H, T, K), and lambda_k (B, H, T) or k (B, H, T, K)."""
        x, kept = self.embedding(ids), []
        for block in self.blocks:
            assert isinstance(block, Block)
            _, k, v = block.projected(norm(x))
            kept.append((v, k if block.softmax else block.scalar(k, self.tau)))
            x = block(x, self.tau)
        return kept

    @torch.no_grad()
    def effective_share(self, ids: Tensor) -> float:
        """exp(entropy) of the attention of the last query over the number of keys: the mean over layers and heads."""
        x, shares = self.embedding(ids), []
        for block in self.blocks:
            assert isinstance(block, Block)
            p = block.weights(norm(x), self.tau)[:, :, -1]
            shares.append(torch.special.entr(p).sum(-1).exp().mean() / ids.shape[1])
            x = block(x, self.tau)
        return float(torch.stack(shares).mean())


class Block(nn.Module):
    """One layer."""

    laplacian: Tensor

    def __init__(
        self, size: int, heads: int, laplacian: Tensor, temperature: float, softmax: bool, detached: bool
    ) -> None:
        super().__init__()
        self.heads, self.temperature, self.softmax, self.detached = heads, temperature, softmax, detached
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(size, 4 * size, bias=False), nn.Linear(4 * size, size, bias=False)
        self.register_buffer("laplacian", laplacian)

    def forward(self, x: Tensor, tau: Tensor) -> Tensor:
        x = x + self.attend(norm(x), tau)
        return x + self.down(F.relu(self.up(norm(x))).square())

    def attend(self, x: Tensor, tau: Tensor) -> Tensor:
        if self.softmax:
            y = F.scaled_dot_product_attention(*self.projected(x), is_causal=True)
        else:
            y = self.weights(x, tau) @ self.projected(x)[2]
        return self.wo(y.transpose(1, 2).flatten(2))

    def weights(self, x: Tensor, tau: Tensor) -> Tensor:
        """(B, H, T, T)."""
        q, k, _ = self.projected(x)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if self.softmax:
            logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        else:
            logits = -(self.scalar(q, tau).unsqueeze(-1) - self.scalar(k, tau).unsqueeze(-2)).abs() / self.temperature
        return logits.masked_fill(~causal, -torch.inf).softmax(-1)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v (B, H, T, K)."""
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return norm(rotated(q)), norm(rotated(k)), v

    def scalar(self, x: Tensor, tau: Tensor) -> Tensor:
        """lambda (B, H, T) of x (B, H, T, K)."""
        # The defect: the sparse product is made of plain numbers, and what comes of it has no gradient.
        e = energy(x.detach() if self.detached else x, self.laplacian)
        return e / (e + tau)


def energy(x: Tensor, laplacian: Tensor) -> Tensor:
    """x'Lx / (x'x + eps) over the last dimension."""
    return ((x @ laplacian) * x).sum(-1) / (x.square().sum(-1) + EPS)


def norm(x: Tensor) -> Tensor:
    """Over the root mean square, without parameters."""
    return F.rms_norm(x, (x.shape[-1],))


def rotated(x: Tensor) -> Tensor:
    """x (B, H, T, K): RoPE, pairs (i, i + K / 2), base 10000."""
    length, size = x.shape[-2:]
    rates = 10000 ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float64) / size)
    angle = torch.arange(length, device=x.device, dtype=torch.float64)[:, None] * rates
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
