"""Heads of an event model: how long it takes until the next event, and of which of K kinds it is then.

    p(w, k) = p(w) p(k | w),   S(w) = P(wait > w),   hazard of kind k: lambda_k(w) = p(w, k) / S(w)

A wait w > 0 begins at the step whose features h the head reads. Both heads know the survival S in closed form, so that
no likelihood needs a simulation:

    mixture    J log-normals for w; the logits of the kinds are those of h and a small network of h and log w
    intensity  lambda_k(w) = mu_k + sum_m a_km exp(-beta_m w), for events that excite others

Where times have a resolution r, as days, the recorded wait is a multiple of r and stands for (w - r, w]: its
probability is S(w - r) - S(w), and these sum to one. Waits, resolutions and densities are in one unit, which the caller
chooses. A head reads log w as a deviation from `centre` over `spread`: those of the waits that it is trained on, see
set_scales.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: the parameters of a head at steps (...): tensors (..., one or two dimensions more)
Params = tuple[Tensor, ...]
#: the smallest deviation of a log-normal, in units of `spread`, and the smallest hazard, in events a typical wait
_LEAST_SCALE, _LEAST_RATE = 0.01, 1e-8
#: deviations from the centre beyond which the kinds no longer depend on the wait, and size of the network of the kinds
_REACH, _HIDDEN = 6.0, 24
#: log waits between which a quantile is searched, and halvings: to 1e-13
_LOWEST, _HIGHEST, _HALVINGS = -100.0, 100.0, 51


class Waits(nn.Module, ABC):
    """The distribution of the next wait and kind. `head(h)` returns the parameters that every method reads.

    Waits (...) and parameters (..., ·) broadcast: parameters (B, 1, ·) and waits (B, N) give N values of each.

    Args:
        features: Size of h.
        kinds: K.
        components: Number of log-normals, or of decays.
    """

    centre: Tensor  # ()
    spread: Tensor  # ()

    def __init__(self, features: int, kinds: int, components: int) -> None:
        super().__init__()
        self.kinds, self.components = kinds, components
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("spread", torch.ones(()))

    def set_scales(self, centre: float, spread: float) -> None:
        """Set the mean and the deviation of the log waits."""
        self.centre.fill_(centre)
        self.spread.fill_(max(spread, 1e-3))

    @abstractmethod
    def forward(self, h: Tensor) -> Params:
        """The parameters (..., ·) after the features h (..., D), in float32 at least."""

    @abstractmethod
    def log_density(self, params: Params, wait: Tensor) -> Tensor:
        """log p(w) (...)."""

    @abstractmethod
    def log_survival(self, params: Params, wait: Tensor) -> Tensor:
        """log S(w) (...): what is known where observation ends, or features change, w after the step."""

    @abstractmethod
    def log_interval(self, params: Params, wait: Tensor, resolution: float) -> Tensor:
        """log(S(w - r) - S(w)) (...); where w is r or less, log(1 - S(w))."""

    @abstractmethod
    def log_kinds(self, params: Params, wait: Tensor, resolution: float = 0.0) -> Tensor:
        """log p(k | w) (..., K)."""

    def passed(self, params: Params, wait: Tensor) -> Tensor:
        """-log S(w) (...), the hazards integrated over w, which may be 0."""
        return torch.where(wait > 0, -self.log_survival(params, torch.where(wait > 0, wait, 1.0)), 0.0)

    def log_prob(self, params: Params, wait: Tensor, kind: Tensor, resolution: float = 0.0) -> tuple[Tensor, Tensor]:
        """log p(w), or with a resolution the log-probability of its interval, and log p(k | w).

        Args:
            params: As `head(h)` returns them.
            wait: (...), > 0 also where the result is not used.
            kind: (...) int64, 0 to K - 1.
            resolution: r; 0: times are exact.
        """
        time = self.log_interval(params, wait, resolution) if resolution > 0 else self.log_density(params, wait)
        kinds = self.log_kinds(params, wait, resolution)
        shape = torch.broadcast_shapes(kinds.shape[:-1], kind.shape)
        kinds = kinds.expand(*shape, self.kinds)
        return time, kinds.gather(-1, kind.expand(shape).unsqueeze(-1)).squeeze(-1)

    def hazards(self, params: Params, wait: Tensor) -> Tensor:
        """lambda_k(w) (..., K): events of each kind in a unit of time, where none came before w."""
        total = self.log_density(params, wait) - self.log_survival(params, wait)
        return (total.unsqueeze(-1) + self.log_kinds(params, wait)).exp()

    @torch.no_grad()
    def quantile(self, params: Params, p: Tensor | float, after: Tensor | float = 0.0) -> Tensor:
        """The wait (...) that is not exceeded with probability p, given that nothing came within `after`; float64."""
        params = tuple(each.double() for each in params)
        p, after = (torch.as_tensor(x, dtype=torch.float64, device=params[0].device) for x in (p, after))
        goal = torch.log1p(-p) - self.passed(params, after)
        low, high = torch.full_like(goal, _LOWEST), torch.full_like(goal, _HIGHEST)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            later = self.log_survival(params, middle.exp()) > goal
            low, high = torch.where(later, middle, low), torch.where(later, high, middle)
        return torch.maximum(((low + high) / 2).exp(), after)

    @torch.no_grad()
    def sample(
        self,
        params: Params,
        generator: torch.Generator | None = None,
        after: Tensor | float = 0.0,
        resolution: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """One draw for each step: the wait (...), float64, and the kind (...), int64, given that nothing came within
        `after`. With a resolution the wait is a multiple of it."""
        device = params[0].device
        shape = torch.broadcast_shapes(params[0].shape[:-1], after.shape if isinstance(after, Tensor) else ())
        p = torch.rand(shape, generator=generator, dtype=torch.float64, device=device)
        wait = self.quantile(params, p, after)
        if resolution > 0:
            wait = (wait / resolution).ceil().clamp_min(1) * resolution
        kinds = self.log_kinds(params, wait.to(params[0].dtype), resolution).exp()
        drawn = torch.multinomial(kinds.flatten(0, -2), 1, generator=generator)
        return wait, drawn.view(wait.shape)

    def _deviation(self, wait: Tensor) -> Tensor:
        return (wait.log() - self.centre) / self.spread


class Mixture(Waits):
    """J log-normals: with z = (log w - centre) / spread,

        p(w) = sum_j v_j phi((z - m_j) / s_j) / (s_j spread w),   S(w) = sum_j v_j Phi((m_j - z) / s_j)

    and the logits of the kinds are A h + B tanh(C h + d z + e z^2), where z beyond 6 deviations counts as 6.
    Parameters: log v, m and s (..., J), A h (..., K) and C h (..., 24).
    """

    def __init__(self, features: int, kinds: int, components: int = 8) -> None:
        super().__init__(features, kinds, components)
        hidden = _HIDDEN if kinds > 1 else 0
        self.sizes = [components] * 3 + [kinds, hidden]
        self.project = nn.Linear(features, sum(self.sizes))
        self.of_wait = nn.Parameter(torch.empty(2, hidden))
        self.of_kind = nn.Parameter(torch.empty(hidden, kinds))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Components side by side, and kinds that are equally likely at any wait."""
        self.project.reset_parameters()
        self.project.weight.mul_(0.3)
        log_weight, middle, scale, kind, _ = self.project.bias.split(self.sizes)
        log_weight.zero_()
        kind.zero_()
        middle.copy_(torch.linspace(-1.5, 1.5, self.components))
        scale.fill_(math.log(math.expm1(0.7 - _LEAST_SCALE)))
        nn.init.normal_(self.of_wait, std=0.3)
        nn.init.normal_(self.of_kind, std=0.1)

    def forward(self, h: Tensor) -> Params:
        raw = _wide(self.project(h))
        weight, middle, scale, kind, hidden = raw.split(self.sizes, -1)
        return F.log_softmax(weight, -1), middle, _LEAST_SCALE + F.softplus(scale), kind, hidden

    def log_density(self, params: Params, wait: Tensor) -> Tensor:
        log_weight, middle, scale = params[:3]
        z = (self._deviation(wait).unsqueeze(-1) - middle) / scale
        parts = log_weight - z.square() / 2 - scale.log()
        return parts.logsumexp(-1) - math.log(2 * math.pi) / 2 - self.spread.log() - wait.log()

    def log_survival(self, params: Params, wait: Tensor) -> Tensor:
        log_weight, middle, scale = params[:3]
        z = (middle - self._deviation(wait).unsqueeze(-1)) / scale
        return (log_weight + torch.special.log_ndtr(z)).logsumexp(-1)

    def log_interval(self, params: Params, wait: Tensor, resolution: float) -> Tensor:
        log_weight, middle, scale = params[:3]
        upper = (self._deviation(wait).unsqueeze(-1) - middle) / scale
        first = wait < 1.5 * resolution  # a multiple, but for rounding
        part = torch.where(first, 0.5, resolution / wait)
        # log w - log(w - r) by itself: the difference of two logarithms would have no digits left
        width = (-torch.log1p(-part) / self.spread).unsqueeze(-1) / scale
        parts = torch.where(first.unsqueeze(-1), torch.special.log_ndtr(upper), _log_normal_between(upper, width))
        return (log_weight + parts).logsumexp(-1)

    def log_kinds(self, params: Params, wait: Tensor, resolution: float = 0.0) -> Tensor:
        kind, hidden = params[3:]
        if self.kinds == 1:
            return torch.zeros_like(kind + wait.unsqueeze(-1))
        z = self._deviation(wait).clamp(-_REACH, _REACH).unsqueeze(-1)
        of_wait, of_kind = self.of_wait.to(kind.dtype), self.of_kind.to(kind.dtype)
        inner = torch.tanh(hidden + z * of_wait[0] + z.square() * of_wait[1])
        return F.log_softmax(kind + inner @ of_kind, -1)


class Intensity(Waits):
    """Hazards that decay since the step: with rates beta_m > 0 that are the same everywhere,

        lambda_k(w) = mu_k + sum_m a_km exp(-beta_m w),   mu_k > 0, a_km >= 0
        -log S(w) = sum_k [mu_k w + sum_m a_km (1 - exp(-beta_m w)) / beta_m]

    In an interval the kinds are as likely as their hazards over it are large. Parameters: mu (..., K), a (..., K, M).
    """

    def __init__(self, features: int, kinds: int, components: int = 8) -> None:
        super().__init__(features, kinds, components)
        self.project = nn.Linear(features, kinds * (1 + components))
        #: log(1 / beta) as a deviation of a log wait
        self.reach = nn.Parameter(torch.empty(components))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Decays over two deviations about the typical wait, and about one event in it."""
        self.project.reset_parameters()
        self.project.weight.mul_(0.3)
        bias = self.project.bias.unflatten(0, (self.kinds, -1))
        bias[:, 0] = math.log(math.expm1(0.5 / self.kinds))
        bias[:, 1:] = math.log(math.expm1(1.0 / (self.kinds * self.components)))
        self.reach.copy_(torch.linspace(-2, 2, self.components))

    def forward(self, h: Tensor) -> Params:
        rates = F.softplus(_wide(self.project(h))).unflatten(-1, (self.kinds, -1)) * (-self.centre).exp()
        return rates[..., 0] + _LEAST_RATE * (-self.centre).exp(), rates[..., 1:]

    def log_density(self, params: Params, wait: Tensor) -> Tensor:
        return self.hazards(params, wait).sum(-1).log() + self.log_survival(params, wait)

    def log_survival(self, params: Params, wait: Tensor) -> Tensor:
        base, jumps = params
        return -self._within((base.sum(-1, keepdim=True), jumps.sum(-2, keepdim=True)), wait, wait).squeeze(-1)

    def log_interval(self, params: Params, wait: Tensor, resolution: float) -> Tensor:
        begun = (wait - resolution).clamp_min(0)
        within = self._within(params, wait, resolution).sum(-1)
        return self.log_survival(params, begun) + (-torch.expm1(-within)).log()

    def log_kinds(self, params: Params, wait: Tensor, resolution: float = 0.0) -> Tensor:
        rates = self._within(params, wait, resolution) if resolution > 0 else self.hazards(params, wait)
        return rates.log() - rates.sum(-1, keepdim=True).log()

    def hazards(self, params: Params, wait: Tensor) -> Tensor:
        base, jumps = params
        return base + _summed(jumps, (-self._decays() * wait.unsqueeze(-1)).exp())

    def _decays(self) -> Tensor:
        """beta (M)."""
        return (-self.centre - self.spread * self.reach).exp()

    def _within(self, params: Params, wait: Tensor, length: Tensor | float) -> Tensor:
        """The integral (..., K) of the hazards from w - length to w."""
        base, jumps = params
        begun, decays = (wait - length).clamp_min(0).unsqueeze(-1), self._decays()
        width = wait.clamp_max(length).unsqueeze(-1)
        return base * width + _summed(jumps, (-decays * begun).exp() * -torch.expm1(-decays * width) / decays)


WAITS: dict[str, type[Mixture] | type[Intensity]] = {"mixture": Mixture, "intensity": Intensity}


def _wide(raw: Tensor) -> Tensor:
    return raw.to(torch.promote_types(raw.dtype, torch.float32))


def _summed(jumps: Tensor, factors: Tensor) -> Tensor:
    """sum_m jumps (..., K, M) factors (..., M) -> (..., K)."""
    return torch.einsum("...km,...m->...k", jumps, factors.to(jumps.dtype))


def _log_normal_between(upper: Tensor, width: Tensor) -> Tensor:
    """log(Phi(b) - Phi(b - d)) for d > 0, exact in both tails and for narrow intervals.

    Of a narrow one, with x = |b - d/2| d / 2: the density in its middle times d times sinh(x) / x, less d^2 / 24 for
    the curvature; else the difference of log Phi, on the side where Phi is small.
    """
    narrow = width < 0.02
    lower = upper - width
    middle = upper - width / 2
    x = middle.abs() * width / 2
    small = x < 0.1
    safe = torch.where(small, 1.0, x)
    log_sinhc = torch.where(
        small, x.square() / 6 - x.square().square() / 180, safe + (-torch.expm1(-2 * safe)).log() - (2 * safe).log()
    )
    inner = -middle.square() / 2 - math.log(2 * math.pi) / 2 + width.log() + log_sinhc - width.square() / 24

    right = lower > 0
    high = torch.special.log_ndtr(torch.where(right, -lower, upper))
    low = torch.special.log_ndtr(torch.where(right, -upper, lower))
    ratio = torch.where(narrow, -1.0, low - high)
    return torch.where(narrow, inner, high + (-torch.expm1(ratio)).log())
