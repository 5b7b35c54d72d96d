"""The picture of what a spectral mixer has learned: how long each channel remembers, and how fast it turns."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from glissando.evaluation.plots import figure_and_axes
from glissando.mixers.spectral import Spectral
from glissando.model import LanguageModel


def spectral_mixers(model: LanguageModel) -> dict[str, Spectral]:
    """Name -> mixer, for every spectral mixer with weights of its own."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Spectral)}


def plot_kernels(model: LanguageModel, target: Path) -> Path:
    """Decay time against period of every channel, and the kernels K(t) = exp((-gamma + i w) t) of nine of them.

    The decay time 1 / gamma is when a kernel has fallen to 1/e, the period 2 pi / |w| how long a turn takes, both in
    tokens. Where the decay depends on the input, this is the channel at rest: with its pre-activation at its bias.

    Raises ValueError for a model without a spectral mixer.
    """
    mixers = spectral_mixers(model)
    if not mixers:
        raise ValueError("this model has no spectral mixer; its kernels cannot be drawn")
    figure, (left, right) = figure_and_axes(columns=2)
    for number, mixer in enumerate(mixers.values(), 1):
        decay, turn = (v.detach().double() for v in mixer.rates_at_rest())
        left.scatter(_tokens(2 * math.pi / turn.abs()), _tokens(1 / decay), s=9, alpha=0.6, label=f"layer {number}")
    left.set(xscale="log", yscale="log", xlabel="period (tokens)", ylabel="decay time (tokens)", title="channels")
    low, high = left.get_ylim()
    left.plot([low, high], [low, high], color="#9aa5b1", linewidth=1, linestyle=":", zorder=0)
    left.set_ylim(low, high)
    if len(mixers) > 1:
        left.legend(frameon=False, fontsize=8)
    decay, turn = (v.detach().double() for v in next(iter(mixers.values())).rates_at_rest())
    order = decay.argsort()
    chosen = order[torch.linspace(0, len(order) - 1, 9).round().long()]
    horizon = float((3 / decay[chosen[4]]).clamp(8, 4096))
    t = torch.linspace(0, horizon, 600, dtype=torch.float64)
    for height, channel in enumerate(chosen.tolist()):
        kernel = torch.exp(-decay[channel] * t) * torch.cos(turn[channel] * t)
        right.plot(t.numpy(), 0.45 * kernel.numpy() + height, linewidth=1.2, color="#0b6e99")
    right.set(xlabel="tokens ago", yticks=[], title="Re K(t) of nine channels, slowest below")
    figure.savefig(target)
    return target


def _tokens(values: torch.Tensor) -> list[float]:
    """Clipped to what a picture can show."""
    return values.clamp(1e-2, 1e7).tolist()
