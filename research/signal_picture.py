"""The picture of a liquid model's time constants over a signal."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from glissando.backbone import Backbone
from glissando.evaluation.diagnostics import every_time_constant, log_ticks
from glissando.evaluation.figures import figure_and_axes
from glissando.evaluation.observe import layer_numbers
from glissando.mixers.liquid import Liquid


def time_constants(model: Backbone, inputs: Tensor, dt: Tensor | None = None) -> Tensor:
    """The median over the modes of tau, in units of dt -> (L, B, T), L applications of liquid mixers.

    inputs, dt  as `every_time_constant` reads them
    """
    return torch.stack([tau.quantile(0.5, -1) for tau in every_time_constant(model, inputs, dt)])


def plot_signal(model: Backbone, x: Tensor, target: Path, dt: Tensor | None = None) -> Path:
    """The signal x (T, F) over time, at most eight of its numbers, and below it tau of each layer as a heat map.

    dt  (T,): how long each step takes, 1 if None. A step is as wide as it is long.
    """
    from matplotlib.colors import LogNorm

    times = torch.ones(len(x)) if dt is None else dt.cpu()
    edges = torch.cat([torch.zeros(1), times.cumsum(0)]).tolist()
    tau = time_constants(model, x.unsqueeze(0), None if dt is None else dt.unsqueeze(0))[:, 0].cpu()
    figure, (above, below) = figure_and_axes(rows=2, size=(11, 0.28 * len(tau) + 2.6))
    for number in range(min(x.shape[1], 8)):
        held = x[:, number].tolist()
        above.step(edges, [*held, held[-1]], where="post", linewidth=0.9)
    above.set(xlim=(0, edges[-1]), ylabel="signal")
    above.tick_params(labelbottom=False)
    low, high, layers = float(tau.min()), float(tau.max()), range(1, len(tau) + 1)
    norm = LogNorm(low, max(high, 1.01 * low))
    image = below.pcolormesh(edges, [i - 0.5 for i in (*layers, len(tau) + 1)], tau.numpy(), cmap="viridis", norm=norm)
    below.set(xlabel="time", ylabel="layer")
    below.grid(False)
    below.set_yticks(layers, layer_numbers(model, Liquid, len(tau)))
    log_ticks(figure.colorbar(image, ax=below, label="tau", pad=0.01), 3)
    figure.suptitle("Time constants over a signal: median over the modes of a layer, in units of dt", fontsize=10)
    figure.savefig(target)
    return target
