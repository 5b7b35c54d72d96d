"""How the attention mixer grows: heads times a factor, of the same size; or of a larger one, whose scale and
frequencies stay."""

from __future__ import annotations

import math
from dataclasses import replace

from glissando.errors import ConfigError
from glissando.growth.lifts import Lift, Table, append, append_pairs, join, linear, tables, tile
from glissando.growth.rules import MIXER_RULES, Growth, MixerRule, output_projection
from glissando.mixers import Attention, AttentionConfig


def options(options: AttentionConfig, hidden_size: int, by: Growth) -> AttentionConfig:
    heads, size = by.factor("heads"), options.head_size or hidden_size // options.heads
    new = by.head_size or size
    if new != size and options.keys == "previous":
        raise ConfigError(
            f"attention with keys: previous cannot grow its head_size {size} to {new}: a new feature of queries "
            "that are keys too would start at zero on both sides and never learn; grow `heads`"
        )
    if new < size or (options.rope and new % 2):
        raise ConfigError(f"head_size must be at least the {size} that the heads have, and even with RoPE; got {new}")
    return replace(
        options,
        heads=options.heads * heads,
        kv_heads=None if options.kv_heads is None else options.kv_heads * heads,
        head_size=new,
        rope_width=(options.rope_width or size) if options.rope else options.rope_width,
        scale=options.scale if new == size else options.scale or 1 / math.sqrt(size),
    )


def table(mixer: Attention, grown: Attention, width: Lift) -> Table:
    heads, groups = tile(mixer.heads, grown.heads), tile(mixer.kv_heads, grown.kv_heads)
    size = (append_pairs if mixer.config.rope else append)(mixer.head_size, grown.head_size)
    qkv = join(heads * size, *[] if mixer.shifts else [groups * size.silent()], groups * size)
    return tables(
        {
            "qkv": linear(mixer.qkv, qkv, width),
            "out": linear(mixer.out, width, heads * size),
            "gate": linear(mixer.gate, heads * size, width),
            "forget": linear(mixer.forget, heads, width),
            "importance": linear(mixer.importance, heads, width),
        }
    )


MIXER_RULES[Attention] = MixerRule(frozenset({"heads", "head_size"}), options, table, output_projection)
