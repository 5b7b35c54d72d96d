"""A loop over time as one operation of a graph: what torch.export keeps for a length that is not known when it traces.

Plain loops and compiled kernels serve everywhere else. ONNX has it as its operator Scan.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def exporting() -> bool:
    """Whether torch.export looks on: a graph may then depend on no value, only on shapes."""
    # Up to PyTorch 2.12, Dynamo says that it is exporting when it compiles.
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def over_time(
    step: Callable[..., tuple[tuple[Tensor, ...], Tensor]],
    carry: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    constants: tuple[Tensor, ...] = (),
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """carry, y_t = step(carry, inputs at t, *constants) for t = 1..T, for inputs (B, T, ...) -> y (B, T, ...) and the
    last carry.

    Every tensor that `step` reads is an argument of it. Without gradients.
    """
    if isinstance(inputs[0].shape[1], int) and inputs[0].shape[1] == 1:
        carry, y = step(carry, tuple(x[:, 0] for x in inputs), *constants)
        return y.unsqueeze(1), carry
    # Not `scan` of the same module, which compiles the step by Dynamo first: half of an export's time.
    from torch._higher_order_ops.scan import scan_op

    count, width = len(carry), len(inputs)

    def combine(*tensors: Tensor) -> list[Tensor]:
        after, y = step(tensors[:count], tensors[count : count + width], *tensors[count + width :])
        # A graph's outputs may not be one and the same tensor.
        return [*after, y.clone()]

    *last, y = scan_op(combine, list(carry), [x.transpose(0, 1) for x in inputs], constants)
    return y.transpose(0, 1), tuple(last)


def delayed(first: Tensor, x: Tensor, dim: int) -> Tensor:
    """x one step later along `dim`: `first`, of size 1 there, then all of x but its last."""
    length = x.shape[dim]
    if exporting():  # a graph for every length has no part of x whose length may be 0
        return torch.cat([first, x], dim).narrow(dim, 0, length)
    return torch.cat([first, x.narrow(dim, 0, length - 1)], dim)
