"""Energy of vectors on a graph over their entries, the Rayleigh quotient: E = x'Lx / (x'x + eps), L = Deg - A.

In edges, x'Lx = sum over {i, j} of w_ij (x_i - x_j)^2, so E is 0 for a constant vector and at most the largest
eigenvalue of L. Both forms take statistics at least in float32, also under autocast, and return them so: what is made
of an energy (lambda = E / (E + tau)) tells near ones apart. x = 0 has E = 0 and gradient 0.

Source: Chung 1997, Spectral Graph Theory, section 1.2.
"""

from __future__ import annotations

from torch import Tensor

from glissando.precision import exact, without_autocast


def energy(x: Tensor, laplacian: Tensor, eps: float = 1e-6) -> Tensor:
    """x (..., K), laplacian (K, K) -> (...); differentiable in both. The plain form, and the fast one for the usual
    K: on one CPU core at 12 edges a node, forward and backward, `energy_edges` takes 11, 7, 2 and 0.5 times as long at
    K = 64, 384, 2048 and 8192.

    Rounding may take the energy of a nearly constant vector slightly below 0.
    """
    x = exact(x)
    with without_autocast(x.device.type):
        smoothed = x @ laplacian.to(x.dtype)
    return (smoothed * x).sum(-1) / (x.square().sum(-1) + eps)


def energy_edges(x: Tensor, edges: Tensor, weights: Tensor, eps: float = 1e-6) -> Tensor:
    """x (..., K), edges (2, E) int64, each once, weights (E,) -> (...); differentiable in x and weights.

    Never below 0 where no weight is. It holds E numbers a vector and no K x K matrix, so memory is linear in the edges.
    """
    x = exact(x)
    differences = x.index_select(-1, edges[0]) - x.index_select(-1, edges[1])
    with without_autocast(x.device.type):
        rise = differences.square() @ weights.to(x.dtype)
    return rise / (x.square().sum(-1) + eps)
