"""What stands between tensors and the compiled kernels of attention by |lambda_q - lambda_k|."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glissando.ops import tau_backward, tau_forward
from glissando.ops.compiled import over_rows

#: A token takes some 8 ns a number, forward; a number that is only read and written takes half of one.
_COST = 32
#: in place of -inf: weight 0 beside anything else, and differences stay numbers
_HIDDEN = -1e30


def sorted_order(q: Any, k: Any) -> Any:
    """(..., L + T) int32: keys 0..L-1 and queries L.. together, sorted along lambda, keys before equal queries."""
    both = np.concatenate([k, q], -1)
    if both.dtype != np.float32:
        return np.argsort(both, axis=-1, kind="stable").astype(np.int32)
    # The bits of a float32, negative ones turned round, sort as integers do; with the index behind them one sort of
    # 64-bit integers, which NumPy does with vector instructions, is stable and brings its own indices.
    bits = (both + np.float32(0)).view(np.int32)  # -0 becomes 0
    keys = np.where(bits < 0, ~bits, bits | np.int32(-(2**31))).view(np.uint32).astype(np.uint64)
    packed = (keys << np.uint64(32)) | np.arange(both.shape[-1], dtype=np.uint64)
    packed.sort(-1)
    return packed.astype(np.uint32).view(np.int32)


def forward(q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """o (B, H, T, K), lse (B, H, T) float64 and the order (B, H, L + T) int32 that backward takes."""
    batch, heads, length = q.shape
    o = q.new_empty(batch, heads, length, v.shape[3])
    lse = torch.empty(batch, heads, length, dtype=torch.float64)
    order = torch.empty(batch, heads, k.shape[2] + length, dtype=torch.int32)
    rows, groups = _rows(q, k, v, e, inverse, past), v.shape[1]

    def run(q: Any, k: Any, e: Any, v: Any, past: Any, inverse: Any, order: Any, *rest: Any) -> None:
        *results, first, last = rest
        order[first:last] = sorted_order(q[first:last], k[first:last])
        tau_forward.forward(q, k, e, v, past, inverse, order, *results, first, last)

    over_rows(run, _by_group(o, groups), *rows, *(_grouped(x, groups) for x in (order, o, lse)), cost=_COST)
    return o, lse, order


def single(q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """o (B, H, 1, K) and lse (B, H, 1) float64 of one query a row: a step of decoding."""
    batch, heads, _ = q.shape
    o = q.new_empty(batch, heads, 1, v.shape[3])
    lse = torch.empty(batch, heads, 1, dtype=torch.float64)
    rows, groups = _rows(q, k, v, e, inverse, past), v.shape[1]
    tau_forward.single(*rows, _grouped(o, groups), _grouped(lse, groups), 0, batch * groups)
    return o, lse


class Fast(torch.autograd.Function):
    """`forward` with gradients; see glissando/ops/tau_cut.py and tau_backward.py."""

    forward = staticmethod(forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output)
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        q, k, v, e, inverse, past, o, lse, order = ctx.saved_tensors
        grad, grad_lse = (
            torch.zeros_like(o) if grad is None else grad,
            torch.zeros_like(lse) if grad_lse is None else grad_lse,
        )
        groups, with_lag = v.shape[1], ctx.needs_input_grad[4]
        delta = (grad * o).sum(-1) - grad_lse.to(o.dtype)
        dq, dk, de = (
            torch.zeros_like(x, dtype=torch.float64, memory_format=torch.contiguous_format) for x in (q, k, e)
        )
        dv = torch.zeros_like(v, memory_format=torch.contiguous_format)
        far = torch.zeros(q.shape[:2], dtype=torch.float64)  # sum ds |q - k| / T = - (1 / T) d(1 / T)
        q_, k_, e_, v_, past_, inverse_ = _rows(q, k, v, e, inverse, past)
        over_rows(
            tau_backward.backward, _by_group(grad, groups), q_, k_, e_, v_,
            *(_grouped(x, groups) for x in (grad, delta, grad_lse, lse)), past_, inverse_,
            *(_grouped(x, groups) for x in (order, dq, dk, de)), dv.flatten(0, 1).numpy(), _grouped(far, groups),
            with_lag, cost=_COST,
        )  # fmt: skip
        of_inverse = -far.sum(0) / inverse if with_lag else None
        return dq.to(q.dtype), dk.to(k.dtype), dv, de, of_inverse, None


def _rows(q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor) -> tuple[Any, ...]:
    """q, k, e, v, past and 1 / T with one row for each head of values: (B G, heads that share it, ...)."""
    batch, groups = v.shape[:2]
    heads = inverse.detach().expand(batch, -1)
    hidden = e.detach().clamp_min(_HIDDEN)
    rows = [_grouped(x, groups) for x in (q, k, hidden)]
    values = v.detach().contiguous().flatten(0, 1).numpy()
    return (*rows, values, past.repeat_interleave(groups).numpy(), _grouped(heads, groups))


def _grouped(x: Tensor, groups: int) -> Any:
    """(B, H, ...) as an array (B G, H / G, ...), sharing memory where x is contiguous."""
    return _by_group(x.detach().contiguous(), groups).numpy()


def _by_group(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(1, (groups, -1)).flatten(0, 1)
