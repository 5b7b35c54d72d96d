"""Continuous batching: texts join and leave a running batch at every token.

A step of the engine (1) lets go of texts that were given up, (2) reads up to `chunk` tokens of the prompts that wait,
and (3) writes one token of every text that is under way. States are values, so that joining is a concatenation of rows
and leaving a selection of them; a text comes out as it would alone, up to rounding.

Texts with a control and texts without are two batches: without one its term is absent, which no value of it stands for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glissando.errors import GlissandoError
from glissando.generation import Sampling, tokenizer_of, tokens_left, writable
from glissando.mixers import Memo
from glissando.model import LanguageModel
from glissando.serving.prefixes import Prefixes
from glissando.serving.session import Listener, Piece, Request, Session, Token
from glissando.state import State, fit_room, join_rows, leaves, select_rows

#: what happened in a step, in order
Outbox = list[tuple[Listener, Piece]]


class BusyError(GlissandoError, RuntimeError):
    """More texts wait than may."""


class StoppingError(BusyError):
    """No text is taken up or written any more."""

    def __init__(self) -> None:
        super().__init__("the server is stopping; ask again later")


@dataclass(eq=False)
class Reading:
    """A prompt that is being read, once for all texts that go on from it."""

    sessions: list[Session]
    state: State
    done: int = 0
    logits: Tensor | None = None  # (V,), after the last token read
    scored: list[Token] = field(default_factory=list)
    sound: bool = True  # every logit that was made is a finite number

    @property
    def request(self) -> Request:
        return self.sessions[0].request

    @property
    def left(self) -> int:
        return len(self.request.ids) - self.done


@dataclass(eq=False)
class Batch:
    """Texts under way, row by row: the state after all but the last token of each, and what follows."""

    sessions: list[Session] = field(default_factory=list)
    state: State = None
    logits: Tensor | None = None  # (B, V)

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


class Engine:
    """A model that writes many texts at once.

    max_sessions  texts under way, or read for; others wait
    max_waiting   texts that may wait; beyond, `submit` raises BusyError
    chunk         tokens of prompts read in a step: how long texts under way can be held up by new ones
    prefix_bytes  kept for states of prompts and of finished texts, to go on from; 0 keeps none
    deliver       called after a step with what happened in it; by default calls every listener

    One thread at a time may call `step`; `submit`, `Session.cancel` and `Session.turn` are for any thread.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_sessions: int = 64,
        max_waiting: int = 256,
        chunk: int = 1024,
        prefix_bytes: int = 2**28,
        deliver: Callable[[Outbox], None] | None = None,
    ) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer_of(model)
        self._memo: Memo = {}  # the weights stand still while they are served
        self.max_sessions, self.max_waiting, self.chunk = max_sessions, max_waiting, chunk
        self.prefixes = Prefixes(prefix_bytes)
        self.deliver = deliver or call_all
        self.reading: list[Reading] = []
        self.batches = {False: Batch(), True: Batch()}
        self.tokens_read = self.tokens_reused = self.tokens_written = 0
        self._waiting: deque[list[Session]] = deque()
        self._lock = threading.Condition()
        self._closed = False
        self._outbox: Outbox = []

    # ------------------------------------------------------------------ from any thread

    def submit(self, request: Request, listeners: Sequence[Listener]) -> list[Session]:
        """Start `request.copies` texts, the pieces of text i sent to listener i.

        Raises BusyError when too many wait, or the engine is closed.
        """
        sessions = [Session(request, n, self.tokenizer, listener) for n, listener in enumerate(listeners)]
        with self._lock:
            if self._closed:
                raise StoppingError
            room = max(0, self.max_sessions - self.running)  # who is taken up in the next step does not count
            if self.waiting + len(sessions) > self.max_waiting + room:
                wait = max(0, self.waiting - room)
                raise BusyError(f"{wait} texts wait already, and {self.max_waiting} may; ask again in a while")
            self._waiting.append(sessions)
            self._lock.notify()
        return sessions

    @property
    def waiting(self) -> int:
        """Texts for which nothing was read yet."""
        return sum(not session.cancelled for sessions in list(self._waiting) for session in sessions)

    @property
    def running(self) -> int:
        """Texts that are written, or whose prompt is being read."""
        under_way = sum(len(batch.sessions) for batch in self.batches.values())
        return under_way + sum(len(reading.sessions) for reading in list(self.reading))

    def room(self, prompt_tokens: int) -> int:
        """How many tokens can be written behind a prompt: endless but for learned positions."""
        return tokens_left(self.model, prompt_tokens)

    def run(self) -> None:
        """Step until `close`; sleeps where there is nothing to do. However it ends, nobody is left waiting."""
        try:
            while True:
                with self._lock:
                    self._lock.wait_for(lambda: self._closed or self.running or self._waiting)
                    if self._closed:
                        break
                self.step()
        finally:
            self.close()
            self._give_up()

    def close(self) -> None:
        """`run` returns after its step; texts under way are given up, with an error for their listeners."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def _give_up(self) -> None:
        under_way = [s for batch in self.batches.values() for s in batch.sessions]
        read_for = [s for reading in self.reading for s in reading.sessions]
        waiting = [s for sessions in self._waiting for s in sessions]
        self.batches, self.reading = {False: Batch(), True: Batch()}, []
        self._waiting.clear()
        error = StoppingError()
        self.deliver([(s.listener, Piece(error=error)) for s in (*under_way, *read_for, *waiting)])

    # ------------------------------------------------------------------ a step

    @torch.no_grad()
    def step(self) -> None:
        """See the module's docstring. What goes wrong in the model ends the texts it went wrong for, and no others."""
        self._let_go()
        self._admit()
        for work, at in ((self._read, self._readings()), *((self._write, batch) for batch in self.batches.values())):
            try:
                work(at)  # type: ignore[operator]
            except Exception as error:  # noqa: BLE001 - sent to every listener that it concerns
                self._fail(at, error)  # type: ignore[arg-type]
        outbox, self._outbox = self._outbox, []
        if outbox:
            self.deliver(outbox)

    def _let_go(self) -> None:
        for batch in self.batches.values():
            batch.keep([row for row, session in enumerate(batch.sessions) if not session.cancelled])
        for reading in self.reading:
            reading.sessions = [s for s in reading.sessions if not s.cancelled] or reading.sessions[:1]
        self.reading = [reading for reading in self.reading if not reading.sessions[0].cancelled]
        plain = self.batches[False]
        for session in (session for batch in self.batches.values() for session in batch.sessions):
            session.control = session.asked
        if any(session.control is not None for session in plain.sessions):
            self._take_up_control(plain)

    def _take_up_control(self, plain: Batch) -> None:
        """Texts whose dial was turned for the first time go over to those with a control."""
        moved = [row for row, session in enumerate(plain.sessions) if session.control is not None]
        stay = [row for row in range(len(plain.sessions)) if row not in moved]
        leaving = Batch(plain.sessions, plain.state, plain.logits)
        leaving.keep(moved)
        plain.keep(stay)
        assert leaving.logits is not None
        self.batches[True].add(leaving.sessions, leaving.state, leaving.logits)

    def _admit(self) -> None:
        """Prompts that wait are taken up in order while there is room; more texts than there is room for, alone.

        Texts that were given up leave the queue here, wherever in it they stand.
        """
        with self._lock:
            still = ([session for session in sessions if not session.cancelled] for sessions in self._waiting)
            self._waiting = deque(sessions for sessions in still if sessions)
            while self._waiting and (not self.running or self.running + len(self._waiting[0]) <= self.max_sessions):
                self.reading.append(self._begin(self._waiting.popleft()))

    def _begin(self, sessions: list[Session]) -> Reading:
        request = sessions[0].request
        known = None if request.reads_all else self.prefixes.longest(request.ids, request.control)
        if known is None:
            return Reading(sessions, self.model.init_state(1))
        self.tokens_reused += known.length
        return Reading(sessions, known.state, known.length, known.logits)

    # ------------------------------------------------------------------ reading

    def _readings(self) -> list[Reading]:
        """The prompts that a step reads of: the first, and those after it of its kind while the padded rows fit."""
        chosen: list[Reading] = []
        longest = 0
        for reading in self.reading:
            longest = max(longest, min(reading.left, self.chunk))
            too_much = (len(chosen) + 1) * longest > self.chunk
            if chosen and (too_much or _controlled(reading) != _controlled(chosen[0])):
                break
            chosen.append(reading)
        return chosen

    def _read(self, readings: list[Reading]) -> None:
        unread = [reading for reading in readings if reading.left]
        if unread:
            self._read_on(unread)
        # Those not read to their end stand behind the others: a long prompt does not hold up short ones.
        self.reading = [r for r in self.reading if r not in readings] + [r for r in readings if r.left]
        for reading in [reading for reading in readings if not reading.left]:
            if reading.sound:
                self._start(reading)
            else:
                self._outbox += [_overflown(session) for session in reading.sessions]

    def _read_on(self, readings: list[Reading]) -> None:
        lengths = [min(reading.left, self.chunk) for reading in readings]
        longest, device = max(lengths), self.model.embedding.weight.device
        ids = torch.zeros(len(readings), longest, dtype=torch.int64)
        for row, (reading, length) in enumerate(zip(readings, lengths, strict=True)):
            ids[row, :length] = torch.tensor(reading.request.ids[reading.done : reading.done + length])
        count = torch.tensor(lengths, device=device)
        mask = torch.arange(longest, device=device) < count.unsqueeze(1) if min(lengths) < longest else None
        state = join_rows(*[reading.state for reading in readings])
        control = self._control([reading.request.control for reading in readings])
        features, state = self.model.features(
            ids.to(device), state, mask=mask, control=control, donate=True, memo=self._memo
        )
        for row, (reading, length) in enumerate(zip(readings, lengths, strict=True)):
            if reading.request.reads_all:
                self._score_prompt(reading, self.model.logits(features[row, :length]))
            reading.logits = self.model.logits(features[row, length - 1])
            reading.sound &= bool(reading.logits.isfinite().all())
            reading.done += length
            reading.state = _alone(state, row, to_grow=reading.left > 0)
        self.tokens_read += sum(lengths)

    def _score_prompt(self, reading: Reading, logits: Tensor) -> None:
        """The probabilities of these tokens, each before it is read."""
        request, ids = reading.request, reading.request.ids[reading.done :][: len(logits)]
        reading.sound &= bool(logits.isfinite().all())
        before = logits[:1] if reading.logits is None else reading.logits.unsqueeze(0)
        tokens = _scored(writable(self.model, torch.cat([before, logits[:-1]])), ids, request.top or 0)
        if reading.logits is None:  # nothing is predicted before the first, which stands for the beginning
            tokens[:1] = [Token(ids[0])] if request.begun else []
        reading.scored += tokens

    def _start(self, reading: Reading) -> None:
        """Every text of a prompt that was read becomes a row."""
        assert reading.logits is not None
        request, sessions = reading.request, reading.sessions
        self.prefixes.keep(request.ids, request.control, reading.state, reading.logits)
        if reading.scored or not request.max_tokens:
            for session in sessions:
                end = None if request.max_tokens else "length"
                self._outbox.append((session.listener, Piece(tokens=tuple(reading.scored), finish=end)))  # type: ignore[arg-type]
        if not request.max_tokens:
            return
        rows = reading.logits.new_zeros(len(sessions), dtype=torch.int64)
        self.batches[_controlled(reading)].add(
            sessions, select_rows(reading.state, rows), reading.logits.expand(len(sessions), -1)
        )

    # ------------------------------------------------------------------ writing

    def _write(self, batch: Batch) -> None:
        if not batch.sessions:
            return
        self._drop_overflown(batch)
        if not batch.sessions:
            return
        assert batch.logits is not None
        ids = self._draw(batch)
        tokens = self._tokens(batch, ids)
        going: list[int] = []
        for row, (session, token) in enumerate(zip(batch.sessions, tokens, strict=True)):
            piece = _pushed(session, token)
            self._outbox.append((session.listener, piece))
            if piece.error is not None:
                continue
            if piece.finish is None:
                going.append(row)
            else:
                session.done = True
                self._remember(batch, row)
        self.tokens_written += len(tokens)
        batch.keep(going)
        if going:
            control = self._control([session.control for session in batch.sessions])
            logits, batch.state = self.model(
                ids[going].unsqueeze(1), batch.state, control=control, donate=True, memo=self._memo
            )
            batch.logits = logits[:, -1]

    def _drop_overflown(self, batch: Batch) -> None:
        """Rows of which nothing can be drawn end alone: a draw fails for its whole batch."""
        assert batch.logits is not None
        sound = batch.logits.isfinite().all(-1).tolist()
        for session, fine in zip(batch.sessions, sound, strict=True):
            if not fine:
                self._outbox.append(_overflown(session))
        batch.keep([row for row, fine in enumerate(sound) if fine])

    def _draw(self, batch: Batch) -> Tensor:
        """(B,) the next token of each row, those that draw alike drawn together."""
        assert batch.logits is not None
        alike: dict[tuple, list[int]] = {}
        for row, session in enumerate(batch.sessions):
            s = session.request.sampling
            alike.setdefault((s.temperature, s.top_k, s.top_p), []).append(row)
        ids = batch.logits.new_empty(len(batch.sessions), dtype=torch.int64)
        known = writable(self.model, batch.logits)
        for kind, rows in alike.items():
            logits = known if len(alike) == 1 else known[rows]
            ids[rows] = Sampling(*kind).draw(logits, [batch.sessions[row].generator for row in rows])
        return ids

    def _tokens(self, batch: Batch, ids: Tensor) -> list[Token]:
        assert batch.logits is not None
        tokens, known = [Token(int(token)) for token in ids.tolist()], writable(self.model, batch.logits)
        for top in {s.request.top for s in batch.sessions} - {None}:
            rows = [row for row, session in enumerate(batch.sessions) if session.request.top == top]
            for row, token in zip(rows, _scored(known[rows], ids[rows].tolist(), top or 0), strict=True):
                tokens[row] = token
        return tokens

    def _remember(self, batch: Batch, row: int) -> None:
        """The state before a finished text's last token: what a conversation goes on from."""
        session = batch.sessions[row]
        if session.turned or len(session.written) < 2:
            return
        assert batch.logits is not None
        read = (*session.request.ids, *session.written[:-1])
        self.prefixes.keep(read, session.request.control, _alone(batch.state, row), batch.logits[row].clone())

    def _control(self, values: Sequence[tuple[float, ...] | None]) -> Tensor | None:
        return None if values[0] is None else self.model.embedding.weight.new_tensor(values)

    def _fail(self, at: Batch | list[Reading], error: Exception) -> None:
        """Every text that was worked on ends here; the batch is empty after it."""
        if isinstance(at, Batch):
            failed, (at.sessions, at.state, at.logits) = at.sessions, ([], None, None)
        else:
            failed = [session for reading in at for session in reading.sessions]
            self.reading = [reading for reading in self.reading if reading not in at]
        ended = {id(listener) for listener, piece in self._outbox if piece.finish or piece.error}
        self._outbox += [(s.listener, Piece(error=error)) for s in failed if id(s.listener) not in ended]


def _alone(state: State, row: int, to_grow: bool = False) -> State:
    """One row, in as much memory as it needs: beside a long text it has room for as long a one."""
    alone = select_rows(state, torch.tensor([row], device=next(leaves(state)).device))
    return alone if to_grow else fit_room(alone)


def _controlled(reading: Reading) -> bool:
    return reading.request.control is not None


def _pushed(session: Session, token: Token) -> Piece:
    """The text's next token; what goes wrong with it, in a tokenizer that does not know it, ends this text alone."""
    try:
        return session.push(token)
    except Exception as error:  # noqa: BLE001 - sent to the one listener that it concerns
        return Piece(error=error)


def _overflown(session: Session) -> tuple[Listener, Piece]:
    """The error of a text from which nothing can be drawn, because the model's logits are not finite."""
    under = "" if session.control is None else f", under the control {session.control}"
    message = f"the logits after {len(session.request.ids) + len(session.written)} tokens are not finite{under}"
    return session.listener, Piece(error=FloatingPointError(message))


def _scored(logits: Tensor, ids: Sequence[int], top: int) -> list[Token]:
    """The tokens `ids`, drawn at logits (N, V), with their log-probabilities and the likeliest `top`."""
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    own = logp.gather(1, torch.tensor(list(ids), device=logp.device).unsqueeze(1)).squeeze(1).tolist()
    best = logp.topk(min(top, logp.shape[1]), -1)
    pairs = zip(ids, own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [Token(token, value, tuple(zip(i, v, strict=True))) for token, value, i, v in pairs]


def call_all(outbox: Outbox) -> None:
    """Call every listener with its piece, in order."""
    for listener, piece in outbox:
        listener(piece)
