"""The recurrence h_t = A_t h_{t-1} + x_t with real 2 x 2 blocks, one for each channel, with gradients for A, x and h0.

It is what a complex recurrence becomes when its factor is the derivative of a function that is not holomorphic, as a
time constant that depends on the state is: glissando.ops.newton solves with it. Backward, with g_t the gradient at h_t
(and that of h_last added to g_T):

    s_t = g_t + A'_{t+1} s_{t+1},    dx_t = s_t,    dA_t = s_t h'_{t-1},    dh0 = A'_1 s_1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glissando.errors import unknown_name
from glissando.ops.compiled import HAS_TRITON, as_rows, kernel, over_rows, require_types, use_numba

Backend = Literal["auto", "reference", "numba", "doubling", "triton"]


def block_scan(a: Tensor, x: Tensor, h0: Tensor | None = None, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """h_t = A_t h_{t-1} + x_t for t = 1..T, h_0 = h0 (zeros if None) -> every h_t and the last one.

    a   (B, T, N, 2, 2) real;  x  (B, T, N, 2);  h0  (B, N, 2)
    ->  h (B, T, N, 2) and h_last (B, N, 2)

    backend  `auto`       `numba` on a CPU, `triton` on CUDA where it is installed, `doubling` elsewhere
             `numba`      one pass over memory
             `triton`     chunks of time in parallel; forms products of A over chunks
             `doubling`   plain tensor code in log2 T passes, for any device; forms products of A, which must not grow
             `reference`  a loop under autograd

    Raises ValueError for shapes or types that do not fit, ConfigError for a backend that cannot run here.
    """
    h0 = _check(a, x, h0)
    if backend not in get_args(Backend):
        raise unknown_name("block_scan backend", backend, get_args(Backend))
    if backend == "reference":
        return reference(a, x, h0)
    chosen = _chosen(backend, x)
    if chosen == "doubling":
        h = doubling(a, x, h0)
    elif torch.is_grad_enabled():
        h = _BlockScan.apply(a, x, h0, chosen)
    else:
        h = _forward_by(chosen)(a, x, h0)
    return h, h[:, -1].clone()


def _chosen(backend: Backend, x: Tensor) -> str:
    """The backend that runs, of `numba`, `triton` and `doubling`."""
    if backend in ("doubling", "triton"):
        return backend
    if backend == "auto" and x.is_cuda and HAS_TRITON and not torch.compiler.is_compiling():
        return "triton"
    return "numba" if use_numba("block_scan", backend, x) else "doubling"


def _forward_by(chosen: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if chosen == "numba":
        return _numba
    from glissando.ops import block_scan_triton

    return block_scan_triton.forward


def reference(a: Tensor, x: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, one step after the other."""
    h, steps = h0, []
    for block, entry in zip(a.unbind(1), x.unbind(1), strict=True):
        h = (block * h.unsqueeze(-2)).sum(-1) + entry
        steps.append(h)
    return torch.stack(steps, 1), h


def doubling(a: Tensor, x: Tensor, h0: Tensor) -> Tensor:
    """Hillis and Steele's scan: after k passes h_t holds the last 2^k terms."""
    first = x[:, :1] + (a[:, :1] * h0[:, None, :, None]).sum(-1)
    h, reach = torch.cat([first, x[:, 1:]], 1), 1
    while reach < x.shape[1]:
        carried = (a[:, reach:] * h[:, :-reach].unsqueeze(-2)).sum(-1)
        h = torch.cat([h[:, :reach], h[:, reach:] + carried], 1)
        a = torch.cat([a[:, :reach], a[:, reach:] @ a[:, :-reach]], 1)
        reach *= 2
    return h


def _check(a: Tensor, x: Tensor, h0: Tensor | None) -> Tensor:
    """h0, or zeros in its place."""
    if x.ndim != 4 or x.shape[3] != 2 or x.shape[1] < 1:
        raise ValueError(f"block_scan: x must be (batch, time >= 1, channels, 2), got {tuple(x.shape)}")
    h0 = x.new_zeros(x.shape[0], *x.shape[2:]) if h0 is None else h0
    expected = {"a": (a, (*x.shape, 2)), "h0": (h0, (x.shape[0], *x.shape[2:]))}
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"block_scan: {name} must be {shape} for x {tuple(x.shape)}, got {tuple(tensor.shape)}")
        if tensor.device != x.device:
            raise ValueError(f"block_scan: {name} is on {tensor.device} and x on {x.device}; bring them to one")
    require_types("block_scan", a=a, x=x, h0=h0)
    return h0


class _BlockScan(torch.autograd.Function):
    """See the module's docstring for the backward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor, h0: Tensor, chosen: Backend) -> Tensor:
        ctx.chosen = chosen
        h = _forward_by(chosen)(a, x, h0)
        ctx.save_for_backward(a, h, h0)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        a, h, h0 = ctx.saved_tensors
        carried, first = adjoint(a, grad, ctx.chosen)
        past = torch.cat([h0.unsqueeze(1), h[:, :-1]], 1)
        return carried.unsqueeze(-1) * past.unsqueeze(-2), carried, first, None


def adjoint(a: Tensor, grad: Tensor, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """s_t = g_t + A'_{t+1} s_{t+1} for grad g (B, T, N, 2), and A'_1 s_1 (B, N, 2); without gradients of its own."""
    chosen = _chosen(backend, grad)
    if chosen == "triton":
        from glissando.ops import block_scan_triton

        return block_scan_triton.adjoint(a, grad)
    if chosen == "doubling":
        # Over reversed time; the last step's gradient arrives as it is, so that the first factor is not used.
        factors = torch.cat([torch.zeros_like(a[:, :1]), a[:, 1:].flip(1).mT], 1)
        carried = doubling(factors, grad.flip(1), torch.zeros_like(grad[:, 0])).flip(1)
        return carried, (a[:, 0].mT * carried[:, 0].unsqueeze(-2)).sum(-1)
    # Contiguous whatever grad is: of other layouts the kernel would fill a copy.
    carried = torch.empty_like(grad, memory_format=torch.contiguous_format)
    first = torch.zeros_like(grad[:, 0], memory_format=torch.contiguous_format)
    over_rows(_adjoint, grad, as_rows(a, 2), as_rows(grad, 2), as_rows(carried, 2), as_rows(first, 1))
    return carried, first


def _numba(a: Tensor, x: Tensor, h0: Tensor) -> Tensor:
    h = torch.empty_like(x, memory_format=torch.contiguous_format)
    over_rows(_forward, x, as_rows(a, 2), as_rows(x, 2), as_rows(h0, 1), as_rows(h, 2))
    return h


@kernel
def _forward(a, x, h0, h, first, last):
    steps, size = x.shape[1], x.shape[2] // 2
    p, q = h0[0, ::2].copy(), h0[0, 1::2].copy()
    for b in range(first, last):
        p[:] = h0[b, ::2]
        q[:] = h0[b, 1::2]
        for t in range(steps):
            block, entry, out = a[b, t], x[b, t], h[b, t]
            for n in range(size):
                u = block[4 * n] * p[n] + block[4 * n + 1] * q[n] + entry[2 * n]
                v = block[4 * n + 2] * p[n] + block[4 * n + 3] * q[n] + entry[2 * n + 1]
                p[n] = u
                q[n] = v
                out[2 * n] = u
                out[2 * n + 1] = v


@kernel
def _adjoint(a, grad, carried, flow, first, last):
    """flow (B, 2 N) holds zeros, and leaves as the gradient of h0."""
    steps, size = grad.shape[1], grad.shape[2] // 2
    for b in range(first, last):
        row = flow[b]
        for t in range(steps - 1, -1, -1):
            block, arrived, out = a[b, t], grad[b, t], carried[b, t]
            for n in range(size):
                u, v = arrived[2 * n] + row[2 * n], arrived[2 * n + 1] + row[2 * n + 1]
                out[2 * n] = u
                out[2 * n + 1] = v
                row[2 * n] = block[4 * n] * u + block[4 * n + 2] * v
                row[2 * n + 1] = block[4 * n + 1] * u + block[4 * n + 3] * v
