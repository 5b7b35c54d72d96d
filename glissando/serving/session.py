"""One text that is being written: what was asked, and what has come of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from glissando.data.tokenizers import Tokenizer
from glissando.errors import GlissandoError
from glissando.sampling import RowSampler, Sampling
from glissando.text_row import TextRow

Finish = Literal["stop", "length"]
#: bytes of a token of a prompt while its text is under way, as it came and as it is kept
_ID_BYTES = 72


class RequestError(GlissandoError):
    """A request that is not answered: its HTTP status, and OpenAI's words for it."""

    http_status = 400
    kind = "invalid_request_error"
    code: str | None = None
    param: str | None = None


class BusyError(RequestError, RuntimeError):
    """More texts wait than may."""

    http_status, kind, code = 429, "rate_limit_error", "too_many_texts"


class TooLargeError(RequestError, ValueError):
    """A text that takes more memory than there is for all texts together."""

    http_status, code = 413, "memory_exceeded"


class StoppingError(BusyError):
    """No text is taken up or written any more."""

    http_status, kind, code = 503, "server_error", "stopping"

    def __init__(self) -> None:
        super().__init__("the server is stopping; try again later")


class ModelFailedError(RequestError, RuntimeError):
    """Something went wrong in the model; see its cause."""

    http_status, kind, code = 500, "server_error", "model_failed"


@dataclass(frozen=True)
class Request:
    """What to write.

    ids         what is read first, at least one token: the end token stands before every text
    max_tokens  at most so many are written; 0 reads the prompt and no more
    sampling    how tokens are drawn, its seed that of the first text
    copies      texts to write; text i is drawn with seed + i
    stop        a text ends before any of these
    control     a value for each of the model's dials, in its order; None: the model without its control
    top         with each token the log-probabilities of the likeliest `top`; None: none, not even its own
    echo        with `top`, those of the prompt's tokens too
    begun       the client itself sent the first token: it is returned, without a log-probability
    key         whose states of prompts it may go on from, and whose its own are
    pace        tokens a second at most; None: as fast as they are computed
    streams     somebody reads the text as it comes
    turns       ((n, control), ...) with n rising: token n of the text, counted from 0, is drawn under this control
    """

    ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    copies: int = 1
    stop: tuple[str, ...] = ()
    control: tuple[float, ...] | None = None
    top: int | None = None
    echo: bool = False
    begun: bool = False
    key: int | None = None
    pace: float | None = None
    streams: bool = True
    turns: tuple[tuple[int, tuple[float, ...]], ...] = ()

    @property
    def reads_all(self) -> bool:
        """Whether the probabilities of the prompt's tokens are requested."""
        return self.echo and self.top is not None

    @property
    def most(self) -> int:
        """Tokens that a text may have."""
        return len(self.ids) + self.max_tokens

    @property
    def answer_bytes(self) -> int:
        """Bytes of all texts until they are sent: a token, its text and its JSON, with each of the likeliest."""
        tokens = self.max_tokens + self.reads_all * len(self.ids)
        return self.copies * tokens * (512 + 240 * (self.top or 0)) + _ID_BYTES * len(self.ids)


@dataclass(eq=False)
class Reservation:
    """Memory for the whole answer to a client, from when its first text is taken up until the answer is sent.

    All of it is reserved at once: two answers that each held a part, and waited for the rest, would never end.
    """

    bytes: int = 0
    taken: bool = False  # counted by the pool
    released: bool = False


class Token(NamedTuple):
    """A token, its log-probability under the model (in nats, before temperature), and the likeliest at its place."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of a text: characters that no later token changes, and its tokens where their log-probabilities are
    requested; `finish` with the last. `control` is that under which the tokens were drawn, where the token before them
    was drawn under another."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    finish: Finish | None = None
    error: BaseException | None = None
    control: tuple[float, ...] | None = None


Listener = Callable[[Piece], None]
#: what happened in a step, in order
Outbox = list[tuple[Listener, Piece]]


def call_all(outbox: Outbox) -> None:
    """Call every listener with its piece, in order."""
    for listener, piece in outbox:
        listener(piece)


class Session:
    """One text; the engine's thread alone changes it, but for `cancel`, `turn` and `pace`."""

    def __init__(
        self, request: Request, number: int, tokenizer: Tokenizer, listener: Listener, reservation: Reservation
    ) -> None:
        self.request, self.listener, self.reservation = request, listener, reservation
        self.text = TextRow(tokenizer, list(request.stop))
        generator = torch.Generator().manual_seed(request.sampling.seed + number)
        # Without the seed, texts that are drawn alike by tensors are drawn together.
        self.sampler = RowSampler(replace(request.sampling, seed=0), generator)
        self.written: list[int] = []
        self.cancelled = self.done = self.failed = False
        #: what the next tokens are drawn under, and what was requested since
        self.control = self.asked = request.control
        self._drawn_under = request.control
        self._turns = list(request.turns)
        self.pace = request.pace  # from the next tokens on
        self.turned = False
        #: by their lengths, earlier states of the text that it can be gone back to
        self.marks: dict[int, Any] = {}

    @property
    def read(self) -> tuple[int, ...]:
        """What the model has read: all but the last token."""
        return (*self.request.ids, *self.written[:-1])

    @property
    def left(self) -> int:
        """Tokens until the end, or until a dial is turned."""
        end = self.request.max_tokens if not self._turns else min(self._turns[0][0], self.request.max_tokens)
        return end - len(self.written)

    def cancel(self) -> None:
        """No further token is written. From any thread."""
        self.cancelled = True

    def turn(self, control: tuple[float, ...]) -> None:
        """The dials from the next tokens on. From any thread."""
        self.turned = True
        self.asked = control

    def take_turns(self) -> None:
        """Draw the next tokens under the control requested by now."""
        while self._turns and self._turns[0][0] <= len(self.written):
            self.turn(self._turns.pop(0)[1])
        self.control = self.asked

    def fail(self, error: BaseException) -> Piece:
        """The text ends with an error."""
        self.done = self.failed = True
        self.marks = {}
        return Piece(error=error)

    def push(self, tokens: list[int], scored: Sequence[Token] = ()) -> Piece:
        """The text's next tokens, at least one; those behind its end are dropped."""
        turned = None if self.control == self._drawn_under else self.control
        self._drawn_under = self.control
        text, count = self.text.push_all(tokens)
        self.written += tokens[:count]
        finish: Finish | None = None
        if self.text.ended:  # the end token is no part of the text, the last of a stop text is
            finish, count = "stop", count - (tokens[count - 1] == self.text.eos_id)
        elif len(self.written) >= self.request.max_tokens:
            finish, text = "length", text + self.text.finish()
        self.done = finish is not None
        return Piece(text, tuple(scored[:count]), finish, control=turned)
