"""HTTP/1.1 with bounds that uvicorn lacks: headers, chunks, and seconds to send a request or to take its answer."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from glissando.serving.limits import error_body

#: of a request: headers (and as many trailers), chunks, bytes of an incomplete head, bytes that are parsed at once
MAX_HEADERS, MAX_CHUNKS, _MAX_HEAD, _PARSED = 100, 256, 2**14, 2**12


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


def bounded_protocol(patience: float) -> type[Any]:
    """The protocol that waits for so many seconds."""
    return type("Protocol", (BoundedProtocol,), {"patience": patience})
