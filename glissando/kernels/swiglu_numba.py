"""SwiGLU on a CPU, one pass over memory forward and one backward, compiled by Numba.

h (B, T, 2 F), y, g (B, T, F): float32, float64, or the bits of bfloat16 as uint16, computed in float32.
"""

from __future__ import annotations

from glissando.kernels.compiled import kernel
from glissando.kernels.exponentials import logistic
from glissando.kernels.products import as_computed, as_stored


@kernel
def forward(h, y, first, last):
    """y = a sigmoid(a) b,   h = [a, b]."""
    size = y.shape[2]
    for b in range(first, last):
        for t in range(y.shape[1]):
            gate, up, result = h[b, t, :size], h[b, t, size:], y[b, t]
            for i in range(size):
                a = as_computed(gate[i])
                result[i] = as_stored(a * logistic(a) * as_computed(up[i]), gate[i])


@kernel
def backward(h, g, grad_h, first, last):
    """grad_a = g b s (1 + a (1 - s)),   grad_b = g a s,   s = sigmoid(a)."""
    size = g.shape[2]
    for b in range(first, last):
        for t in range(g.shape[1]):
            gate, up, arrived = h[b, t, :size], h[b, t, size:], g[b, t]
            grad_gate, grad_up = grad_h[b, t, :size], grad_h[b, t, size:]
            for i in range(size):
                a, flow = as_computed(gate[i]), as_computed(arrived[i])
                s = logistic(a)
                silu = a * s
                grad_up[i] = as_stored(flow * silu, gate[i])
                grad_gate[i] = as_stored(flow * as_computed(up[i]) * (s + silu * (1 - s)), gate[i])
