"""Muon for the linear maps inside a model and AdamW for all else, as one optimizer.

    M <- mu M + (1 - mu) G,    N = (1 - mu) G + mu M (Nesterov's),    W <- (1 - r d) W - 0.2 r sqrt(max(m, n)) O(N)

for a matrix W (m, n) with gradient G, the rate r and weight decay d. O(N) has N's singular vectors and singular values
near 1: five steps X <- a X + (b X X' + c (X X')^2) X from X = N / |N|.

PyTorch's own Muon computes O in bfloat16, which a CPU without that arithmetic emulates: there a step of a 1M-parameter
model took ten times as long as its gradients. Here a CPU uses float32, or bfloat16 if the model is trained in
bf16-mixed and the processor has its instructions (1.6 to 1.9 times as fast). In float32 the steps of wide and tall
matrices are taken by squares (0.6 of the time for 128 x 512). Matrices of one shape go together. Of a matrix that is
sharded over processes each of them gathers N, computes O and takes its own rows.

A grown matrix has `copies` of each entry of a smaller one, times `share`, and O(N) is the tiled O(smaller N) divided
by sqrt(copies). Each copy moves by `share` times what the entry would have moved, if the rate is multiplied by
share copies^(1/4). This is exact where both sides of the matrix grew by the same factor.

Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; its rate matched to AdamW's: Liu et al. 2025, arXiv
2502.16982.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from glissando.precision import computes_bfloat16
from glissando.sharding import gathered, place
from glissando.training.config import MuonOptions
from glissando.training.shares import Share

#: a, b and c of a step, by Jordan et al.
_STEP = (3.4445, -4.775, 2.0315)
_STEPS = 5
#: n / m from which the steps of (m, n) by squares are cheaper
_WIDE = 2


class Muon(torch.optim.Optimizer):
    """See the module's docstring; every parameter is a matrix."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], learning_rate: float, momentum: float, precision: str = "32-true"
    ) -> None:
        super().__init__(list(groups), {"lr": learning_rate, "momentum": momentum, "weight_decay": 0.0})
        #: what O is computed in on a CPU
        self.on_cpu = torch.bfloat16 if precision == "bf16-mixed" and computes_bfloat16("cpu") else torch.float32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            mu = group["momentum"]
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                mean = state["momentum_buffer"].lerp_(weight.grad, 1 - mu)
                by_shape.setdefault(weight.shape, []).append((weight, gathered(weight.grad.lerp(mean, mu))))
            for (rows, columns), pairs in by_shape.items():
                stacked = torch.stack([direction for _, direction in pairs])
                directions = orthogonal(stacked, self.on_cpu if stacked.device.type == "cpu" else torch.bfloat16)
                for (weight, _), direction in zip(pairs, directions, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(place(direction, weight), alpha=-0.2 * group["lr"] * max(rows, columns) ** 0.5)


def orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """O of (B, m, n), computed in `dtype`: singular values near 1, from 0.7 to 1.2, in the place of each matrix's."""
    x = matrices.to(dtype)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.flatten(1).norm(dim=1).clamp_min(1e-7).view(-1, 1, 1)
    by_squares = dtype == torch.float32 and x.shape[2] >= _WIDE * x.shape[1]
    x = (steps_by_squares if by_squares else steps)(x)
    return (x.mT if tall else x).to(matrices.dtype)


def steps(x: Tensor) -> Tensor:
    """The five steps of (B, m, n) as the module's docstring has them."""
    a, b, c = _STEP
    for _ in range(_STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


def steps_by_squares(x: Tensor) -> Tensor:
    """The same with products of (m, m) matrices between the first and the last.

    With S = X X' and P = a + b S + c S^2 a step is X <- P X, S <- P S P. All P are polynomials of the first S and
    commute, so that the last X is their product in any order times the first. Steps multiply small singular values by
    up to 3.4 each, and the rounding of S by the square of that: too much for bfloat16.
    """
    a, b, c = _STEP
    square, factors = x @ x.mT, list[Tensor]()
    for step in range(_STEPS):
        if step:
            square = factors[-1] @ square @ factors[-1]
        factors.append(torch.baddbmm(square, square, square, beta=b, alpha=c))
        factors[-1].diagonal(dim1=1, dim2=2).add_(a)
    return functools.reduce(torch.matmul, factors) @ x


def growth_rate(share: Share) -> float:
    """What multiplies the learning rate of a grown matrix, see the module's docstring; 1 once its share is released."""
    left = math.log(share.rate) / math.log(share.share) if share.share != 1 else 1.0
    return share.rate * share.copies ** (left / 4)


class MuonWithAdamW(torch.optim.Optimizer):
    """One list of groups and one state, that of each parameter as its own optimizer keeps it."""

    def __init__(
        self,
        matrices: Sequence[dict[str, Any]],
        rest: Sequence[dict[str, Any]],
        options: MuonOptions,
        precision: str,
        fused: bool,
    ) -> None:
        o = options
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(Muon(matrices, o.learning_rate, o.momentum, precision))
        if rest:
            betas = (o.beta1, o.beta2)
            self._parts.append(torch.optim.AdamW(list(rest), o.learning_rate, betas=betas, eps=o.eps, fused=fused))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            part.state, by_muon = self.state, isinstance(part, Muon)
            part.param_groups = [group for group in self.param_groups if ("momentum" in group) == by_muon]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of both; `closure` computes the loss anew, as for every optimizer of PyTorch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss
