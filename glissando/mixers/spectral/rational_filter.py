"""The spectral filter over features: s = IFFT(Z f / (|Z| g + c)) with Z = FFT(z), each token on its own.

The gain of a bin falls as its content grows, so that loud bins are compressed. The Continuous Transformer's, c = 0.1.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from glissando.kernels.compiled import as_rows, over_rows, use_numba
from glissando.kernels.plain import without_derivatives


def rational_filter(
    z: Tensor, f: Tensor, g: Tensor, floor: float = 0.1, backend: Literal["auto", "reference", "numba"] = "auto"
) -> Tensor:
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
    """z f / (|z| g + floor) for real g; see glissando.mixers.spectral.numba for the backward."""

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
