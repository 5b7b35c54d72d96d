"""The picture of channels that decay and turn: how long each remembers, and how fast it turns.

python -m research.kernel_picture RUN PICTURE.png
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor

from glissando.evaluation.figures import figure_and_axes
from glissando.evaluation.layers import layer_numbers
from glissando.loading import load
from glissando.model import LanguageModel

#: periods are drawn up to here, in tokens; a channel that hardly turns has no period worth a scale
LONGEST = 100_000


def turning_mixers(model: LanguageModel) -> list[Any]:
    """Every mixer with weights of its own whose channels decay and turn, such as `spectral`: it has `base_rates`."""
    return [module for module in model.modules() if hasattr(module, "base_rates")]


def plot_kernels(model: LanguageModel, target: Path) -> Path:
    """Decay time against period of every channel, and the kernels K(t) = exp((-gamma + i w) t) of nine
    channels of the middle layer.

    The decay time 1 / gamma is when a kernel has fallen to 1/e, the period 2 pi / |w| how long a turn takes, both in
    tokens. Where the decay depends on the input, its pre-activation is at its bias.

    Raises ValueError for a model without such a mixer.
    """
    mixers = turning_mixers(model)
    if not mixers:
        raise ValueError(
            "no mixer of this model has channels that decay and turn, as `spectral` has; there are no kernels"
        )
    numbers = layer_numbers(model, type(mixers[0]), len(mixers))
    rates = dict(zip(numbers, map(_rates, mixers), strict=True))
    figure, (left, right) = figure_and_axes(columns=2)
    _draw_channels(left, rates)
    middle = numbers[len(numbers) // 2]
    _draw_kernels(right, rates[middle], middle)
    figure.savefig(target)
    return target


def _rates(mixer: Any) -> tuple[Tensor, Tensor]:
    decay, turn = mixer.base_rates()
    return decay.detach().cpu().double(), turn.detach().cpu().double()


def _draw_channels(axes: Any, rates: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """A point a channel, the layers, by their numbers, from dark to light."""
    shades = matplotlib.colormaps["viridis"]
    for place, (number, (decay, turn)) in enumerate(rates.items()):
        shade = shades(place / max(len(rates) - 1, 1) * 0.9)
        period = (2 * math.pi / turn.abs()).clamp_max(LONGEST)
        label = f"layer {number}" if place in (0, len(rates) - 1) else None
        axes.scatter(period.tolist(), (1 / decay).tolist(), s=9, alpha=0.6, color=shade, label=label)
    axes.set(xscale="log", yscale="log", xlabel=f"period (tokens; {LONGEST:,} and more at the edge)")
    axes.set(ylabel="decay time (tokens)", title="Every channel")
    if len(rates) > 1:
        axes.legend(frameon=False, fontsize=8)


def _draw_kernels(axes: Any, rates: tuple[Tensor, Tensor], layer: int) -> None:
    """Nine kernels of one layer from the fastest to the slowest, over a logarithmic age."""
    decay, turn = rates
    order = decay.argsort(descending=True)
    chosen = order[torch.linspace(0, len(order) - 1, 9).round().long()].unique_consecutive()
    age = torch.logspace(-0.3, math.log10(max(4 / float(decay.min()), 16)), 800, dtype=torch.float64)
    for height, channel in enumerate(chosen.tolist()):
        kernel = torch.exp(-decay[channel] * age) * torch.cos(turn[channel] * age)
        axes.axhline(height, color="#d5dbe1", linewidth=0.8, zorder=0)
        axes.plot(age.numpy(), 0.8 * kernel.numpy() + height, linewidth=1.3, color="#0b6e99")
    names = [f"{float(1 / decay[c]):.3g} / {float(2 * math.pi / turn[c].abs()):.3g}" for c in chosen]
    axes.set(xscale="log", xlabel="age (tokens)", title=f"Re K(age) of nine channels, layer {layer}")
    axes.set(yticks=range(len(names)), ylabel="decay time / period (tokens)")
    axes.set_yticklabels(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a run directory")
    parser.add_argument("picture", type=Path, help="the file to write")
    options = parser.parse_args()
    plot_kernels(load(options.run), options.picture)


if __name__ == "__main__":
    main()
