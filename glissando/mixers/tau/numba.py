"""What stands between tensors and the compiled kernels of attention by |lambda_q - lambda_k|."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.kernels.compiled import over_rows

from . import backward as backward_kernels
from . import forward as forward_kernels

#: A token takes some 8 ns a number, forward; a number that is only read and written takes half of one.
_COST = 32


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
    o, lse = q.new_empty(*q.shape, v.shape[3]), torch.empty(q.shape, dtype=torch.float64)
    order = torch.empty(*q.shape[:2], k.shape[2] + q.shape[2], dtype=torch.int32)

    def run(q: Any, k: Any, e: Any, v: Any, past: Any, inverse: Any, order: Any, *rest: Any) -> None:
        *results, first, last = rest
        order[first:last] = sorted_order(q[first:last], k[first:last])
        forward_kernels.forward(q, k, e, v, past, inverse, order, *results, first, last)

    rows = _rows(q, k, v, e, inverse, past)
    over_rows(run, o.flatten(0, 1), *rows, *(_flat(x) for x in (order, o, lse)), cost=_COST)
    return o, lse, order


def single(q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor) -> Tensor:
    """o (B, H, 1, K) of one query a row: a step of decoding."""
    o = q.new_empty(*q.shape, v.shape[3])
    forward_kernels.single(*_rows(q, k, v, e, inverse, past), _flat(o), 0, q.shape[0] * q.shape[1])
    return o


# Operations of a graph: torch.compile cannot see into the kernels, and need not.


#: `forward` with gradients for all but past; see cut.py and backward.py.
differentiable = torch.library.custom_op("glissando::tau_fast", forward, mutates_args=())


@differentiable.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    order = q.new_empty(*q.shape[:2], k.shape[2] + q.shape[2], dtype=torch.int32)
    return q.new_empty(*q.shape, v.shape[3]), q.new_empty(q.shape, dtype=torch.float64), order


@torch.library.custom_op("glissando::tau_fast_backward", mutates_args=())
def backward(
    q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor, o: Tensor, lse: Tensor, order: Tensor,
    grad: Tensor, with_lag: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, e and inverse; that of inverse is 0 unless `with_lag`."""
    delta = (grad * o).sum(-1)
    dq, dk, de = (torch.zeros_like(x, dtype=torch.float64, memory_format=torch.contiguous_format) for x in (q, k, e))
    dv = torch.zeros_like(v, memory_format=torch.contiguous_format)
    far = torch.zeros(q.shape[:2], dtype=torch.float64)  # sum ds |q - k| / T = - (1 / T) d(1 / T)
    q_, k_, e_, v_, past_, inverse_ = _rows(q, k, v, e, inverse, past)
    over_rows(
        backward_kernels.backward, grad.flatten(0, 1), q_, k_, e_, v_, *(_flat(x) for x in (grad, delta, lse)), past_,
        inverse_, *(_flat(x) for x in (order, dq, dk, de, dv, far)), with_lag, cost=_COST,
    )  # fmt: skip
    return dq.to(q.dtype), dk.to(k.dtype), dv, de, -far.sum(0) / inverse


@backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in arguments[:5])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *backward(*ctx.saved_tensors, grad, ctx.needs_input_grad[4]), None


differentiable.register_autograd(_gradients, setup_context=_keep)


def _rows(q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor) -> tuple[Any, ...]:
    """q, k, e, v, past and 1 / T with one row for each head: (B H, ...)."""
    batch, heads = q.shape[:2]
    return (*(_flat(x) for x in (q, k, e, v)), past.repeat_interleave(heads).numpy(), _flat(inverse.expand(batch, -1)))


def _flat(x: Tensor) -> Any:
    """(B, H, ...) as an array (B H, ...), sharing memory where x is contiguous."""
    return x.detach().contiguous().flatten(0, 1).numpy()
