"""Texts of one model read or written together: rows of one state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glissando.decoding.lookup import LookupStep
from glissando.decoding.steps import BlockStep
from glissando.generation import known_tokens
from glissando.model import LanguageModel
from glissando.sampling import Sampler
from glissando.serving.session import Listener, Piece, Request, Session, Token
from glissando.state import State

#: seconds that a call of the model may take where somebody reads the texts as they come, and where nobody does: a new
#: request waits as long
PROMPT, PATIENT = 0.05, 0.2
#: states of a text that can be gone back to, and tokens between them at least
MARKS, MARK_EVERY = 8, 32


@dataclass(eq=False)
class Reading:
    """A prompt, read once for all texts that go on from it.

    step  of one row, once all is read
    """

    request: Request
    sessions: list[Session]
    state: State = None
    done: int = 0
    step: BlockStep | None = None
    logits: Tensor | None = None  # (V,), after the last token read
    scored: list[Token] = field(default_factory=list)
    sound: bool = True  # every logit that was made is a finite number
    marks: dict[int, Any] = field(default_factory=dict)

    def drop_cancelled(self) -> bool:
        """Forget texts that were given up; whether any is left."""
        self.sessions = [session for session in self.sessions if not session.cancelled]
        return bool(self.sessions)

    @property
    def controlled(self) -> bool:
        return self.request.control is not None

    @property
    def left(self) -> int:
        return len(self.request.ids) - self.done

    def score(self, model: LanguageModel, logits: Tensor) -> None:
        """The probabilities of the next tokens, each before it is read; logits (N, V) behind each of them."""
        request, ids = self.request, self.request.ids[self.done :][: len(logits)]
        self.sound &= bool(logits.isfinite().all())
        before = logits[:1] if self.logits is None else self.logits.unsqueeze(0)
        tokens = scored(torch.cat([before, logits[:-1]])[:, : known_tokens(model)], ids, request.top or 0)
        if self.logits is None:  # nothing is predicted before the first, which stands for the beginning
            tokens[:1] = [Token(ids[0])] if request.begun else []
        self.scored += tokens


class Together(NamedTuple):
    """What texts of one batch have in common.

    controlled  whether they have a control
    pace        tokens a second of each; None: as fast as they are computed
    level       of their lengths, see `Needs.level`
    """

    controlled: bool = False
    pace: float | None = None
    level: int = 0


class Batch:
    """Texts under way, row by row: the state before the last token of each, and that token.

    due  the time, in seconds of the engine's clock, before which no token is written
    """

    def __init__(self, together: Together, due: float = -math.inf) -> None:
        self.together, self.due = together, due
        self.sessions: list[Session] = []
        self.step: BlockStep | LookupStep | None = None
        self.unread: Any = np.empty(0, np.int64)
        self._sampler: Sampler | None = None
        self._seconds: float | None = None  # a token of every row, lately

    @property
    def most(self) -> int:
        """Tokens of the text that may become longest."""
        return max((session.request.most for session in self.sessions), default=0)

    @property
    def block(self) -> BlockStep:
        """The step, with nothing read ahead."""
        assert self.step is not None
        if isinstance(self.step, LookupStep):
            self.step = self.step.settled()
        return self.step

    def add(self, sessions: Sequence[Session], step: BlockStep, unread: Any) -> None:
        """Rows of their own behind those that are there; `step` is not used any more."""
        if self.sessions:
            self.block.join(step)
        else:
            self.step = step
        self.sessions, self.unread = [*self.sessions, *sessions], np.concatenate([self.unread, unread])
        self._sampler = None

    def keep(self, rows: list[int]) -> None:
        """Only these rows, in this order."""
        if not rows:
            self.clear()
        elif len(rows) < len(self.sessions):
            self.sessions, self.unread, self._sampler = [self.sessions[row] for row in rows], self.unread[rows], None
            self.block.keep(rows)

    def split(self) -> list[Batch]:
        """Batches of the texts that no longer belong here, as they were turned for the first time or got another pace;
        the others stay."""
        kinds = [self.together._replace(controlled=s.control is not None, pace=s.pace) for s in self.sessions]
        leaving = []
        for kind in dict.fromkeys(kinds):
            if kind != self.together:
                rows = [row for row, its in enumerate(kinds) if its == kind]
                others = Batch(kind, self.due if kind.pace else -math.inf)
                others.add([self.sessions[row] for row in rows], self.block.select(rows), self.unread[rows])
                leaving.append(others)
        if leaving:
            self.keep([row for row, its in enumerate(kinds) if its == self.together])
        return leaving

    def wait(self, now: float, count: int) -> None:
        """So many tokens are written since `now`: the next ones are due at the pace. A late batch does not catch up."""
        if self.together.pace is not None:
            pause = count / self.together.pace
            self.due = (self.due if now - self.due < pause else now) + pause

    def counts(self, block: int, longest: float) -> Any:
        """(B,) the tokens that are to be written in the next call, `block` at most: what takes `longest` seconds, and
        of a paced text so many that it moves on every `PROMPT` seconds, and at least one."""
        if self.together.pace is not None:
            block = min(block, max(1, int(self.together.pace * PROMPT)))
        if self._seconds is None:
            block = min(block, 4)
        elif self._seconds > 0:
            block = min(block, max(1, int(longest / self._seconds)))
        return np.array([min(block, session.left) for session in self.sessions], np.int64)

    def mark(self) -> None:
        """Keep of each text the state that it can be gone back to, now and then."""
        for row, session in enumerate(self.sessions):
            length, marks = len(session.read), session.marks
            if length - max(marks, default=-MARK_EVERY) >= MARK_EVERY and not session.turned:
                # What looks up the text stays, as it has read all of it.
                step = self.step.settled() if isinstance(self.step, LookupStep) else self.block
                if (state := step.mark(row)) is None:
                    return
                marks[length] = state
                thin_out(marks)

    def write(
        self, counts: Any, control: Tensor | None, known: int, end: int, lookup: int, seconds: Any, logits: Any
    ) -> Any:
        """counts (B,) tokens of each row, (B, n) as `Step.write` has them; a text alone reads up to `lookup` tokens
        ahead. seconds: a clock."""
        if self._sampler is None:
            self._sampler = Sampler([session.sampler for session in self.sessions], known)
        if lookup and len(self.sessions) == 1 and not isinstance(self.step, LookupStep):
            [session] = self.sessions
            self.step = LookupStep(self.block, session.read, lookup, session.request.most - 1 - len(session.read))
        assert self.step is not None
        began = seconds()
        written = self.step.write(self.unread, control, self._sampler, counts, end, logits)
        self._seconds = (seconds() - began) / written.shape[1]
        return written

    def clear(self) -> None:
        """No texts."""
        self.sessions, self.step, self.unread, self._sampler = [], None, self.unread[:0], None


def thin_out(marks: dict[int, Any]) -> None:
    """Drop every other mark but the last, where there are more than `MARKS`."""
    if len(marks) > MARKS:
        for each in sorted(marks)[:-1:2]:
            del marks[each]


def pushed(session: Session, tokens: list[int], logits: Any, known: int) -> Piece:
    """The text's next tokens, drawn at logits (n, V); what goes wrong with them, in a tokenizer that does not know one,
    ends this text alone."""
    try:
        top = session.request.top
        if top is None:
            return session.push(tokens)
        return session.push(tokens, scored(torch.from_numpy(logits[: len(tokens), :known]), tokens, top))
    except Exception as error:  # noqa: BLE001 - sent to the one listener that it concerns
        return session.fail(error)


def overflown(session: Session) -> tuple[Listener, Piece]:
    """The error of a text from which nothing can be drawn, because the model's logits are not finite."""
    under = "" if session.control is None else f", under the control {session.control}"
    message = f"the logits after {len(session.request.ids) + len(session.written)} tokens are not finite{under}"
    return session.listener, session.fail(FloatingPointError(message))


def scored(logits: Tensor, ids: Sequence[int], top: int) -> list[Token]:
    """The tokens `ids`, drawn at logits (N, V), with their log-probabilities and the likeliest `top`."""
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    chosen = logp.gather(1, torch.tensor(list(ids), device=logp.device).unsqueeze(1)).squeeze(1).tolist()
    best = logp.topk(min(top, logp.shape[1]), -1)
    pairs = zip(ids, chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    return [Token(token, value, tuple(zip(i, v, strict=True))) for token, value, i, v in pairs]
