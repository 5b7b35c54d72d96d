"""The matrix logarithm: a continuous system from its sampled one, the inverse of glissando.mixers.liquid.discretize."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from glissando.mixers.liquid.zero_order_hold import exponential, fitted, largest_entry

#: how near to I, in the 1-norm, a root must be for the quadrature of the logarithm to be exact to float64
_NEAR = 0.25
_NODES = 7
#: square roots, and Denman-Beavers steps for each; the residual shows what needs more
_ROOTS, _STEPS = 64, 100
#: how far exp(log F) may be from F, relative to the largest entry of F, where F came in this type
_RESIDUAL = {torch.float64: 1e-9, torch.float32: 1e-5}


def undiscretize(Ad: Tensor, Bd: Tensor, dt: Tensor | float) -> tuple[Tensor, Tensor]:
    """The inverse of `discretize`: (A, B) from dt [[A, B], [0, 0]] = log [[Ad, Bd], [0, I]], the principal logarithm.

    Shapes as in `discretize`; computed in float64 and returned in the common type of Ad and Bd. Gradients for Ad, Bd
    and dt. Of all A that give Ad it is the one whose frequencies are below pi / dt: faster ones cannot be distinguished
    from their aliases.

    Raises ValueError for shapes or types that do not fit, values that are not finite, dt = 0, an Ad with an eigenvalue
    at 0 or on the negative real axis, and where `discretize` would not give Ad and Bd back to 1e-9 (float32: 1e-5) of
    their largest entries: the condition of Ad limits what can be determined, and it grows like exp(dt |A|).

    Inverse scaling and squaring, log F = 2^s log F^(1/2^s), with the roots by the product form of the Denman-Beavers
    iteration and a Gauss-Legendre rule near I: Cheng, Higham, Kenney and Laub 2001, "Approximating the logarithm of a
    matrix to specified accuracy", SIAM J. Matrix Anal. Appl. 22(4).
    """
    A, B, step = fitted("undiscretize", ("Ad", Ad), ("Bd", Bd), dt, torch.float64)
    single = torch.promote_types(Ad.dtype, Bd.dtype).to_real() in (torch.float16, torch.bfloat16, torch.float32)
    given = torch.float32 if single else torch.float64
    _require_logarithm(A, B, step, given)
    unit, size, inputs = largest_entry(B), A.shape[-1], B.shape[-1]
    below = torch.eye(size + inputs, dtype=A.dtype, device=A.device)[size:].expand(*A.shape[:-2], -1, -1)
    F = torch.cat([torch.cat([A, B / unit], -1), below], -2)
    L = _logarithm(F)
    _require_inverse(L, F, _RESIDUAL[given])
    L = L[..., :size, :] / step
    dtype = torch.promote_types(torch.promote_types(Ad.dtype, Bd.dtype), torch.float32)
    return L[..., :size].to(dtype), (L[..., size:] * unit).to(dtype)


def _require_logarithm(A: Tensor, B: Tensor, dt: Tensor, given: torch.dtype) -> None:
    """Raise ValueError unless [[A, B], [0, I]] has a principal logarithm, and dt can divide it."""
    if bool((dt == 0).any()):
        raise ValueError("undiscretize: dt is 0, over which no system moves: every A fits; give the time that passed")
    if not bool(A.isfinite().all() & B.isfinite().all()):
        raise ValueError("undiscretize: Ad and Bd must be finite")
    # A double eigenvalue splits by the root of the error of the entries.
    values, apart = torch.linalg.eigvals(A.detach()), torch.finfo(given).eps ** 0.5
    stuck = values[(values.real <= 0) & (values.imag.abs() <= apart * values.abs())]
    if len(stuck):
        raise ValueError(
            f"undiscretize: Ad has {len(stuck)} eigenvalues at 0 or on the negative real axis, such as "
            f"{stuck[0].item():.3g}, where no principal logarithm exists: no real A with frequencies below pi / dt "
            "gives it. If it was sampled from a flow, the decay over dt is below rounding: sample with a smaller dt"
        )


def _require_inverse(L: Tensor, F: Tensor, tolerance: float) -> None:
    with torch.no_grad():
        miss = (exponential(L) - F).abs().amax((-2, -1)) / F.abs().amax((-2, -1))
    failed = ~(miss <= tolerance)
    if bool(failed.any()):
        raise ValueError(
            f"undiscretize: no logarithm reached {tolerance:.0e} in float64 for {int(failed.sum())} systems (residual "
            f"{miss[failed].max().item():.1e}): their Ad are too ill-conditioned, up to "
            f"{torch.linalg.cond(F.detach()[failed]).max().item():.0e}. Sample with a smaller dt"
        )


def _logarithm(F: Tensor) -> Tensor:
    """The principal logarithm, F (..., N, N). Each matrix has a number of roots of its own: no row moves another."""
    eye = torch.eye(F.shape[-1], dtype=F.dtype, device=F.device)
    root, roots = F, torch.zeros(F.shape[:-2], device=F.device)
    for _ in range(_ROOTS):
        far = _norm(root - eye) > _NEAR
        if not bool(far.any()):
            break
        root = torch.where(far[..., None, None], _square_root(root, eye), root)
        roots = roots + far
    return _logarithm_near_one(root - eye, eye) * (2**roots)[..., None, None]


def _square_root(F: Tensor, eye: Tensor) -> Tensor:
    """Product form of Denman and Beavers: X <- X (I + M^-1) / 2, M <- (2 I + M + M^-1) / 4 from X = M = F; M -> I."""
    X = M = F
    for _ in range(_STEPS):
        inverse = torch.linalg.inv_ex(M).inverse  # not inv: a matrix that rounding made singular shows in the residual
        X, M = X @ (eye + inverse) / 2, (2 * eye + M + inverse) / 4
        # Quadratic, also for the derivative one step behind: past this point both are at rounding.
        if not bool((_norm(M - eye) > 1e-14 * len(eye)).any()):
            break
    return X


def _logarithm_near_one(E: Tensor, eye: Tensor) -> Tensor:
    """log(I + E) = integral from 0 to 1 of E (I + x E)^-1 dx, by Gauss-Legendre: the [m/m] Pade approximant."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    total = torch.zeros_like(E)
    for x, weight in zip(nodes, weights, strict=True):  # on [-1, 1]
        total = total + weight / 2 * torch.linalg.solve_ex(eye + (x + 1) / 2 * E, E).result
    return total


def _norm(X: Tensor) -> Tensor:
    return X.detach().abs().sum(-2).amax(-1)
