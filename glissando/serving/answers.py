"""OpenAI's forms of what was written: completions, chats, and the pieces of both."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from glissando.data.tokenizers import Tokenizer
from glissando.serving.planning import Served
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


class Answer:
    """The answer to one request, whole or in pieces; asked: whether log-probabilities were requested."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, served: Served, asked: bool) -> None:
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.served, self.tokenizer, self.asked = served, served.tokenizer, asked

    def whole(self, texts: Sequence[str], pieces: Sequence[list[Piece]], usage: dict[str, int]) -> bytes:
        """Every text with its tokens and why it ended, as JSON. Each text's `pieces` are cleared once it is written, so
        that an answer is not there twice."""
        choices = []
        for index, text in enumerate(texts):
            tokens, finish = [token for piece in pieces[index] for token in piece.tokens], pieces[index][-1].finish
            pieces[index].clear()
            logprobs = self._logprobs(tokens) if self.asked else None
            choices.append(as_json(self._choice(index, text, finish) | {"logprobs": logprobs}))
        head = as_json(self._head(self.kind) | {"usage": usage})
        return f'{head[:-1]},"choices":[{",".join(choices)}]}}'.encode()

    def chunk(self, index: int, text: str, piece: Piece) -> dict[str, Any]:
        """What is new of a text; with `control`, where its token is the first that was drawn under it."""
        logprobs = self._logprobs(list(piece.tokens)) if self.asked else None
        choice = self._delta(index, text, piece.finish) | {"logprobs": logprobs}
        if piece.control is not None:
            choice |= {"control": dict(zip(self.served.dials, piece.control, strict=True))}
        return self._head(self.chunk_kind) | {"choices": [choice]}

    def openings(self, texts: int) -> list[dict[str, Any]]:
        """What is sent before the first pieces of so many texts."""
        return []

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last chunk, for those who asked for it."""
        return self._head(self.chunk_kind) | {"choices": [], "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.served.name}

    def _choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "finish_reason": finish}

    _delta = _choice

    def _logprobs(self, tokens: list[Token]) -> dict[str, list[Any]]:
        return {
            "tokens": [token_text(self.tokenizer, token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                None if token.logprob is None else {token_text(self.tokenizer, i): value for i, value in token.top}
                for token in tokens
            ],
        }


class ChatAnswer(Answer):
    """The same as a message."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def openings(self, texts: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        choices = [{"index": index, "delta": delta, "finish_reason": None} for index in range(texts)]
        return [self._head(self.chunk_kind) | {"choices": [choice]} for choice in choices]

    def _choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "finish_reason": finish}

    def _delta(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text} if text else {}, "finish_reason": finish}

    def _logprobs(self, tokens: list[Token]) -> dict[str, list[Any]]:
        tops = [[self._one(i, value) for i, value in token.top] for token in tokens]
        ones = [self._one(token.id, token.logprob) for token in tokens]
        return {"content": [one | {"top_logprobs": top} for one, top in zip(ones, tops, strict=True)], "refusal": []}

    def _one(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = None if self.tokenizer.token_bytes is None else list(self.tokenizer.token_bytes[token])
        return {"token": token_text(self.tokenizer, token), "logprob": logprob, "bytes": raw}
