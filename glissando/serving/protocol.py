"""HTTP/1.1 for clients that mean harm: bounds on connections, headers, chunks, and the time to send and to read."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from glissando.serving.limits import Limits, error_body

#: headers (and as many trailers) and chunks of a request: each costs the event loop some 10 us, however short it is
MAX_HEADERS, MAX_CHUNKS = 100, 256
#: bytes that are parsed at once, and bytes of a head that is not complete
_PARSED, _MAX_HEAD = 2**12, 2**14
#: bytes that wait in the server and in the system for a client to take them
_SEND_BUFFER = 2**16


class BoundedConnection(h11.Connection):
    """h11's parser, which refuses a request of more than `MAX_HEADERS` headers or `MAX_CHUNKS` chunks.

    It is fed `_PARSED` bytes at a time, so that neither takes long before it is counted.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _MAX_HEAD)
        self._chunks = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        lines = 0
        if event is h11.NEED_DATA:  # what is left is an incomplete head, or incomplete trailers
            lines = self.trailing_data[0].count(b"\n")
        elif isinstance(event, h11.Request):
            lines, self._chunks = len(event.headers), 0
        elif isinstance(event, h11.EndOfMessage):
            lines = len(event.headers)
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
        if lines > MAX_HEADERS:
            raise h11.RemoteProtocolError(f"the request has more than {MAX_HEADERS} headers; send fewer", 431)
        if self._chunks > MAX_CHUNKS:
            raise h11.RemoteProtocolError(
                f"the request has more than {MAX_CHUNKS} chunks; send larger ones, or a content-length", 413
            )
        return event


class PatientProtocol(H11Protocol):
    """Cuts off who is slow: a request not sent whole, or bytes not taken, for `patience` seconds.

    Bytes are taken when none is left of what waits: who takes a few now and then is slow. Beyond `most` connections the
    one that has been idle longest is closed; where every one has a request under way, the new one gets a 503.

    It goes on listening to who has sent a further request before the answer to one, or it would not be noticed that
    such a client left; who sends more than `ahead` bytes so is cut off too.
    """

    patience = 30.0
    most = 1024
    ahead = 2**16

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.conn = BoundedConnection()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since_sending = self._since_taking = self._idle_since = self.loop.time()
        self._watch = self.loop.call_later(self._period(), self._look)
        transport.set_write_buffer_limits(high=_SEND_BUFFER, low=0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        if len(self.connections) > self.most:
            others = [c for c in self.connections if isinstance(c, PatientProtocol) and c is not self and c.idle]
            if others:
                oldest = min(others, key=lambda other: other._idle_since)
                self.connections.discard(oldest)
                oldest.transport.abort()
            else:
                transport.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                transport.close()

    @property
    def idle(self) -> bool:
        """Whether no whole request is under way."""
        return self.cycle is None or self.cycle.response_complete or self.conn.their_state is h11.SEND_BODY

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        for first in range(0, len(data), _PARSED):
            if self.transport.is_closing():
                return
            super().data_received(data[first : first + _PARSED])
        if not self.flow.read_paused or self.conn.their_state is not h11.DONE:
            return
        if len(self.conn.trailing_data[0]) > self.ahead:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """The parser's own words and status, as OpenAI's error; cut off where an answer has begun."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = json.dumps(error_body(f"{error or msg}", "invalid_request_error")).encode()
        head = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=status, headers=head), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def pause_writing(self) -> None:
        self._since_taking = self.loop.time()  # a loop that was held up before has no say in it
        super().pause_writing()

    def resume_writing(self) -> None:
        self._since_taking = self.loop.time()
        super().resume_writing()

    def shutdown(self) -> None:
        """A server that stops cuts off who has not taken the end of an answer, before uvicorn cancels its task."""
        super().shutdown()
        self.loop.call_later((self.config.timeout_graceful_shutdown or 0) / 2, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def _period(self) -> float:
        return min(1.0, self.patience / 4)

    def _look(self) -> None:
        now = self.loop.time()
        between_requests = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is not None
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY) or between_requests:
            self._since_sending = now
        if self.transport.get_write_buffer_size() == 0:
            self._since_taking = now
        if now - min(self._since_sending, self._since_taking) > self.patience:
            self.transport.abort()
            return
        self._watch = self.loop.call_later(self._period(), self._look)


def patient_protocol(limits: Limits) -> type[PatientProtocol]:
    """The protocol with these limits."""
    return type("Protocol", (PatientProtocol,), {"patience": limits.patience, "most": limits.connections})
