"""Heads of a series model: the parameters of a predictive distribution, and what follows from them.

A model's last layer writes O times `width` numbers at a step. `parameters` turns them into the parameters (..., O, P)
of the distribution of each of the O targets, in units of a deviation about a centre, and `affine` into the units of the
data:

    point      P = 1: the value
    quantiles  P = number of levels: the values at these levels, ascending
    gaussian   P = 2: mean and deviation
    student    P = 3: location, scale and degrees of freedom, which exceed 2, so that the variance is finite

All raw numbers zero are a standard normal distribution (Student-t: with 8 degrees of freedom). A head has no weights.
Targets (..., O) that are NaN are not scored, and their gradient is zero.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.errors import ConfigError

#: levels of the head `quantiles` where none are named
LEVELS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
#: the smallest deviation and distance of quantiles, in units of the target's deviation
_LEAST_SCALE = 1e-4
_LEAST_DF, _FIRST_DF = 2.001, 8.0


class Head(ABC):
    """A kind of predictive distribution. `width` is P, the number of parameters of one target."""

    name: ClassVar[str]
    width: int

    def parameters(self, raw: Tensor) -> Tensor:
        """Raw numbers (..., O P) -> parameters (..., O, P), in units of a deviation about zero."""
        return self._constrained(raw.unflatten(-1, (-1, self.width)))

    def _constrained(self, raw: Tensor) -> Tensor:
        return raw

    def affine(self, params: Tensor, shift: Tensor | float, scale: Tensor | float) -> Tensor:
        """The parameters of shift + scale * y, where y has `params` (..., O, P); shift and scale > 0 are (..., O)."""
        shift, scale = (x.unsqueeze(-1) if isinstance(x, Tensor) else x for x in (shift, scale))
        return torch.cat([shift + scale * params[..., :1], scale * params[..., 1:2], params[..., 2:]], -1)

    def loss(self, params: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The loss summed over the targets (..., O) that are not NaN, and their number: the squared error, the pinball
        loss, as that of `Quantiles.crps`, or the negative log-likelihood in nats."""
        scored = ~target.isnan()
        # NaN in an excluded target would pass through `where` into gradients, as 0 * NaN: it is replaced before
        losses = self.each_loss(params, target.where(scored, params[..., 0].detach()))
        return losses.where(scored, torch.zeros_like(losses)).sum(), scored.sum()

    @abstractmethod
    def each_loss(self, params: Tensor, target: Tensor) -> Tensor:
        """The loss (..., O) of each target, none of which is NaN."""

    def mean(self, params: Tensor) -> Tensor:
        """The mean (..., O)."""
        return params[..., 0]

    def quantile(self, params: Tensor, levels: Sequence[float]) -> Tensor:
        """The quantiles (..., O, L). Raises ConfigError for levels outside of (0, 1), or where there is no spread."""
        raise self._without_spread(f"quantiles {', '.join(map(str, levels))}")

    def sample(self, params: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n independent draws (n, ..., O). Raises ConfigError for a head without a spread."""
        raise self._without_spread(f"{n} samples")

    def _without_spread(self, what: str) -> ConfigError:
        return ConfigError(
            f"{what} were requested of a model with the head `{self.name}`, which predicts no spread: train with "
            "--model.head quantiles, student or gaussian"
        )

    @abstractmethod
    def crps(self, params: Tensor, target: Tensor) -> Tensor:
        """The continuous ranked probability score (..., O), in the target's unit; NaN where the target is NaN."""


class Point(Head):
    """The value itself, trained by the squared error. Its CRPS, that of a point mass, is the absolute error."""

    name, width = "point", 1

    def each_loss(self, params: Tensor, target: Tensor) -> Tensor:
        return (params[..., 0] - target).square()

    def crps(self, params: Tensor, target: Tensor) -> Tensor:
        return (params[..., 0] - target).abs()


class Quantiles(Head):
    """The quantiles q_1 < ... < q_P at given levels, trained by the pinball loss.

    The middle one is a raw number, the others follow from it by positive distances, so that they ascend. Between levels
    the quantile function is linear. Outside, the tails are exponential through the two outermost quantiles,
    q(p) = q_1 + (q_2 - q_1) log(p / p_1) / log(p_2 / p_1) below, and mirrored above.
    """

    name = "quantiles"

    def __init__(self, levels: Sequence[float] = LEVELS) -> None:
        checked = _levels(levels)
        if not levels or any(a >= b for a, b in pairwise(levels)):
            raise ConfigError(
                f"levels of quantiles are {list(levels)}: give at least one, ascending, such as 0.1,0.5,0.9"
            )
        self.levels, self.width = tuple(levels), len(levels)
        self._middle = min(range(self.width), key=lambda i: abs(self.levels[i] - 0.5))
        self._normal = torch.special.ndtri(checked)
        middles = (checked[1:] + checked[:-1]) / 2
        self._weights = torch.cat([middles, checked.new_ones(1)]).diff(prepend=checked.new_zeros(1))

    def _constrained(self, raw: Tensor) -> Tensor:
        normal, middle = self._normal.to(raw), self._middle
        centre = raw[..., middle : middle + 1] + normal[middle]
        steps = _positive(torch.cat([raw[..., :middle], raw[..., middle + 1 :]], -1), normal.diff())
        below = centre - steps[..., :middle].flip(-1).cumsum(-1).flip(-1)
        return torch.cat([below, centre, centre + steps[..., middle:].cumsum(-1)], -1)

    def affine(self, params: Tensor, shift: Tensor | float, scale: Tensor | float) -> Tensor:
        shift, scale = (x.unsqueeze(-1) if isinstance(x, Tensor) else x for x in (shift, scale))
        return shift + scale * params

    def each_loss(self, params: Tensor, target: Tensor) -> Tensor:
        return self.crps(params, target)

    def mean(self, params: Tensor) -> Tensor:
        """The integral of the quantile function over (0, 1)."""
        p = torch.tensor(self.levels, dtype=params.dtype, device=params.device)
        inner = ((params[..., 1:] + params[..., :-1]) / 2 * p.diff()).sum(-1)
        lower, upper = self._tails(params)
        return inner + p[0] * (params[..., 0] - lower) + (1 - p[-1]) * (params[..., -1] + upper)

    def quantile(self, params: Tensor, levels: Sequence[float]) -> Tensor:
        p = _levels(levels).to(params)
        return self._at(params, p.expand(*params.shape[:-1], len(levels)))

    def sample(self, params: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        like = {"dtype": params.dtype, "device": params.device}
        p = torch.rand(*params.shape[:-1], n, generator=generator, **like)  # type: ignore[call-overload]
        tiny = torch.finfo(params.dtype).eps / 2
        return self._at(params, p.clamp(tiny, 1 - tiny)).movedim(-1, 0)

    def crps(self, params: Tensor, target: Tensor) -> Tensor:
        """Twice the pinball loss at the levels, each with the part of (0, 1) that is nearest to it: about 1 % above
        the CRPS for the usual levels, where a plain mean would be 4 % below."""
        p = torch.tensor(self.levels, dtype=params.dtype, device=params.device)
        error = target.unsqueeze(-1) - params
        return 2 * (torch.maximum(p * error, (p - 1) * error) * self._weights.to(params)).sum(-1)

    def _tails(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """The scales of the exponential tails, (...): zero for a single level."""
        if self.width == 1:
            return torch.zeros_like(params[..., 0]), torch.zeros_like(params[..., 0])
        p = self.levels
        lower = (params[..., 1] - params[..., 0]) / math.log(p[1] / p[0])
        upper = (params[..., -1] - params[..., -2]) / math.log((1 - p[-2]) / (1 - p[-1]))
        return lower, upper

    def _at(self, params: Tensor, p: Tensor) -> Tensor:
        """The quantile function at p (..., N), of params (..., P)."""
        known = torch.tensor(self.levels, dtype=params.dtype, device=params.device)
        lower, upper = (tail.unsqueeze(-1) for tail in self._tails(params))
        below = params[..., :1] + lower * (p / known[0]).clamp(max=1).log()
        above = params[..., -1:] - upper * ((1 - p) / (1 - known[-1])).clamp(max=1).log()
        inside = torch.where(p < known[0], below, above)
        if self.width > 1:
            right = torch.searchsorted(known, p.contiguous()).clamp(1, self.width - 1)
            at_left, at_right = params.gather(-1, right - 1), params.gather(-1, right)
            part = (p - known[right - 1]) / (known[right] - known[right - 1])
            between = at_left + part * (at_right - at_left)
            inside = torch.where((p >= known[0]) & (p <= known[-1]), between, inside)
        return inside


class Gaussian(Head):
    """Mean m and deviation s; -log p(y) = (y - m)^2 / (2 s^2) + log s + log(2 pi) / 2."""

    name, width = "gaussian", 2

    def _constrained(self, raw: Tensor) -> Tensor:
        return torch.stack([raw[..., 0], _positive(raw[..., 1], 1.0)], -1)

    def each_loss(self, params: Tensor, target: Tensor) -> Tensor:
        mean, scale = params.unbind(-1)
        return ((target - mean) / scale).square() / 2 + scale.log() + math.log(2 * math.pi) / 2

    def quantile(self, params: Tensor, levels: Sequence[float]) -> Tensor:
        return params[..., :1] + params[..., 1:] * torch.special.ndtri(_levels(levels)).to(params)

    def sample(self, params: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        mean, scale = params.unbind(-1)
        return mean + scale * _normal(n, mean, generator)

    def crps(self, params: Tensor, target: Tensor) -> Tensor:
        """s (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)), z = (y - m) / s."""
        mean, scale = params.unbind(-1)
        z = (target - mean) / scale
        density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
        return scale * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))


class Student(Head):
    """Student's t: location m, scale s and degrees of freedom v > 2. The deviation is s sqrt(v / (v - 2))."""

    name, width = "student", 3

    def _constrained(self, raw: Tensor) -> Tensor:
        df = _LEAST_DF + _positive(raw[..., 2], _FIRST_DF - _LEAST_DF)
        return torch.stack([raw[..., 0], _positive(raw[..., 1], 1.0), df], -1)

    def each_loss(self, params: Tensor, target: Tensor) -> Tensor:
        mean, scale, df = params.unbind(-1)
        z = (target - mean) / scale
        return (df + 1) / 2 * torch.log1p(z.square() / df) + scale.log() - _log_peak(df)

    def quantile(self, params: Tensor, levels: Sequence[float]) -> Tensor:
        p = _levels(levels).to(params.device)
        mean, scale, df = (part.unsqueeze(-1) for part in params.unbind(-1))
        return mean + scale * student_quantile(p, df.double()).to(params)

    def sample(self, params: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        mean, scale, df = params.unbind(-1)
        half = (df / 2).expand(n, *df.shape).contiguous()
        gamma = torch._standard_gamma(half, generator=generator)
        return mean + scale * _normal(n, mean, generator) * (half / gamma).sqrt()

    @torch.no_grad()
    def crps(self, params: Tensor, target: Tensor) -> Tensor:
        """The closed form of Jordan, Krueger and Lerch (2019), without gradients; F and f are those of z:

        s (z (2 F - 1) + 2 f (v + z^2) / (v - 1) - 2 sqrt(v) B(1/2, v - 1/2) / ((v - 1) B(1/2, v/2)^2)).
        """
        mean, scale, df = params.double().unbind(-1)
        z = (target - mean) / scale
        density = (_log_peak(df) - (df + 1) / 2 * torch.log1p(z.square() / df)).exp()
        spread = (_log_beta(0.5, df - 0.5) - 2 * _log_beta(0.5, df / 2)).exp() * 2 * df.sqrt() / (df - 1)
        score = z * (2 * student_cdf(z, df) - 1) + 2 * density * (df + z.square()) / (df - 1) - spread
        return (scale * score).to(params)


HEADS: dict[str, type[Head]] = {head.name: head for head in (Point, Quantiles, Gaussian, Student)}


def make_head(name: str, levels: Sequence[float] = LEVELS) -> Head:
    """The head of a name in HEADS; `levels` are those of `quantiles`."""
    return Quantiles(levels) if name == "quantiles" else HEADS[name]()


# ---------------------------------------------------------------------- distributions


def _levels(levels: Sequence[float]) -> Tensor:
    if wrong := [p for p in levels if not 0 < p < 1]:
        raise ConfigError(f"{wrong[0]} is no level of a quantile: levels lie between 0 and 1, such as 0.1,0.5,0.9")
    return torch.tensor(levels, dtype=torch.float64)


def _positive(raw: Tensor, first: Tensor | float) -> Tensor:
    """softplus, with the value `first` at zero."""
    start = (torch.as_tensor(first, dtype=raw.dtype, device=raw.device) - _LEAST_SCALE).clamp_min(_LEAST_SCALE)
    return _LEAST_SCALE + F.softplus(raw + start.expm1().log())


def _normal(n: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(n, *like.shape, generator=generator, dtype=like.dtype, device=like.device)


def _log_beta(a: Tensor | float, b: Tensor) -> Tensor:
    return torch.lgamma(torch.as_tensor(a, dtype=b.dtype, device=b.device)) + torch.lgamma(b) - torch.lgamma(a + b)


def _log_peak(df: Tensor) -> Tensor:
    """The log-density of Student's t at its location, for the scale 1."""
    return torch.lgamma((df + 1) / 2) - torch.lgamma(df / 2) - (df * math.pi).log() / 2


def student_cdf(z: Tensor, df: Tensor) -> Tensor:
    """P(Z <= z) for Student's t, in float64; z and df > 0 broadcast. NaN where z is NaN."""
    z, df = torch.broadcast_tensors(z.double(), df.double())
    tail = student_tail(z.abs(), df)
    return torch.where(z > 0, 1 - tail, tail)


def student_tail(z: Tensor, df: Tensor) -> Tensor:
    """P(Z > z) for z >= 0: I_x(df/2, 1/2) / 2 with x = df / (df + z^2), the regularised incomplete beta function.

    Where x is beyond the bulk of the beta distribution its complement is computed, so that the continued fraction
    converges.
    """
    a, b = df / 2, torch.full_like(df, 0.5)
    square = z.square()
    x, rest = df / (df + square), square / (df + square)
    near = x > (a + 1) / (a + b + 2)
    first, second = torch.where(near, b, a), torch.where(near, a, b)
    at, other = torch.where(near, rest, x), torch.where(near, x, rest)
    log_front = first * at.log() + second * other.log() - first.log() - _log_beta(first, second)
    part = log_front.exp() * _continued_fraction(first, second, at)
    part = torch.where(at == 0, torch.zeros_like(part), part)
    return torch.where(near, 1 - part, part) / 2


def _continued_fraction(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Lentz's evaluation of the continued fraction of the incomplete beta function (Abramowitz and Stegun, 26.5.8)."""
    tiny = 1e-300
    c, d = torch.ones_like(x), 1 - (a + b) * x / (a + 1)
    d = 1 / torch.where(d.abs() < tiny, tiny, d)
    value = d
    for m in range(1, 20_000):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + factor * d
            c = 1 + factor / c
            d = 1 / torch.where(d.abs() < tiny, tiny, d)
            c = torch.where(c.abs() < tiny, tiny, c)
            change = d * c
            value = value * change
        if not bool(((change - 1).abs() > 1e-15).any()):  # NaN does not hold the others up
            break
    return value


@torch.no_grad()
def student_quantile(p: Tensor, df: Tensor) -> Tensor:
    """The quantile of Student's t at the levels p, in float64; p and df broadcast.

    Newton's method on the concave upper half of the distribution function from the normal quantile, which is below: the
    iterates rise and do not pass the root.
    """
    p, df = torch.broadcast_tensors(p.double(), df.double())
    tail = torch.minimum(p, 1 - p)
    z = -torch.special.ndtri(tail)
    for _ in range(200):
        density = (_log_peak(df) - (df + 1) / 2 * torch.log1p(z.square() / df)).exp()
        step = (student_tail(z, df) - tail) / density
        z = z + step
        if not bool((step.abs() > 1e-12 * (1 + z)).any()):
            break
    return torch.where(p < 0.5, -z, z)
