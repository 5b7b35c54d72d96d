"""Texts of one model read or written together: rows of one state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from glissando.decoding.lookup import LookupStep
from glissando.decoding.steps import BlockStep, CompiledStep, Kind, step_from
from glissando.generation import known_tokens
from glissando.kernels.drawing import NOT_FINITE
from glissando.mixers import Memo
from glissando.model import LanguageModel
from glissando.sampling import Sampler
from glissando.serving.session import Listener, Outbox, Piece, Request, Session, Token
from glissando.state import State, fit_room, join_rows, leaves, select_rows


@dataclass(eq=False)
class Reading:
    """A prompt, read once for all texts that go on from it."""

    request: Request
    sessions: list[Session]
    state: State = None
    done: int = 0
    logits: Tensor | None = None  # (V,), after the last token read
    scored: list[Token] = field(default_factory=list)
    sound: bool = True  # every logit that was made is a finite number

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
    level       of their lengths, see `Needs.level`
    pace        tokens a second of each; None: as fast as they are computed
    """

    controlled: bool = False
    level: int = 0
    pace: float | None = None


class Batch:
    """Texts under way, row by row: the state after all but the last token of each, and what follows.

    due  the time, in seconds of the engine's clock, before which no token is written
    """

    def __init__(
        self,
        together: Together,
        sessions: Sequence[Session] = (),
        state: State = None,
        logits: Tensor | None = None,
        due: float = -math.inf,
    ) -> None:
        self.together, self.due = together, due
        self.sessions, self.logits = list(sessions), logits  # logits (B, V)
        self._state = state
        self._step: BlockStep | LookupStep | None = None
        self._sampler: Sampler | None = None

    @property
    def state(self) -> State:
        """The model's state; a compiled step, which keeps it in another form, is made anew after it was asked for."""
        if self._step is not None:
            self._state, self._step = self._step.state, None
        return self._state

    @property
    def most(self) -> int:
        """Tokens of the text that may become longest."""
        return max((session.request.most for session in self.sessions), default=0)

    def add(self, sessions: Sequence[Session], state: State, logits: Tensor) -> None:
        """Rows of their own behind those that are there."""
        if self.sessions:
            assert self.logits is not None
            state, logits = join_rows(self.state, state), torch.cat([self.logits, logits])
        self.sessions, self._state, self._step, self.logits = [*self.sessions, *sessions], state, None, logits
        self._sampler = None

    def keep(self, rows: list[int]) -> None:
        """Only these rows, in this order."""
        if len(rows) == len(self.sessions):
            return
        self.sessions, self._sampler = [self.sessions[row] for row in rows], None
        if not rows:
            self.clear()
            return
        assert self.logits is not None
        index = torch.tensor(rows, device=self.logits.device)
        self.logits = self.logits[index]
        if isinstance(self._step, CompiledStep):
            self._step.keep(rows)
        else:
            self._state, self._step = fit_room(select_rows(self.state, index), spare=True), None

    def split(self) -> list[Batch]:
        """Batches of the texts that no longer belong here, as they were turned for the first time or got another pace;
        the others stay."""
        kinds = [self.together._replace(controlled=s.control is not None, pace=s.pace) for s in self.sessions]
        leaving = []
        for kind in dict.fromkeys(kinds):
            if kind != self.together:
                others = Batch(kind, self.sessions, self.state, self.logits, self.due if kind.pace else -math.inf)
                others.keep([row for row, its in enumerate(kinds) if its == kind])
                leaving.append(others)
        if leaving:
            self.keep([row for row, its in enumerate(kinds) if its == self.together])
        return leaving

    def tick(self, now: float) -> bool:
        """Whether a token is due now; then the next one is, a pace later. A late batch does not catch up."""
        if now < self.due:
            return False
        if self.together.pace is not None:
            pause = 1 / self.together.pace
            self.due = (self.due if now - self.due < pause else now) + pause
        return True

    def draw(self, known: int) -> Tensor:
        """(B,) the next token of each row, of the first `known`; NOT_FINITE where its logits are not."""
        assert self.logits is not None
        if self._sampler is None:
            self._sampler = Sampler([session.sampler for session in self.sessions], known)
        return torch.from_numpy(self._sampler.draw(self.logits)[:, 0])

    def drop_overflown(self, ids: Tensor) -> tuple[Outbox, list[int]]:
        """Rows of which nothing could be drawn end alone; those that stay, as they were numbered."""
        fell = [overflown(s) for s, token in zip(self.sessions, ids.tolist(), strict=True) if token == NOT_FINITE]
        sound = (ids != NOT_FINITE).nonzero().flatten().tolist()
        self.keep(sound)
        return fell, sound

    def clear(self) -> None:
        """No texts."""
        self.sessions, self._state, self._step, self.logits, self._sampler = [], None, None, None, None

    def row(self, row: int) -> tuple[State, Tensor]:
        """The state and the logits (V,) of one row, in memory of their own."""
        assert self.logits is not None
        alone = self._step.row(row) if isinstance(self._step, CompiledStep) else one_row(self.state, row)
        return alone, self.logits[row].clone()

    def advance(
        self, model: LanguageModel, ids: Tensor, control: Tensor | None, kind: Kind, memo: Memo, lookup: int = 0
    ) -> None:
        """One token (B,) of every row, computed by the compiled step where the model has one; a text alone reads up to
        `lookup` tokens ahead."""
        if self._step is None:
            self._step, self._state = step_from(model, self._state, kind, control is not None, memo=memo), None
        if lookup and len(self.sessions) == 1 and not isinstance(self._step, LookupStep):
            session = self.sessions[0]
            text = (*session.request.ids, *session.written[:-1])
            self._step = LookupStep(self._step, text, lookup, session.request.most - 1 - len(text))
        self.logits = self._step(ids, control).clone()


def one_row(state: State, row: int, to_grow: bool = False) -> State:
    """One row, in as much memory as it needs: beside a long text it has room for as long a one."""
    alone = select_rows(state, torch.tensor([row], device=next(leaves(state)).device))
    return alone if to_grow else fit_room(alone)


def pushed(session: Session, token: Token) -> Piece:
    """The text's next token; what goes wrong with it, in a tokenizer that does not know it, ends this text alone."""
    try:
        return session.push(token)
    except Exception as error:  # noqa: BLE001 - sent to the one listener that it concerns
        return Piece(error=error)


def overflown(session: Session) -> tuple[Listener, Piece]:
    """The error of a text from which nothing can be drawn, because the model's logits are not finite."""
    under = "" if session.control is None else f", under the control {session.control}"
    message = f"the logits after {len(session.request.ids) + len(session.written)} tokens are not finite{under}"
    return session.listener, Piece(error=FloatingPointError(message))


def scored(logits: Tensor, ids: Sequence[int], top: int) -> list[Token]:
    """The tokens `ids`, drawn at logits (N, V), with their log-probabilities and the likeliest `top`."""
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    chosen = logp.gather(1, torch.tensor(list(ids), device=logp.device).unsqueeze(1)).squeeze(1).tolist()
    best = logp.topk(min(top, logp.shape[1]), -1)
    pairs = zip(ids, chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    return [Token(token, value, tuple(zip(i, v, strict=True))) for token, value, i, v in pairs]


def tokens_of(model: LanguageModel, batch: Batch, ids: Tensor) -> list[Token]:
    """The tokens `ids`, one a row, with the log-probabilities that each text asks for."""
    assert batch.logits is not None
    tokens, known = [Token(token) for token in ids.tolist()], batch.logits[:, : known_tokens(model)]
    for top in {s.request.top for s in batch.sessions} - {None}:
        rows = [row for row, session in enumerate(batch.sessions) if session.request.top == top]
        for row, token in zip(rows, scored(known[rows], ids[rows].tolist(), top or 0), strict=True):
            tokens[row] = token
    return tokens
