"""Softmax attention, with an optional bias by key.

    y_i = sum_j p_ij v_j,   p_ij = softmax_j(scale * q_i . k_j + b_j)   over the visible j

A bias that depends on the key alone costs nothing in a fused kernel: append 1 to every query and b_j / scale to
every key. A forget gate has this form, because its part C_i of the query cancels in the softmax.

A sliding window of W tokens costs T (c + W) products instead of T^2: the queries go in blocks of c, each with the keys
that one of the block sees.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.errors import unknown_name
from glissando.kernels.compiled import require_backend
from glissando.kernels.plain import resolved
from glissando.mixers.attention import tiles
from glissando.precision import autocast_type, without_autocast


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | Literal["causal", "all"] = "causal",
    window: int | None = None,
    key_bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: Literal["auto", "reference"] = "auto",
) -> Tensor:
    """q (B, H, T, K), k and v (B, G, L, K) with G dividing H -> (B, H, T, K).

    visible   "causal": query i sees keys j <= i, for L = T; "all"; or bool, broadcastable to (B, H, T, L).
    window    for "causal": a query sees the latest `window` keys alone; L may be above T, the queries being the last.
    key_bias  (B, H, L), added to the logits.
    scale     1 / sqrt(K) by default.
    dropout   probability of dropping a weight.

    `auto` is PyTorch's fused scaled_dot_product_attention, or `tiles` where they were measured to be faster, forward
    and for gradients; `reference` forms the T x L matrix, and alone has second derivatives.
    Raises ValueError if "causal" is given with L != T, a window is below 1 or given without "causal", or heads
    cannot share those of keys evenly; UnknownNameError for a backend, or a name of `visible`, that there is not.
    """
    require_backend("attention", backend, ("auto", "reference"))
    backend = resolved(backend)
    if isinstance(visible, str) and visible not in ("causal", "all"):
        raise unknown_name("attention visible", visible, ("causal", "all"))
    queries, keys = q.shape[2], k.shape[2]
    if window is not None and (visible != "causal" or window < 1):
        raise ValueError(f'a window is of at least 1 key and for visible "causal", got {window} with {visible!r}')
    if visible == "causal" and (keys < queries if window is not None else keys != queries):
        need = "as many keys as queries" if window is None else "at least as many keys as queries"
        raise ValueError(f"causal attention needs {need}, got {keys} and {queries}")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if k.shape[1] != q.shape[1]:
        if not k.shape[1] or q.shape[1] % k.shape[1]:
            raise ValueError(f"attention: {q.shape[1]} heads cannot share {k.shape[1]} heads of keys and values evenly")
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if window is not None:
        band = _Band(window, max(64, window // 4))
        if backend == "auto" and band.pays(queries, keys):
            return _fused(q, k, v, band, key_bias, scale, dropout)
        visible = within(window, queries, keys, q.device)
    run = _reference if backend == "reference" else _fused
    return run(q, k, v, visible, key_bias, scale, dropout)


def within(window: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """bool (queries, keys): which of the keys are the latest `window` of each query, where the queries are the last."""
    slots = torch.arange(keys, device=device)
    query_slot = slots[keys - queries :].unsqueeze(1)
    # Compared, not subtracted: eight bytes a pair would be eight times the mask.
    return (query_slot >= slots) & (query_slot - window < slots)


class _Band(NamedTuple):
    """A causal window by blocks of queries, each a row of its own with the keys from window - 1 before its first."""

    window: int
    block: int

    def pays(self, queries: int, keys: int) -> bool:
        """Whether blocks have under two thirds of the pairs that a mask has; nearer to it they gain nothing."""
        pairs = -(-queries // self.block) * self.block * (self.block + self.window - 1)
        return 0 < 3 * pairs <= 2 * queries * keys

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float) -> Tensor:
        (batch, heads, queries), keys = q.shape[:3], k.shape[2]
        n, span = -(-queries // self.block), self.block + self.window - 1
        early, late = self.window - 1 - (keys - queries), n * self.block - queries

        def rows(x: Tensor, size: int, before: int) -> Tensor:
            """(B, H, L, K), padded -> (n, B H, size, K): rows that overlap share their memory."""
            parts = F.pad(x, (0, 0, before, late)).unfold(2, size, self.block)
            return parts.permute(2, 0, 1, 4, 3).flatten(1, 2)

        first = torch.arange(n, device=q.device).view(-1, 1, 1, 1) * self.block - early
        there = first + torch.arange(span, device=q.device) >= 0  # what stands before all keys is padding
        y = F.scaled_dot_product_attention(
            rows(q, self.block, 0),
            rows(k, span, early),
            rows(v, span, early),
            attn_mask=within(self.window, self.block, span, q.device) & there,
            dropout_p=dropout,
            scale=scale,
        )
        return y.unflatten(1, (batch, heads)).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :queries]


def _reference(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | str, key_bias: Tensor | None, scale: float, dropout: float
) -> Tensor:
    logits = scale * q @ k.transpose(-1, -2)
    if key_bias is not None:
        logits = logits + key_bias.unsqueeze(-2)
    if visible == "causal":
        visible = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if isinstance(visible, Tensor):
        logits = logits.masked_fill(~visible, -torch.inf)
    # A bias by key comes in float64, whatever the values are in.
    return F.dropout(logits.softmax(-1).to(v.dtype), dropout) @ v


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | str | _Band,
    key_bias: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    size = v.shape[-1]
    if key_bias is not None:
        if torch.float16 in (v.dtype, autocast_type(v.device.type)):
            # A bias of thousands over the scale is more than float16 holds.
            with without_autocast(v.device.type):
                return _fused(q.float(), k.float(), v.float(), visible, key_bias, scale, dropout).to(v.dtype)
        extra = _coordinates(key_bias / scale, k.dtype)
        q = F.pad(q, (0, extra.shape[-1]), value=1.0)
        k = torch.cat([k, extra], -1)
        v = F.pad(v, (0, extra.shape[-1]))  # the fused CPU kernel needs one head size for all three
    if isinstance(visible, _Band):
        return visible.attend(q, k, v, scale, dropout)[..., :size]
    if isinstance(visible, Tensor):
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=dropout, scale=scale)
    elif visible == "causal" and not dropout and tiles.fit(q, k, v):
        y = tiles.causal(q, k, v, scale)
    else:
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=visible == "causal", scale=scale)
    return y[..., :size]


def _coordinates(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """bias (...) as coordinates (..., n) of `dtype` that sum to it.

    One would do but for half precision: bfloat16 keeps 8 bits, so that a bias of 40 would be off by 0.1 and the slope
    between neighbours would be lost in steps. Three hold 24 bits, and the kernel adds them up in float32.
    """
    if dtype in (torch.float32, torch.float64):
        return bias.to(dtype).unsqueeze(-1)
    parts = []
    for _ in range(3):
        parts.append(bias.to(dtype))
        bias = bias - parts[-1].to(bias.dtype)
    return torch.stack(parts, -1)
