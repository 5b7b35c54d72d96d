"""HTTP/1.1 with the bounds that uvicorn lacks: seconds to send a request or to take its answer."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedProtocol(H11Protocol):
    """Closes a connection on which a request is incomplete, or sent bytes are not taken, for `patience` seconds."""

    patience = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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

    def shutdown(self) -> None:
        """Also closes connections whose client has not taken the end of an answer before uvicorn cancels its task."""
        super().shutdown()
        self.loop.call_later((self.config.timeout_graceful_shutdown or 0) / 2, self.transport.abort)


def bounded_protocol(patience: float) -> type[Any]:
    """The protocol that waits for so many seconds."""
    return type("Protocol", (BoundedProtocol,), {"patience": patience})
