"""How the liquid mixer grows: the state times a factor. A tiled state follows the tiled equation: modes do not couple,
and a dense A reads copies in equal shares."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from glissando.growth.lifts import Grows, Lift, Reads, Table, grow_norm, join, linear, tables, tile, under
from glissando.growth.rules import MIXER_RULES, Growth, MixerRule
from glissando.mixers import Liquid, LiquidConfig
from glissando.mixers.liquid import Gated, Published
from glissando.mixers.liquid_dynamics import Dense, Diagonal


def options(options: LiquidConfig, hidden_size: int, by: Growth) -> LiquidConfig:
    return replace(options, state_size=(options.state_size or hidden_size) * by.factor("state"))


def table(mixer: Liquid, grown: Liquid, width: Lift) -> Table:
    if isinstance(mixer.dynamics, Diagonal):
        state = tile(mixer.size // 2, grown.size // 2) * tile(2, 2)
        dynamics = _diagonal(mixer.dynamics, grown.size)
    else:
        state = tile(mixer.size, grown.size)
        dynamics = _dense(mixer.dynamics, grown.size)
    if isinstance(mixer.layer, Gated):
        layer = _gated(mixer.layer, width, state, grown.size)
    else:
        layer = _published(mixer.layer, width, state, grown.size)
    return under("dynamics", dynamics) | under("layer", layer)


def _diagonal(old: Diagonal, size: int) -> Table:
    n = tile(len(old.turn), size // 2)
    names = ("raw_tau", "raw_adaptation", "log_decay", "turn", "log_step", "bias")
    table: Table = {name: Grows(n) for name in names}
    return table if old.state_weights is None else table | {"state_weights": Grows(n, tile(2, 2))}


def _dense(old: Dense, size: int) -> Table:
    n, inner = tile(old.size, size), tile(2 * old.size, 2 * size)
    network = {
        "adapt.0": linear(old.adapt[0], inner, join(n, n) if old.config.state_dependence else n),
        "adapt.1": grow_norm(old.adapt[1], inner),
        "adapt.3": linear(old.adapt[3], n, inner),
    }
    # The difference of two copies of x then decays by 1 / tau alone, whatever A is. With noise N its rates would be
    # those of N, which at the published size multiply rounding by exp(22) a token.
    matrices: Table = {"a": Grows(n, Reads(n, equal=True)), "b": Grows(n, Reads(n))}
    return matrices | tables(network) | {"raw_tau": Grows(n), "raw_adaptation": Grows(tile(1, 1))}


def _gated(old: Gated, width: Lift, state: Lift, size: int) -> Table:
    parts = [tile(part, part * size // old.sizes[-1]) for part in old.sizes[:-1]]
    return tables({"project": linear(old.project, join(*parts, state), width), "out": linear(old.out, width, state)})


def _published(old: Published, width: Lift, state: Lift, size: int) -> Table:
    before, once = len(old.state_norm.weight), tile(1, 1)
    inner, wide = tile(2 * before, 2 * size), width * tile(2, 2)
    table = {
        "entry": linear(old.entry, state, width),
        "entry_norm": grow_norm(old.entry_norm, state),
        "state_norm": grow_norm(old.state_norm, state),
        "c": linear(old.c, width, state),
        "d": linear(old.d, width, state),
        "gate.0": linear(old.gate[0], state, state),
        "gate.2": linear(old.gate[2], once, state),
        "up": linear(old.up, wide, width),
        "up_norm": grow_norm(old.up_norm, wide),
        "down": linear(old.down, width, wide),
    }
    if old.b is not None:
        table |= {
            "b": linear(old.b, state, state),
            "adapt.0": linear(old.adapt[0], inner, state),
            "adapt.1": grow_norm(old.adapt[1], inner),
            "adapt.3": linear(old.adapt[3], tile(before // 2, size // 2), inner),
        }
    return tables(table) | {"scale": Grows(width), "shift": Grows(width), "residual": Grows(tile(1, 1))}


def silence(mixer: Liquid) -> list[nn.Parameter]:
    layer = mixer.layer
    return list(layer.out.parameters()) if isinstance(layer, Gated) else [*layer.down.parameters(), layer.residual]


MIXER_RULES[Liquid] = MixerRule(frozenset({"state"}), options, table, silence)
