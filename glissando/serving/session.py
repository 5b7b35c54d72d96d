"""One text that is being written: what was asked, and what has come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from glissando.data.tokenizers import Tokenizer
from glissando.generation import Sampling, TextRow

Finish = Literal["stop", "length"]


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

    @property
    def reads_all(self) -> bool:
        """Whether the probabilities of the prompt's tokens are requested."""
        return self.echo and self.top is not None


@dataclass(frozen=True)
class Token:
    """A token, its log-probability under the model (in nats, before temperature), and the likeliest at its place."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What is new of a text: characters that no later token changes, and tokens; `finish` with the last."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    finish: Finish | None = None
    error: BaseException | None = None


Listener = Callable[[Piece], None]


class Session:
    """One text; the engine's thread alone changes it, but for `cancel` and `turn`."""

    def __init__(self, request: Request, number: int, tokenizer: Tokenizer, listener: Listener) -> None:
        self.request, self.listener = request, listener
        self.text = TextRow(tokenizer, list(request.stop))
        self.generator = torch.Generator().manual_seed(request.sampling.seed + number)
        self.written: list[int] = []
        self.cancelled = self.done = False
        #: what the next token is written under, and what was asked for after it
        self.control = self.asked = request.control
        self.turned = False

    def cancel(self) -> None:
        """No further token is written. From any thread."""
        self.cancelled = True

    def turn(self, control: tuple[float, ...]) -> None:
        """The dials from the next token on. From any thread."""
        self.turned = True
        self.asked = control

    def push(self, token: Token) -> Piece:
        """The text's next token."""
        self.written.append(token.id)
        text = self.text.push(token.id)
        if self.text.ended:  # the end token is no part of the text, the last of a stop text is
            return Piece(text, () if token.id == self.text.eos_id else (token,), "stop")
        if len(self.written) >= self.request.max_tokens:
            return Piece(text + self.text.finish(), (token,), "length")
        return Piece(text, (token,))
