"""The Minimal Transformer as published: 2,648 parameters, as its code has it, or as the text beside the code tells it.

    h = E[id]
    per layer, with ONE LayerNorm ln1 used twice:
    a = ln1(h);   q, k, v = Wq a, Wk a, Wv a;   q, k <- rotated by angles pos * 10000^(-2i / D), interleaved pairs
    h <- ln1(h + Wo softmax(q k' / sqrt(K), causal) v)
    h <- ln2(h + W2 relu(W1 h))
    logits = W h + b

D = 4, two heads, two layers, an MLP of 8, all linear maps with biases, no final norm. The text adds what the code does
not have (`as_text`): values are rotated too and not rotated back, and dropout min(0.1, 0.5 D / 256) before each
residual.

Its defects, kept:

* attention gives a name for a shape to another shape, so that a batch of B rows of T tokens fails unless B = T
  (`overwrites`);
* the step of training computes the mask of what follows the tab, and scores everything, the padding included;
* nothing ends an output: generation has to be told how long an answer is.

Weights start as PyTorch starts them. tests/test_sources.py runs the publication's own program beside this one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TAB = 9


class PublishedMinimal(nn.Module):
    """ids (B, T) -> logits (B, T, V); see the module's docstring."""

    def __init__(
        self,
        size: int = 4,
        heads: int = 2,
        ffn: int = 8,
        layers: int = 2,
        *,
        vocab_size: int = 256,
        as_text: bool = False,
        dropout: float | None = None,
        overwrites: bool = True,
    ) -> None:
        """dropout: None for the published share, where there is one."""
        super().__init__()
        share = min(0.1, 0.5 * size / 256) if as_text else 0.0
        self.embedding = nn.Embedding(vocab_size, size)
        self.blocks = nn.ModuleList(
            Block(size, heads, ffn, as_text, share if dropout is None else dropout, overwrites) for _ in range(layers)
        )
        self.head = nn.Linear(size, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)

    def training_step(self, ids: Tensor) -> Tensor:
        """The loss of rows `input TAB output`, padded with 0: ids (B, T)."""
        logits, target = self(ids[:, :-1]), ids[:, 1:]
        first_tab = (ids == TAB).int().argmax(1, keepdim=True)
        ignored = torch.arange(target.shape[1], device=ids.device) < first_tab  # noqa: F841 (the defect: never used)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Block(nn.Module):
    """One layer."""

    def __init__(self, size: int, heads: int, ffn: int, rotates_v: bool, dropout: float, overwrites: bool) -> None:
        super().__init__()
        self.heads, self.rotates_v, self.dropout, self.overwrites = heads, rotates_v, dropout, overwrites
        self.ln1, self.ln2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(size, size) for _ in range(4))
        self.up, self.down = nn.Linear(size, ffn), nn.Linear(ffn, size)

    def forward(self, h: Tensor) -> Tensor:
        h = self.ln1(h + self._drop(self.attend(self.ln1(h))))
        return self.ln2(h + self._drop(self.down(F.relu(self.up(h)))))

    def attend(self, a: Tensor) -> Tensor:
        batch, length, size = a.shape
        q, k, v = (w(a).view(batch, length, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, size), rotated(k, size)
        v = rotated(v, size) if self.rotates_v else v
        causal = torch.ones(length, length, dtype=torch.bool, device=a.device).tril()
        if self.overwrites:
            batch, length = causal.shape  # the defect: the rows of the batch are forgotten
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~causal, -torch.inf)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, size))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


def rotated(x: Tensor, width: int) -> Tensor:
    """x (B, H, T, K): pair i turned by pos * 10000^(-2i / width), `width` that of the model and not of a head."""
    length, size = x.shape[-2:]
    rates = 10000 ** (-torch.arange(0, size, 2, dtype=torch.float64, device=x.device) / width)
    angles = torch.arange(length, dtype=torch.float64, device=x.device)[:, None] * rates
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).to(x.dtype)


def preset_weights(model: PublishedMinimal) -> dict[str, Tensor]:
    """The weights under the names of our preset `minimal-transformer`, where q, k and v are one matrix."""
    modules: dict[str, nn.Module] = {"embedding": model.embedding, "head": model.head}
    weights: dict[str, Tensor] = {}
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        place = f"depth.blocks.{i}"
        modules |= {f"{place}.mixer_norm": block.ln1, f"{place}.mlp_norm": block.ln2, f"{place}.mixer.out": block.wo}
        modules |= {f"{place}.mlp.up": block.up, f"{place}.mlp.down": block.down}
        for leaf in ("weight", "bias"):
            parts = [getattr(w, leaf).detach() for w in (block.wq, block.wk, block.wv)]
            weights[f"{place}.mixer.qkv.{leaf}"] = torch.cat(parts)
    return weights | {f"{name}.{leaf}": value for name, m in modules.items() for leaf, value in m.state_dict().items()}
