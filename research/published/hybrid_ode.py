"""The Hybrid ODE Transformer as published, and the six-layer GPT it was published against.

    x    = E[id] + P[position],   E (V, D), P (128, D)
    block:      x <- x + drop(attn(ln1(x)));   x <- x + mlp(ln2(x))
    ODE block:  dH/dtau = alpha F(H, tau, u),   tau in [0, 1], four Euler steps, in the place of layers 2 and 3
                h = H + time_embed(tau) + control_embed(u);   F = attn(ln1(h)) + mlp(ln2(h))
    logits = head(ln(x))

attn: fused qkv, causal softmax, dropout on its weights; mlp: Linear(D, 4 D) GELU Linear(4 D, D) dropout;
time_embed: Linear(1, D) SiLU Linear(D, D); control_embed: Linear(4, D), whose term is absent without u. 29,781,249
parameters at V = 50257 and D = 256; the baseline has 30,503,424.

Its defects, kept:

* gradients come from the adjoint equation, solved backward by Euler steps of its own: they are those of another scheme
  than the one that made the loss, and dropout is drawn anew on the way back;
* u is set beside the equation and gets no gradient;
* memory is not constant in the number of steps: the state at every time that the solver is asked for is kept;
* dropout stands within the field, so that its right-hand side is another one at every evaluation.

Weights start as PyTorch starts them. tests/test_sources.py runs the publication's own program beside this one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.errors import GlissandoError

LENGTH = 128


class PublishedHybrid(nn.Module):
    """ids (B, T <= 128), control (B, 4) or None -> logits (B, T, V); see the module's docstring.

    ode      False for the baseline, whose six layers have weights of their own
    adjoint  False to differentiate the Euler steps themselves, which the authors did not
    """

    def __init__(
        self,
        vocab_size: int = 50257,
        hidden_size: int = 256,
        heads: int = 4,
        *,
        layers: int = 6,
        ode: bool = True,
        n_steps: int = 4,
        dropout: float = 0.1,
        adjoint: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(LENGTH, hidden_size)
        blocks: list[nn.Module] = [Layer(hidden_size, heads, dropout) for _ in range(layers - 2 if ode else layers)]
        if ode:
            blocks.insert((layers - 2) // 2, ODEBlock(hidden_size, heads, dropout, n_steps, adjoint))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, ids: Tensor, control: Tensor | None = None) -> Tensor:
        return self.head(self.features(ids, control))

    def features(self, ids: Tensor, control: Tensor | None = None) -> Tensor:
        """What the head reads, (B, T, D)."""
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, control) if isinstance(block, ODEBlock) else block(x)
        return self.norm(x)

    @property
    def flow(self) -> ODEBlock:
        return next(block for block in self.blocks if isinstance(block, ODEBlock))


class ODEBlock(nn.Module):
    """The equation from tau = 0 to 1, x (B, T, D) -> (B, T, D)."""

    def __init__(self, size: int, heads: int, dropout: float, n_steps: int, adjoint: bool = True) -> None:
        super().__init__()
        self.field = Field(size, heads, dropout)
        self.n_steps, self.adjoint = n_steps, adjoint

    def forward(self, x: Tensor, control: Tensor | None = None) -> Tensor:
        return self.solve(x, control, "euler")

    def solve(self, x: Tensor, control: Tensor | None = None, method: str = "euler", **options: float) -> Tensor:
        """H(1) by any of torchdiffeq's methods, its tolerances in `options`."""
        self.field.control = control
        times = torch.linspace(0, 1, self.n_steps + 1, dtype=x.dtype, device=x.device)
        solver = torchdiffeq().odeint_adjoint if self.adjoint else torchdiffeq().odeint
        return solver(self.field, x, times, method=method, **options)[-1]


class Field(nn.Module):
    """alpha F(H, tau, u); u is set beside it, because the solver hands it nothing but tau and H."""

    def __init__(self, size: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.inner = Layer(size, heads, dropout)
        self.time_embed = nn.Sequential(nn.Linear(1, size), nn.SiLU(), nn.Linear(size, size))
        self.control_embed = nn.Linear(4, size)
        self.alpha = nn.Parameter(torch.tensor(0.1))
        self.control: Tensor | None = None

    def forward(self, tau: Tensor, x: Tensor) -> Tensor:
        h = x + self.time_embed(tau.reshape(1, 1).to(x.dtype))
        if self.control is not None:
            h = h + self.control_embed(self.control).unsqueeze(1)
        return self.alpha * (self.inner.attend(h) + self.inner.think(h))


class Layer(nn.Module):
    """A pre-norm layer, and the two branches that the field is made of."""

    def __init__(self, size: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln1, self.ln2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.think(x)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        share = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=share)
        return self.out(y.transpose(1, 2).flatten(2))

    def think(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(self.ln2(x)))), self.dropout, self.training)


def torchdiffeq() -> Any:
    """The publication's solvers. Raises GlissandoError where they are not installed."""
    try:
        import torchdiffeq
    except ImportError as error:
        raise GlissandoError("this needs torchdiffeq: pip install torchdiffeq") from error
    return torchdiffeq


def preset_weights(model: PublishedHybrid) -> dict[str, Tensor]:
    """The weights under the names of our presets `hybrid-ode` and, for the baseline, `gpt`."""
    modules = {"embedding": model.embedding, "position_embedding": model.positions, "norm": model.norm}
    modules["head"] = model.head
    weights = {}
    where, number = ("depth.before", 0) if any(isinstance(b, ODEBlock) for b in model.blocks) else ("depth.blocks", 0)
    for block in model.blocks:
        if isinstance(block, ODEBlock):
            field = block.field
            modules |= {"depth.time": field.time_embed, "depth.control": field.control_embed}
            modules |= _parts("depth.field", field.inner)
            weights["depth.alpha"] = field.alpha.detach().reshape(1)
            where, number = "depth.after", 0
        else:
            modules |= _parts(f"{where}.{number}", block)
            number += 1
    named = {f"{name}.{leaf}": value for name, module in modules.items() for leaf, value in module.state_dict().items()}
    return named | weights


def _parts(place: str, block: nn.Module) -> dict[str, nn.Module]:
    ours = {"ln1": "mixer_norm", "qkv": "mixer.qkv", "out": "mixer.out", "ln2": "mlp_norm"}
    ours |= {"up": "mlp.up", "down": "mlp.down"}
    return {f"{place}.{name}": getattr(block, theirs) for theirs, name in ours.items()}
