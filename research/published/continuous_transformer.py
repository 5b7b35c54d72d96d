"""The Continuous Transformer as published: one spectral operator, applied again and again to complex vectors.

    z    = lift(E[id])                               E (256, D); the lift D -> 2D, its real half first
    six times, with a bias b_i of its own each time and one operator for all:
    z   <- z + b_i
    Z    = FFT(z) over features;   s = IFFT(Z F / (|Z G| + 0.1))
    phi  = (t omega + pi) mod 2 pi - pi;   g = tanh(|s| alpha + phi beta)
    h    = IFFT(FFT(s g) FFT(K)) over time,   K_t = exp((-gamma + i w) t),   gamma = exp(log_gamma)
           w = omega + 0.1 sin(m)
    z   <- P(z + dt h),   P(z) = (z - mu) / (sqrt(mean((z - mu)^2)) + 1e-6), mu and mean over features
    logits = W_re Re z + b_re + W_im Im z + b_im

Its defects, kept:

* the FFT over time is not padded, so the convolution is circular: every position sees the last one, and the loss of
  training is that of a model that has seen the answer;
* P divides by the square root of the pseudo-variance mean((z - mu)^2), which is near 0 where the phases of z are
  spread evenly, however large z is; and where it crosses the negative axis its square root jumps in sign;
* a character is decoded by computing its whole context again, and positions count from the start of that context;
* 7,169 of 2,905,601 parameters are in the operator; the lift and the tables hold the others;
* t omega is rounded in float32, so the phase is lost at large t.

F, G and b_i start N(0, 0.02) in each of their real and imaginary parts, log_gamma N(-2, 0.5), m N(0, 0.02); the table,
the lift and the head as PyTorch starts them. tests/test_sources.py runs the publication's own program beside this one.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

#: characters of context that decoding computes again for every new one
CONTEXT = 1024


class PublishedContinuousTransformer(nn.Module):
    """ids (B, T), bytes -> logits (B, T, 256); see the module's docstring. Not causal."""

    def __init__(self, hidden_size: int = 1024, steps: int = 6, checkpoint: bool = True) -> None:
        """checkpoint: keep only what enters each step, and compute the rest again in the backward pass."""
        super().__init__()
        self.checkpoint = checkpoint
        self.embedding = nn.Embedding(256, hidden_size)
        self.lift = nn.Linear(hidden_size, 2 * hidden_size)
        self.biases = nn.Parameter(0.02 * torch.randn(steps, hidden_size, 2))
        self.operator = _Operator(hidden_size)
        self.head_real = nn.Linear(hidden_size, 256)
        self.head_imag = nn.Linear(hidden_size, 256)

    def forward(self, ids: Tensor) -> Tensor:
        z = torch.complex(*self.lift(self.embedding(ids)).chunk(2, -1))
        for bias in torch.view_as_complex(self.biases):
            if self.checkpoint and torch.is_grad_enabled():
                z = cast(Tensor, recompute(self.operator, z, bias, use_reentrant=False, preserve_rng_state=False))
            else:
                z = self.operator(z, bias)
        return self.head_real(z.real) + self.head_imag(z.imag)

    @torch.no_grad()
    def next_logits(self, ids: Tensor) -> Tensor:
        """Logits (B, 256) of the character after ids (B, T): the last CONTEXT characters, all of them, every time."""
        return self(ids[:, -CONTEXT:])[:, -1]


class _Operator(nn.Module):
    """One step, z (B, T, D) complex and the step's bias (D) -> z."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.filter = nn.Parameter(0.02 * torch.complex(torch.randn(size), torch.randn(size)))  # F
        self.gate = nn.Parameter(0.02 * torch.complex(torch.randn(size), torch.randn(size)))  # G
        self.alpha = nn.Parameter(torch.full((size,), 0.5))
        self.beta = nn.Parameter(torch.zeros(size))
        self.log_gamma = nn.Parameter(-2 + 0.5 * torch.randn(size))
        self.omega = nn.Parameter(frequencies(size))
        self.modulation = nn.Parameter(0.02 * torch.randn(size))  # m
        self.dt = nn.Parameter(torch.tensor(0.1))

    def forward(self, z: Tensor, bias: Tensor) -> Tensor:
        z = z + bias
        spectrum = torch.fft.fft(z)
        s = torch.fft.ifft(spectrum * self.filter / ((spectrum * self.gate).abs() + 0.1))
        t = torch.arange(z.shape[1], device=z.device, dtype=self.omega.dtype)[:, None]
        phase = torch.remainder(t * self.omega + math.pi, 2 * math.pi) - math.pi
        s = s * torch.tanh(s.abs() * self.alpha + phase * self.beta)
        kernel = torch.exp(torch.complex(-self.log_gamma.exp(), self.omega + 0.1 * self.modulation.sin()) * t)
        # The defect: n = T and not 2T - 1, so what leaves at the end comes in again at the start.
        h = torch.fft.ifft(torch.fft.fft(s, dim=1) * torch.fft.fft(kernel, dim=0), dim=1)
        return standardise(z + self.dt * h)


def standardise(z: Tensor) -> Tensor:
    """P: zero mean and, by the pseudo-variance, "unit deviation" over the features."""
    centred = z - z.mean(-1, keepdim=True)
    return centred / ((centred * centred).mean(-1, keepdim=True).sqrt() + 1e-6)


def frequencies(size: int) -> Tensor:
    """omega_n = exp(-r_n / max r * ln 10^4) with r_n = sqrt(2n + 1), n = 0..size-1; called HiPPO's."""
    roots = torch.sqrt(2 * torch.arange(size) + 1.0)
    return torch.exp(-roots / roots.max() * math.log(1e4))
