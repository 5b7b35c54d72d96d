"""The liquid state-space model as published: time constants that follow input and state, and never learn.

    x    = E[id] + P[position],   E (V, D), P (length, D)
    per layer, with ONE gate g for all:    h = layer(ln(x));   x <- x + h g(mean over the sequence of h)
    logits = clamp(head(ln(x)), -50, 50)

    layer:  u = GELU(LN(Linear(D, S)(x)));   y = core(u) * sigmoid(Linear(S, 1)(tanh(Linear(S, S)(state))))
            Linear(2 D, D)(drop(GELU(LN(Linear(D, 2 D)(y))))) + clamp(r, 0, 1) x,   r = 0.1 at first
    core:   ds/dt = -s / tau + A s + B u;   y = c * (C LN(s) + D u) + b
            tau = clamp(clamp(exp(log_tau), .01, 10) (1 + clamp(a, .001, 1) phi(s, u)), .01, 10)
            phi = tanh Linear(2 S, S) tanh LN Linear(I + S, 2 S)
    a token: tau once; dt = clamp(min tau / 10, .001, .1); ten steps s <- clamp(Ad s + Bd u, -1e6, 1e6) with
            [[Ad, Bd], [0, I]] = exp(dt [[M, B], [0, 0]]), M = clamp(A - 1 / tau, -10, 10)

2,711,669 parameters at V = 1000, D = 256, S = 128, four layers, length 512. A, called HiPPO's, is 0.1 times
+sqrt((2i + 1)(2j + 1)) below the diagonal and -(2i + 1) on it, or 0.1 N; B and C are 0.1 N, D is 0, log_tau 0, a 0.1.

Its defects, kept:

* tau, A and B are detached before the discretisation: A, B, log_tau, a and phi get no gradient, and never learn;
* the gate of the layers averages over the whole sequence, so that every position sees the last one;
* dt is the least over the batch and the states, so that rows change each other;
* a matrix exponential of its own for every row, token and layer, one token after the other; ten steps with one Ad are
  one with Ad^10; decoding computes the whole prefix again for every token;
* that A is not LegS (whose signs are the other way and whose diagonal is -(i + 1)), and its transients explode;
* NaN becomes 0 and any infinity, minus infinity too, the upper bound (`safe`); ids out of range are moved into it and
  long inputs cut: all of it silently;
* generation stops at token 2 and takes one row alone; there are no time stamps, so that no series is irregular.

Linear maps start by Xavier's uniform rule with biases of 0, tables N(0, 0.02). The publication takes SciPy's
exponential of [[M, B], [0, 0]], row by row in float64, and rounds Ad and Bd to float32; here it is PyTorch's, of all
rows at once (which is faster), in the type of the weights. tests/test_sources.py runs the publication's own program
beside this one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.mixers.liquid.zero_order_hold import discretize

SUBSTEPS = 10
END = 2


class PublishedLiquid(nn.Module):
    """ids (B, T) -> logits (B, min(T, length), V); see the module's docstring. Not causal, and no row stands alone."""

    def __init__(
        self,
        vocab_size: int = 1000,
        hidden_size: int = 256,
        state_size: int = 128,
        *,
        layers: int = 4,
        length: int = 512,
        hippo: bool = True,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(length, hidden_size)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden_size) for _ in range(layers))
        self.layers = nn.ModuleList(Layer(hidden_size, state_size, hippo, dropout) for _ in range(layers))
        quarter = hidden_size // 4
        self.gate = nn.Sequential(nn.Linear(hidden_size, quarter), nn.GELU(), nn.Linear(quarter, 1), nn.Sigmoid())
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids[:, : self.positions.num_embeddings].clamp(0, self.embedding.num_embeddings - 1)
        x = safe(self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            h = layer(norm(x))
            x = safe(x + h * self.gate(h.mean(1, keepdim=True)))
        return safe(self.head(self.norm(x)), 50)

    @torch.no_grad()
    def generate(self, ids: Tensor, tokens: int, top_p: float = 0.95) -> Tensor:
        """ids (1, T) and up to so many tokens drawn after them, from the likeliest that make up top_p: (1, T + tokens),
        or less where token 2 came or the table of positions ends."""
        self.eval()
        for _ in range(tokens):
            if ids.shape[1] > self.positions.num_embeddings:
                break
            logits, order = self(ids)[:, -1].sort(descending=True)
            p = logits.softmax(-1)
            kept = logits.masked_fill(p.cumsum(-1) - p > top_p, -torch.inf)
            drawn = torch.empty_like(kept).scatter(-1, order, kept).softmax(-1).multinomial(1)
            ids = torch.cat([ids, drawn], 1)
            if drawn.item() == END:
                break
        return ids


class Layer(nn.Module):
    """x (B, T, D), which a norm has read -> (B, T, D)."""

    def __init__(self, size: int, state_size: int, hippo: bool, dropout: float) -> None:
        super().__init__()
        self.input = nn.Sequential(nn.Linear(size, state_size), nn.LayerNorm(state_size), nn.GELU())
        self.core = Core(size, state_size, hippo)
        self.gate = nn.Sequential(nn.Linear(state_size, state_size), nn.Tanh(), nn.Linear(state_size, 1), nn.Sigmoid())
        self.output = nn.Sequential(
            nn.Linear(size, 2 * size), nn.LayerNorm(2 * size), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * size, size)
        )
        self.residual = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        y, states = self.core(self.input(x))
        return self.output(y * self.gate(states)) + self.residual.clamp(0, 1) * x


class Core(nn.Module):
    """The equation: u (B, T, I), I = S unless it is given -> y (B, T, D) and the states (B, T, S)."""

    def __init__(self, size: int, state_size: int, hippo: bool, inputs: int | None = None) -> None:
        super().__init__()
        inputs = inputs or state_size
        noise = 0.1 * torch.randn(state_size, state_size)
        self.A = nn.Parameter(0.1 * called_hippo(state_size) if hippo else noise)
        self.B = nn.Parameter(0.1 * torch.randn(state_size, inputs))
        self.C = nn.Parameter(0.1 * torch.randn(size, state_size))
        self.D = nn.Parameter(torch.zeros(size, inputs))
        self.log_tau = nn.Parameter(torch.zeros(state_size))
        self.a = nn.Parameter(torch.tensor(0.1))
        self.phi = nn.Sequential(
            nn.Linear(state_size + inputs, 2 * state_size),
            nn.LayerNorm(2 * state_size),
            nn.Tanh(),
            nn.Linear(2 * state_size, state_size),
            nn.Tanh(),
        )
        self.norm = nn.LayerNorm(state_size)
        self.scale, self.shift = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        states, _ = self.run(u)
        y = F.linear(self.norm(states), self.C) + F.linear(u, self.D)
        return safe(y * self.scale + self.shift), states

    def run(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The states and the time constants behind every token, (B, T, S) each."""
        state, states, constants = u.new_zeros(len(u), len(self.A)), [], []
        for latest in u.unbind(1):
            tau = self.tau(state, latest)
            state = self.step(state, latest, tau)
            states.append(state)
            constants.append(tau)
        return torch.stack(states, 1), torch.stack(constants, 1)

    def tau(self, state: Tensor, u: Tensor) -> Tensor:
        still = self.log_tau.exp().clamp(0.01, 10)
        return (still * (1 + self.a.clamp(0.001, 1) * self.phi(torch.cat([state, u], -1)))).clamp(0.01, 10)

    def step(self, state: Tensor, u: Tensor, tau: Tensor) -> Tensor:
        # The defect: detached, so that nothing below carries a gradient but the state and the input.
        tau, A, B = tau.detach(), self.A.detach(), self.B.detach()
        dt = max(0.001, min(0.1, 0.1 * tau.min().item()))  # of all rows
        Ad, Bd = discretize(safe(A - torch.diag_embed(1 / tau), 10), B, dt)
        entered = (Bd @ u.unsqueeze(-1)).squeeze(-1)
        for _ in range(SUBSTEPS):
            state = safe((Ad @ state.unsqueeze(-1)).squeeze(-1) + entered)
        return state


def safe(x: Tensor, bound: float = 1e6) -> Tensor:
    """x within +-bound, NaN as 0 and both infinities as bound."""
    return x.nan_to_num(0.0, bound, bound).clamp(-bound, bound)


def called_hippo(size: int) -> Tensor:
    """+sqrt((2i + 1)(2j + 1)) below the diagonal, -(2i + 1) on it: not `glissando.mixers.liquid.hippo_legs`."""
    odd = 2 * torch.arange(size) + 1.0
    return torch.outer(odd, odd).sqrt().tril(-1) - torch.diag(odd)
