"""The scan on a CPU: one pass over memory, compiled by Numba.

What bounds it is memory traffic: a row of features is read, combined with the state, which stays in the first-level
cache, and written, at about the speed of a copy. Hence whole rows and never strided blocks of features (twice as slow
on the machine of log/2026-11.md), and threads over the batch only where the work is large.

Complex numbers are read as interleaved pairs of reals; Numba's complex type is not vectorised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glissando.kernels.compiled import as_rows, kernel, over_rows

#: steps summed in the working precision before they are added to a float64 total
_RUN = 256


@kernel
def _forward_real(a, x, h0, h, first, last):
    steps, size = x.shape[1], x.shape[2]
    by_row, by_step = a.shape[0] > 1, a.shape[1] > 1
    state = h0[0].copy()
    for b in range(first, last):
        for d in range(size):
            state[d] = h0[b, d]
        for t in range(steps):
            factor = a[b if by_row else 0, t if by_step else 0]
            entry, out = x[b, t], h[b, t]
            for d in range(size):
                value = factor[d] * state[d] + entry[d]
                state[d] = value
                out[d] = value


@kernel
def forward_pairs(a, x, h0, h, first, last):
    steps, size = x.shape[1], x.shape[2] // 2
    by_row, by_step = a.shape[0] > 1, a.shape[1] > 1
    real, imag = h0[0, ::2].copy(), h0[0, 1::2].copy()
    for b in range(first, last):
        for d in range(size):
            real[d], imag[d] = h0[b, 2 * d], h0[b, 2 * d + 1]
        for t in range(steps):
            factor = a[b if by_row else 0, t if by_step else 0]
            entry, out = x[b, t], h[b, t]
            for d in range(size):
                p, q = factor[2 * d], factor[2 * d + 1]
                u = p * real[d] - q * imag[d] + entry[2 * d]
                v = p * imag[d] + q * real[d] + entry[2 * d + 1]
                real[d] = u
                imag[d] = v
                out[2 * d] = u
                out[2 * d + 1] = v


@kernel
def _backward_real(a, h, h0, grad, grad_a, grad_x, carry, first, last):
    """carry (B, F) holds grad_last and leaves as the gradient of h0; grad_a is (B, T or 1, F)."""
    steps, size = h.shape[1], h.shape[2]
    by_row, by_step = a.shape[0] > 1, a.shape[1] > 1
    total = carry[0].copy()
    for b in range(first, last):
        flow = carry[b]
        total[:] = 0
        for t in range(steps - 1, -1, -1):
            factor = a[b if by_row else 0, t if by_step else 0]
            past = h[b, t - 1] if t > 0 else h0[b]
            arrived, out = grad[b, t], grad_x[b, t]
            if by_step:
                slope = grad_a[b, t]
                for d in range(size):
                    s = arrived[d] + flow[d]
                    out[d] = s
                    slope[d] = s * past[d]
                    flow[d] = factor[d] * s
            else:
                for d in range(size):
                    s = arrived[d] + flow[d]
                    out[d] = s
                    total[d] += s * past[d]
                    flow[d] = factor[d] * s
                if t % _RUN == 0:
                    for d in range(total.shape[0]):
                        grad_a[b, 0, d] += total[d]
                        total[d] = 0


@kernel
def _backward_pairs(a, h, h0, grad, grad_a, grad_x, carry, first, last):
    """As _backward_real, on pairs: da = s conj(past), carry = conj(a) s."""
    steps, size = h.shape[1], h.shape[2] // 2
    by_row, by_step = a.shape[0] > 1, a.shape[1] > 1
    real, imag = carry[0, ::2].copy(), carry[0, 1::2].copy()
    total = carry[0].copy()
    for b in range(first, last):
        for d in range(size):
            real[d], imag[d] = carry[b, 2 * d], carry[b, 2 * d + 1]
        total[:] = 0
        for t in range(steps - 1, -1, -1):
            factor = a[b if by_row else 0, t if by_step else 0]
            past = h[b, t - 1] if t > 0 else h0[b]
            arrived, out = grad[b, t], grad_x[b, t]
            if by_step:
                slope = grad_a[b, t]
                for d in range(size):
                    p, q = factor[2 * d], factor[2 * d + 1]
                    u, v = arrived[2 * d] + real[d], arrived[2 * d + 1] + imag[d]
                    out[2 * d] = u
                    out[2 * d + 1] = v
                    slope[2 * d] = u * past[2 * d] + v * past[2 * d + 1]
                    slope[2 * d + 1] = v * past[2 * d] - u * past[2 * d + 1]
                    real[d] = p * u + q * v
                    imag[d] = p * v - q * u
            else:
                for d in range(size):
                    p, q = factor[2 * d], factor[2 * d + 1]
                    u, v = arrived[2 * d] + real[d], arrived[2 * d + 1] + imag[d]
                    out[2 * d] = u
                    out[2 * d + 1] = v
                    total[2 * d] += u * past[2 * d] + v * past[2 * d + 1]
                    total[2 * d + 1] += v * past[2 * d] - u * past[2 * d + 1]
                    real[d] = p * u + q * v
                    imag[d] = p * v - q * u
                if t % _RUN == 0:
                    for d in range(total.shape[0]):
                        grad_a[b, 0, d] += total[d]
                        total[d] = 0
        for d in range(size):
            carry[b, 2 * d], carry[b, 2 * d + 1] = real[d], imag[d]


class NumbaScan:
    """The backend `numba` of glissando.kernels.scan; a (B or 1, T or 1, *F), all of one floating type."""

    @staticmethod
    def forward(a: Tensor, x: Tensor, h0: Tensor) -> Tensor:
        h = torch.empty_like(x, memory_format=torch.contiguous_format)
        step = forward_pairs if x.is_complex() else _forward_real
        over_rows(step, x, as_rows(a, 2), as_rows(x, 2), as_rows(h0, 1), as_rows(h, 2))
        return h

    @staticmethod
    def backward(a: Tensor, h: Tensor, h0: Tensor, grad: Tensor, grad_last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        step = _backward_pairs if h.is_complex() else _backward_real
        exact = h.dtype if a.shape[1] > 1 else torch.promote_types(h.dtype, torch.float64)
        grad_a = torch.zeros(h.shape[0], *a.shape[1:], dtype=exact)
        grad_x = torch.empty_like(h, memory_format=torch.contiguous_format)
        carry = grad_last.clone(memory_format=torch.contiguous_format)
        past = (as_rows(a, 2), as_rows(h, 2), as_rows(h0, 1))
        over_rows(step, h, *past, as_rows(grad, 2), as_rows(grad_a, 2), as_rows(grad_x, 2), as_rows(carry, 1))
        return grad_a.sum_to_size(a.shape).to(a.dtype), grad_x, carry
