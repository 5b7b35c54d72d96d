"""The spectral operator's parts: the rational filter over features, the phase gate, and with projections the whole
recurrence from what is projected to the gated states; on a CPU each in one pass over memory each way.

    filter      s = IFFT(Z f / (|Z| g + c)) with Z = FFT(z), each token on its own. The gain of a bin falls as its
                content grows, so that loud bins are compressed. The Continuous Transformer's, c = 0.1
    phase gate  u = s tanh(|s| alpha + phi beta), phi_t = (t omega + pi) mod 2 pi - pi, t the absolute position. The
                phase is reduced in float64, so that it stays exact at any position; where there is none see
                glissando.kernels.precise. From the Continuous Transformer
    recurrence  of parts = [v, r, g] (B, T, 4 N); see layer.py for the equation

numba.py has the backwards.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from glissando.kernels.compiled import as_rows, as_stored_rows, over_rows, require_shapes, same_reals, use_numba
from glissando.kernels.plain import without_derivatives
from glissando.kernels.precise import angle
from glissando.precision import upcast

Backend = Literal["auto", "reference", "numba"]
#: how much longer a number takes in the recurrence than to read, combine and write it: four exponentials
_COST = 4


def rational_filter(z: Tensor, f: Tensor, g: Tensor, floor: float = 0.1, backend: Backend = "auto") -> Tensor:
    """z (B, T, N) complex, f (N,) complex, g (N,) real: the modulus of G in |Z G| -> (B, T, N).

    `numba` (a CPU only; `auto` there) keeps Z alone for the backward and touches it once each way.
    """
    if z.numel() == 0:
        return z * f
    spectrum = torch.fft.fft(z)
    if use_numba("rational_filter", backend, z):
        ratio = _Ratio.apply if torch.is_grad_enabled() else _ratio
        return torch.fft.ifft(ratio(spectrum, f, g, floor))
    return torch.fft.ifft(spectrum * f / (spectrum.abs() * g + floor))


def _ratio(z: Tensor, f: Tensor, g: Tensor, floor: float) -> Tensor:
    from glissando.mixers.spectral.numba import filter_forward

    out = torch.empty_like(z, memory_format=torch.contiguous_format)
    over_rows(filter_forward, z, as_rows(z, 2), as_rows(f, 0), as_rows(g, 0), floor, as_rows(out, 2))
    return out


class _Ratio(torch.autograd.Function):
    """z f / (|z| g + floor) for real g."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, f: Tensor, g: Tensor, floor: float) -> Tensor:
        ctx.save_for_backward(z, f, g)
        ctx.floor = floor
        return _ratio(z, f, g, floor)

    @staticmethod
    @without_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from glissando.mixers.spectral.numba import filter_backward

        z, f, g = ctx.saved_tensors
        grad_z = torch.empty_like(z, memory_format=torch.contiguous_format)
        grad_f = torch.zeros(len(z), len(f), dtype=torch.complex128)
        grad_g = torch.zeros(len(z), len(g), dtype=torch.float64)
        arrays = (as_rows(z, 2), as_rows(f, 0), as_rows(g, 0), ctx.floor, as_rows(grad, 2))
        over_rows(filter_backward, z, *arrays, as_rows(grad_z, 2), as_rows(grad_f, 1), as_rows(grad_g, 1))
        return grad_z, grad_f.sum(0).to(f.dtype), grad_g.sum(0).to(g.dtype), None


def phase_gate(
    s: Tensor, alpha: Tensor, beta: Tensor, omega: Tensor, position: Tensor, backend: Backend = "auto"
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


def has_kernel(parts: Tensor, *constants: Tensor) -> bool:
    """Whether `gated_scan` serves these tensors, on a CPU."""
    stored = parts.dtype in (torch.float32, torch.float64, torch.bfloat16)
    return stored and use_numba("spectral", "auto", parts) and same_reals(upcast(parts[:0]), *constants)


def gated_scan(parts: Tensor, gammas: Tensor, bias: Tensor, factor: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
    """y = h silu(g) (B, T, 2 N) in the type of `parts`, and the states h (B, T, N, 2), which must not be changed.

    gammas (N,) 8 gamma; bias (N,) of the decay; factor (N, 2) exp(i w); h0 (B, N, 2), zeros if None

    Raises ValueError for shapes that do not fit.
    """
    if parts.shape[1] < 1:
        raise ValueError(f"spectral: x must be (batch, time >= 1, features), got {tuple(parts.shape[:2])}")
    if h0 is None:
        h0 = factor.new_zeros(len(parts), *factor.shape)
    require_shapes("spectral", h0=(h0, (len(parts), *factor.shape)))
    return _GatedScan.apply(parts, gammas, bias, factor, h0.to(factor.dtype))


class _GatedScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, gammas: Tensor, bias: Tensor, factor: Tensor, h0: Tensor) -> Any:
        from glissando.mixers.spectral.numba import forward

        h = factor.new_empty(*parts.shape[:2], *factor.shape)
        y = parts.new_empty(*parts.shape[:2], factor.numel())
        arrays = *_arrays(parts, gammas, bias, factor, h0), as_rows(h, 2), as_stored_rows(y)
        over_rows(forward, parts, *arrays, cost=_COST)
        ctx.save_for_backward(parts, gammas, bias, factor, h0, h)
        ctx.set_materialize_grads(False)
        return y, h

    @staticmethod
    @without_derivatives
    def backward(ctx: Any, grad_y: Tensor | None, grad_h: Tensor | None) -> tuple[Tensor | None, ...]:
        from glissando.mixers.spectral.numba import backward

        *inputs, h = ctx.saved_tensors
        parts, _, bias, factor, h0 = inputs
        grad_y = parts.new_zeros(*parts.shape[:2], factor.numel()) if grad_y is None else grad_y.to(parts.dtype)
        grad_h = h[:, :, :0] if grad_h is None else grad_h
        grad_parts = torch.empty_like(parts, memory_format=torch.contiguous_format)
        sums, carry = torch.zeros(len(parts), 4, len(bias), dtype=torch.float64), h.new_zeros(h0.shape)
        past = *_arrays(*inputs), as_rows(h, 2), as_stored_rows(grad_y), as_rows(grad_h, 2)
        over_rows(backward, parts, *past, as_stored_rows(grad_parts), sums.numpy(), as_rows(carry, 1), cost=_COST)
        of_gammas, of_bias, real, imag = sums.sum(0).to(bias.dtype)
        return grad_parts, of_gammas, of_bias, torch.stack((real, imag), -1), carry


def _arrays(parts: Tensor, gammas: Tensor, bias: Tensor, factor: Tensor, h0: Tensor) -> tuple[Any, ...]:
    vectors = gammas, bias, *factor.unbind(-1)
    return as_stored_rows(parts), *(as_rows(vector, 0) for vector in vectors), as_rows(h0, 1)
