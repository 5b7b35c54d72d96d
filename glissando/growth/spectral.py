"""How the spectral mixer grows: channels times a factor; without projections they are the width's."""

from __future__ import annotations

from dataclasses import replace

from glissando.errors import ConfigError
from glissando.growth.lifts import Grows, Lift, Table, join, linear, spread, tables, tile
from glissando.growth.rules import MIXER_RULES, Growth, MixerRule, output_projection
from glissando.mixers import Spectral, SpectralConfig


def options(options: SpectralConfig, hidden_size: int, by: Growth) -> SpectralConfig:
    if options.projections:
        return replace(options, channels=(options.channels or hidden_size) * by.factor("state"))
    if by.factor("state") != by.width:
        raise ConfigError(
            f"state {by.state} was given, but without projections the channels of `spectral` are the width: "
            "grow that, and leave state out"
        )
    return options


def table(mixer: Spectral, grown: Spectral, width: Lift) -> Table:
    """A tile of k has content in every k-th Fourier bin alone, k times as much: F' = F and G' = G / k there."""
    n = tile(mixer.channels, grown.channels)
    bins, pair = spread(mixer.channels, grown.channels), tile(2, 2)
    table: Table = {"log_gamma": Grows(n), "omega": Grows(n), "modulation": Grows(n)}
    if mixer.config.filter:
        table |= {"numerator": Grows(bins, pair), "denominator": Grows(bins, pair, scale=1 / n.copies)}
    if mixer.config.phase_gate:
        table |= {"gate_alpha": Grows(n), "gate_beta": Grows(n)}
    if mixer.config.projections:
        parts = [n * tile(size // mixer.channels, size // mixer.channels) for size in mixer.sizes if size]
        table |= tables({"project": linear(mixer.project, join(*parts), width)})
        table |= tables({"out": linear(mixer.out, width, n * pair)})
        table |= {} if mixer.decay_bias is None else {"decay_bias": Grows(n)}
    return table


MIXER_RULES[Spectral] = MixerRule(frozenset({"state"}), options, table, output_projection)
