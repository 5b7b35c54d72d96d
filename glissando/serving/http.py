"""What every server here has: limits, the gate that every request passes, errors in OpenAI's form, and HTTP/1.1 with
bounds that uvicorn lacks: headers, chunks, and seconds to send a request or to take its answer."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from glissando.serving.session import BusyError, ModelFailedError, RequestError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_log = logging.getLogger("glissando.serve")
#: connections; beyond, every request gets a 503 until some are closed
MAX_CONNECTIONS = 512
#: of a request: headers (and as many trailers), chunks, bytes of an incomplete head, bytes that are parsed at once
MAX_HEADERS, MAX_CHUNKS, _MAX_HEAD, _PARSED = 100, 256, 2**14, 2**12


@dataclass(frozen=True)
class Limits:
    """
    max_prompt   tokens of a prompt, its end token included
    max_tokens   tokens that a text may ask for
    max_copies   texts of one request, prompts times n
    max_body     bytes of a request; as many connections as there may be can each hold so many
    patience     seconds to send a request, and to take what was sent
    """

    max_prompt: int = 16384
    max_tokens: int = 4096
    max_copies: int = 64
    max_body: int = 2**18
    patience: float = 30.0


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def application(
    routes: Mapping[str, Callable[[Request], Any]], known: str, limits: Limits, keys: Sequence[str],
    hosts: Sequence[str] | None, lifespan: Any,
) -> Starlette:  # fmt: skip
    """An application that answers at `routes`, by "METHOD PATH" (HEAD goes with GET), of which `known` tells who asks
    at another place; keys and hosts as in Gate."""

    async def http(request: Request, error: HTTPException) -> Response:
        messages = {
            404: f"there is no {request.url.path} here; {known}",
            405: f"{request.url.path} does not take {request.method}",
        }
        message = messages.get(error.status_code, str(error.detail))
        return JSONResponse(error_body(message, "invalid_request_error"), error.status_code, error.headers)

    handlers: dict[Any, Any] = {RequestError: _refused, HTTPException: http, Exception: _unexpected}
    gate = Middleware(Gate, limits=limits, keys=keys, hosts=hosts)
    places = [Route(place.split()[1], answer, methods=[place.split()[0]]) for place, answer in routes.items()]
    return Starlette(routes=places, middleware=[gate], exception_handlers=handlers, lifespan=lifespan)


def configuration(app: Starlette, limits: Limits, **options: Any) -> uvicorn.Config:
    """How uvicorn is to serve an application; `options` are its own, such as host and port.

    It logs errors alone: warnings are about what clients send, who could fill the log with them.
    """
    protocol = type("Protocol", (BoundedProtocol,), {"patience": limits.patience})
    defaults: dict[str, Any] = {
        "http": protocol, "ws": "none", "access_log": False, "log_level": "error",
        "server_header": False, "limit_concurrency": MAX_CONNECTIONS, "timeout_graceful_shutdown": 5,
        "timeout_keep_alive": int(max(1, limits.patience)),
    }  # fmt: skip
    return uvicorn.Config(app, **defaults | options)


def logged(error: RequestError) -> dict[str, Any]:
    """The body of an error, which is logged where the model failed."""
    if isinstance(error, ModelFailedError):
        _log.error("a text was given up", exc_info=error)
    return error_body(str(error), error.kind, error.code, error.param)


async def _refused(request: Request, error: RequestError) -> Response:
    headers = {"retry-after": "1"} if isinstance(error, BusyError) else None
    return JSONResponse(logged(error), error.http_status, headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    """Unexpected error: a generic 500, details in the log."""
    return JSONResponse(error_body(f"the server failed on this request: {type(error).__name__}", "server_error"), 500)


class Gate:
    """Every request passes it: its host, its origin, its key, and its size.

    keys   one of them is asked for by /v1, as `Authorization: Bearer KEY`; none: anyone may come
    hosts  names that requests may call this server by; None: any

    The application receives the whole body, and the number of the key in `scope["key"]`.
    """

    def __init__(self, app: App, limits: Limits, keys: Sequence[str], hosts: Sequence[str] | None) -> None:
        self.app, self.limit = app, limits.max_body
        self.keys = [key.encode() for key in keys]
        self.hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])

        async def refuse(status: int, message: str, code: str) -> None:
            extra = {"connection": "close"} | ({"www-authenticate": "Bearer"} if status == 401 else {})
            error = error_body(message, "invalid_request_error", code)
            await JSONResponse(error, status, extra)(scope, receive, send)

        if refusal := self._foreign(scope["method"], headers) or self._keyless(scope, headers):
            return await refuse(*refusal)
        length = headers.get(b"content-length", b"0")
        too_large = 413, f"the request has more than {self.limit:,} bytes; send a shorter one", "body_too_large"
        if length.isdigit() and int(length) > self.limit:
            return await refuse(*too_large)
        body = bytearray()
        try:
            async for part in Request(scope, receive).stream():
                body += part
                if len(body) > self.limit:
                    return await refuse(*too_large)
        except ClientDisconnect:
            return None
        whole = [{"type": "http.request", "body": bytes(body)}]

        async def replay() -> MutableMapping[str, Any]:
            return whole.pop() if whole else await receive()

        await self.app(scope, replay, send)

    def _foreign(self, method: str, headers: dict[bytes, bytes]) -> tuple[int, str, str] | None:
        """What a page of another origin does: it calls this server by its own name, or writes from its own place."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        # without the port, and the brackets of an IPv6 address
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if self.hosts is not None and name not in self.hosts:
            names = ", ".join(sorted(self.hosts))
            message = f"the request is for the host {host[:100]!r}, and this server answers to {names}; call it by one "
            return 400, message + "of these, or serve with --host", "unknown_host"
        if method in ("GET", "HEAD", "OPTIONS"):
            return None
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        if site is not None:  # browsers alone say this, and no page can change it
            foreign = site not in (b"same-origin", b"none")
        else:
            foreign = origin is not None and origin.decode("latin-1").partition("://")[2].lower() != host
        if foreign:
            page = (origin or b"another site").decode("latin-1")[:100]
            return 403, f"a page of {page} may not write here; ask from this server's own page", "foreign_origin"
        return None

    def _keyless(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, str, str] | None:
        scope["key"] = None
        if not self.keys or not scope["path"].startswith("/v1"):
            return None
        scheme, _, key_sent = headers.get(b"authorization", b"").partition(b" ")
        # Every key is compared, each in constant time.
        right = [number for number, key in enumerate(self.keys) if hmac.compare_digest(key_sent, key)]
        if not right or scheme.lower() != b"bearer":
            return 401, "this server asks for a key: send the header `Authorization: Bearer KEY`", "invalid_api_key"
        scope["key"] = right[0]
        return None


class BoundedConnection(h11.Connection):
    """h11's parser, which refuses a request of more than `MAX_HEADERS` headers or `MAX_CHUNKS` chunks."""

    _chunks = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        lines = len(getattr(event, "headers", ()))
        if event is h11.NEED_DATA:  # what is left is an incomplete head, or incomplete trailers
            lines = self.trailing_data[0].count(b"\n")
        elif isinstance(event, h11.Request):
            self._chunks = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
        if lines > MAX_HEADERS:
            raise h11.RemoteProtocolError(f"the request has more than {MAX_HEADERS} headers; send fewer", 431)
        if self._chunks > MAX_CHUNKS:
            message = f"the request has more than {MAX_CHUNKS} chunks; send larger ones, or a content-length"
            raise h11.RemoteProtocolError(message, 413)
        return event


class BoundedProtocol(H11Protocol):
    """Closes a connection on which a request is incomplete, or sent bytes are not taken, for `patience` seconds."""

    patience = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = BoundedConnection(h11.SERVER, _MAX_HEAD)
        # What the system has taken counts as taken by the client, so it takes little.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        self._progress()
        self._check()

    def _progress(self) -> None:
        self._since = self.loop.time()

    def _check(self) -> None:
        incomplete = self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and self.timeout_keep_alive_task is None
        if not incomplete and self.transport.get_write_buffer_size() == 0:
            self._progress()
        elif self.loop.time() - self._since > self.patience:
            return self.transport.abort()
        self._timer = self.loop.call_later(min(1.0, self.patience / 4), self._check)

    def resume_writing(self) -> None:
        self._progress()
        super().resume_writing()

    def on_response_complete(self) -> None:
        self._progress()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for first in range(0, len(data), _PARSED):  # so that few lines are parsed before they are counted
            if not self.transport.is_closing():
                super().data_received(data[first : first + _PARSED])

    def send_400_response(self, msg: str) -> None:
        """The parser's own message and status, as OpenAI's error; after the beginning of an answer nothing."""
        error = sys.exc_info()[1]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error_body(str(error or msg), "invalid_request_error")).encode()
            head = b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (getattr(error, "error_status_hint", 400), len(body)) + body)
        self.transport.close()

    def shutdown(self) -> None:
        """Also closes connections whose client has not taken the end of an answer before uvicorn cancels its task."""
        super().shutdown()
        self.loop.call_later((self.config.timeout_graceful_shutdown or 0) / 2, self.transport.abort)
