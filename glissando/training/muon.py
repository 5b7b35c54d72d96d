"""Muon for the matrices inside a model and AdamW for all else, as one optimizer; both are PyTorch's.

Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; its rate matched to AdamW's: Liu et al. 2025, arXiv
2502.16982.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from glissando.training.config import MuonOptions

Named = Sequence[tuple[str, nn.Parameter]]


class MuonWithAdamW(torch.optim.Optimizer):
    """One list of groups and one state, that of each parameter as its own optimizer keeps it."""

    def __init__(self, matrices: Named, decayed: Named, others: Named, options: MuonOptions, fused: bool) -> None:
        def group(named: Named, weight_decay: float) -> dict[str, Any]:
            names, parameters = [name for name, _ in named], [parameter for _, parameter in named]
            return {"params": parameters, "names": names, "weight_decay": weight_decay, "rate": 1.0}

        o = options
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            groups = [group(matrices, o.weight_decay)]
            self._parts.append(
                torch.optim.Muon(groups, o.learning_rate, momentum=o.momentum, adjust_lr_fn="match_rms_adamw")
            )
        rest = [group(named, decay) for named, decay in ((decayed, o.weight_decay), (others, 0.0)) if named]
        if rest:
            betas = (o.beta1, o.beta2)
            self._parts.append(torch.optim.AdamW(rest, o.learning_rate, betas=betas, eps=o.eps, fused=fused))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if ("momentum" in group) == _is_muon(part)]

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


def _is_muon(part: torch.optim.Optimizer) -> bool:
    return isinstance(part, torch.optim.Muon)
