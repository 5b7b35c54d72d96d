"""How the delta mixer grows: heads times a factor, of the same size."""

from __future__ import annotations

from dataclasses import replace

from glissando.growth.lifts import Grows, Lift, Table, join, linear, tables, tile
from glissando.growth.rules import MIXER_RULES, Growth, MixerRule, output_projection
from glissando.mixers import Delta, DeltaConfig


def options(options: DeltaConfig, hidden_size: int, by: Growth) -> DeltaConfig:
    size = options.key_size or hidden_size // options.heads
    return replace(
        options,
        heads=options.heads * by.factor("heads"),
        key_size=size,
        value_size=options.value_size or size,
    )


def table(mixer: Delta, grown: Delta, width: Lift) -> Table:
    heads, writes = tile(mixer.heads, grown.heads), mixer.config.writes
    parts = []
    for part, size in enumerate(mixer.sizes):
        times = writes if part in (1, 2, 3) else 1  # k, v and z of each write
        inner = size // (times * mixer.heads)
        if size:
            parts.append(tile(times, times) * heads * tile(inner, inner))
    rates, values = tile(mixer.rates, mixer.rates), tile(mixer.value_size, mixer.value_size)
    found = tables(
        {
            "project": linear(mixer.project, join(*parts), width),
            "out": linear(mixer.out, width, heads * values),
        }
    )
    found |= {"log_rate": Grows(heads, rates), "decay_bias": Grows(heads, rates), "write_bias": Grows(heads)}
    if mixer.omega is not None:
        found["omega"] = Grows(heads, tile(mixer.key_size // 2, mixer.key_size // 2))
    return found | {"norm": Grows(values)}


MIXER_RULES[Delta] = MixerRule(frozenset({"heads"}), options, table, output_projection)
