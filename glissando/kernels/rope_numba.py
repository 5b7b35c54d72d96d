"""Rotation of pairs on a CPU in one pass over memory, compiled by Numba."""

from __future__ import annotations

from glissando.kernels.compiled import kernel


@kernel
def turn(x, cos, sin, y, first, last):
    """Pairs (i, i + K/2) of x (B, T, H, K) by cos, sin (1 or B, T, K/2)."""
    half = cos.shape[2]
    for b in range(first, last):
        of = b if cos.shape[0] > 1 else 0
        for t in range(x.shape[1]):
            for h in range(x.shape[2]):
                pairs, turned = x[b, t, h], y[b, t, h]
                for i in range(half):
                    c, s = cos[of, t, i], sin[of, t, i]
                    turned[i] = pairs[i] * c - pairs[half + i] * s
                    turned[half + i] = pairs[half + i] * c + pairs[i] * s
