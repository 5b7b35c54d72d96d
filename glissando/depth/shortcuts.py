"""Learned shortcuts from the input of a depth, the embedding. Before each application s of a block

    x <- x + c_s x_0 / rms(x_0),     rms(x_0) = sqrt(mean(x_0^2) + eps)

x_0 (B, T, D) is what enters the depth, and c_s are D numbers that start at 0, so that a model with shortcuts starts as
the one without. Gates act behind the shortcut: they scale what the block adds and not what the shortcut does. The field
of a flow reads h + c x_0 / rms(x_0) at every evaluation. Shortcuts from the embedding are of the modded-nanogpt
speedruns (Jordan et al. 2024, github.com/KellerJordan/modded-nanogpt), where two numbers a block weigh x and x_0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glissando.kernels.rms_norm import rms_norm

EPS = 1e-6


def new_shortcuts(wanted: bool, applications: int, hidden_size: int) -> nn.Parameter | None:
    """c (S, D) for S applications of blocks; None where no shortcuts are wanted."""
    return nn.Parameter(torch.zeros(applications, hidden_size)) if wanted else None


def shortcut_source(shortcuts: Tensor | None, x: Tensor) -> Tensor | None:
    """x_0 / rms(x_0) of the depth's input x (B, T, D); None without shortcuts."""
    return None if shortcuts is None else rms_norm(x, x.new_ones(x.shape[-1]), EPS)


def with_shortcut(x: Tensor, shortcuts: Tensor | None, application: int, source: Tensor | None) -> Tensor:
    """x + c_s x_0 / rms(x_0), or x without shortcuts."""
    return x if shortcuts is None or source is None else x + shortcuts[application] * source
