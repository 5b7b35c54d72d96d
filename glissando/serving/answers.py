"""OpenAI's forms of what was written: completions, chats, and the pieces of both."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from glissando.data.tokenizers import StreamDecoder, Tokenizer
from glissando.serving.session import Piece, Token

#: tokens that are written as JSON at once
_BLOCK = 256


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token by itself; one that is part of a character as OpenAI writes it, bytes:\\xe2\\x82."""
    raw = None if tokenizer.token_bytes is None else tokenizer.token_bytes[token]
    if raw is None:
        return tokenizer.decode([token])
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def as_json(value: Any) -> str:
    """As short as it can be written."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class _Characters:
    """How many whole characters of a text stand before each of its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decoder, self.count = StreamDecoder(tokenizer), 0

    def before(self, token: int) -> int:
        before = self.count
        self.count += len(self.decoder.push(token))
        return before


class Answer:
    """The answer to one request, whole or in pieces.

    asked  whether log-probabilities were requested
    dials  the model's, in its order
    """

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, model: str, tokenizer: Tokenizer, asked: bool, dials: Sequence[str] = ()) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.model, self.tokenizer, self.asked, self.created = model, tokenizer, asked, int(time.time())
        self.dials = dials
        self.characters: dict[int, _Characters] = {}

    def whole(self, texts: Sequence[str], pieces: Sequence[list[Piece]], usage: dict[str, int]) -> bytes:
        """Every text with its tokens and why it ended, as JSON. Each text's `pieces` are cleared once it is written, so
        that an answer is not there twice."""
        head = as_json(self._head(self.kind) | {"usage": usage})
        parts = [f'{head[:-1]},"choices":['.encode()]
        for index, text in enumerate(texts):
            tokens = [token for piece in pieces[index] for token in piece.tokens]
            choice = as_json(self._choice(index, text, pieces[index][-1].finish))
            pieces[index].clear()
            parts += [f'{"," if index else ""}{choice[:-1]},"logprobs":'.encode(), *self._written(index, tokens), b"}"]
        return b"".join([*parts, b"]}"])

    def _written(self, index: int, tokens: list[Token]) -> list[bytes]:
        """The log-probabilities of a whole text, a block at a time: as objects they take several times their JSON."""
        if not self.asked:
            return [b"null"]
        lists: dict[str, list[bytes]] = {}
        for first in range(0, max(1, len(tokens)), _BLOCK):
            for name, values in self._logprobs(index, tokens[first : first + _BLOCK]).items():
                lists.setdefault(name, []).append((("," if first else "") + as_json(values)[1:-1]).encode())
        parts = [part for name, blocks in lists.items() for part in (f',"{name}":['.encode(), *blocks, b"]")]
        parts[0] = b"{" + parts[0][1:]
        return [*parts, b"}"]

    def chunk(self, index: int, text: str, piece: Piece) -> dict[str, Any]:
        """What is new of a text; with `control`, where its token is the first that was drawn under it."""
        logprobs = self._logprobs(index, list(piece.tokens)) if self.asked else None
        choice = self._delta(index, text, piece.finish) | {"logprobs": logprobs}
        if piece.control is not None:
            choice |= {"control": dict(zip(self.dials, piece.control, strict=True))}
        return self._head(self.chunk_kind) | {"choices": [choice]}

    def opening(self, index: int) -> dict[str, Any] | None:
        """What is sent before a text's first piece."""
        return None

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last chunk, for those who asked for it."""
        return self._head(self.chunk_kind) | {"choices": [], "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "finish_reason": finish}

    _delta = _choice

    def _logprobs(self, index: int, tokens: list[Token]) -> dict[str, list[Any]]:
        texts = [token_text(self.tokenizer, token.id) for token in tokens]
        characters = self.characters.setdefault(index, _Characters(self.tokenizer))
        offsets = [characters.before(token.id) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float] | None:
        """None for a token without a log-probability."""
        if token.logprob is None:
            return None
        return {token_text(self.tokenizer, i): value for i, value in token.top}


class ChatAnswer(Answer):
    """The same as a message."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self, index: int) -> dict[str, Any] | None:
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return self._head(self.chunk_kind) | {"choices": [choice]}

    def _choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "finish_reason": finish}

    def _delta(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text} if text else {}, "finish_reason": finish}

    def _logprobs(self, index: int, tokens: list[Token]) -> dict[str, list[Any]]:
        return {"content": [self._token(token) for token in tokens], "refusal": []}

    def _token(self, token: Token) -> dict[str, Any]:
        top = [self._one(i, value) for i, value in token.top]
        return self._one(token.id, token.logprob) | {"top_logprobs": top}

    def _one(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = None if self.tokenizer.token_bytes is None else list(self.tokenizer.token_bytes[token])
        return {"token": token_text(self.tokenizer, token), "logprob": logprob, "bytes": raw}
