"""Limits of requests, and the gate that every request passes: host, origin, key, size. See also `protocol.py`."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        refusal = self._foreign(scope["method"], headers) or self._keyless(scope, headers)
        if refusal is not None:
            return await _refuse(send, *refusal)
        length = headers.get(b"content-length", b"0")
        too_large = 413, f"the request has more than {self.limit:,} bytes; send a shorter one", "body_too_large"
        if length.isdigit() and int(length) > self.limit:
            return await _refuse(send, *too_large)
        body, more = bytearray(), True
        while more:
            part = await receive()
            if part["type"] == "http.disconnect":
                return None
            body += part.get("body", b"")
            more = part.get("more_body", False)
            if len(body) > self.limit:
                return await _refuse(send, *too_large)
        await self.app(scope, _replay(bytes(body), receive), send)

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


async def _refuse(send: Send, status: int, message: str, code: str) -> None:
    body = json.dumps(error_body(message, "invalid_request_error", code)).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    head += [(b"connection", b"close")]
    head += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def _replay(body: bytes, receive: Receive) -> Receive:
    """`body`, and then what `receive` has."""
    sent = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
