"""The linear forecast under a series model: for each target a ridge on what its history says, solved in closed form.

    y_o(t + h) = c_o(t) + f_o(t, h) . w_o,     w = (F^T W F + r I)^-1 F^T W (y - c)

c is the target's last value, and the mean of the data before the first, when other weights are used. f has a constant,
the last value, the mean and the number of the values so far, logarithms of the last value's age at the time asked for,
products of these, the last values of all channels, static facts and known-future columns; and all of it once more times
1 / (1 + h) and 1 / (1 + h / 8). Values are in units of their channel's deviation, times in units of the median step.
W weighs a row by one over the mean square of y - c at horizons like its own, so that far horizons, where errors are
large, do not decide on near ones. On tables of rare values such a ridge is nearly all that can be predicted.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glissando.kernels.precise import double
from glissando.series.history import Past

#: r, in units of the squared features of one row
_RIDGE = 1.0
#: features of a target's own history
_OWN = 12
#: units of the horizon, in whose functions the weights vary
_UNITS = (1.0, 8.0)
#: rows that a target needs; with fewer its forecast is the last value, or the mean
_FEWEST = 50
#: groups of horizons whose errors are alike
_BINS = 16
#: numbers, and products of numbers, that a fit may take: of more rows every so-and-so-many-th is used
_NUMBERS, _PRODUCTS = 2e7, 5e9


class Anchor(nn.Module):
    """The weights are buffers: they are saved with the model, and no gradient changes them. New ones are 0, which
    forecasts the last value.

    Args:
        targets: The channel that each output forecasts.
        channels: K, number of channels.
        facts: P, number of static facts.
        ahead: U, number of known-future columns.
    """

    weight: Tensor  # (2, O, features): before a target's first value, and after it

    def __init__(self, targets: list[int], channels: int, facts: int, ahead: int) -> None:
        super().__init__()
        self.targets = targets
        self.register_buffer(
            "weight", torch.zeros(2, len(targets), (1 + len(_UNITS)) * (_OWN + 2 * channels + facts + ahead))
        )

    def forward(self, known: Past, horizon: Tensor, static: Tensor, ahead: Tensor | None) -> Tensor:
        """Forecasts (B, T, O) at t + horizon.

        Args:
            known: (B, T, K) each, standardised; ages in units of the time scale.
            horizon: (B, T), in units of the time scale.
            static: (B, T or 1, P) what is known of the series, in units of the data's deviations: numbers, their
                absence, and categories as 0 and 1.
            ahead: (B, T, U), known-future columns at the time asked for, in units of the data's deviations.
        """
        channel_inputs, shared = _own(known, horizon, self.targets), _shared(known, horizon, static, ahead)
        split = channel_inputs.shape[-1]
        before, after = (
            (channel_inputs * weight[:, :split]).sum(-1) + shared @ weight[:, split:].T
            for weight in self.weight.to(horizon.dtype)
        )
        return known.value[..., self.targets] + torch.where(known.ever[..., self.targets], after, before)

    @torch.no_grad()
    def fit(
        self, known: Past, horizon: Tensor, static: Tensor, ahead: Tensor | None, target: Tensor, scored: Tensor
    ) -> None:
        """Set the weights to those of the ridge.

        Args:
            known: As in `forward`.
            horizon: (B, T).
            static: As in `forward`.
            ahead: As in `forward`.
            target: (B, T, O), standardised.
            scored: (B, T, O) bool, where the target was observed.
        """
        shared = double(_shared(known, horizon, static, ahead)).flatten(0, 1)
        features, outputs = self.weight.shape[-1], len(self.targets)
        most = min(_NUMBERS / features, _PRODUCTS / features**2 / outputs)
        every = max(1, round(len(shared) / most))
        for output, channel in enumerate(self.targets):
            channel_inputs = double(_own(known, horizon, [channel])).flatten(0, 2)
            ever = known.ever[..., channel].reshape(-1)
            change = double(target[..., output] - known.value[..., channel]).reshape(-1)
            use = scored[..., output].reshape(-1)
            for regime, rows in enumerate((use & ~ever, use & ever)):
                chosen = rows.nonzero().flatten()[::every]
                if len(chosen) < _FEWEST:
                    self.weight[regime, output] = 0
                    continue
                row = torch.cat([channel_inputs[chosen], shared[chosen]], 1)
                weighted = row.T * _weights(horizon.reshape(-1)[chosen], change[chosen])
                gram = weighted @ row + _RIDGE * torch.eye(features, dtype=row.dtype)
                self.weight[regime, output] = torch.linalg.solve(gram, weighted @ change[chosen]).to(self.weight)


def _weights(horizon: Tensor, change: Tensor) -> Tensor:
    """(N,) one over the mean of change^2 among rows of like horizons (N,), with a mean of 1."""
    edges = horizon.double().quantile(torch.linspace(0, 1, _BINS + 1, dtype=torch.float64)[1:-1]).unique()
    bins = torch.bucketize(horizon.double(), edges, right=True)
    total = change.new_zeros(len(edges) + 1).index_add(0, bins, change.square())
    mean = total / bins.bincount(minlength=len(total)).clamp_min(1)
    weights = 1 / mean[bins].clamp_min(1e-3 * change.square().mean() + 1e-12)
    return weights / weights.mean()


def logarithm(time: Tensor) -> Tensor:
    """The logarithm of a time in units of the time scale that tells times far below it apart, about 1 in size."""
    return (64 * time).log1p() / 3


def _own(known: Past, horizon: Tensor, targets: list[int]) -> Tensor:
    """(B, T, O, features): what is known of each target itself."""
    value, age, mean, number = (part[..., targets] for part in known[:4])
    age = (age + horizon.unsqueeze(-1)) * known.ever[..., targets]
    few, fine, coarse = (1 + number).rsqrt(), logarithm(age), age.log1p()
    parts = [torch.ones_like(age), value, mean, number.log1p(), value * few, mean * few, fine, coarse]
    return _by_horizon(
        torch.stack([*parts, value * fine, value * coarse, mean * fine, mean * coarse], -1),
        horizon[..., None, None],
    )


def _shared(known: Past, horizon: Tensor, static: Tensor, ahead: Tensor | None) -> Tensor:
    """(B, T, features): what is known to every target."""
    ever, static = known.ever.to(horizon.dtype), static.expand(-1, horizon.shape[1], -1)
    inputs = torch.cat([known.value, ever, static, *([] if ahead is None else [ahead])], -1)
    return _by_horizon(inputs, horizon.unsqueeze(-1))


def _by_horizon(features: Tensor, horizon: Tensor) -> Tensor:
    """Features, and the same times functions of the horizon."""
    return torch.cat([features, *(features / (1 + horizon / unit) for unit in _UNITS)], -1)
