"""What texts of a model take, in bytes: measured once, so that it is known before a text is taken up."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch

from glissando.errors import ConfigError
from glissando.generation import tokens_left
from glissando.machine import allocated_at_peak, readable
from glissando.model import LanguageModel
from glissando.serving.batches import MARKS
from glissando.serving.session import Request
from glissando.state import fit_room, state_bytes

#: tokens that are read to measure, and how many behind them
_BEFORE, _BEHIND = 1024, 128
_measured: WeakKeyDictionary[LanguageModel, tuple[tuple[torch.dtype, torch.device], Footprint]] = WeakKeyDictionary()


class Footprint:
    """The bytes of a model's states, and of what reading needs beside them.

    fixed, a_token  of a row's state, and for each of its tokens: caches grow, recurrent states do not
    reading         for each token that is read at once, whatever came before
    looking_back    for each token that is read at once and each that came before it
    """

    def __init__(self, model: LanguageModel) -> None:
        before = max(1, min(_BEFORE, tokens_left(model, 1) // 2))
        behind = min(_BEHIND, before)
        ids = torch.zeros(1, before, dtype=torch.int64, device=model.embedding.weight.device)
        start = model.init_state(1)
        with torch.no_grad():
            model.features(ids[:, :1], start)  # what is made once and kept is not counted
            first, early = _peak(model, ids, start)
            second, late = _peak(model, ids[:, :behind], early)
        sizes = [state_bytes(fit_room(state)) for state in (early, late)]
        self.a_token = max(0.0, (sizes[1] - sizes[0]) / behind)
        self.fixed = sizes[0] - self.a_token * before
        self.reading = first / before
        looks_back = second / behind > 1.1 * self.reading
        self.looking_back = second / behind / before if looks_back else 0.0

    @classmethod
    def of(cls, model: LanguageModel) -> Footprint:
        """Measured once for a model, its type and device."""
        kind = model.embedding.weight.dtype, model.embedding.weight.device
        if model not in _measured or _measured[model][0] != kind:
            _measured[model] = kind, cls(model)
        return _measured[model][1]

    def state(self, tokens: int) -> int:
        """Bytes of a row that has read so many tokens: a cache doubles when it is full, from 64 on."""
        return int(self.fixed + self.a_token * max(64, 2 * tokens))


class Needs:
    """The bytes that requests take of a model with so much memory for all, which reads `most` tokens at once.

    page  bytes of the caches of 64 tokens where texts are written by the compiled step: they share their prompt's
          caches, and theirs grow by pages; None for the plain step

    Raises ConfigError where the shortest text would not fit.
    """

    def __init__(self, model: LanguageModel, memory: int, most: int, page: int | None) -> None:
        self.footprint, self.memory, self.most, self.paged = Footprint.of(model), memory, most, page is not None
        self._page = page or 0
        self.vocab_size = model.config.vocab_size
        if (least := self.alone(Request((0,), 1))) > memory:
            raise ConfigError(
                f"the shortest text takes {readable(least)}, and there are {readable(memory)} for all texts; "
                "give more memory"
            )

    def alone(self, request: Request) -> int:
        """A request and no other: its prompt's state, its texts, and the work of reading or of growing."""
        growing = 0 if self.paged else request.copies * self.footprint.state(request.most)
        return self.texts(request) + max(self.work(request), growing)

    def texts(self, request: Request) -> int:
        """The prompt's state, and all texts at their longest."""
        return self.prompt(request) + request.copies * self.text(request)

    def prompt(self, request: Request) -> int:
        """What the texts of a request share: the state behind their prompt."""
        if self.paged:
            return int(self.footprint.fixed) + self._pages(len(request.ids))
        return self.footprint.state(len(request.ids))

    def text(self, request: Request) -> int:
        """What each text takes beside, at its longest; with the earlier states that it can be gone back to."""
        if self.paged:
            return (1 + MARKS) * int(self.footprint.fixed) + self._pages(request.max_tokens)
        return self.footprint.state(request.most)

    def _pages(self, tokens: int) -> int:
        """Bytes of the caches of so many tokens, with a page that two texts cannot share."""
        return self._page * (tokens + 128) // 64

    def work(self, request: Request) -> int:
        """Reading: the state is copied before it is written to, and its caches when they grow."""
        return 2 * self.footprint.state(len(request.ids)) + self.chunk(request) * self._token(request)

    def chunk(self, request: Request) -> int:
        """Tokens that are read at once: fewer where each takes much beside the state, as it looks back at many."""
        return min(self.most, len(request.ids), max(16, self.memory // 16 // max(1, self._token(request))))

    def _token(self, request: Request) -> int:
        """Bytes of each token that is read; with probabilities of the prompt it has logits of its own."""
        logits = 16 * self.vocab_size if request.reads_all else 0
        return logits + int(self.footprint.reading + self.footprint.looking_back * len(request.ids))

    def level(self, request: Request) -> int:
        """Texts of one level are of about one length, to a factor of 4; all are where rows need no room for the
        longest."""
        return 0 if self.paged or not self.footprint.a_token else max(0, math.ceil(math.log2(request.most / 256) / 2))


def _peak(model: LanguageModel, ids: torch.Tensor, state: Any) -> tuple[int, Any]:
    """The most bytes that were allocated at a time while `ids` were read, the new state not counted; and that state."""
    read = []
    most = allocated_at_peak(ids.device, lambda: read.append(model.features(ids, state)[1]))
    return max(0, most - state_bytes(read[0])), read[0]
