"""The picture of a liquid model's time constants over a signal."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from glissando.backbone import Backbone
from glissando.evaluation.layers import layer_numbers
from glissando.evaluation.time_constants import draw_heat, finish, stacked, time_constants
from glissando.mixers.liquid import Liquid


def plot_signal(model: Backbone, x: Tensor, target: Path, dt: Tensor | None = None) -> Path:
    """The signal x (T, F) over time, at most eight of its numbers, and below it tau of each layer as a heat map.

    dt  (T,): how long each step takes, 1 if None. A step is as wide as it is long.
    """
    times = torch.ones(len(x)) if dt is None else dt.cpu()
    edges = torch.cat([torch.zeros(1), times.cumsum(0)]).tolist()
    tau = time_constants(model, x.unsqueeze(0), None if dt is None else dt.unsqueeze(0))[:, 0].cpu()
    figure, (above, below) = stacked([1.6, 0.28 * len(tau) + 0.5])
    for number in range(min(x.shape[1], 8)):
        held = x[:, number].tolist()
        above.step(edges, [*held, held[-1]], where="post", linewidth=0.9)
    above.set(xlim=(0, edges[-1]), ylabel="signal")
    above.tick_params(labelbottom=False)
    above.grid(alpha=0.25)
    image = draw_heat(below, tau, tau, layer_numbers(model, Liquid, len(tau)), edges)
    below.set(xlabel="time")
    finish(figure, [below], image, "Time constants over a signal")
    figure.savefig(target)
    return target
