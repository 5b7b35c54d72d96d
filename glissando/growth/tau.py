"""How the tau mixer grows: heads times a factor. Larger heads: values get new features, and keys are tiled, with
L' = diag(L, L), eps' = 2 eps and every part rotated alike; new features of 0 would alter the energy's eps and never
learn."""

from __future__ import annotations

from dataclasses import replace

import torch

from glissando.errors import ConfigError
from glissando.growth.lifts import Grows, Lift, Table, append, append_pairs, join, leaning_tile, linear, tables, tile
from glissando.growth.rules import MIXER_RULES, Growth, MixerRule, output_projection
from glissando.mixers import Tau, TauConfig


def options(options: TauConfig, hidden_size: int, by: Growth) -> TauConfig:
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


def table(mixer: Tau, grown: Tau, width: Lift) -> Table:
    heads, groups = tile(mixer.heads, grown.heads), tile(mixer.value_heads, grown.value_heads)
    rotated = mixer.config.value_rotation is not None
    size = (append_pairs if rotated else append)(mixer.head_size, grown.head_size)
    key = tile(mixer.key_size, grown.key_size)
    queries = heads * leaning_tile(mixer.key_size, grown.key_size)
    table = tables(
        {
            "qk": linear(mixer.qk, join(*[queries] * mixer.sides), width),
            "v": linear(mixer.v, groups * size, width),
            "out": linear(mixer.out, width, heads * size),
            "gate": linear(mixer.gate, heads * size, width),
            "importance": linear(mixer.importance, heads, width),
            "forget": linear(mixer.forget, heads, width),
        }
    )
    edges = {} if mixer.log_edges is None else {"log_edges": Grows(*[key] * mixer.log_edges.ndim)}
    diagonal = torch.block_diag(*[mixer.laplacian] * key.copies)
    return table | edges | {"log_temperature": Grows(heads), "tau": mixer.tau, "laplacian": diagonal}


@torch.no_grad()
def begin(new: Tau, like: Tau) -> None:
    """tau is one number for the model, and L comes with the weights."""
    new.tau.copy_(like.tau)
    new.laplacian.copy_(like.laplacian)


MIXER_RULES[Tau] = MixerRule(frozenset({"heads", "head_size"}), options, table, output_projection, begin)
