"""What one client can take of the server: bytes of a body, time to send and to read, and nothing without the key."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Limits:
    """
    max_prompt   tokens of a prompt, its end token included
    max_tokens   tokens that a text may ask for
    max_copies   texts of one request, prompts times n
    max_body     bytes of a request
    patience     seconds to send a request, and to take what was sent
    connections  open at a time; beyond, 503
    """

    max_prompt: int = 16384
    max_tokens: int = 4096
    max_copies: int = 64
    max_body: int = 2**20
    patience: float = 30.0
    connections: int = 1024


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def _refuse(send: Send, status: int, message: str, code: str, headers: list[tuple[bytes, bytes]]) -> None:
    body = json.dumps(error_body(message, "invalid_request_error", code)).encode()
    size = (b"content-length", str(len(body)).encode())
    head = [(b"content-type", b"application/json"), size, (b"connection", b"close"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


class BodyLimit:
    """413 for a request of more than `limit` bytes, by its header, or once they have come."""

    def __init__(self, app: App, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        length = dict(scope["headers"]).get(b"content-length", b"0")
        message = f"the request has more than {self.limit:,} bytes; send a shorter one"
        if length.isdigit() and int(length) > self.limit:
            return await _refuse(send, 413, message, "body_too_large", [])
        body, more = bytearray(), True
        while more:
            part = await receive()
            if part["type"] == "http.disconnect":
                return None
            body += part.get("body", b"")
            more = part.get("more_body", False)
            if len(body) > self.limit:
                return await _refuse(send, 413, message, "body_too_large", [])
        given = False

        async def replay() -> MutableMapping[str, Any]:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        return await self.app(scope, replay, send)


class KeyRequired:
    """401 for /v1 and /metrics without `Authorization: Bearer KEY`; the key is compared in constant time."""

    def __init__(self, app: App, key: str) -> None:
        self.app, self.expected = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(("/v1", "/metrics")):
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if not hmac.compare_digest(given, self.expected) or scheme.lower() != b"bearer":
                message = "this server wants its key: send the header `Authorization: Bearer KEY`"
                challenge = [(b"www-authenticate", b"Bearer")]
                return await _refuse(send, 401, message, "invalid_api_key", challenge)
        return await self.app(scope, receive, send)


class OwnNames:
    """400 for a request that calls this server by a name that is not its own."""

    def __init__(self, app: App, names: Sequence[str]) -> None:
        self.app, self.names = app, frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if _host_name(given) not in self.names:
                message = (
                    f"the request is for the host {given[:100]!r}, and this server answers to "
                    f"{', '.join(sorted(self.names))}; call it by one of these, or serve with --host"
                )
                return await _refuse(send, 400, message, "unknown_host", [])
        return await self.app(scope, receive, send)


def _host_name(given: str) -> str:
    """Of a Host header, without the port and the brackets of an IPv6 address."""
    if given.startswith("["):
        return given[1:].partition("]")[0].lower()
    return given.partition(":")[0].lower()


class PatientProtocol(H11Protocol):
    """HTTP/1.1 that cuts off who is slow: a request not sent whole, or bytes not taken, for `patience` seconds.

    And that goes on listening to who has sent a further request before the answer to one, or it would not be heard that
    such a client left; who sends more than `ahead` bytes so is cut off too.
    """

    patience = 30.0
    ahead = 2**20

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since_sending = self._since_taking = self.loop.time()
        self._unsent = 0
        self._watch = self.loop.call_later(self._period(), self._look)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.flow.read_paused or self.conn.their_state is not h11.DONE:
            return
        if len(self.conn.trailing_data[0]) > self.ahead:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def _period(self) -> float:
        return min(1.0, self.patience / 4)

    def _look(self) -> None:
        now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY) or self._between_requests():
            self._since_sending = now
        if unsent == 0 or unsent < self._unsent:
            self._since_taking = now
        self._unsent = unsent
        if now - min(self._since_sending, self._since_taking) > self.patience:
            self.transport.abort()
            return
        self._watch = self.loop.call_later(self._period(), self._look)

    def _between_requests(self) -> bool:
        """Kept alive after an answer, which has a time limit of its own."""
        return self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is not None


def patient_protocol(patience: float) -> type[PatientProtocol]:
    """The protocol with this patience in seconds."""
    return type("Protocol", (PatientProtocol,), {"patience": patience})
