"""OpenAI's forms of what was written: completions, chats, and the pieces of both."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from glissando.data.tokenizers import StreamDecoder, Tokenizer
from glissando.serving.session import Piece, Token


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

    def whole(self, texts: Sequence[str], pieces: Sequence[Sequence[Piece]], usage: dict[str, int]) -> bytes:
        """Every text with its tokens and why it ended, as JSON: a text at a time, as others wait meanwhile."""
        choices = []
        for index, (text, parts) in enumerate(zip(texts, pieces, strict=True)):
            tokens = [token for piece in parts for token in piece.tokens]
            choices.append(as_json(self._choice(index, text, tokens, parts[-1].finish)))
        head = as_json(self._head(self.kind) | {"usage": usage})
        return f'{head[:-1]},"choices":[{",".join(choices)}]}}'.encode()

    def chunk(self, index: int, text: str, piece: Piece) -> dict[str, Any]:
        """What is new of a text; with `control`, where its token is the first that was drawn under it."""
        choice = self._delta(index, text, list(piece.tokens), piece.finish)
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

    def _choice(self, index: int, text: str, tokens: list[Token], finish: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(index, tokens) if self.asked else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    _delta = _choice

    def _logprobs(self, index: int, tokens: list[Token]) -> dict[str, Any]:
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

    def _choice(self, index: int, text: str, tokens: list[Token], finish: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message} | self._end(tokens, finish)

    def _delta(self, index: int, text: str, tokens: list[Token], finish: str | None) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text} if text else {}} | self._end(tokens, finish)

    def _end(self, tokens: list[Token], finish: str | None) -> dict[str, Any]:
        logprobs = {"content": [self._token(token) for token in tokens], "refusal": None} if self.asked else None
        return {"logprobs": logprobs, "finish_reason": finish}

    def _token(self, token: Token) -> dict[str, Any]:
        top = [self._one(i, value) for i, value in token.top]
        return self._one(token.id, token.logprob) | {"top_logprobs": top}

    def _one(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = None if self.tokenizer.token_bytes is None else list(self.tokenizer.token_bytes[token])
        return {"token": token_text(self.tokenizer, token), "logprob": logprob, "bytes": raw}
