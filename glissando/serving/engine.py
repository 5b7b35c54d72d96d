"""Continuous batching: texts join and leave a running batch every few tokens.

A step of the engine (1) lets go of texts that were given up, (2) reads up to `chunk` tokens of the prompts that wait,
and (3) writes up to `block` tokens of every text that is under way, as many as take 50 ms. A text comes out as it would
alone, up to rounding.

Texts with a control and texts without are in different batches: without one its term is absent, which no value of it
stands for. So are texts of another pace: a batch with a pace is written only when its next tokens are due. Without a
compiled step, short texts and long ones are apart, too, as every row of a cache has room for the longest.

The memory of a request is known before it starts (`Needs`), and all texts together stay within `memory`: others wait,
and start in their order. The texts of one request share their prompt, which is read once, and, with the compiled step,
the pages of its caches.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from glissando.allocator import return_freed_memory
from glissando.decoding.lookup import require_lookup
from glissando.decoding.steps import BlockStep, CompiledStep, Kind, PlainStep, decoder_of
from glissando.generation import known_tokens, tokenizer_of
from glissando.kernels.drawing import NOT_FINITE
from glissando.machine import available_bytes, readable
from glissando.mixers import Memo
from glissando.model import LanguageModel
from glissando.sampling import Sampler
from glissando.serving.batches import MARK_EVERY, PATIENT, PROMPT, Batch, Reading, Together, overflown, pushed, thin_out
from glissando.serving.memory import Needs
from glissando.serving.prefixes import Prefixes
from glissando.serving.runner import Runner
from glissando.serving.session import (
    BusyError,
    Listener,
    Outbox,
    Piece,
    Request,
    Reservation,
    Session,
    StoppingError,
    TooLargeError,
    call_all,
)
from glissando.state import State, join_states, leaves, rows_of

#: logits that a call keeps at most, for the probabilities of its tokens
_LOGITS = 2**24


class Engine:
    """A model that writes many texts at once.

    max_sessions  texts under way, or read for; others wait
    max_waiting   texts that may wait; beyond, `submit` raises BusyError
    chunk         tokens of prompts read in a step: how long texts under way can be held up by new ones
    prefix_bytes  kept for states of prompts and of finished texts, to go on from, where `memory` has room; 0 keeps none
    memory        bytes for all that texts take: states, caches, what reading needs beside them, answers; half of what
                  is available if None. What does not fit now waits; for what never will `submit` raises TooLargeError
    runner        the thread that several engines share; None: one of its own
    lookup        tokens that a text under way alone reads ahead, see glissando.decoding.lookup
    block         largest number of tokens that a text gets in a step
    deliver       called after a step with what happened in it; by default calls every listener
    clock         seconds, for the pace of texts

    One thread at a time may call `step`; `submit` and `release`, and `cancel`, `turn` and `pace` of a session are for
    any thread.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_sessions: int = 64,
        max_waiting: int = 256,
        chunk: int = 1024,
        prefix_bytes: int = 2**28,
        memory: int | None = None,
        runner: Runner | None = None,
        deliver: Callable[[Outbox], None] | None = None,
        step: Kind = "auto",
        lookup: int = 0,
        block: int = 32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_lookup(lookup, 1)
        self.lookup, self.block, self.model, self.tokenizer = lookup, block, model.eval(), tokenizer_of(model)
        self._known = known_tokens(model)
        self._memo: Memo = {}  # the weights stand still while they are served
        # Of texts without and with a control; a step that there is not fails here, and not every text.
        self._step_kind, self._decoders = step, {False: decoder_of(model, step, False)}
        self.max_sessions, self.max_waiting, self.chunk = max_sessions, max_waiting, chunk
        self.memory = available_bytes(model.embedding.weight.device) // 2 if memory is None else memory
        page = None if isinstance(self._decoders[False], str) else self._decoders[False].page_bytes
        self.needs = Needs(model, self.memory, chunk, page)
        self.prefixes = Prefixes(min(prefix_bytes, self.memory // 4))
        self.deliver, self.clock = deliver or call_all, clock
        self.reading: list[Reading] = []  # prompts that are not read to their end
        self.batches: list[Batch] = []
        self.tokens_read = self.tokens_reused = self.tokens_written = 0
        self.idle = False
        self._waiting: deque[Reading] = deque()
        self._reservations: list[Reservation] = []  # of answers that are not sent to their end
        self._untrimmed = self._steps = 0
        self._outbox = Outbox()
        self.runner = runner or Runner()
        self.runner.engines.append(self)

    # ------------------------------------------------------------------ from any thread

    def submit(
        self, request: Request, listeners: Sequence[Listener], reservation: Reservation | None = None
    ) -> list[Session]:
        """Start `request.copies` texts, the pieces of text i sent to listener i; `reservation` is for what these keep.

        Raises BusyError when too many wait, or the engine is closed, and TooLargeError for texts that never fit.
        """
        reservation = reservation or Reservation()
        need = self.needs.alone(request) + reservation.bytes
        if need > self.memory or request.copies > self.max_sessions:
            raise TooLargeError(
                f"{request.copies} texts behind a prompt of {len(request.ids):,} tokens, of {request.max_tokens:,} "
                f"more each, take {readable(need)} of memory with the whole answer, and there are "
                f"{readable(self.memory)} for all texts, {self.max_sessions} at a time; shorten the prompt, lower "
                "max_tokens, or ask for fewer texts or logprobs"
            )
        sessions = [Session(request, n, self.tokenizer, each, reservation) for n, each in enumerate(listeners)]
        with self.runner.lock:
            if self.runner.closed:
                raise StoppingError
            room = max(0, self.max_sessions - self.running)  # texts that start in the next step do not count
            if self.waiting + len(sessions) > self.max_waiting + room:
                wait = max(0, self.waiting - room)
                raise BusyError(f"{wait} texts wait already, and {self.max_waiting} may; try again later")
            prompts = sum(36 * len(reading.request.ids) for reading in self._waiting)
            if prompts > self.memory // 8:
                raise BusyError(f"prompts that wait take {readable(prompts)}, an eighth of the memory; try again later")
            self._waiting.append(Reading(request, sessions))
            self.runner.lock.notify()
        return sessions

    def release(self, reservation: Reservation) -> None:
        """The answer is sent, or given up."""
        with self.runner.lock:
            reservation.released = True
            self.runner.lock.notify_all()

    @property
    def waiting(self) -> int:
        """Texts whose prompt has not begun to be read."""
        return sum(not session.cancelled for reading in list(self._waiting) for session in reading.sessions)

    @property
    def running(self) -> int:
        """Texts that are written, or whose prompts are being read."""
        groups: list[Batch | Reading] = [*self.batches, *self.reading]
        return sum(len(group.sessions) for group in groups)

    def rest(self) -> float:
        """Seconds until a step has something to do; inf where no text is under way."""
        if (self._waiting or self.reading) and not self.idle:
            return 0.0
        return min((batch.due for batch in self.batches), default=math.inf) - self.clock()

    def give_up(self) -> None:
        """Every text ends with StoppingError. From the thread that steps."""
        groups: list[Batch | Reading] = [*self.batches, *self.reading, *self._waiting]
        self.batches, self.reading, self._waiting = [], [], deque()
        error = StoppingError()
        self.deliver([(s.listener, Piece(error=error)) for group in groups for s in group.sessions])

    # ------------------------------------------------------------------ memory

    def _batch_bytes(self, batch: Batch, more: int = 0, most: int = 0) -> int:
        """Bytes with `more` texts of up to `most` tokens: without pages every row has room for the longest."""
        if self.needs.paged:
            shared = {id(session.request): self.needs.prompt(session.request) for session in batch.sessions}
            return sum(shared.values()) + sum(self.needs.text(session.request) for session in batch.sessions)
        return (len(batch.sessions) + more) * self.needs.footprint.state(max(batch.most, most))

    def _batch_with_room(self, together: Together, rows: int, most: int) -> Batch:
        """A batch that so many texts, of up to `most` tokens, may join, a new one where there is none; without pages a
        copy of it must fit, too."""
        for batch in self.batches:
            small = self.needs.paged or 6 * self._batch_bytes(batch, rows, most) < self.memory
            if batch.together == together and small:
                return batch
        self.batches.append(batch := Batch(together))
        return batch

    @property
    def used(self) -> int:
        """Bytes that are taken, or promised: to texts under way, and to answers until they are sent."""
        texts = sum(map(self._batch_bytes, self.batches)) + sum(self.needs.texts(each.request) for each in self.reading)
        return texts + sum(each.bytes for each in self._reservations if not each.released)

    def _fits(self, more: int, work: int) -> bool:
        """Whether `more` bytes can be taken beside the largest step, which takes `work` at least. States that are only
        kept make room."""
        growing = [] if self.needs.paged else map(self._batch_bytes, self.batches)
        steps = [*growing, *(self.needs.work(each.request) for each in self.reading)]
        room = self.memory - self.used - more - max([work, *steps])
        if room >= 0:
            self.prefixes.shrink(room)
        return room >= 0

    # ------------------------------------------------------------------ a step

    @torch.no_grad()
    def step(self) -> None:
        """See the module's docstring. What goes wrong in the model ends the texts it went wrong for, and no others."""
        for batch in self.batches:
            self._try(self._let_go, batch)
        self.reading = [reading for reading in self.reading if reading.drop_cancelled()]
        self._admit()
        readings = self._readings()
        self._try(self._read, readings)
        self._deliver()
        self._turn()
        due = [batch for batch in self.batches if batch.due <= self.clock()]
        for batch in due:
            self._try(self._write, batch)
        self.idle = not (readings or due)
        self._trim()
        self._deliver()

    def _deliver(self) -> None:
        outbox, self._outbox = self._outbox, []
        if outbox:
            self.deliver(outbox)

    def _try(self, work: Callable[[Any], None], at: Any) -> None:
        """Where it fails, every text that is worked on ends there; a batch is empty after it."""
        try:
            work(at)
        except Exception as error:  # noqa: BLE001 - sent to every listener that it concerns
            if isinstance(at, Batch):
                failed = at.sessions
                at.clear()
            else:
                failed = [session for reading in at for session in reading.sessions]
                self.reading = [reading for reading in self.reading if reading not in at]
            for session in failed:
                if not session.done:
                    self._outbox.append((session.listener, session.fail(error)))

    def _let_go(self, batch: Batch) -> None:
        for row, session in enumerate(batch.sessions):
            if session.cancelled:  # its reader may go on from what is there
                self._remember(batch, row)
        batch.keep([row for row, session in enumerate(batch.sessions) if not session.cancelled])

    def _turn(self) -> None:
        """Texts whose dials or pace were turned go on in a batch of their kind."""
        for batch in list(self.batches):
            for session in batch.sessions:
                session.take_turns()
            for leaving in batch.split():
                other = self._batch_with_room(leaving.together, len(leaving.sessions), leaving.most)
                step = leaving.block
                if leaving.together.controlled and not batch.together.controlled:
                    step = self._under_control(step)
                other.add(leaving.sessions, step, leaving.unread)
                other.due = max(other.due, leaving.due)
        self.batches = [batch for batch in self.batches if batch.sessions]

    def _trim(self) -> None:
        """Give freed memory back to the system: once it may be much, and now and then while large states come."""
        self.batches = [batch for batch in self.batches if batch.sessions]
        self._steps += 1
        # A prompt's caches leave behind, as they grow, the smaller ones that they were.
        if self._steps % 4 == 0 and any(reading.done >= 4 * self.chunk for reading in self.reading):
            return_freed_memory()
        if self.batches and self._steps % 16:
            return
        used = self.used
        self._untrimmed = max(self._untrimmed, used)
        freed = self._untrimmed - used
        if freed > max(2**26, self.memory // 16) or 4 * used > self.memory:
            return_freed_memory()
            self._untrimmed = used

    def _admit(self) -> None:
        """Start to read the prompts that wait, in their order, as long as there are places and memory."""
        with self.runner.lock:
            self._waiting = deque(reading for reading in self._waiting if reading.drop_cancelled())
        while self._waiting:
            reading = self._waiting[0]
            request, reservation = reading.request, reading.sessions[0].reservation
            more = self.needs.texts(request) + (0 if reservation.taken else reservation.bytes)
            is_room = self.running + len(reading.sessions) <= self.max_sessions
            if not (is_room and self._fits(more, self.needs.work(request))):
                return
            if not reservation.taken:
                reservation.taken = True
                self._reservations = [*(each for each in self._reservations if not each.released), reservation]
            with self.runner.lock:
                self._waiting.popleft()
            known = None
            if not request.reads_all:
                known = self.prefixes.longest(request.ids, request.control, request.key)
            if known is None:
                reading.state = self.model.init_state(1)
            else:
                self.tokens_reused += known.length
                reading.done, reading.logits = known.length, known.logits
                if reading.left:
                    reading.state = known.step.select([0]).state  # of its own: it is written to
                else:
                    reading.step = known.step
            self.reading.append(reading)

    # ------------------------------------------------------------------ reading

    def _readings(self) -> list[Reading]:
        """The prompts that a step reads of: the first, and those after it of its kind while the padded rows fit."""
        chosen: list[Reading] = []
        longest = most = 0
        for reading in self.reading:
            longest = max(longest, min(reading.left, self.needs.chunk(reading.request)))
            most = max(most, self.needs.footprint.state(len(reading.request.ids)))
            rows = len(chosen) + 1
            too_much = rows * longest > self.chunk or 12 * rows * most > self.memory
            if chosen and (too_much or reading.controlled != chosen[0].controlled):
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
            self._try(self._begin, [reading])

    def _read_on(self, readings: list[Reading]) -> None:
        lengths, device = list(map(self._next_length, readings)), self.model.embedding.weight.device
        parts = [torch.tensor(r.request.ids[r.done : r.done + n]) for r, n in zip(readings, lengths, strict=True)]
        ids, count = pad_sequence(parts, batch_first=True), torch.tensor(lengths, device=device)
        longest = ids.shape[1]
        mask = torch.arange(longest, device=device) < count.unsqueeze(1) if min(lengths) < longest else None
        state = join_states([reading.state for reading in readings])
        control = self._control([reading.request.control for reading in readings])
        features, state = self.model.features(
            ids.to(device), state, mask=mask, control=control, donate=True, memo=self._memo
        )
        logits = self.model.logits(features[torch.arange(len(readings), device=device), count - 1])
        finite = logits.isfinite().all(-1).tolist()
        for row, (reading, length) in enumerate(zip(readings, lengths, strict=True)):
            if reading.request.reads_all:
                reading.score(self.model, self.model.logits(features[row, :length]))
            reading.logits = logits[row].clone()
            reading.sound &= finite[row]
            reading.done += length
            reading.state = None
        self._keep_states(readings, state)
        self.tokens_read += sum(lengths)

    def _keep_states(self, readings: list[Reading], state: State) -> None:
        """Give each reading its row of the state: as a step where it is read to its end."""
        index = torch.arange(len(readings), device=next(leaves(state)).device)
        ends = [row for row, reading in enumerate(readings) if not reading.left]
        if ends:
            step = self._step(rows_of(state, index[ends]), readings[0].controlled)
            for number, row in enumerate(ends):
                readings[row].step = step.select([number])
        for row, reading in enumerate(readings):
            if reading.left:
                reading.state = rows_of(state, index[row : row + 1])
                if self.prefixes.limit and self.needs.paged:
                    decoder = self._decoder(reading.controlled)
                    beginning = CompiledStep(decoder, decoder.rows(reading.state, caches=False))
                    reading.marks[reading.done] = beginning.mark(0)
                    thin_out(reading.marks)

    def _next_length(self, reading: Reading) -> int:
        """Tokens that are read now: all that are left, or, of a prompt that is read in parts or long, all but the last
        few, so that an edited prompt can go on from there."""
        most, few = self.needs.chunk(reading.request), MARK_EVERY * (1 if reading.marks else 4)
        stops = self.prefixes.limit and self.needs.paged and most >= reading.left > few
        return reading.left - MARK_EVERY if stops else min(reading.left, most)

    def _step(self, state: State, controlled: bool) -> BlockStep:
        decoder = self._decoder(controlled)
        if isinstance(decoder, str):
            return PlainStep(self.model, state, self._memo)
        return CompiledStep(decoder, decoder.rows(state))

    def _under_control(self, step: BlockStep) -> BlockStep:
        """The same rows for texts with a control, in the pages that they share; `step` is not used any more."""
        decoder = self._decoder(True)
        if isinstance(decoder, str) or not isinstance(step, CompiledStep) or not decoder.keeps_alike(step.decoder):
            return self._step(step.state, True)
        return CompiledStep(decoder, decoder.select(step.rows, range(len(step.rows)), moved=True))

    def _decoder(self, controlled: bool) -> Any:
        if controlled not in self._decoders:
            self._decoders[controlled] = decoder_of(self.model, self._step_kind, controlled)
        return self._decoders[controlled]

    def _begin(self, readings: list[Reading]) -> None:
        """The first tokens of the texts of a prompt that was read, which then become rows of a batch."""
        [reading] = readings
        request, sessions, step = reading.request, reading.sessions, reading.step
        assert step is not None
        assert reading.logits is not None
        if not reading.sound:
            self._outbox += map(overflown, sessions)
            return
        self.prefixes.keep(request.ids, request.control, step, reading.logits, request.key, reading.marks)
        if reading.scored or not request.max_tokens:
            piece = Piece(tokens=tuple(reading.scored), finish=None if request.max_tokens else "length")
            self._outbox += [(session.listener, piece) for session in sessions]
        if not request.max_tokens:
            return
        logits = reading.logits.expand(len(sessions), -1)
        drawn = Sampler([session.sampler for session in sessions], self._known).draw(logits)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).unsqueeze(1).cpu().numpy()
        going = self._push(sessions, drawn, wide)
        if going:
            together = Together(reading.controlled, request.pace, self.needs.level(request))
            batch = self._batch_with_room(together, len(going), request.most)
            for row in going:
                sessions[row].marks.update(reading.marks)
            batch.add([sessions[row] for row in going], step.select([0] * len(going)), drawn[going, 0])
            if request.pace is not None and batch.due == -math.inf:
                batch.wait(self.clock(), 1)  # their first tokens are written

    # ------------------------------------------------------------------ writing

    def _push(self, sessions: Sequence[Session], written: Any, logits: Any) -> list[int]:
        """Give the texts their tokens (B, n), drawn at logits (B, n, V) or None; the rows that go on."""
        eos, going = self.tokenizer.eos_id, []
        for row, (session, tokens) in enumerate(zip(sessions, written.tolist(), strict=True)):
            fell, count = NOT_FINITE in tokens, sum(token >= 0 for token in tokens)
            tokens = tokens[: tokens.index(eos) + 1 if eos in tokens else count]
            if tokens:
                before = len(session.written)
                piece = pushed(session, tokens, None if logits is None else logits[row], self._known)
                self._outbox.append((session.listener, piece))
                self.tokens_written += len(session.written) - before
            if fell and not session.done:
                self._outbox.append(overflown(session))
            if not session.done:
                going.append(row)
        return going

    def _write(self, batch: Batch) -> None:
        # Where somebody reads a text as it comes, others do not hold it up, whichever batch they are in.
        is_read = any(session.request.streams for each in self.batches for session in each.sessions)
        counts, logits = batch.counts(self.block, PROMPT if is_read else PATIENT), None
        if any(session.request.top is not None for session in batch.sessions):
            size = self.model.config.vocab_size
            most = min(_LOGITS, self.memory // 64)  # 1/16 of the memory in float32
            counts = counts.clip(max=max(1, most // (len(counts) * size)))
            kind = np.float64 if self.model.embedding.weight.dtype == torch.float64 else np.float32
            logits = np.empty((len(counts), counts.max(), size), kind)
        if self.prefixes.limit:
            batch.mark()
        now, control = self.clock(), self._control([session.control for session in batch.sessions])
        written = batch.write(counts, control, self._known, self.tokenizer.eos_id, self.lookup, self.clock, logits)
        batch.wait(now, written.shape[1])
        going = self._push(batch.sessions, written, logits)
        for row, session in enumerate(batch.sessions):
            if session.done:
                self._remember(batch, row)
        batch.unread = written[np.arange(len(written)), (written >= 0).sum(1) - 1]
        batch.keep(going)

    def _remember(self, batch: Batch, row: int) -> None:
        """The state before a finished text's last token: what a conversation goes on from."""
        session = batch.sessions[row]
        marks, session.marks = session.marks, {}  # a session is there until its answer is sent
        if session.turned or session.failed or len(session.written) < 2 or not self.prefixes.limit:
            return
        step, request = batch.block.select([row]), session.request
        self.prefixes.keep(session.read, request.control, step, None, request.key, marks)

    def _control(self, values: Sequence[tuple[float, ...] | None]) -> Tensor | None:
        return None if values[0] is None else self.model.embedding.weight.new_tensor(values)
