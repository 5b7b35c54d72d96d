"""The tau mixer: causal attention by one Laplacian scalar a head, of the Tauformer.

    E(x) = x'Lx / (x'x + eps),   lambda = E / (E + tau)               for rotated q_i and k_j
    y_i  = Wo [ silu(Wg x_i) * sum_{j <= i} softmax_j( g_j + C_i - C_j - |lambda^q_i - lambda^k_j| / T ) v_j ]

(The published code normalises q and k first; E does not depend on their length.)
With `keys: previous` a key is the lambda of the token before it, lambda^k_j = lambda^q_{j-1}: a token attends to what
came right after tokens like it. Like tokens have like lambdas before anything is learned, if `rope` does not turn them.

L is a graph Laplacian over the S features of a head, T one temperature a head. Optional: g_j = w_g . x_j, an importance
of each key; C, the cumulative log of a forget gate; the output gate silu(Wg x); and values that turn with position and
are rotated back when they are read, R_{j-i} v_j in place of v_j. The published form has none of these, T = 1 and a tau
that is calibrated at start and restart: tau := median of E(k) over the keys k of the first tau layer, all heads and
real tokens of the batch that the next step trains on. As tau moves with the energies, a loss that falls with it is
worth less than one that falls on a frozen tau: `calibrations` in metrics.csv separates the two.

With dt the values' rotation follows time, and C sums dt log sigmoid. An energy behind `rope` depends on the position
itself, not on differences: with it, and with neither of the two, dt is refused.

State: v and lambda_k of all tokens seen, and e = g - C where there is an importance or a gate. Bytes of a layer and row
at context L, in float32: 4 L (H K + H), and 8 L H for e, beside 8 L H K for the cache of softmax attention; 4 H bytes
more for the latest lambdas with `keys: previous`.

Tauformer: published as posts and code in 2026; see docs/tauformer.md. Forget gate: Lin
et al. 2025, arXiv 2503.02130.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from glissando.config import options, recorded, starting
from glissando.errors import ConfigError, TrainingError
from glissando.kernels.precise import wide
from glissando.kernels.rope import rotate, rotation_after
from glissando.mixers.base import (
    Context,
    Mixer,
    Moment,
    Picture,
    head_size_of,
    initialized,
    placement,
    register_mixer,
    require_parts,
)
from glissando.mixers.memory import Horizons, log_kept, start_forget_gate
from glissando.mixers.rope import ROPE_BASE, check_rope
from glissando.mixers.slots import append as append_slots
from glissando.mixers.slots import at_last, cut, latest_of, shifted
from glissando.precision import upcast
from glissando.state import zeros_position
from glissando.widening import (
    Grows,
    Growth,
    Lift,
    Table,
    append,
    append_pairs,
    join,
    leaning_tile,
    linear,
    tables,
    tile,
)

from .attention import exponents, tau_attention
from .laplacian import energy, starting_laplacian
from .observation import OBSERVED, attention_entropy, collapses, observe_tau

Positive = Annotated[float, Field(gt=0)]


@options
class TauConfig:
    """Options of the `tau` mixer.

    heads              H, number of lambdas of a token
    head_size          K, entries of a value; None: hidden_size / heads
    key_size           entries of a query or key, the size of L; None: the head size
    keys               `own`: keys have their own projection; `previous`: a key is the lambda of the query of the token
                       before it
    rope               rotate queries and keys by position
    rope_repeat        number of equal parts of a key, each rotated alike; set by growth
    eps                added to x'x; set by growth
    value_rotation     rotate values by position, the slowest pair by one radian in about this many tokens; None: no
                       rotation
    value_width        denominator of the exponent of those frequencies; None: the head size; set by growth
    tau                initial tau; calibration changes it
    laplacian          `chain`, a file of `glissando laplacian build`, or `saved` with the weights
    laplacian_weights  `fixed`; `diagonal`: a learned positive diagonal instead of L; `learned`: learned edges of L
    temperature        initial temperatures: one number, or those of the first and the last head, spread evenly in the
                       logarithm
    importance         add a linear map of x to the logits of each key, a number for each head
    forget_gate        data-dependent decay of the logits, C
    horizons           initial horizons of the forget gates in tokens, from the first head to the last
    output_gate        multiply the output of the attention by silu of a linear map of x
    calibration        `start`: at its start and restarts, training sets tau to the median energy of the first layer's
                       keys; `fixed`: never
    """

    heads: PositiveInt = 4
    head_size: PositiveInt | None = None
    key_size: PositiveInt | None = None
    keys: Literal["own", "previous"] = "own"
    rope: bool = True
    rope_repeat: PositiveInt = recorded(default=1)
    value_rotation: Annotated[float, Field(gt=1)] | None = None
    value_width: PositiveInt | None = recorded(default=None)
    eps: Positive = recorded(default=1e-6)
    tau: Positive = starting(default=1.0, of="mixer.tau")
    laplacian: str = starting(default="chain", of="mixer.laplacian")
    laplacian_weights: Literal["fixed", "diagonal", "learned"] = "fixed"
    temperature: Positive | tuple[Positive, Positive] = starting(default=0.05, of="log_temperature")
    importance: bool = False
    forget_gate: bool = False
    horizons: Horizons = starting(default=(8.0, 1024.0), of="mixer.forget")
    output_gate: bool = False
    calibration: Literal["fixed", "start"] = "fixed"

    def __post_init__(self) -> None:
        check_rope("tau", self)
        if self.laplacian_weights == "diagonal" and self.laplacian not in ("chain", "saved"):
            raise ConfigError(
                f"tau.laplacian {self.laplacian} would not be used: tau.laplacian_weights is `diagonal`, a learned "
                "diagonal in the place of L; set it to `fixed` or `learned`, or leave the file out"
            )

    def without_files(self) -> TauConfig:
        """For a model whose weights are loaded: L comes with them, and the file it was first read from may be gone."""
        return replace(self, laplacian="saved")


class Projected(NamedTuple):
    """What attention is computed from. B rows, T tokens, H heads."""

    q: Tensor  # lambda^q (B, H, T)
    k: Tensor  # lambda^k (B, H, T)
    v: Tensor  # (B, H, T, K)
    temperature: Tensor  # (H,)
    importance: Tensor | None  # g (B, H, T)
    decay: Tensor | None  # C (B, H, T) in the widest type, from the first token of the call


class TauState(NamedTuple):
    """Slots [0, length) are real; those behind them are spare and never read."""

    k: Tensor  # lambda_k (B, H, slots), at least float32
    v: Tensor  # (B, H, slots, K)
    e: Tensor | None  # (B, H, slots) in the widest type
    total: Tensor | None  # (B, H) the same: C at the latest token
    latest: Tensor | None  # (B, H), at least float32: lambda^q of the latest token, the next one's key; 0 before any
    length: Tensor  # (B,) int64: tokens seen
    position: Tensor  # (B,) the same; with dt the time that they took

    @property
    def filled(self) -> Tensor:
        return self.length

    @property
    def capacity(self) -> int:
        return self.k.shape[2]

    def with_capacity(self, capacity: int) -> TauState:
        e = None if self.e is None else cut(self.e, capacity)
        return self._replace(k=cut(self.k, capacity), v=cut(self.v, capacity), e=e)


@register_mixer("tau", TauConfig)
class Tau(Mixer):
    """See the module's docstring for the equation."""

    input = "impulse"
    tau: Tensor
    laplacian: Tensor

    def __init__(self, hidden_size: int, config: TauConfig | None = None, **options: Any) -> None:
        """`config`, or its fields as keywords. Raises ConfigError for sizes that do not fit."""
        super().__init__()
        self.config = config = config or TauConfig(**options)
        timed = not config.rope and (config.forget_gate or config.value_rotation is not None)
        self.accepts = frozenset({"mask", "dt"} if timed else {"mask"})
        self.heads = config.heads
        self.head_size = head_size_of(hidden_size, config.heads, config.head_size, "tau.head_size")
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
        self.v = nn.Linear(hidden_size, inner, bias=False)
        self.out = nn.Linear(inner, hidden_size, bias=False)
        self.gate = nn.Linear(hidden_size, inner, bias=False) if config.output_gate else None
        self.importance = nn.Linear(hidden_size, heads, bias=False) if config.importance else None
        self.forget = nn.Linear(hidden_size, heads) if config.forget_gate else None
        self.log_temperature = nn.Parameter(torch.empty(heads))
        self.register_buffer("tau", torch.tensor(float(config.tau), dtype=torch.float32))
        self.register_buffer("laplacian", torch.zeros(self.key_size, self.key_size))
        self.log_edges: nn.Parameter | None = None
        if config.laplacian_weights == "diagonal":
            self.log_edges = nn.Parameter(torch.empty(self.key_size))
        elif config.laplacian_weights == "learned":
            self.log_edges = nn.Parameter(torch.empty(self.key_size, self.key_size))
        initialized(self)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """L is NaN where it is `saved`, until weights replace it. Raises ConfigError for a file that does not fit."""
        c = self.config
        first, last = c.temperature if isinstance(c.temperature, tuple) else (c.temperature, c.temperature)
        low, high = math.log(first), math.log(last)
        self.log_temperature.copy_(torch.linspace(low, high, self.heads))
        nn.init.constant_(self.tau, c.tau)
        source = "chain" if c.laplacian_weights == "diagonal" else c.laplacian  # nothing reads it beside a diagonal
        with torch.device("cpu"):  # also for a model on the meta device the graph has values
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
        v = torch.zeros(batch_size, self.heads, 0, self.head_size, **placement(self, device, dtype))
        k = v.new_zeros(v.shape[:3], dtype=torch.promote_types(v.dtype, torch.float32))
        e = None if self.importance is None and self.forget is None else wide(k)
        total = None if self.forget is None else wide(k.new_zeros(k.shape[:2]))
        latest = k.new_zeros(k.shape[:2]) if self.shifts else None
        position = zeros_position(batch_size, v.device)
        return TauState(k, v, e, total, latest, position, position)

    def forward(
        self, x: Tensor, state: TauState | None = None, ctx: Context | None = None
    ) -> tuple[Tensor, TauState | None]:
        ctx, position = self.context(ctx), None if state is None else state.position
        p = self.project(x, self.energies(x, position), state, ctx.dt)
        rotation = None
        if self.config.value_rotation is not None:
            size, base = self.head_size, self.config.value_rotation
            width = self.config.value_width or size
            rotation = rotation_after(position, x.shape[1], size, base, width, self.v.weight.dtype, x.device, ctx.dt)
            rotation = rotation.unsqueeze(-2)  # cos and sin (2, 1 or B, T, 1, K/2)
            p = p._replace(v=rotate(p.v.transpose(1, 2), rotation).transpose(1, 2))
        if state is None:
            y = tau_attention(p.q, p.k, p.v, p.temperature, exponents(p.k, p.importance, p.decay))
        else:
            counts = x.shape[1] if ctx.mask is None else ctx.counts(x)
            y, state = self._attend(p, state, counts, ctx)
        y = y.transpose(1, 2)
        if rotation is not None:
            y = rotate(y, rotation * rotation.new_tensor([1, -1]).view(2, 1, 1, 1, 1))
        y = y.flatten(2)
        return self.out(y if self.gate is None else y * F.silu(self.gate(x))), state

    def _attend(self, p: Projected, state: Any, counts: Tensor | int, ctx: Context) -> tuple[Tensor, TauState]:
        """What `p` attends to behind the tokens of a state, and the state after it."""
        has_decay = self.forget is not None
        require_parts(state, e=has_decay or self.importance is not None, total=has_decay, latest=self.shifts)
        lengths = state.length.tolist()
        end = max(lengths, default=0) + p.q.shape[2]
        uniform = len(set(lengths)) <= 1

        def grown(slots: Tensor, latest: Tensor) -> Tensor:
            return append_slots(slots, latest, state.length, end, uniform, ctx.donate)

        keys, values, e, total = grown(state.k, p.k), grown(state.v, p.v), state.e, state.total
        if e is not None:
            decay = None if p.decay is None else p.decay + total.unsqueeze(2)
            e = grown(e, exponents(p.k, p.importance, decay))
            total = None if decay is None else at_last(decay, counts, total)
        # A step of decoding reads what it sees; cutting the rest off would copy all of the cache.
        end = keys.shape[2] if p.q.shape[2] == 1 else end
        seen = keys[:, :, :end].to(p.q.dtype)
        near = None if e is None else e[:, :, :end]
        y = tau_attention(p.q, seen, values[:, :, :end].to(p.v.dtype), p.temperature, near, past=state.length)
        latest = latest_of(p.q, counts, state.latest)
        length, position = state.length + counts, state.position + ctx.elapsed(counts)
        return y, TauState(keys, values, e, total, latest, length, position)

    def project(
        self, x: Tensor, energies: Tensor, state: TauState | None = None, dt: Tensor | None = None
    ) -> Projected:
        """What attention is computed from; x (B, T, D), its `energies`, behind the tokens of the state."""
        lambdas = energies / (energies + self.tau)
        q = lambdas.transpose(1, 2)
        if self.shifts:
            k = shifted(q, None if state is None else state.latest)
        else:
            q, k = q.split(self.heads, 1)
        v = self.v(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        importance = None if self.importance is None else self.importance(x).transpose(1, 2)
        decay = None if self.forget is None else log_kept(self.forget, x, dt)
        return Projected(q, k, v, upcast(self.log_temperature).exp(), importance, decay)

    def energies(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        """E (B, T, 2 H), at least float32, of queries and then keys; (B, T, H) where keys are earlier queries."""
        heads = self.qk(x).unflatten(-1, (-1, self.key_size))
        if self.config.rope:
            repeat = self.config.rope_repeat
            size = self.key_size // repeat
            table = rotation_after(position, x.shape[1], size, ROPE_BASE, size, self.qk.weight.dtype, x.device)
            heads = rotate(heads.unflatten(-1, (repeat, size)), table[..., None, None, :]).flatten(-2)
        return energy(heads, self.matrix(), self.config.eps).clamp_min(0)

    def key_energies(self, x: Tensor, ctx: Context) -> Tensor:
        """E (N, H) of the keys of the N real tokens of x (B, T, D), from no state on."""
        return self.of_keys(self.energies(x), ctx)

    def of_keys(self, energies: Tensor, ctx: Context) -> Tensor:
        """Energies (N, H) of the keys of the real tokens, of those of all."""
        keys = energies[..., -self.heads :]
        return keys.flatten(0, 1) if ctx.mask is None else keys[ctx.mask]

    def matrix(self) -> Tensor:
        """L (S, S): fixed or with learned edges; or a learned diagonal (S,)."""
        if self.log_edges is not None and self.log_edges.ndim == 1:
            return self.log_edges.exp()
        if self.log_edges is None and self.laplacian.dtype is torch.float32:
            return self.laplacian
        weights = -upcast(self.laplacian)  # summed anew: cast to another precision, its rows would not sum to 0
        if self.log_edges is not None:
            weights = weights * (0.5 * (self.log_edges + self.log_edges.T)).exp()
        weights = weights - weights.diag().diag()
        return weights.sum(-1).diag() - weights

    growth_axes = frozenset({"heads", "head_size"})
    observed, warnings = OBSERVED, staticmethod(collapses)

    def flops(self, length: int) -> tuple[float, float]:
        """x'L of every query and key where L is no diagonal, and p v."""
        energies = 0 if self.config.laplacian_weights == "diagonal" else self.key_size**2
        return 2.0 * self.sides * self.heads * energies + 2.0 * self.heads * self.head_size * length, 0.0

    @staticmethod
    def grow(options: TauConfig, hidden_size: int, by: Growth) -> TauConfig:
        """Heads times a factor. Larger heads: values get new features, and keys are tiled, with L' = diag(L, L),
        eps' = 2 eps and every part rotated alike; new features of 0 would alter the energy's eps and never learn."""
        heads, size = by.factor("heads"), options.head_size or hidden_size // options.heads
        key_size, new = options.key_size or size, by.head_size or size
        if new % size:
            raise ConfigError(f"head_size of `tau` must be a multiple of its {size}, as keys are tiled; got {new}")
        times = new // size
        return replace(
            options,
            heads=options.heads * heads,
            head_size=new,
            key_size=key_size * times,
            rope_repeat=options.rope_repeat * times if options.rope else 1,
            eps=options.eps * times,
            value_width=None if options.value_rotation is None else options.value_width or size,
            laplacian=options.laplacian if times == 1 else "saved",
        )

    def growth(self, grown: Tau, width: Lift) -> Table:
        heads = tile(self.heads, grown.heads)
        rotated = self.config.value_rotation is not None
        size = (append_pairs if rotated else append)(self.head_size, grown.head_size)
        key = tile(self.key_size, grown.key_size)
        queries = heads * leaning_tile(self.key_size, grown.key_size)
        table = tables(
            {
                "qk": linear(self.qk, join(*[queries] * self.sides), width),
                "v": linear(self.v, heads * size, width),
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

    def calibrate(self, now: Moment) -> bool:
        """Set tau in all tau mixers, where that is due; whether it was.

        Raises TrainingError, on every process, unless the median energy is finite and above 0.
        """
        if self.config.calibration == "fixed" or not now.restarted:
            return False
        median = float(np.median(now.measure(self.key_energies)))
        if not (math.isfinite(median) and median > 0):
            raise TrainingError(
                f"tau cannot be calibrated before step {now.step + 1}: the median energy of the keys is {median}, "
                "and tau must be finite and above 0. Train again with another model.mixer.laplacian, or with "
                "model.mixer.calibration fixed"
            )
        for each in now.mixers:
            each.tau.fill_(median)
        return True

    observe = observe_tau

    def pictures(self, x: Tensor, ctx: Context) -> list[Picture]:
        queries = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        projected = self.project(x, self.energies(x))
        keys = attention_entropy(projected, queries)[0].exp().mean(0)
        about = "Among how many earlier tokens a layer's attention is spread: exp of its entropy, the mean over heads."
        number = "The one number by which a key is found, E / (E + tau) in [0, 1): the mean over heads."
        return [
            Picture("effective_keys", "Effective keys", about, "tokens", True, keys),
            Picture("lambda", "Lambda of the keys", number, "", False, projected.k[0].mean(0)),
        ]

    def lower(self, builder: Any, x: int) -> tuple[int, Any]:
        c, heads, size, key_size = self.config, self.heads, self.head_size, self.key_size
        vectors = self.sides * heads
        parts = builder.linear(self.qk.weight, None, x)
        if c.rope:
            part = key_size // c.rope_repeat
            builder.rotate(parts, builder.rope(part, ROPE_BASE, part), vectors * c.rope_repeat, part)
        matrix, lambdas = self.matrix(), builder.register(vectors)
        constants = builder.number(c.eps, float(self.tau))
        is_diagonal = matrix.ndim == 1
        builder.emit(
            "BOUNDED_ENERGY", parts, lambdas, vectors, key_size, builder.weights(matrix), is_diagonal, constants
        )
        v = builder.linear(self.v.weight, None, x)
        table = None
        if c.value_rotation is not None:
            table = builder.rope(size, c.value_rotation, c.value_width or size)
            builder.rotate(v, table, heads, size)
        biases, e, total = builder.key_biases(self.forget, self.importance, x, heads)
        keys, values = builder.keep_slots(heads), builder.keep_vectors(heads, size)
        latest = builder.keep_fixed(heads) if self.shifts else None
        y, temperature = builder.register(heads * size), builder.weights(self.log_temperature.float().exp())
        flags = (self.forget is not None, self.importance is not None, self.shifts, builder.is_half)
        sizes = (heads, heads, size, *flags)
        places = (keys.at, values.at, *builder.places(e, total, latest))
        builder.emit("NEARNESS", lambdas, lambdas + heads, v, y, biases, *places, temperature, *sizes)
        if table is not None:
            builder.rotate(y, table, heads, size, -1)
        if self.gate is not None:
            y = builder.silu_product(builder.linear(self.gate.weight, None, x), y, heads * size)
        return builder.linear(self.out.weight, None, y), TauState(
            keys, values, e, total, latest, builder.filled, builder.filled
        )

    def export_form(self, capacity: int) -> nn.Module:
        from .export import FixedTau

        return FixedTau(self, capacity)
