"""Energy of vectors on a graph over their entries, the Rayleigh quotient: E = x'Lx / (x'x + eps), L = Deg - A.

In edges, x'Lx = sum over {i, j} of w_ij (x_i - x_j)^2, so E is 0 for a constant vector and at most the largest
eigenvalue of L. Statistics are taken at least in float32, also under autocast, and returned so: what is made of an
energy (lambda = E / (E + tau)) distinguishes near ones. x = 0 has E = 0 and gradient 0.

Source: Chung 1997, Spectral Graph Theory, section 1.2.
"""

from __future__ import annotations

from torch import Tensor

from glissando.precision import exact, without_autocast


def energy(x: Tensor, laplacian: Tensor, eps: float = 1e-6) -> Tensor:
    """x (..., K), laplacian (K, K), or (K,) a diagonal -> (...); differentiable in both.

    Rounding may take the energy of a nearly constant vector slightly below 0.
    """
    x = exact(x)
    laplacian = laplacian.to(x.dtype)
    if laplacian.ndim == 1:
        return (x * laplacian * x).sum(-1) / (x.square().sum(-1) + eps)
    with without_autocast(x.device.type):
        smoothed = x @ laplacian
    return (smoothed * x).sum(-1) / (x.square().sum(-1) + eps)
