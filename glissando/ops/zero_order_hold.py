"""Linear systems sampled in time, both ways, and the HiPPO-LegS system.

    dx/dt = A x + B u, u held for a time dt   <->   x' = Ad x + Bd u,     [[Ad, Bd], [0, I]] = exp(dt [[A, B], [0, 0]])

The block form needs no inverse of A, so that a singular one, an integrator, is like any other.

Van Loan 1978, "Computing integrals involving the matrix exponential", IEEE TAC 23(3).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: how near to I, in the 1-norm, a root must be for the quadrature of the logarithm to be exact to float64
_NEAR = 0.25
_NODES = 7
#: square roots, and Denman-Beavers steps for each; the residual shows what needs more
_ROOTS, _STEPS = 64, 100
#: how far exp(log F) may be from F, relative to the largest entry of F, where F came in this type
_RESIDUAL = {torch.float64: 1e-9, torch.float32: 1e-5}


def discretize(A: Tensor, B: Tensor, dt: Tensor | float) -> tuple[Tensor, Tensor]:
    """Ad = exp(dt A) and Bd = (integral from 0 to dt of exp(s A) ds) B: the exact zero-order hold.

    A (..., N, N), B (..., N, M), dt (...) or a number, of any sign; leading dimensions broadcast -> Ad (..., N, N) and
    Bd (..., N, M) in the common type of A and B, float32 for half precision. Gradients for A, B and dt.

    Raises ValueError for shapes or types that do not fit and a dt that is not finite.
    """
    A, B, dt = _fitted("discretize", ("A", A), ("B", B), dt, torch.float32)
    A, B, size = dt * A, dt * B, A.shape[-1]
    unit = _unit(B)
    zeros = A.new_zeros(*A.shape[:-2], B.shape[-1], size + B.shape[-1])
    E = _exponential(torch.cat([torch.cat([A, B / unit], -1), zeros], -2))
    return E[..., :size, :size], E[..., :size, size:] * unit


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
    A, B, step = _fitted("undiscretize", ("Ad", Ad), ("Bd", Bd), dt, torch.float64)
    single = torch.promote_types(Ad.dtype, Bd.dtype).to_real() in (torch.float16, torch.bfloat16, torch.float32)
    given = torch.float32 if single else torch.float64
    _require_logarithm(A, B, step, given)
    unit, size, inputs = _unit(B), A.shape[-1], B.shape[-1]
    below = torch.eye(size + inputs, dtype=A.dtype, device=A.device)[size:].expand(*A.shape[:-2], -1, -1)
    F = torch.cat([torch.cat([A, B / unit], -1), below], -2)
    L = _logarithm(F)
    _require_inverse(L, F, _RESIDUAL[given])
    L = L[..., :size, :] / step
    dtype = torch.promote_types(torch.promote_types(Ad.dtype, Bd.dtype), torch.float32)
    return L[..., :size].to(dtype), (L[..., size:] * unit).to(dtype)


def hippo_legs(size: int) -> tuple[Tensor, Tensor]:
    """The system whose state holds the Legendre coefficients of all that was seen: A (N, N) and B (N, 1), float64.

        A_ij = -sqrt((2i + 1)(2j + 1)) for i > j, -(i + 1) for i = j, 0 above;   B_i = sqrt(2i + 1);   i, j = 0..N-1

    With dc/dt = (A c + B f(t)) / t, f on [0, t] is nearest to sum_i c_i sqrt(2i + 1) P_i(2x/t - 1); in the time log t
    it is a system like any other. A + A' = -(I + B B'): no state grows.

    Raises ValueError for a size below 1. Gu et al. 2020, "HiPPO", arXiv 2008.07669, theorem 2 (A of the other sign).
    """
    if size < 1:
        raise ValueError(f"hippo_legs: size must be at least 1, got {size}")
    i = torch.arange(size, dtype=torch.float64)
    root = (2 * i + 1).sqrt()
    return -(torch.outer(root, root).tril(-1) + torch.diag(i + 1)), root.unsqueeze(-1)


def legs_modes(size: int) -> Tensor:
    """Eigenvalues -1/2 + i w with w > 0 of the normal part of LegS, A + B B'/2: (N/2,) complex128, ascending in w.

    That part is -I/2 and a skew matrix; the other N/2 eigenvalues are the conjugates. (Those of A itself are
    -1, ..., -N, with eigenvectors too near each other to be of use.)

    Raises ValueError for an odd size, which leaves one real eigenvalue. Gu et al. 2022, "On the parameterization and
    initialization of diagonal state space models", arXiv 2206.11893: S4D-LegS.
    """
    if size < 2 or size % 2:
        raise ValueError(f"legs_modes: modes come in conjugate pairs, so size must be even and at least 2, got {size}")
    A, B = hippo_legs(size)
    skew = A + B @ B.T / 2
    skew.diagonal().zero_()
    w = torch.linalg.eigvalsh(1j * skew)[size // 2 :]
    return torch.complex(torch.full_like(w, -0.5), w)


def _fitted(
    operation: str, square: tuple[str, Tensor], wide: tuple[str, Tensor], dt: Tensor | float, least: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """A (..., N, N), B (..., N, M) and dt (..., 1, 1) of one shape and type, `least` at the least."""
    (a_name, A), (b_name, B) = square, wide
    for name, tensor in (square, wide):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{operation}: {name} must be a tensor, got {type(tensor).__name__}; use torch.as_tensor")
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"{operation}: {name} must be floating point or complex, got {tensor.dtype}; use {name}.double()"
            )
    square_shape, wide_shape = A.shape[-2:], B.shape[-2:]
    if A.ndim < 2 or B.ndim < 2 or {*square_shape} != {wide_shape[0]} or 0 in (*square_shape, *wide_shape):
        raise ValueError(
            f"{operation}: {a_name} must be (..., N, N) and {b_name} (..., N, M), got {tuple(A.shape)} and "
            f"{tuple(B.shape)}; a single input is (N, 1)"
        )
    dtype = torch.promote_types(torch.promote_types(A.dtype, B.dtype), least)
    if not isinstance(dt, Tensor | float | int):
        raise ValueError(f"{operation}: dt must be a number or a tensor, got {dt!r}")
    dt = torch.as_tensor(dt, dtype=dtype, device=A.device)
    if not bool(dt.isfinite().all()):
        raise ValueError(f"{operation}: dt must be finite, got {dt[~dt.isfinite()][0].item()}")
    try:
        batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2], dt.shape)
    except RuntimeError as error:
        raise ValueError(
            f"{operation}: the leading dimensions of {a_name} {tuple(A.shape)}, {b_name} {tuple(B.shape)} and "
            f"dt {tuple(dt.shape)} do not broadcast; dt is one number a system"
        ) from error
    A, B = (tensor.to(dtype).expand(*batch, *tensor.shape[-2:]) for tensor in (A, B))
    return A, B, dt.expand(batch)[..., None, None]


def _exponential(X: Tensor) -> Tensor:
    """exp(X), X (..., N, N)."""
    # For one matrix alone, and for its gradient, PyTorch chooses among polynomials by the size of its entries. That of
    # degree 8, for small ones, has a wrong coefficient (pytorch issue 196592): errors of 1e-10 in float64, 3e-5 in
    # float32. Two matrices always get the highest degree.
    if X[..., 0, 0].numel() == 1 and bool(X.abs().max() < 1):
        return torch.linalg.matrix_exp(torch.stack([X, torch.zeros_like(X)]))[0]
    return torch.linalg.matrix_exp(X)


def _unit(B: Tensor) -> Tensor:
    """(..., 1, 1), the largest entry of B. In these units an input of any size costs A no digits and no roots."""
    largest = B.detach().abs().amax((-2, -1), keepdim=True)
    return torch.where(largest > 0, largest, 1)


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
        miss = (_exponential(L) - F).abs().amax((-2, -1)) / F.abs().amax((-2, -1))
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
