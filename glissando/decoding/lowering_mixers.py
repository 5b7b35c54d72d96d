"""The mixers as instructions, see glissando.decoding.lowering."""

from __future__ import annotations

from typing import Any

import torch

from glissando.decoding.lowering import lower_mixer
from glissando.decoding.program import (
    ATTENTION,
    DELTA,
    FILLED,
    LIQUID,
    SPECTRAL,
    SPECTRAL_PAIRS,
    TAU,
    TAU_LAMBDAS,
    Builder,
    NotCompiled,
    Slot,
)
from glissando.mixers import Attention, Delta, Liquid, Spectral, Tau
from glissando.mixers.attention import AttentionState
from glissando.mixers.delta import DeltaState
from glissando.mixers.liquid import Gated, LiquidState
from glissando.mixers.liquid_dynamics import Diagonal
from glissando.mixers.spectral import SpectralState
from glissando.mixers.tau_cache import TauState
from glissando.ops.liquid import pack

# States here hold Slots where a mixer's own hold tensors.
# mypy: disable-error-code="arg-type"


@lower_mixer.register
def _(mixer: Spectral, builder: Builder, x: int) -> tuple[int, Any]:
    c, n = mixer.config, mixer.channels
    for option in ("filter", "phase_gate"):
        if getattr(c, option):
            raise NotCompiled(f"spectral.{option}")
    constants, h = mixer._derive(), builder.keep_fixed(n, 2)
    state = SpectralState(h, FILLED)
    y = builder.register(2 * n)
    if not c.projections:
        vectors = builder.weights(*constants.factor.unbind(-1))
        builder.emit(SPECTRAL_PAIRS, x, y, 2 * n, vectors, h.at)
        return y, state
    parts = builder.linear(mixer.project.weight, None, x)
    has_rate = mixer.decay_bias is not None
    gamma = 8 * constants.gamma if has_rate else constants.gamma
    bias = mixer.decay_bias if mixer.decay_bias is not None else torch.zeros_like(gamma)
    vectors = builder.weights(gamma, bias, *constants.factor.unbind(-1))
    builder.emit(SPECTRAL, parts, parts + n if has_rate else -1, y, n, vectors, h.at)
    if mixer.sizes[2]:
        y = builder.silu_product(parts + sum(mixer.sizes[:2]), y, 2 * n)
    return builder.linear(mixer.out.weight, None, y), state


@lower_mixer.register
def _(mixer: Liquid, builder: Builder, x: int) -> tuple[int, Any]:
    dynamics, layer = mixer.dynamics, mixer.layer
    if not isinstance(dynamics, Diagonal):
        raise NotCompiled("liquid.dynamics `dense`")
    if not isinstance(layer, Gated):
        raise NotCompiled("liquid.layer `published`")
    n, packed = mixer.size // 2, pack(dynamics.modes())
    slot = builder.keep_fixed(mixer.size)
    sines, versines = (torch.from_numpy(table) for table in packed.tables)
    vectors = builder.weights(torch.from_numpy(packed.vectors), sines, versines, dynamics.bias)
    parts, y = builder.linear(layer.project.weight, None, x), builder.register(mixer.size)
    builder.emit(LIQUID, parts, parts + n, y, n, vectors, slot.at, bool(mixer.config.coupled))
    y = builder.silu_product(parts + 2 * n, y, mixer.size)
    return builder.linear(layer.out.weight, None, y), LiquidState(slot)


@lower_mixer.register
def _(mixer: Delta, builder: Builder, x: int) -> tuple[int, Any]:
    c, h, keys, values = mixer.config, mixer.heads, mixer.key_size, mixer.value_size
    shifts = c.keys == "previous"
    s = builder.keep_fixed(h, keys, values)
    latest = builder.keep_fixed(h, keys) if shifts else None
    parts, y = builder.linear(mixer.project.weight, None, x), builder.register(h * values)
    work = builder.register(values + keys // 2)
    rates = 8 * mixer.log_rate.float().exp()
    omega = [] if mixer.omega is None else [mixer.omega]
    vectors = builder.weights(rates, mixer.decay_bias, mixer.write_bias, mixer.norm, *omega)
    sizes = (h, keys, values, c.writes, mixer.rates, mixer.rotates, c.transition == "reflect", shifts)
    builder.emit(DELTA, parts, y, vectors, s.at, -1 if latest is None else latest.at, work, 0, *sizes)
    if c.output_gate:
        y = builder.silu_product(parts + sum(mixer.sizes[:-1]), y, h * values)
    return builder.linear(mixer.out.weight, None, y), DeltaState(s, latest)


@lower_mixer.register
def _(mixer: Attention, builder: Builder, x: int) -> tuple[int, Any]:
    c, heads, groups, size = mixer.config, mixer.heads, mixer.kv_heads, mixer.head_size
    if c.window is not None:
        raise NotCompiled("attention.window")
    parts = builder.linear(mixer.qkv.weight, mixer.qkv.bias, x)
    if c.rope:
        turned = sum(mixer._split) if c.rope_on_value else sum(mixer._split[:2])
        builder.rotate(parts, builder.rope(size, c.rope_base, c.rope_width or size), turned, size)
    k = parts + heads * size
    v = k + mixer._split[1] * size
    biases = _biases(mixer.forget, mixer.importance, builder, x, heads)
    has_decay = mixer.forget is not None or mixer.importance is not None
    keys, values = builder.keep_slots(groups, size), builder.keep_slots(groups, size)
    lowered, total = _cache_parts(builder, heads, has_decay, mixer.forget is not None)
    before = builder.keep_fixed(heads, size) if mixer.shifts else None
    y, scale = builder.register(heads * size), builder.number(c.scale or size**-0.5)
    sizes = (heads, groups, size, mixer.forget is not None, mixer.importance is not None, mixer.shifts)
    places = (_at(lowered), _at(total), _at(before))
    builder.emit(ATTENTION, parts, k, v, y, biases, keys.at, values.at, *places, scale, *sizes)
    if mixer.gate is not None:
        y = builder.silu_product(builder.linear(mixer.gate.weight, None, x), y, heads * size)
    y = builder.linear(mixer.out.weight, mixer.out.bias, y)
    return y, AttentionState(keys, values, lowered, total, before, FILLED, FILLED)


@lower_mixer.register
def _(mixer: Tau, builder: Builder, x: int) -> tuple[int, Any]:
    c, heads, groups, size, key_size = mixer.config, mixer.heads, mixer.value_heads, mixer.head_size, mixer.key_size
    vectors = mixer.sides * heads
    parts = builder.linear(mixer.qk.weight, None, x)
    if c.rope:
        part = key_size // c.rope_repeat
        builder.rotate(parts, builder.rope(part, c.rope_base, part), vectors * c.rope_repeat, part)
    matrix, lambdas = mixer.matrix(), builder.register(vectors)
    constants = builder.number(c.eps, float(mixer.tau))
    is_diagonal = matrix.ndim == 1
    builder.emit(TAU_LAMBDAS, parts, lambdas, vectors, key_size, builder.weights(matrix), is_diagonal, constants)
    v = builder.linear(mixer.v.weight, None, x)
    table = None
    if c.value_rotation is not None:
        table = builder.rope(size, c.value_rotation, c.value_width or size)
        builder.rotate(v, table, groups, size)
    biases = _biases(mixer.forget, mixer.importance, builder, x, heads)
    keys, values = builder.keep_slots(heads), builder.keep_slots(groups, size)
    e, total = _cache_parts(builder, heads, mixer.cache.has_e, mixer.cache.has_decay)
    latest = builder.keep_fixed(heads) if mixer.shifts else None
    y, temperature = builder.register(heads * size), builder.weights(mixer.log_temperature.float().exp())
    sizes = (heads, groups, size, mixer.forget is not None, mixer.importance is not None, mixer.shifts)
    places = (_at(e), _at(total), _at(latest))
    builder.emit(TAU, lambdas, lambdas + heads, v, y, biases, keys.at, values.at, *places, temperature, *sizes)
    if table is not None:
        builder.rotate(y, table, heads, size, -1)
    if mixer.gate is not None:
        y = builder.silu_product(builder.linear(mixer.gate.weight, None, x), y, heads * size)
    return builder.linear(mixer.out.weight, None, y), TauState(keys, values, e, total, latest, FILLED)


def _biases(forget: Any, importance: Any, builder: Builder, x: int, heads: int) -> int:
    """A register with the forget gates' arguments and then the importances (2 H)."""
    dst = builder.register(2 * heads)
    for layer, at in ((forget, dst), (importance, dst + heads)):
        if layer is not None:
            builder.linear(layer.weight, layer.bias, x, at)
    return dst


def _cache_parts(builder: Builder, heads: int, has_decay: bool, has_total: bool) -> tuple[Slot | None, Slot | None]:
    """Slots of C - g of each key and of C at the latest token, where a mixer keeps them."""
    return builder.keep_exact_slots(heads) if has_decay else None, builder.keep_exact(heads) if has_total else None


def _at(slot: Slot | None) -> int:
    return 0 if slot is None else slot.at
