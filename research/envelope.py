"""Where a time constant must see the state: the level detector of an audio compressor.

    e_t = e_{t-1} + k (u_t - e_{t-1}),     k = 1 - exp(-1 / attack) if u_t > e_{t-1}, else 1 - exp(-1 / release)

It rises with a time constant of 2 steps and falls with one of 40, and which of them it is depends on the state e
(Giannoulis, Massberg and Reiss 2012, "Digital dynamic range compressor design"). Models are given u, noise whose level
jumps, and say e: a liquid model whose tau sees input and state, the same whose tau sees the input alone, and a GRU, at
equal parameters, each at the rate that is best with the first seed. Errors are mean squares in units of e's variance,
on other signals, as long and eight times as long.

    python -m research.envelope --seeds 3
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from research.irregular_series import Windows, add_training_options, compare, error
from research.runs import options_of

ATTACK, RELEASE = 2.0, 40.0
MODELS = ["liquid", "liquid, tau of the input alone", "GRU, dt a feature"]


def signals(count: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """u and e, (count, length) each."""
    rng = np.random.default_rng(seed)
    jumps = rng.random((count, length)) < 0.03
    levels = np.exp(rng.normal(size=(count, length)))
    latest = np.maximum.accumulate(np.where(jumps, np.arange(length), 0), axis=1)
    u = np.take_along_axis(levels, latest, 1) * np.abs(rng.normal(size=(count, length)))
    e, follower = np.empty_like(u), np.zeros(count)
    for t, now in enumerate(u.T):
        follower = follower + (1 - np.exp(-1 / np.where(now > follower, ATTACK, RELEASE))) * (now - follower)
        e[:, t] = follower
    return u, e


def standardised(made: list[tuple[np.ndarray, np.ndarray]]) -> list[Windows]:
    """By mean and deviation of the first, which is trained on; every step takes the time 1."""
    (u_mean, u_scale), (e_mean, e_scale) = ((part.mean(), part.std()) for part in made[0])
    parts = []
    for u, e in made:
        x, y = (
            torch.tensor(v, dtype=torch.float32).unsqueeze(-1) for v in ((u - u_mean) / u_scale, (e - e_mean) / e_scale)
        )
        parts.append(Windows(x, torch.ones(u.shape), y))
    return parts


def main() -> None:
    options = _options()
    torch.set_num_threads(1)  # models this small do not gain by more
    rows, length = (16, 32) if options.quick else (384, 128)
    sizes = [(rows, length), (64, length), (64, length), (64, 8 * length)]
    train, valid, test, longer = standardised([signals(*size, seed) for seed, size in enumerate(sizes)])
    found = compare(MODELS, (train, valid, test), options)
    print(f"\n{f'error over {8 * length:,} steps':32}")
    for name, outcomes in found.items():
        print(f"{name:32}" + "".join(f"{error(outcome.model, longer):>10.4f}" for outcome in outcomes))


def _options() -> argparse.Namespace:
    parser = options_of(__doc__)
    add_training_options(parser, 40, [1e-2, 2e-2, 4e-2])
    help = "a few signals, one epoch, in the place of what the other options say: shows that it runs"
    parser.add_argument("--quick", action="store_true", help=help)
    options = parser.parse_args()
    if options.quick:
        options.parameters, options.epochs, options.rates = 3_000, 1, [1e-2]
    return options


if __name__ == "__main__":
    main()
