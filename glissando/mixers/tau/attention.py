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

from glissando.errors import ConfigError, unknown_name
from glissando.kernels.compiled import HAS_TRITON, kernels_serve, require_shapes
from glissando.kernels.loop import exporting
from glissando.kernels.plain import plain, resolved
from glissando.kernels.precise import wide, widest
from glissando.precision import without_autocast

Backend = Literal["auto", "fast", "triton", "reference"]

#: below this many visible keys a head the direct form is faster, on the machine of docs/experiments.md
_CROSSOVER = 64

#: values that the Triton kernel takes
_WIDEST = 256


def tau_attention(
    lambda_q: Tensor,
    lambda_k: Tensor,
    v: Tensor,
    temperature: Tensor | float,
    key_bias: Tensor | None = None,
    cumulative_log_forget: Tensor | None = None,
    backend: Backend = "auto",
    past: Tensor | None = None,
) -> Tensor:
    """lambda_q (B, H, T), lambda_k (B, H, L), v (B, G, L, K) with G dividing H -> (B, H, T, K).

    temperature  T > 0, a number or (H,); a tensor's values are not looked at
    key_bias     g (B, H, L): added to the logits of a key; -inf hides it. Each query must see one that is not hidden.
    cumulative_log_forget  C (B, H, L): only its differences count, which float64 keeps exact at any length
    past         (B,) int64: query i of row b sees the keys 0 .. past_b + i. L - T by default: causal if L = T.
    backend      `fast`       O(N log N) time and O(N) memory, on a CPU
                 `triton`     O(N^2) time and O(N) memory, on CUDA; not in float64, nor for K > 256
                 `reference`  the T x L matrix, on any device
                 `auto`       `fast` on a CPU from some 64 tokens on; `triton` on CUDA where it is installed and T > 1;
                              else `reference`

    Gradients for everything but `past`; where lambdas are equal, that of their distance is 0. Half precision is
    computed in float32; `triton` rounds the factors of its products to TF32 then, and where
    torch.set_float32_matmul_precision allows it.

    Raises ValueError for shapes that do not fit and for a query without a key, ConfigError for a backend that cannot
    run here.
    """
    _check_terms(lambda_k, v, key_bias, cumulative_log_forget, past)
    if key_bias is not None and not torch.compiler.is_compiling():
        _require_a_key(lambda_q, lambda_k, v, key_bias, past)
    o, _ = attend(
        lambda_q, lambda_k, v, temperature, exponents(lambda_k, key_bias, cumulative_log_forget), backend, past
    )
    return o


def _check_terms(
    lambda_k: Tensor, v: Tensor, key_bias: Tensor | None, cumulative_log_forget: Tensor | None, past: Tensor | None
) -> None:
    """Raises ValueError for terms of another shape than the keys, which would broadcast, and for types."""
    for name, term in (("key_bias", key_bias), ("cumulative_log_forget", cumulative_log_forget)):
        if term is not None:
            require_shapes("tau_attention", **{name: (term, tuple(lambda_k.shape))})
    if not v.is_floating_point():
        raise ValueError(f"tau_attention: v must be floating point, got {v.dtype}; use v.float()")
    if past is not None and not (isinstance(past, Tensor) and past.dtype == torch.int64):
        given = past.dtype if isinstance(past, Tensor) else type(past).__name__
        raise ValueError(f"tau_attention: past must be an int64 tensor, one number a row, got {given}")


def _require_a_key(q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, past: Tensor | None) -> None:
    """Raises ValueError where all keys that the first query of a row sees are hidden: there is nothing to weigh."""
    hidden = torch.isneginf(key_bias)
    if not bool(hidden.any()):
        return
    first = _check(q, k, v, key_bias, past).cpu()
    seen = torch.arange(key_bias.shape[-1]) <= first.unsqueeze(-1)
    if bool((hidden.cpu() | ~seen.unsqueeze(1)).all(-1).any()):
        raise ValueError(
            "tau_attention: key_bias hides (-inf) every key that a first query sees. Put padding last, where nothing "
            "sees it, or hide fewer keys"
        )


def exponents(lambda_k: Tensor, key_bias: Tensor | None, cumulative_log_forget: Tensor | None) -> Tensor:
    """e_j = g_j - C_j (B, H, L), in the widest type. C_i is the same for all keys of a query, and cancels."""
    e = wide(torch.zeros_like(lambda_k) if key_bias is None else key_bias)
    return e if cumulative_log_forget is None else e - cumulative_log_forget


def attend(
    lambda_q: Tensor,
    lambda_k: Tensor,
    v: Tensor,
    temperature: Tensor | float,
    e: Tensor,
    backend: Backend = "auto",
    past: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o as above for logits e_j - |lambda^q_i - lambda^k_j| / T, e and
    log sum_j exp of them (B, H, T) in the widest type.

    Attention to two sets of keys together is the mean of the two o by their exp(lse).
    """
    given, values, backend = v.dtype, v, resolved(backend)
    exact = torch.promote_types(torch.promote_types(given, lambda_q.dtype), torch.float32)
    q, k, v = lambda_q.to(exact), lambda_k.to(exact), v.to(exact)
    past = _check(q, k, v, e, past)
    inverse = _inverse(temperature, q)
    if _use_triton(backend, q, v):
        from . import triton

        # Half precision is read as it is: the kernel converts what it reads.
        halves = values if values.dtype in (torch.float16, torch.bfloat16) and exact == torch.float32 else v
        o, lse, _ = triton.forward(q, k, halves, e, inverse, past.to(q.device), inverse.requires_grad)
        return o.to(given), lse
    if _is_step(backend, q, k, v, e, inverse):
        from . import numba

        o, lse = numba.single(q, k, v, e, inverse, past)
    elif _use_fast(backend, q, k):
        from . import numba

        is_traced = torch.is_grad_enabled() or torch.compiler.is_compiling()
        compute = numba.differentiable if is_traced else numba.forward
        o, lse, _ = compute(q, k, v, e, inverse, past)
    else:
        with without_autocast(q.device.type):
            o, lse = _reference(q, k, v, e, inverse, past)
    return o.to(given), lse


def _check(q: Tensor, k: Tensor, v: Tensor, e: Tensor, past: Tensor | None) -> Tensor:
    """past, as (B,) int64."""
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 4:
        raise ValueError(
            "tau_attention: lambda_q must be (B, H, T), lambda_k (B, H, L) and v (B, G, L, K), got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    batch, heads, length = q.shape
    n_keys, groups = k.shape[2], v.shape[1]
    if not length or not n_keys:
        raise ValueError(f"tau_attention: at least one query and one key are needed, got {length} and {n_keys}")
    if groups < 1 or heads % groups:
        raise ValueError(f"tau_attention: {heads} heads cannot share {groups} heads of values evenly")
    require_shapes(
        "tau_attention",
        lambda_k=(k, (batch, heads, n_keys)),
        v=(v, (batch, groups, n_keys, v.shape[3])),
        key_bias=(e, (batch, heads, n_keys)),
    )
    if past is None:
        if n_keys < length:
            raise ValueError(f"tau_attention: {length} queries need at least as many keys, got {n_keys}")
        return torch.full((batch,), n_keys - length, dtype=torch.int64, device=q.device)
    require_shapes("tau_attention", past=(past, (batch,)))
    if exporting() or plain():
        return past  # values are not looked at in a graph
    most = int(past.max()) + length if batch else 0
    if batch and (int(past.min()) < 0 or most > n_keys):
        raise ValueError(
            f"tau_attention: past must be from 0 to L - T = {n_keys - length}, "
            f"got {int(past.min())} to {int(past.max())}"
        )
    return past


def _inverse(temperature: Tensor | float, q: Tensor) -> Tensor:
    """1 / T (H,), in the widest type."""
    heads = q.shape[1]
    if not isinstance(temperature, Tensor | float | int):
        raise ValueError(f"tau_attention: temperature must be a number or a tensor, got {temperature!r}")
    each = torch.as_tensor(temperature, dtype=widest(q.device), device=q.device)
    if each.shape not in ((), (1,), (heads,)):
        raise ValueError(
            f"tau_attention: temperature must be a number or one for each of {heads} heads, got {tuple(each.shape)}"
        )
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise ValueError(f"tau_attention: temperature must be above 0, got {temperature}")
    return (1 / each).expand(heads)


def _is_step(backend: str, q: Tensor, *others: Tensor) -> bool:
    """One query without gradients on a CPU: a step of decoding, for which nothing needs sorting."""
    if backend == "reference" or q.shape[2] != 1 or not kernels_serve(q.device) or torch.compiler.is_compiling():
        return False
    return backend in ("auto", "fast") and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, *others)))


def _use_triton(backend: str, q: Tensor, v: Tensor) -> bool:
    if backend != "auto":
        return backend == "triton"
    return HAS_TRITON and q.is_cuda and q.dtype == torch.float32 and q.shape[2] > 1 and v.shape[3] <= _WIDEST


def _use_fast(backend: str, q: Tensor, k: Tensor) -> bool:
    on_cpu = q.device.type == "cpu"
    if backend == "auto":
        return kernels_serve(q.device) and q.shape[2] > 1 and k.shape[2] >= _CROSSOVER and not exporting()
    if backend not in get_args(Backend):
        raise unknown_name("tau_attention backend", backend, sorted(get_args(Backend)))
    if backend == "fast" and not on_cpu:
        raise ConfigError(f"tau_attention: backend 'fast' runs on a CPU, the tensors are on {q.device}; use 'auto'")
    return backend == "fast"


def _reference(q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """The definition."""
    length, n_keys = q.shape[2], k.shape[2]
    own = past.to(q.device).unsqueeze(1) + torch.arange(length, device=q.device)
    visible = (torch.arange(n_keys, device=q.device) <= own.unsqueeze(-1)).unsqueeze(1)
    gap, e, scale = (wide(q).unsqueeze(-1) - wide(k).unsqueeze(-2)).abs(), e.unsqueeze(-2), inverse.view(-1, 1, 1)
    # Exponents and distances over T may be in the thousands, and what is left where they cancel decides: logits are of
    # the widest type until the heaviest key's is taken off, which changes no weight. Distances count from that key's,
    # for where all are hundreds of T their own sum would leave the gradient of T few digits.
    with torch.no_grad():
        best = (gap * -scale).add_(e).masked_fill_(~visible, -torch.inf).argmax(-1, keepdim=True)
        most, nearest = e.expand_as(gap).gather(-1, best).clamp_min(-1e30), gap.gather(-1, best)
    logits = ((nearest - gap) * scale).add_(e).sub_(most).masked_fill_(~visible, -torch.inf).to(q.dtype)
    lse = logits.logsumexp(-1, keepdim=True)
    # Heads that share values stand in one matrix: nothing is copied.
    weights = (logits - lse).exp().unflatten(1, (v.shape[1], -1)).flatten(2, 3)
    lse = wide(lse) + most - nearest * scale
    return (weights @ v).view(*q.shape, v.shape[3]), lse.squeeze(-1)
