"""Texts of one model read or written together: rows of one state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glissando.generation import writable
from glissando.model import LanguageModel
from glissando.serving.session import Listener, Piece, Request, Session, Token
from glissando.state import State, fit_room, join_rows, leaves, select_rows


@dataclass(eq=False)
class Reading:
    """A prompt, read once for all texts that go on from it: of these `sessions` has those that have not begun."""

    sessions: list[Session]
    state: State = None
    done: int = 0
    logits: Tensor | None = None  # (V,), after the last token read
    scored: list[Token] = field(default_factory=list)
    sound: bool = True  # every logit that was made is a finite number
    begun: bool = False  # one of its texts at least is under way
    passed: int = 0  # how often others were taken up before it, as it did not fit

    @property
    def request(self) -> Request:
        return self.sessions[0].request

    @property
    def controlled(self) -> bool:
        return self.request.control is not None

    @property
    def left(self) -> int:
        return len(self.request.ids) - self.done


@dataclass(eq=False)
class Batch:
    """Texts under way, row by row: the state after all but the last token of each, and what follows."""

    controlled: bool = False
    level: int = 0  # of the lengths of its texts, see `Needs.level`
    sessions: list[Session] = field(default_factory=list)
    state: State = None
    logits: Tensor | None = None  # (B, V)

    @property
    def most(self) -> int:
        """Tokens of the text that may become longest."""
        return max((session.request.most for session in self.sessions), default=0)

    def add(self, sessions: Sequence[Session], state: State, logits: Tensor) -> None:
        """Rows of their own behind those that are there."""
        if self.sessions:
            assert self.logits is not None
            state, logits = join_rows(self.state, state), torch.cat([self.logits, logits])
        self.sessions, self.state, self.logits = [*self.sessions, *sessions], state, logits

    def keep(self, rows: list[int]) -> None:
        """Only these rows, in this order."""
        if len(rows) == len(self.sessions):
            return
        self.sessions = [self.sessions[row] for row in rows]
        if not rows:
            self.state = self.logits = None
            return
        assert self.logits is not None
        index = torch.tensor(rows, device=self.logits.device)
        self.state, self.logits = fit_room(select_rows(self.state, index), spare=True), self.logits[index]


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
    own = logp.gather(1, torch.tensor(list(ids), device=logp.device).unsqueeze(1)).squeeze(1).tolist()
    best = logp.topk(min(top, logp.shape[1]), -1)
    pairs = zip(ids, own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [Token(token, value, tuple(zip(i, v, strict=True))) for token, value, i, v in pairs]


def tokens_of(model: LanguageModel, batch: Batch, ids: Tensor) -> list[Token]:
    """The tokens `ids`, one a row, with the log-probabilities that each text asks for."""
    assert batch.logits is not None
    tokens, known = [Token(int(token)) for token in ids.tolist()], writable(model, batch.logits)
    for top in {s.request.top for s in batch.sessions} - {None}:
        rows = [row for row, session in enumerate(batch.sessions) if session.request.top == top]
        for row, token in zip(rows, scored(known[rows], ids[rows].tolist(), top or 0), strict=True):
            tokens[row] = token
    return tokens
