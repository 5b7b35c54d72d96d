"""Whether what was exported computes what the model computes.

Two texts, which the model writes itself, are read side by side, a part at once and then token by token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glissando.errors import Refused
from glissando.evaluation.scoring import token_losses
from glissando.generation import Continuation, Sampling, computing, tokenizer_of
from glissando.model import LanguageModel

#: at most so far may bits per token be off, and the logits of two tokens of which each is the likeliest for one
TOLERANCE = 1e-4
_ROWS, _LENGTH = 2, 192

#: (ids, control or none, *state) -> logits and the state
Runtime = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class Check:
    """What was compared and what came out.

    model, exported  bits per token
    largest          largest difference of a logit
    equal            tokens behind which both find the same token likeliest
    """

    by: str
    tokens: int
    model: float
    exported: float
    largest: float
    equal: int

    def lines(self) -> list[str]:
        return [
            f"checked with {self.by} on {self.tokens:,} tokens that the model wrote",
            f"bits per token  {self.model:.6f} of the model, {self.exported:.6f} exported, "
            f"difference {self.exported - self.model:+.1e}",
            f"logits          differ by at most {self.largest:.1e}",
            f"likeliest       {self.equal} of {self.tokens} tokens equal",
        ]

    def require_equal(self) -> Check:
        """Raise Refused where the two are not the same but for rounding."""
        if not abs(self.exported - self.model) <= TOLERANCE or self.equal < self.tokens:
            raise Refused(
                "the check failed, so that nothing was written; this is a defect, please report it:\n  "
                + "\n  ".join(self.lines())
            )
        return self


def compare(
    model: LanguageModel,
    run: Runtime,
    start: Callable[[int], list[Any]],
    room: int | None,
    by: str,
    *,
    one_row: bool = False,
) -> Check:
    """The model beside `run`, whose state before any token is start(B); `room` tokens fit into it.

    one_row  `run` reads one text at a time
    """
    names = model.config.dials
    control = torch.tensor([[0.0] * len(names), [0.5] * len(names)]) if names else None
    drawn = Continuation(
        model, [[tokenizer_of(model).eos_id]] * _ROWS, min(_LENGTH, room or _LENGTH), Sampling(1.0, seed=0),
        control=control,
    )  # fmt: skip
    texts = torch.tensor([[tokenizer_of(model).eos_id] * _ROWS, *drawn]).T
    ids, targets = texts[:, :-1], texts[:, 1:]
    with computing(model):
        expected = model(ids, control=control)[0]
    split = max(1, ids.shape[1] * 2 // 3)

    def read(rows: slice) -> Tensor:
        extra, state, parts = [] if control is None else [control[rows]], start(len(ids[rows])), list[Tensor]()
        for part in (ids[rows, :split], *(ids[rows, t : t + 1] for t in range(split, ids.shape[1]))):
            logits, *state = run(part, *extra, *state)
            parts.append(logits)
        return torch.cat(parts, 1)

    together = [slice(row, row + 1) for row in range(_ROWS)] if one_row else [slice(_ROWS)]
    exported = torch.cat([read(rows) for rows in together])
    # Where two logits are a tie within rounding, either may be the largest.
    behind = expected.amax(-1) - expected.gather(-1, exported.argmax(-1, keepdim=True)).squeeze(-1)
    largest, equal = float((expected - exported).abs().max()), int((behind <= TOLERANCE).sum())
    return Check(by, ids.numel(), _bits(expected, targets), _bits(exported, targets), largest, equal)


def _bits(logits: Tensor, targets: Tensor) -> float:
    """Bits per token."""
    return float(token_losses(logits, targets).double().mean()) / math.log(2)
