"""The phase gate: u = s tanh(|s| alpha + phi beta), phi_t = (t omega + pi) mod 2 pi - pi, t the absolute position.

The phase is reduced in float64, so that it stays exact at any position; where there is none see
glissando.kernels.precise. From the Continuous Transformer.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from glissando.kernels.compiled import as_rows, over_rows, use_numba
from glissando.kernels.plain import without_derivatives
from glissando.kernels.precise import angle


def phase_gate(
    s: Tensor,
    alpha: Tensor,
    beta: Tensor,
    omega: Tensor,
    position: Tensor,
    backend: Literal["auto", "reference", "numba"] = "auto",
) -> Tensor:
    """s (B, T, N) complex; alpha, beta, omega (N,) real; position (B,) int64 of the first token -> (B, T, N),
    all of one precision."""
    if use_numba("phase_gate", backend, s):
        if torch.is_grad_enabled():
            return _PhaseGate.apply(s, alpha, beta, omega, position)
        return s * _gates(s, alpha, beta, omega, position)
    phi = phases(omega, position, s.shape[1]).to(alpha.dtype)
    return s * torch.tanh(s.abs() * alpha + phi * beta)


def phases(omega: Tensor, position: Tensor, length: int) -> Tensor:
    """t omega in [-pi, pi), (B, length, N), for t = position, position + 1, ...; in float64, or in float32 on a device
    without it: within 1e-6 to position 2^24, on either side of pi where the phase is as near to it."""
    t = position.unsqueeze(1) + torch.arange(length, device=position.device)
    turned = angle(t.unsqueeze(-1), omega)
    return torch.remainder(turned + math.pi, 2 * math.pi) - math.pi


def _gates(s: Tensor, alpha: Tensor, beta: Tensor, omega: Tensor, position: Tensor) -> Tensor:
    """tanh(|s| alpha + phi beta)."""
    from glissando.mixers.spectral.numba import gate_argument

    gates = torch.empty(s.shape, dtype=alpha.dtype)
    vectors = (as_rows(alpha, 0), as_rows(beta, 0), as_rows(omega, 0))
    over_rows(gate_argument, s, as_rows(s, 2), *vectors, position.numpy(), gates.numpy())
    return gates.tanh_()


class _PhaseGate(torch.autograd.Function):
    """See glissando.mixers.spectral.numba for the backward."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, alpha: Tensor, beta: Tensor, omega: Tensor, position: Tensor) -> Tensor:
        tanh = _gates(s, alpha, beta, omega, position)
        ctx.save_for_backward(s, tanh, alpha, beta, omega, position)
        return s * tanh

    @staticmethod
    @without_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from glissando.mixers.spectral.numba import gate_backward

        s, tanh, alpha, beta, omega, position = ctx.saved_tensors
        grad_s = torch.empty_like(s, memory_format=torch.contiguous_format)
        sums = torch.zeros(len(s), 3, len(alpha), dtype=torch.float64)
        vectors = tuple(as_rows(v, 0) for v in (alpha, beta, omega))
        arrays = (as_rows(s, 2), tanh.numpy(), *vectors, position.numpy(), as_rows(grad, 2))
        over_rows(gate_backward, s, *arrays, as_rows(grad_s, 2), sums.numpy())
        of_alpha, of_beta, of_omega = sums.sum(0).to(alpha.dtype)
        return grad_s, of_alpha, of_beta, of_omega * beta, None
