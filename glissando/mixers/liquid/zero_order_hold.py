"""Linear systems sampled in time, and the HiPPO-LegS system.

    dx/dt = A x + B u, u held for a time dt   ->   x' = Ad x + Bd u,     [[Ad, Bd], [0, I]] = exp(dt [[A, B], [0, 0]])

The block form needs no inverse of A, so that a singular one, an integrator, is like any other.

Van Loan 1978, "Computing integrals involving the matrix exponential", IEEE TAC 23(3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from glissando.kernels.plain import underlying


def discretize(A: Tensor, B: Tensor, dt: Tensor | float) -> tuple[Tensor, Tensor]:
    """Ad = exp(dt A) and Bd = (integral from 0 to dt of exp(s A) ds) B: the exact zero-order hold.

    A (..., N, N), B (..., N, M), dt (...) or a number, of any sign; leading dimensions broadcast -> Ad (..., N, N) and
    Bd (..., N, M) in the common type of A and B, float32 for half precision. Gradients for A, B and dt.

    Raises ValueError for shapes or types that do not fit and a dt that is not finite.
    """
    A, B, dt = fitted("discretize", ("A", A), ("B", B), dt, torch.float32)
    A, B, size = dt * A, dt * B, A.shape[-1]
    unit = largest_entry(B)
    zeros = A.new_zeros(*A.shape[:-2], B.shape[-1], size + B.shape[-1])
    E = exponential(torch.cat([torch.cat([A, B / unit], -1), zeros], -2))
    return E[..., :size, :size], E[..., :size, size:] * unit


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


def fitted(
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
    if not bool(underlying(dt).isfinite().all()):
        raise ValueError(f"{operation}: dt must be finite, got {underlying(dt)[~underlying(dt).isfinite()][0].item()}")
    try:
        batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2], dt.shape)
    except RuntimeError as error:
        raise ValueError(
            f"{operation}: the leading dimensions of {a_name} {tuple(A.shape)}, {b_name} {tuple(B.shape)} and "
            f"dt {tuple(dt.shape)} do not broadcast; dt is one number a system"
        ) from error
    A, B = (tensor.to(dtype).expand(*batch, *tensor.shape[-2:]) for tensor in (A, B))
    return A, B, dt.expand(batch)[..., None, None]


def exponential(X: Tensor) -> Tensor:
    """exp(X), X (..., N, N)."""
    # For one matrix alone, and for its gradient, PyTorch chooses among polynomials by the size of its entries. That of
    # degree 8, for small ones, has a wrong coefficient (pytorch issue 196592): errors of 1e-10 in float64, 3e-5 in
    # float32. Two matrices always get the highest degree.
    if X[..., 0, 0].numel() == 1 and bool(underlying(X).abs().max() < 1):
        return torch.linalg.matrix_exp(torch.stack([X, torch.zeros_like(X)]))[0]
    return torch.linalg.matrix_exp(X)


def largest_entry(B: Tensor) -> Tensor:
    """(..., 1, 1), the largest entry of B. In these units an input of any size costs A no digits and no roots."""
    largest = B.detach().abs().amax((-2, -1), keepdim=True)
    return torch.where(largest > 0, largest, 1)
