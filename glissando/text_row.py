"""The text of ids as they come: whole characters, and nothing that may yet become a stop text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from glissando.data.tokenizers import StreamDecoder, Tokenizer

#: ids from which a tokenizer knows how to write the next one: a character has 4 bytes at most
_RECENT = 64


class TextRow:
    """One row's text: whole characters, held back while they may yet become a stop text."""

    def __init__(self, tokenizer: Tokenizer, stops: list[str]) -> None:
        self.decoder, self.eos_id = StreamDecoder(tokenizer), tokenizer.eos_id
        self.stops, self.held, self.ended = stops, "", False
        self._recent: deque[int] = deque(maxlen=_RECENT)

    @property
    def recent(self) -> list[int]:
        """The last ids of the text."""
        return list(self._recent)

    def go_on(self, recent: Sequence[int], waiting: str) -> None:
        """Take up a text whose last ids are `recent`, and of which `waiting` was held back."""
        self._recent.extend(recent)
        for token in recent:  # whose whole characters were released then
            self.decoder.push(token)
        self.held = waiting

    def push(self, token: int) -> str:
        if token == self.eos_id:
            self._recent.clear()
            return self.finish()
        self._recent.append(token)
        return self._release(self.decoder.push(token))

    def push_all(self, tokens: Sequence[int]) -> tuple[str, int]:
        """The new text, and how many of the tokens belong to it: it may end before the last one."""
        if not (self.stops or self.held or self.eos_id in tokens):
            self._recent.extend(tokens)
            return self.decoder.push_all(tokens), len(tokens)
        text = ""
        for count, token in enumerate(tokens, 1):
            text += self.push(token)
            if self.ended:
                return text, count
        return text, len(tokens)

    def finish(self) -> str:
        """What was held back, if no stop text came of it."""
        if self.ended:
            return ""
        text = self._release(self.decoder.flush())
        text, self.held, self.ended = text + self.held, "", True
        return text

    def _release(self, text: str) -> str:
        if not (self.stops or self.held):
            return text
        self.held += text
        ends = [at for at in (self.held.find(s) for s in self.stops) if at >= 0]
        if ends:
            out, self.held, self.ended = self.held[: min(ends)], "", True
            return out
        keep = max((_overlap(self.held, s) for s in self.stops), default=0)
        out, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that ends `text`."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


def visible(text: str) -> str:
    """`text` with control characters but newline and tab as U+FFFD: an untrained model writes terminal commands."""
    return text.translate(_INVISIBLE)


_INVISIBLE = {code: "\ufffd" for code in [*range(32), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}
