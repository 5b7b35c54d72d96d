"""The spectral mixer in real numbers: every complex one is a pair.

h_t = |lambda_t| (cos w_t + i sin w_t) h_{t-1} + u_t,   FFT and its inverse over channels as products of real matrices
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.kernels.loop import over_time
from glissando.mixers.base import Context
from glissando.mixers.spectral.layer import Spectral, SpectralState, aged
from glissando.mixers.spectral.phase_gate import phases
from glissando.precision import exact


class PairedSpectral(Spectral):
    """See the module's docstring; the same parameters and the same state."""

    def __init__(self, mixer: Spectral) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(mixer))

    def forward(self, x: Tensor, state: Any = None, ctx: Context | None = None) -> tuple[Tensor, Any]:
        state = self.init_state(len(x)) if state is None else state
        entry, rate, gate = self._project(x)
        c, n, u = self.config, self.channels, exact(entry)
        gamma = exact(self.log_gamma).exp()
        turn = exact(self.omega) + 0.1 * torch.sin(exact(self.modulation))
        real, imag = u.unflatten(-1, (n, 2)).unbind(-1) if u.shape[-1] != n else (u, None)
        if c.filter and imag is not None:
            real, imag = self._filtered(real, imag)
        if c.phase_gate and imag is not None:
            phi = phases(exact(self.omega), state.position, x.shape[1]).to(u.dtype)
            modulus = torch.sqrt(real.square() + imag.square())
            share = torch.tanh(modulus * exact(self.gate_alpha) + phi * exact(self.gate_beta))
            real, imag = real * share, imag * share
        if c.projections:
            if rate is not None:
                gamma = 8 * gamma * torch.sigmoid(exact(rate) + exact(self.decay_bias))
            scale = torch.sqrt((-torch.expm1(-2 * gamma)).clamp_min(torch.finfo(gamma.dtype).tiny))
            real, imag = real * scale, None if imag is None else imag * scale
        keep, cos, sin = torch.exp(-gamma), turn.cos(), turn.sin()
        if ctx is not None and ctx.dt is not None:
            keep, (cos, sin) = torch.ones_like(real), aged(gamma, turn, ctx.dt).unbind(-1)
        h, last = _turning(keep, cos, sin, real, imag, state.h.to(u.dtype))
        y = h.flatten(-2)
        if gate is not None:
            y = y.to(gate.dtype) * F.silu(gate)
        y = self.out(y.to(x.dtype)) if c.projections else y.to(x.dtype)
        return y, SpectralState(last.to(state.h.dtype), state.position + x.shape[1])

    def _filtered(self, real: Tensor, imag: Tensor) -> tuple[Tensor, Tensor]:
        """glissando.mixers.spectral.rational_filter of pairs."""
        n = self.channels
        angle = 2 * math.pi / n * (torch.arange(n).unsqueeze(1) * torch.arange(n) % n).double()
        cos, sin = (part.to(real) for part in (angle.cos(), angle.sin()))
        z_re, z_im = real @ cos + imag @ sin, imag @ cos - real @ sin  # exp(-i angle)
        (f_re, f_im), g = exact(self.numerator).unbind(-1), exact(self.denominator).square().sum(-1).sqrt()
        share = 1 / ((z_re.square() + z_im.square()).sqrt() * g + 0.1)
        s_re, s_im = (z_re * f_re - z_im * f_im) * share, (z_re * f_im + z_im * f_re) * share
        return (s_re @ cos - s_im @ sin) / n, (s_im @ cos + s_re @ sin) / n


def _turning(
    keep: Tensor, cos: Tensor, sin: Tensor, real: Tensor, imag: Tensor | None, h0: Tensor
) -> tuple[Tensor, Tensor]:
    """h_t = keep_t (cos_t + i sin_t) h_{t-1} + u_t as pairs (B, T, N, 2), from h0 (B, N, 2), and the last."""
    entry = torch.stack([real, torch.zeros_like(real) if imag is None else imag], -1)

    def step(carry: tuple[Tensor, ...], now: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        (a, b), (kept, c, s) = carry[0].unbind(-1), now[1:]
        h = torch.stack([kept * (c * a - s * b), kept * (s * a + c * b)], -1) + now[0]
        return (h,), h

    factors = (part.expand_as(real) for part in (keep, cos, sin))
    h, (last,) = over_time(step, (h0,), (entry, *factors))
    return h, last
