"""The tau mixer: causal attention by one Laplacian scalar a head, of the Tauformer.

    E(x) = x'Lx / (x'x + eps),   lambda = E / (E + tau)               for rotated q_i and k_j
    y_i  = Wo [ silu(Wg x_i) * sum_{j <= i} softmax_j( g_j + C_i - C_j - |lambda^q_i - lambda^k_j| / T ) v_j ]

(The published code normalises q and k first; E does not depend on their length.)
With `keys: previous` a key is the lambda of the token before it, lambda^k_j = lambda^q_{j-1}: a token attends to what
came right after tokens like it. Like tokens have like lambdas before anything is learned, if `rope` does not turn them.

L is a graph Laplacian over the S features of a head, T one temperature a head. Optional: g_j = w_g . x_j, an importance
of each key; C, the cumulative log of a forget gate; the output gate silu(Wg x); and values that turn with position and
are turned back when they are heard, R_{j-i} v_j in place of v_j. The published form has none of these, T = 1 and a tau
that is calibrated (glissando/training/calibration.py).

State: v and lambda_k of the tokens seen, (K + 1) numbers a key and head where softmax attention keeps 2 K, and one more
number with g or C; and with `keys: previous` the lambdas of the latest token. Or, `cache: binned`, a memory of constant
size; see glissando/mixers/tau_cache.py.

Tauformer: published as posts and code in 2026; its defects and figures are told in docs/tauformer.md. Forget gate: Lin
et al. 2025, arXiv 2503.02130.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando import laplacian as graphs
from glissando.config import check_choices, starting
from glissando.errors import ConfigError, nearest
from glissando.flops import Flops
from glissando.lifts import Grows, Lift, Table, append, append_pairs, join, leaning_tile, linear, tables, tile
from glissando.mixers.base import Context, Mixer
from glissando.mixers.memory import check_horizons, log_kept, start_forget_gate
from glissando.mixers.rope import check_rope
from glissando.mixers.slots import shifted
from glissando.mixers.tau_cache import BinnedCache, ExactCache, Heard, TauState
from glissando.ops.energy import edges_pay, energy, energy_edges
from glissando.ops.rope import rotate, rotation_after
from glissando.ops.tau_attention import exponents, tau_attention
from glissando.precision import exact

if TYPE_CHECKING:
    from glissando.growth import Growth

#: attention entropy is the mean over so many queries of a row
_OBSERVED_QUERIES = 16


@dataclass
class TauConfig:
    """Options of the `tau` mixer.

    heads              H lambdas a token
    value_heads        G heads of values, each heard by H / G lambdas; H if None
    head_size          K of a value; hidden_size / value_heads if None
    key_size           S, the features that L is over; the head size if None
    keys               `own`: a projection of their own; `previous`: a key is the lambda of the token before it
    rope               rotate queries and keys by position
    rope_base          slowest rotation is about 1 / rope_base
    rope_repeat        the key's features come so many times over, each part rotated alike: growth tiles them
    eps                added to x'x
    value_rotation     values turn by position, the slowest pair by one radian in some so many tokens; None: they do not
    value_width        denominator of the exponent of those frequencies; the head size if None
    tau                where tau starts; calibration moves it
    laplacian          `chain`, a file of `glissando laplacian build`, or `saved` with the weights
    laplacian_weights  `fixed`; `diagonal`: a learned positive diagonal in place of L; `learned`: learned edges of L
    temperature        where T starts: one number, or from the first head to the last, spread evenly in the logarithm
    learn_temperature  T is trained, as its logarithm
    gradient_temperature  what flows back into the lambdas of a head with a smaller T is scaled by T over this, as the
                       gradient of a logit is 1 / T and steep heads drown the others; None: it is not scaled
    importance         g: a linear map of x, a number for each key and head
    forget_gate        C: data-dependent decay of the logits
    horizons           forget gates start with these horizons in tokens, from the first head to the last
    output_gate        silu of a linear map of x multiplies what was heard
    cache              `exact`, or `binned`: constant memory with a bounded error
    bins               of `binned`, over lambda in [0, 1); 1024 if None
    """

    heads: int = 4
    value_heads: int | None = None
    head_size: int | None = None
    key_size: int | None = None
    keys: Literal["own", "previous"] = "own"
    rope: bool = True
    rope_base: float = 10000.0
    rope_repeat: int = 1
    value_rotation: float | None = None
    value_width: int | None = None
    eps: float = 1e-6
    tau: float = starting(1.0, of="mixer.tau")
    laplacian: str = "chain"
    laplacian_weights: Literal["fixed", "diagonal", "learned"] = "fixed"
    temperature: float | tuple[float, float] = starting(0.05, of="log_temperature")
    learn_temperature: bool = True
    gradient_temperature: float | None = None
    importance: bool = False
    forget_gate: bool = False
    horizons: tuple[float, float] = starting((8.0, 1024.0), of="mixer.forget", forget_gate=True)
    output_gate: bool = False
    cache: Literal["exact", "binned"] = "exact"
    bins: int | None = None

    def weights_follow(self) -> None:
        """L comes with the weights: the file it was first read from need not be there."""
        self.laplacian = "saved"


class Tau(Mixer):
    """See the module's docstring for the equation."""

    tau: Tensor
    laplacian: Tensor
    axes = frozenset({"heads", "head_size"})

    observed = (
        "energy_p05", "energy_p50", "energy_p95", "tau", "temperature", "attention_entropy", "effective_keys",
        "effective_share",
    )  # fmt: skip
    observed_first = ("energy_p05", "energy_p50", "energy_p95")

    def __init__(self, config: TauConfig, hidden_size: int) -> None:
        super().__init__()
        self._check(config, hidden_size)
        self.config = config
        self.heads, self.value_heads = config.heads, config.value_heads or config.heads
        self.head_size = config.head_size or hidden_size // self.value_heads
        self.key_size = config.key_size or self.head_size
        if config.rope and self.key_size % (2 * config.rope_repeat):
            times = "" if config.rope_repeat == 1 else f" in each of tau.rope_repeat {config.rope_repeat} parts"
            raise ConfigError(
                f"RoPE needs an even key size{times}, got {self.key_size}; set tau.key_size or tau.rope: false"
            )
        if config.value_rotation is not None and self.head_size % 2:
            raise ConfigError(f"tau.value_rotation turns pairs and needs an even head size, got {self.head_size}")
        heads, inner = self.heads, self.heads * self.head_size
        self.shifts = config.keys == "previous"
        self.sides = 1 if self.shifts else 2  # lambdas a head and token
        self.qk = nn.Linear(hidden_size, self.sides * heads * self.key_size, bias=False)
        self.v = nn.Linear(hidden_size, self.value_heads * self.head_size, bias=False)
        self.out = nn.Linear(inner, hidden_size, bias=False)
        self.gate = nn.Linear(hidden_size, inner, bias=False) if config.output_gate else None
        self.importance = nn.Linear(hidden_size, heads, bias=False) if config.importance else None
        self.forget = nn.Linear(hidden_size, heads) if config.forget_gate else None
        self.log_temperature = nn.Parameter(torch.empty(heads), requires_grad=config.learn_temperature)
        self.register_buffer("tau", torch.tensor(float(config.tau), dtype=torch.float32))
        self.register_buffer("laplacian", torch.zeros(self.key_size, self.key_size))
        self.log_edges: nn.Parameter | None = None
        if config.laplacian_weights == "diagonal":
            self.log_edges = nn.Parameter(torch.empty(self.key_size))
        elif config.laplacian_weights == "learned":
            self.log_edges = nn.Parameter(torch.empty(self.key_size, self.key_size))
        self.cache: ExactCache | BinnedCache = (ExactCache if config.cache == "exact" else BinnedCache)(self)

    @staticmethod
    def _check(config: TauConfig, hidden_size: int) -> None:
        check_choices(config, "tau")
        for name in ("heads", "value_heads", "head_size", "key_size", "rope_repeat", "value_width", "bins"):
            value = getattr(config, name)
            if value is not None and value < 1:
                raise ConfigError(f"tau.{name} must be at least 1, got {value}")
        for name, values in (("tau", [config.tau]), ("temperature", temperatures(config)), ("eps", [config.eps])):
            if not all(math.isfinite(value) and value > 0 for value in values):
                raise ConfigError(f"tau.{name} must be above 0, got {getattr(config, name)}")
        limit = config.gradient_temperature
        if limit is not None and not (math.isfinite(limit) and limit > 0):
            raise ConfigError(f"tau.gradient_temperature must be above 0, got {limit}")
        Tau._check_turning(config)
        if config.laplacian_weights == "diagonal" and config.laplacian not in ("chain", "saved"):
            raise ConfigError(
                f"tau.laplacian {config.laplacian} would not be used: tau.laplacian_weights is `diagonal`, a learned "
                "diagonal in the place of L; set it to `fixed` or `learned`, or leave the file out"
            )
        if config.cache == "exact" and config.bins is not None:
            raise ConfigError(f"tau.bins {config.bins} needs tau.cache: binned; the exact cache has none")
        check_horizons("tau", config.horizons)
        groups = config.value_heads or config.heads
        if config.heads % groups:
            raise ConfigError(f"tau.heads {config.heads} cannot share {groups} value_heads evenly")
        if config.head_size is None and hidden_size % groups:
            raise ConfigError(
                f"hidden_size {hidden_size} is not a multiple of {groups} heads of values; "
                "change one of them or give tau.head_size"
            )

    @staticmethod
    def _check_turning(config: TauConfig) -> None:
        if config.value_rotation is not None and not 1 < config.value_rotation < math.inf:
            raise ConfigError(f"tau.value_rotation must be above 1 token and finite, got {config.value_rotation}")
        if config.value_width is not None and config.value_rotation is None:
            raise ConfigError(f"tau.value_width {config.value_width} needs tau.value_rotation; without it leave it out")
        check_rope("tau", config)

    def require_start(self) -> None:
        if self.config.laplacian == "saved" and self.config.laplacian_weights != "diagonal":
            raise ConfigError(
                "tau.laplacian of this model came with its weights, so that new weights would have none: build a new "
                "model whose mixers.tau.laplacian is `chain` or a file of `glissando laplacian build`"
            )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        c = self.config
        low, high = (math.log(t) for t in temperatures(c))
        self.log_temperature.copy_(torch.linspace(low, high, self.heads))
        nn.init.constant_(self.tau, c.tau)
        source = "chain" if c.laplacian_weights == "diagonal" else c.laplacian  # nothing reads it beside a diagonal
        with torch.device("cpu"):  # a model that is built without memory asks for a graph with values all the same
            graph = starting_laplacian(source, self.key_size)
        self.laplacian.copy_(graph)
        if self.forget is not None:
            start_forget_gate(self.forget, c.horizons)
        if self.log_edges is not None and self.log_edges.ndim == 1:
            # Unequal from the start: with all alike, E would be 1 for every vector and lambda the same.
            self.log_edges.copy_(torch.linspace(-1, 1, self.key_size))
        elif self.log_edges is not None:
            self.log_edges.zero_()

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> TauState:
        return self.cache.init_state(batch_size, **self._placement(device, dtype))

    @classmethod
    def grown_config(cls, options: TauConfig, hidden_size: int, by: Growth) -> TauConfig:
        """Heads times a factor. Larger heads: values get new features, and keys are tiled, with L' = diag(L, L), eps' =
        2 eps and every part rotated alike; new features of 0 would alter the energy's eps and never learn."""
        heads, groups = by.factor("heads"), options.value_heads or options.heads
        size = options.head_size or hidden_size // groups
        key_size, new = options.key_size or size, by.head_size or size
        if new % size:
            raise ConfigError(f"head_size of `tau` must be a multiple of its {size}, as keys are tiled; got {new}")
        times = new // size
        return replace(
            options,
            heads=options.heads * heads,
            value_heads=None if options.value_heads is None else options.value_heads * heads,
            head_size=new,
            key_size=key_size * times,
            rope_repeat=options.rope_repeat * times if options.rope else 1,
            eps=options.eps * times,
            value_width=None if options.value_rotation is None else options.value_width or size,
            laplacian=options.laplacian if times == 1 else "saved",
        )

    def growth(self, grown: Tau, width: Lift) -> Table:
        heads, groups = tile(self.heads, grown.heads), tile(self.value_heads, grown.value_heads)
        turned = self.config.value_rotation is not None
        size = (append_pairs if turned else append)(self.head_size, grown.head_size)
        key = tile(self.key_size, grown.key_size)
        queries = heads * leaning_tile(self.key_size, grown.key_size)
        table = tables(
            {
                "qk": linear(self.qk, join(*[queries] * self.sides), width),
                "v": linear(self.v, groups * size, width),
                "out": linear(self.out, width, heads * size),
                "gate": linear(self.gate, heads * size, width),
                "importance": linear(self.importance, heads, width),
                "forget": linear(self.forget, heads, width),
            }
        )
        edges = {} if self.log_edges is None else {"log_edges": Grows(*[key] * self.log_edges.ndim)}
        diagonal = torch.block_diag(*[self.laplacian] * key.copies)
        return table | edges | {"log_temperature": Grows(heads), "tau": self.tau, "laplacian": diagonal}

    @torch.no_grad()
    def begin_like(self, other: Tau) -> None:
        """tau is one number for the model, and L comes with the weights."""
        self.tau.copy_(other.tau)
        self.laplacian.copy_(other.laplacian)

    def flops(self, length: int) -> Flops:
        """x'L of every query and key where L is no diagonal, and p v."""
        energies = 0 if self.config.laplacian_weights == "diagonal" else self.key_size**2
        return Flops(2.0 * self.sides * self.heads * energies + 2.0 * self.heads * self.head_size * length)

    def mix(self, x: Tensor, state: TauState | None, ctx: Context) -> tuple[Tensor, TauState | None]:
        heard, turn = self.lambdas(x, state), self._turn(x, None if state is None else state.position)
        if turn is not None:
            heard = heard._replace(v=rotate(heard.v.transpose(1, 2), turn).transpose(1, 2))
        if state is None:
            temperature = heard.temperature
            y = tau_attention(heard.q, heard.k, heard.v, temperature, heard.importance, heard.decay)
        else:
            counts = x.shape[1] if ctx.mask is None else ctx.counts(x)
            y, state = self.cache.hear(heard, state, counts, ctx.donate)
        y = y.transpose(1, 2)
        if turn is not None:
            y = rotate(y, turn * turn.new_tensor([1, -1]).view(2, 1, 1, 1, 1))
        y = y.flatten(2)
        if self.gate is not None:
            y = y * F.silu(self.gate(x))
        return self.out(y), state

    def _turn(self, x: Tensor, position: Tensor | None) -> Tensor | None:
        """cos and sin (2, 1 or B, T, 1, K/2) of the values' rotation."""
        base, size = self.config.value_rotation, self.head_size
        if base is None:
            return None
        width = self.config.value_width or size
        return rotation_after(position, x.shape[1], size, base, width, self.v.weight.dtype, x.device).unsqueeze(-2)

    def lambdas(self, x: Tensor, state: TauState | None = None) -> Heard:
        """What attention is computed from; x (B, T, D) as the mixer is given it, behind the tokens of the state."""
        return self._heard(x, self.energies(x, None if state is None else state.position), state)

    def _heard(self, x: Tensor, e: Tensor, state: TauState | None = None) -> Heard:
        q = self._damped(e / (e + self.tau)).transpose(1, 2)
        if self.shifts:
            k = shifted(q, None if state is None else state.latest)
        else:
            q, k = q.split(self.heads, 1)
        v = self.v(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        importance = None if self.importance is None else self.importance(x).transpose(1, 2)
        decay = None
        if self.forget is not None:
            decay = log_kept(self.forget, x)
        return Heard(q, k, v, exact(self.log_temperature).exp(), importance, decay)

    def _damped(self, lambdas: Tensor) -> Tensor:
        """lambdas (B, T, 2 H) or (B, T, H) as they are; their gradient times min(1, T / gradient_temperature)."""
        limit = self.config.gradient_temperature
        if limit is None or not torch.is_grad_enabled():
            return lambdas
        share = (exact(self.log_temperature.detach()).exp() / limit).clamp_max(1).to(lambdas.dtype)
        return _Scaled.apply(lambdas, share.repeat(self.sides))

    def energies(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        """E (B, T, 2 H), at least float32, of queries and then keys; (B, T, H) where keys are earlier queries."""
        heads = self.qk(x).unflatten(-1, (-1, self.key_size))
        if self.config.rope:
            base, repeat = self.config.rope_base, self.config.rope_repeat
            size = self.key_size // repeat
            table = rotation_after(position, x.shape[1], size, base, size, self.qk.weight.dtype, x.device)
            heads = rotate(heads.unflatten(-1, (repeat, size)), table[..., None, None, :]).flatten(-2)
        if self.log_edges is None and edges_pay(heads, self.laplacian):
            return energy_edges(heads, *graphs.edges_of(self.laplacian), self.config.eps)
        return energy(heads, self.matrix(), self.config.eps).clamp_min(0)

    def key_energies(self, x: Tensor, ctx: Context) -> Tensor:
        """E (N, H) of the keys of the N real tokens of x (B, T, D), from no state on."""
        return self._of_keys(self.energies(x), ctx)

    def _of_keys(self, energies: Tensor, ctx: Context) -> Tensor:
        keys = energies[..., -self.heads :]
        return keys.flatten(0, 1) if ctx.mask is None else keys[ctx.mask]

    def observe(self, x: Tensor, ctx: Context) -> dict[str, Tensor]:
        """Quantiles of the keys' energies, tau, the mean of T, and how attention spreads over the keys.

        Entropy -sum_j p_ij log p_ij in nats, effective keys exp(entropy), and their share of the keys that query i sees
        are means over heads and over at most 16 queries of each row's second half, evenly spaced.
        """
        energies = self.energies(x)
        heard, keys = self._heard(x, energies), self._of_keys(energies, ctx)
        p05, p50, p95 = keys.quantile(energies.new_tensor([0.05, 0.5, 0.95])).unbind()
        queries = _late_positions(ctx.counts(x), min(_OBSERVED_QUERIES, x.shape[1] - x.shape[1] // 2))
        entropy = attention_entropy(heard, queries)
        effective = entropy.exp()
        share = effective / (queries + 1).unsqueeze(1)
        means = (heard.temperature.mean(), entropy.mean(), effective.mean(), share.mean())
        return dict(zip(self.observed, (p05, p50, p95, self.tau, *means), strict=True))

    def matrix(self) -> Tensor:
        """L (S, S): fixed or with learned edges; or a learned diagonal (S,)."""
        if self.log_edges is not None and self.log_edges.ndim == 1:
            return self.log_edges.exp()
        if self.log_edges is None and self.laplacian.dtype is torch.float32:
            return self.laplacian
        weights = -exact(self.laplacian)  # summed anew: cast to another precision, its rows would not sum to 0
        if self.log_edges is not None:
            weights = weights * (0.5 * (self.log_edges + self.log_edges.T)).exp()
        weights = weights - weights.diag().diag()
        return weights.sum(-1).diag() - weights


class _Scaled(torch.autograd.Function):
    """x; its gradient times `share`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (share,) = ctx.saved_tensors
        return grad * share, None


def temperatures(config: TauConfig) -> tuple[float, float]:
    """Where T starts in the first and in the last head."""
    t = config.temperature
    if not isinstance(t, tuple | list):
        return t, t
    if len(t) != 2:
        raise ConfigError(f"tau.temperature must be one number, or the first head's and the last's, got {list(t)}")
    return t[0], t[1]


def attention_entropy(heard: Heard, queries: Tensor) -> Tensor:
    """-sum_j p_ij log p_ij in nats (B, H, Q) float64, over the keys j <= i of the queries i at positions (B, Q)."""
    where = queries.unsqueeze(1).expand(-1, heard.q.shape[1], -1)
    gap = (heard.q.gather(-1, where).unsqueeze(-1) - heard.k.unsqueeze(-2)).abs()
    near = exponents(heard.k, heard.importance, heard.decay).unsqueeze(-2)
    logits = near - gap / heard.temperature.double().view(-1, 1, 1)
    visible = torch.arange(gap.shape[-1], device=gap.device) <= queries.unsqueeze(-1)
    return torch.special.entr(logits.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)).sum(-1)


def _late_positions(counts: Tensor, number: int) -> Tensor:
    """(B, number) int64: positions of the second half of rows with counts (B,) real tokens, evenly spaced."""
    first = counts.unsqueeze(1) // 2
    share = torch.linspace(0, 1, number, device=counts.device)
    return (first + share * (counts.unsqueeze(1) - 1 - first)).round().long().clamp_min(0)


def starting_laplacian(source: str, size: int) -> Tensor:
    """L (size, size) that `tau.laplacian` names, at the chain's mean degree.

    Raises ConfigError for a file that is absent, of another size or no Laplacian.
    """
    if source == "saved":
        return torch.full((size, size), torch.nan)  # to be replaced; whoever trains on it is told
    if source == "chain":
        return graphs.chain(size)
    if not source or (nearest(source, ["chain", "saved"]) and not Path(source).exists()):
        raise ConfigError(
            f"tau.laplacian must be `chain`, `saved` or a file of `glissando laplacian build`, got {source!r}, "
            "which is none"
        )
    found, _ = graphs.load(source)
    if len(found) != size:
        raise ConfigError(
            f"tau.laplacian {source} is over {len(found)} features and a head of this model has {size}; build it with "
            f"`glissando laplacian build ... --size {size}`, or set tau.key_size: {len(found)}"
        )
    return graphs.normalise(found)
