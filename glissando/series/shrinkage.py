"""How much of the network's contribution a forecast keeps, by channel, fitted on what is held out.

    y = a + s n,     s = clip(S - e, 0, 1),     S = sum n (v - a) / sum n^2

v are the values, a the anchor's forecasts and n the network's contributions; S has the least squares, e is its standard
error over groups of answers, the series or, where these are few, stretches of them. What a small table does not show
beyond one standard error is left to the anchor: the one-standard-error rule of Breiman et al. 1984.
"""

from __future__ import annotations

import numpy as np
import torch

from glissando.series.heads import Head
from glissando.series.scores import ANCHOR, Answers

#: with fewer series the groups are so many stretches of consecutive answers
_GROUPS = 20


def shares(answers: Answers, head: Head, channels: int) -> np.ndarray:
    """(O,) s of each channel, 0 where nothing was answered, of answers that have all of the network's contribution."""
    network = _contribution(answers, head) / answers.scale
    left = (answers.target - answers.baselines[ANCHOR]) / answers.scale
    made = np.zeros(channels)
    for channel in range(channels):
        chosen = np.flatnonzero(answers.channel == channel)
        n, r = network[chosen], left[chosen]
        if not (n**2).sum() > 0:
            continue
        _, group = np.unique(answers.series[chosen], return_inverse=True)
        if group.max() + 1 < _GROUPS:
            group = np.arange(len(chosen)) * _GROUPS // len(chosen)
        products, squares = np.bincount(group, n * r), np.bincount(group, n**2)
        best = products.sum() / squares.sum()
        error = np.sqrt(((products - best * squares) ** 2).sum()) / squares.sum()
        made[channel] = np.clip(best - error, 0, 1)
    return made


def shrunk(answers: Answers, head: Head, share: np.ndarray) -> Answers:
    """Answers with so much (O,) of the network's contribution."""
    shift = (share[answers.channel] - 1) * _contribution(answers, head)
    params = answers.params.double()
    moved = head.affine(params.unsqueeze(1), torch.from_numpy(shift).unsqueeze(1), 1.0).squeeze(1)
    return answers._replace(params=moved)


def _contribution(answers: Answers, head: Head) -> np.ndarray:
    """(N,) what the network adds to the anchor's forecasts."""
    mean: np.ndarray = head.mean(answers.params.double().unsqueeze(1)).squeeze(1).numpy()
    return mean - answers.baselines[ANCHOR]
