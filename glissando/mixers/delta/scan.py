"""The gated delta rule: a recurrence whose state S (K, V) of each head is an associative memory.

    S_t = (I - e_t k_t k_t^T) exp(g_t) S_{t-1} + b_t k_t v_t^T,      o_t = S_t^T q_t

Backward, with D the gradient at S_t, P_t = exp(g_t) S_{t-1}, w_t = P_t^T k_t and u_t = b_t v_t - e_t w_t:

    D <- D + q_t do_t^T,    dq_t = S_t do_t,    du = D^T k_t,    dw = -e_t du
    dv_t = b_t du,   db_t = v_t . du,   de_t = -w_t . du,   dk_t = D u_t + P_t dw
    D <- D + k_t dw^T,      dg_t = sum(D * P_t),     D <- exp(g_t) D

`chunked` needs no loop over tokens. Within a chunk, with G_t the sum of g from its start and S_0 the state before it,

    S_t = exp(G_t) S_0 + sum_{j <= t} exp(G_t - G_j) k_j u_j^T
    u_t + e_t sum_{j < t} exp(G_t - G_j) (k_t . k_j) u_j = b_t v_t - e_t exp(G_t) S_0^T k_t

a unit lower triangular system for all u of the chunk at once, affine in S_0. So is the state at the chunk's end, S_0 ->
A S_0 + X, and such maps are joined in pairs: log2 N steps for N chunks.

Yang et al. 2024, arXiv 2406.06484 (the chunked form) and arXiv 2412.06464 (with decay).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.kernels.compiled import (
    compiles,
    over_rows,
    require_backend,
    require_shapes,
    require_types,
    same_reals,
    use_numba,
)
from glissando.kernels.loop import exporting, over_time
from glissando.kernels.plain import without_derivatives
from glissando.kernels.precise import wide

Backend = Literal["auto", "reference", "chunked", "numba"]

#: tokens of a chunk, and between the states that the kernel keeps
_CHUNK, KEPT_EVERY = 64, 64


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    e: Tensor,
    b: Tensor,
    s0: Tensor,
    backend: Backend = "auto",
    gaps: bool = False,
) -> tuple[Tensor, Tensor]:
    """The outputs o (B, T, H, V) and the last state (B, H, K, V).

    q, k   (B, T, H, K), any T >= 1; the transition contracts where |k| = 1 and 0 <= e <= 2
    v      (B, T, H, V)
    g      (B, T, H, 1), the logarithm of the decay, at most 0
    e, b   (B, T, H)
    s0     (B, H, K, V)
    gaps   g may be as low as -100: its sums within a chunk need more digits than its own type has

    backend  `auto`       `numba` on a CPU, `chunked` elsewhere and under torch.compile
             `numba`      one pass over time with S in the first-level cache; keeps w, and a state every 64 tokens, for
                          the backward, which computes the states between anew
             `chunked`    batched products of matrices, for any device
             `reference`  a loop over the equation

    Raises ValueError for shapes that do not fit, or types that the kernel does not take, ConfigError for `numba`
    where the tensors are not on a CPU.
    """
    require_backend("delta_rule", backend, ("auto", "reference", "chunked", "numba"))
    if q.ndim != 4 or v.ndim != 4 or q.shape[1] < 1:
        raise ValueError(
            f"delta_rule: q must be (B, T >= 1, H, K) and v (B, T, H, V), got {tuple(q.shape)} and {tuple(v.shape)}"
        )
    rows, steps, heads, size = q.shape
    require_shapes(
        "delta_rule",
        k=(k, q.shape),
        v=(v, (rows, steps, heads, v.shape[-1])),
        g=(g, (rows, steps, heads, 1)),
        e=(e, (rows, steps, heads)),
        b=(b, (rows, steps, heads)),
        s0=(s0, (rows, heads, size, v.shape[-1])),
    )
    if exporting():
        o, (last,) = over_time(_step, (s0,), (q, k, v, g.exp(), e, b))
        return o, last
    tensors = {"q": q, "k": k, "v": v, "g": g, "e": e, "b": b, "s0": s0}
    if backend == "reference":
        return reference(**tensors)
    unfit = backend == "auto" and not (compiles() and same_reals(*tensors.values()))
    if backend == "chunked" or unfit or not use_numba("delta_rule", backend, q):
        return _chunked(**tensors, gaps=gaps) if steps > 1 else reference(**tensors)
    require_types("delta_rule", **tensors)
    from glissando.mixers.delta.passes import BLOCK

    width = v.shape[-1]
    more, wider = -size % BLOCK, -width % BLOCK  # entries of 0 change no other
    if more or wider:
        q, k, v, s0 = F.pad(q, (0, more)), F.pad(k, (0, more)), F.pad(v, (0, wider)), F.pad(s0, (0, wider, 0, more))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values()):
        o, last = _Delta.apply(q, k, v, g, e, b, s0)
    else:
        o, last, _, _ = _forward(q, k, v, g, e, b, s0, keep=False)
    if more or wider:  # copies: a view would keep the entries of 0 alive
        return o[..., :width].clone(), last[:, :, :size, :width].clone()
    return o, last


def reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, e: Tensor, b: Tensor, s0: Tensor) -> tuple[Tensor, Tensor]:
    """The equation, one token after the other."""
    carry: tuple[Tensor, ...] = (s0,)
    outputs = []
    for now in zip(*(tensor.unbind(1) for tensor in (q, k, v, g.exp(), e, b)), strict=True):
        carry, o = _step(carry, now)
        outputs.append(o)
    return torch.stack(outputs, 1), carry[0]


def _step(carry: tuple[Tensor, ...], now: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
    """One token of the equation: S in and out, and o."""
    q, k, v, a, e, b = now
    s = a.unsqueeze(-1) * carry[0]
    recalled = torch.einsum("bhkv,bhk->bhv", s, k)
    change = b.unsqueeze(-1) * v - e.unsqueeze(-1) * recalled
    s = s + k.unsqueeze(-1) * change.unsqueeze(-2)
    return (s,), torch.einsum("bhkv,bhk->bhv", s, q)


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, e: Tensor, b: Tensor, s0: Tensor, gaps: bool
) -> tuple[Tensor, Tensor]:
    steps = q.shape[1]
    chunk = min(_CHUNK, steps)
    count = -(-steps // chunk)

    def cut(x: Tensor) -> Tensor:
        """(B, T, H, F) -> (B, H, chunks, C, F), with tokens that leave the state alone at the end."""
        padded = F.pad(x, (0, 0, 0, 0, 0, count * chunk - steps))
        return padded.unflatten(1, (count, chunk)).movedim(3, 1)

    q, k, v, g = cut(q), cut(k), cut(v), cut(g)
    e, b = cut(e.unsqueeze(-1)), cut(b.unsqueeze(-1))
    total = (wide(g) if gaps else g).cumsum(3)
    kept = total.to(g.dtype).exp()
    to_end = (total[:, :, :, -1:] - total).to(g.dtype).exp()
    between = (total[:, :, :, :, None] - total[:, :, :, None]).to(g.dtype)
    earlier = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    # Differences of later pairs would overflow: they are masked before the exponential.
    decay = between.squeeze(-1).masked_fill(~earlier, -torch.inf).exp()
    keys, queries = (k @ k.transpose(-1, -2)) * decay, (q @ k.transpose(-1, -2)) * decay
    system = (e * keys).tril(-1) + torch.eye(chunk, dtype=q.dtype, device=q.device)
    sides = torch.cat([b * v, e * kept * k], -1)
    by_value, by_state = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    k = (k * to_end).transpose(-1, -2)
    last = torch.diag_embed(kept[..., -1, :].expand(*kept.shape[:-2], k.shape[-2]))
    ends = _chain(last - k @ by_state, k @ by_value, s0)
    before = torch.cat([s0.unsqueeze(2), ends[:, :, :-1]], 2)
    outputs = (q * kept) @ before + queries @ (by_value - by_state @ before)
    return outputs.flatten(2, 3)[:, :, :steps].transpose(1, 2), ends[:, :, -1].clone()


def _chain(a: Tensor, x: Tensor, s0: Tensor) -> Tensor:
    """s_i = a_i s_{i-1} + x_i for a (B, H, N, K, K) and x (B, H, N, K, V), of all i, in 2 log2 N steps of products:
    pairs are joined into one, the states after each pair are found, and then those within the pairs."""
    if a.shape[2] == 1:
        return a @ s0.unsqueeze(2) + x
    pairs = a.shape[2] // 2
    (first, second), (x_1, x_2) = (y[:, :, : 2 * pairs].unflatten(2, (pairs, 2)).unbind(3) for y in (a, x))
    after = _chain(second @ first, second @ x_1 + x_2, s0)
    before = torch.cat([s0.unsqueeze(2), after], 2)
    whole, odd = a.shape[2] - pairs, a.shape[2] % 2
    within = a[:, :, ::2] @ before[:, :, :whole] + x[:, :, ::2]
    joined = torch.stack([within[:, :, :pairs], after], 3).flatten(2, 3)
    return torch.cat([joined, within[:, :, pairs:]], 2) if odd else joined


class _Delta(torch.autograd.Function):
    """See the module's docstring for the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, e: Tensor, b: Tensor, s0: Tensor) -> Any:
        o, last, kept, w = _forward(q, k, v, g, e, b, s0, keep=True)
        ctx.save_for_backward(q, k, v, g, e, b, kept, w)
        return o, last

    @staticmethod
    @without_derivatives
    def backward(ctx: Any, grad: Tensor, grad_last: Tensor) -> tuple[Tensor, ...]:
        from glissando.mixers.delta.numba import backward

        q, k, v, g, e, b, kept, w = ctx.saved_tensors
        state = grad_last.clone(memory_format=torch.contiguous_format)
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, e, b)]
        arrays = [_flat(x) for x in (q, k, v, g.exp(), e, b, grad, kept, w, state, *grads)]
        shape = (*q.shape[1:], v.shape[-1])
        over_rows(backward, state.flatten(0, 1), *arrays, shape, KEPT_EVERY, cost=8 * q.shape[1])
        return *grads, state


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, e: Tensor, b: Tensor, s0: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs and the last state; with `keep` also the states before every KEPT_EVERY tokens, and w."""
    from glissando.mixers.delta.numba import forward

    rows, steps, heads, size = q.shape
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    state = s0.detach().clone(memory_format=torch.contiguous_format)
    kept = state.new_empty(rows, heads, -(-steps // KEPT_EVERY) if keep else 0, size, v.shape[-1])
    w = state.new_empty(v.shape if keep else (0, 0, 0, 0))
    arrays = [_flat(x) for x in (q, k, v, g.exp(), e, b, state, o, kept, w)]
    shape = (steps, heads, size, v.shape[-1])
    over_rows(forward, state.flatten(0, 1), *arrays, shape, KEPT_EVERY, cost=4 * steps)
    return o, state, kept, w


def _flat(x: Tensor) -> Any:
    return x.detach().contiguous().view(-1).numpy()
