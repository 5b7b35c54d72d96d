"""Causal attention by one number a head: weights fall with the distance of lambdas, in place of a product of vectors.

    o_i = sum_{j <= i} softmax_j( g_j + C_i - C_j - |lambda^q_i - lambda^k_j| / T ) v_j

g is an importance of each key, C the cumulative sum of a log forget gate. The kernel exp(-|a - b| / T) of one dimension
factors on either side of a query, so that sorting replaces the N x N matrix: O(N log N) time, O(N) memory, exact.

The Tauformer's logit; fast kernel sums by sorting: Langrene and Warin 2020, arXiv 2005.03246; sorting inside attention:
arXiv 2512.11411; forget gates: Lin et al. 2025, arXiv 2503.02130.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from glissando.errors import ConfigError
from glissando.kernels.compiled import HAS_TRITON, kernels_serve, require_backend, require_shapes, require_triton
from glissando.kernels.loop import exporting
from glissando.kernels.plain import resolved
from glissando.kernels.precise import wide, widest_float
from glissando.precision import without_autocast

Backend = Literal["auto", "fast", "triton", "reference"]

#: below this many visible keys a head the direct form is faster, on the machine of log/2026-11.md
_CROSSOVER = 64

#: width of the widest values that the Triton kernel takes: a wider tile does not fit beside what its backward keeps
WIDEST = 256


def tau_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | float,
    e: Tensor | None = None,
    backend: Backend = "auto",
    past: Tensor | None = None,
) -> Tensor:
    """Lambdas q (B, H, T) and k (B, H, L), v (B, H, L, K) -> (B, H, T, K).

    temperature  T > 0, a number or (H,)
    e            (B, H, L), what is added to the logits of a key: g_j - C_j, see `exponents`; 0 by default
    past         (B,) int64: query i of row b sees the keys 0 .. past_b + i, of which there are L at most. L - T by
                 default: causal if L = T.
    backend      `fast`       O(N log N) time and O(N) memory, on a CPU
                 `triton`     O(N^2) time and O(N) memory, on CUDA; not in float64, nor for K > 256
                 `reference`  the T x L matrix, on any device
                 `auto`       `fast` on a CPU from some 64 tokens on; `triton` on CUDA where it is installed and T > 1;
                              else `reference`

    Gradients for everything but `past`; where lambdas are equal, that of their distance is 0. Half precision is
    computed in float32; `triton` rounds the factors of its products to TF32 then, and where
    torch.set_float32_matmul_precision allows it.

    Raises ValueError for shapes that do not fit, ConfigError for a backend that cannot run here.
    """
    dtype, values, backend = v.dtype, v, resolved(backend)
    e = exponents(k, None, None) if e is None else wide(e)
    batch, heads, length = q.shape
    keys = (batch, heads, k.shape[-1])
    require_shapes("tau_attention", k=(k, keys), v=(v, (*keys, v.shape[-1])), e=(e, keys))
    if past is None:
        past = torch.full((batch,), k.shape[2] - length, dtype=torch.int64, device=q.device)
    exact = torch.promote_types(torch.promote_types(dtype, q.dtype), torch.float32)
    q, k, v = q.to(exact), k.to(exact), v.to(exact)
    inverse = (1 / torch.as_tensor(temperature, dtype=widest_float(q.device), device=q.device)).expand(heads)
    form = _form(backend, q, k, v, e, inverse)
    if form == "triton":
        from . import triton

        # Half precision is read as it is: the kernel converts what it reads.
        halves = values if values.dtype in (torch.float16, torch.bfloat16) and exact == torch.float32 else v
        o, _, _ = triton.forward(q, k, halves, e, inverse, past.to(q.device), inverse.requires_grad)
    elif form == "single":
        from . import numba

        o = numba.single(q, k, v, e, inverse, past)
    elif form == "fast":
        from . import numba

        is_traced = torch.is_grad_enabled() or torch.compiler.is_compiling()
        o, _, _ = (numba.differentiable if is_traced else numba.forward)(q, k, v, e, inverse, past)
    else:
        with without_autocast(q.device.type):
            o = _reference(q, k, v, e, inverse, past)
    return o.to(dtype)


def exponents(k: Tensor, importance: Tensor | None, cumulative_log_forget: Tensor | None) -> Tensor:
    """e_j = g_j - C_j (B, H, L), in the widest type. C_i is the same for all keys of a query, and cancels."""
    e = wide(torch.zeros_like(k) if importance is None else importance)
    return e if cumulative_log_forget is None else e - cumulative_log_forget


def _form(backend: str, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> str:
    """What computes it: a backend; or `single`, which sorts nothing, for a step of decoding: one query on a CPU without
    gradients."""
    require_backend("tau_attention", backend, get_args(Backend))
    if backend == "triton":
        require_triton("tau_attention", q)
    if backend == "fast" and q.device.type != "cpu":
        raise ConfigError(f"tau_attention: backend 'fast' runs on a CPU, the tensors are on {q.device}; use 'auto'")
    if backend in ("triton", "reference"):
        return backend
    queries, serves = q.shape[2], kernels_serve(q.device)
    is_step = queries == 1 and serves and not torch.compiler.is_compiling()
    if is_step and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *others))):
        return "single"
    if backend == "fast" or (serves and queries > 1 and k.shape[2] >= _CROSSOVER and not exporting()):
        return "fast"
    fits = q.is_cuda and q.dtype == torch.float32 and v.shape[3] <= WIDEST
    return "triton" if HAS_TRITON and fits and queries > 1 else "reference"


def _reference(q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor) -> Tensor:
    """The definition."""
    query_at = past.to(q.device).unsqueeze(1) + torch.arange(q.shape[2], device=q.device)
    visible = (torch.arange(k.shape[2], device=q.device) <= query_at.unsqueeze(-1)).unsqueeze(1)
    gap, e, scale = (wide(q).unsqueeze(-1) - wide(k).unsqueeze(-2)).abs(), e.unsqueeze(-2), inverse.view(-1, 1, 1)
    # Exponents and distances over T may be in the thousands, and what is left where they cancel decides: logits are of
    # the widest type until the heaviest key's is taken off, which changes no weight. Distances count from that key's,
    # for where all are hundreds of T their own sum would leave the gradient of T few digits.
    with torch.no_grad():
        best = (gap * -scale).add_(e).masked_fill_(~visible, -torch.inf).argmax(-1, keepdim=True)
        most, nearest = e.expand_as(gap).gather(-1, best), gap.gather(-1, best)
    logits = ((nearest - gap) * scale).add_(e).sub_(most).masked_fill_(~visible, -torch.inf).to(q.dtype)
    return (logits - logits.logsumexp(-1, keepdim=True)).exp() @ v
