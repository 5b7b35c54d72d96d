"""Whether what was exported computes what the model computes: bits per byte on held-out text, and greedy text.

Two texts side by side, read in part by the prefill and then token by token, against the model's own forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from glissando.errors import Refused
from glissando.evaluation.scoring import token_losses
from glissando.generation import computing, tokenizer_of
from glissando.model import LanguageModel

#: at most so far may bits per byte be off, and two greedy tokens' logits where they differ
TOLERANCE = 1e-4
_ROWS, _PREFILL, _STEPS, _PROMPT, _GREEDY = 2, 128, 64, 32, 64

#: (kind, ids, control or none, *state) -> logits and the state
Runtime = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class Check:
    """What was compared and what came out.

    ours, exported  bits per byte
    largest         largest difference of a logit
    greedy, equal   tokens written with temperature 0, and how many are the same from the beginning on
    """

    by: str
    tokens: int
    ours: float
    exported: float
    largest: float
    greedy: int
    equal: int

    def lines(self) -> list[str]:
        return [
            f"checked with {self.by} on {self.tokens:,} held-out tokens",
            f"bits per byte   {self.ours:.6f} ours, {self.exported:.6f} exported, "
            f"difference {self.exported - self.ours:+.1e}",
            f"logits          differ by at most {self.largest:.1e}",
            f"greedy text     {self.equal} of {self.greedy} tokens equal",
        ]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def require_equal(self) -> Check:
        """Raise Refused where the two are not the same but for rounding."""
        if not abs(self.exported - self.ours) <= TOLERANCE or self.equal < self.greedy:
            raise Refused(
                "the check failed, so that nothing was written; this is a defect, please report it:\n  "
                + "\n  ".join(self.lines())
            )
        return self


def texts_of(stream: list[int], room: int | None) -> Tensor:
    """Rows (B, T + 1) of a stream of held-out tokens, T at most `room`.

    Raises Refused where there is less text than two tokens a row.
    """
    length = min(_PREFILL + _STEPS, room or _PREFILL + _STEPS, len(stream) // _ROWS - 1)
    if length < 2:
        raise Refused(
            f"the held-out text has {len(stream)} tokens, of which the check cannot make {_ROWS} rows of 3; give a "
            "longer one: --file TEXT"
        )
    return torch.tensor(stream[: _ROWS * (length + 1)]).view(_ROWS, length + 1)


def compare(
    model: LanguageModel, run: Runtime, start: Callable[[int], list[Tensor]], texts: Tensor, room: int | None, by: str
) -> Check:
    """The model beside `run`, whose state before any token is start(B); `room` tokens fit into it."""
    ids, targets = texts[:, :-1], texts[:, 1:]
    control = control_of(model)
    with computing(model):
        expected = model(ids, control=control)[0]
    exported = torch.cat(list(_read(run, start(len(ids)), ids, control, len(ids[0]) * 2 // 3)), 1)
    equal, greedy = _greedy(model, run, start, ids, control, room)
    return Check(
        by,
        ids.numel(),
        bits_per_byte(model, expected, targets),
        bits_per_byte(model, exported, targets),
        float((expected - exported).abs().max()),
        greedy,
        equal,
    )


def control_of(model: LanguageModel) -> Tensor | None:
    """The dials of the rows: all at 0, and all at 1/2."""
    names = model.config.dials
    return torch.tensor([[0.0] * len(names), [0.5] * len(names)]) if names else None


def bits_per_byte(model: LanguageModel, logits: Tensor, targets: Tensor) -> float:
    tokenizer = tokenizer_of(model)
    n_bytes = sum(len(tokenizer.decode(row.tolist()).encode()) for row in targets)
    return float(token_losses(logits, targets).double().sum()) / math.log(2) / max(n_bytes, 1)


def _read(run: Runtime, state: list[Tensor], ids: Tensor, control: Tensor | None, split: int) -> Iterator[Tensor]:
    """Logits of the first `split` tokens by the prefill, and of the others step by step."""
    extra = [] if control is None else [control]
    logits, *state = run("prefill", ids[:, :split], *extra, *state)
    yield logits
    for t in range(split, ids.shape[1]):
        logits, *state = run("step", ids[:, t : t + 1], *extra, *state)
        yield logits


def _greedy(
    model: LanguageModel,
    run: Runtime,
    start: Callable[[int], list[Tensor]],
    ids: Tensor,
    control: Tensor | None,
    room: int | None,
) -> tuple[int, int]:
    """How many greedy tokens are equal, of how many. Where two logits are a tie within rounding either may be taken."""
    extra = [] if control is None else [control]
    prompt = ids[:, : min(_PROMPT, ids.shape[1] // 2)]
    count = min(_GREEDY, (room or 1 << 62) - prompt.shape[1])
    exported, *flat = run("prefill", prompt, *extra, *start(len(prompt)))
    equal, differs = 0, torch.zeros(len(prompt), dtype=torch.bool)
    with computing(model):
        expected, state = model(prompt, model.init_state(len(prompt)), control=control)
        for _ in range(count):
            expected, exported = expected[:, -1], exported[:, -1]
            token, other = expected.argmax(-1, keepdim=True), exported.argmax(-1, keepdim=True)
            tie = (expected.gather(1, token) - expected.gather(1, other)).squeeze(1) <= TOLERANCE
            differs |= ~tie
            equal += int((~differs).sum())
            # Both go on with our token, so that a tie does not end the comparison.
            expected, state = model(token, state, control=control)
            exported, *flat = run("step", token, *extra, *flat)
    return equal, count * len(prompt)
