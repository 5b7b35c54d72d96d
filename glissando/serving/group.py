"""The texts of one HTTP request, between the engine's thread and the server's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from typing import Any

from glissando.serving.engine import BusyError, Engine
from glissando.serving.session import Piece, Request, Session


class DisconnectedError(Exception):
    """The client left."""


class ModelFailedError(RuntimeError):
    """Something went wrong in the model; the cause says what."""


class Group:
    """Started texts; `pieces` yields what comes of them, and giving it up gives up the texts."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        """Raises BusyError if they cannot all wait; then none does."""
        self.queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self.sessions: list[Session] = []
        try:
            for request in requests:
                first = len(self.sessions)
                listeners = [partial(self._hear, first + copy) for copy in range(request.copies)]
                self.sessions += engine.submit(request, listeners)
        except BaseException:
            self.cancel()
            raise

    def _hear(self, index: int, piece: Piece) -> None:
        """In the server's loop."""
        self.queue.put_nowait((index, piece))

    def cancel(self) -> None:
        """Whatever is not done is not written."""
        for session in self.sessions:
            session.cancel()

    async def pieces(
        self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]]
    ) -> AsyncIterator[tuple[int, Piece]]:
        """(text, what is new of it) until all are done.

        Raises DisconnectedError when the client leaves, BusyError when the server stops, else ModelFailedError.
        """
        gone = asyncio.ensure_future(_disconnected(receive))
        left = len(self.sessions)
        try:
            while left:
                for index, piece in await self._next(gone):
                    if piece.error is not None:
                        raise _told(piece.error)
                    left -= piece.finish is not None
                    yield index, piece
        finally:
            gone.cancel()
            self.cancel()

    async def _next(self, gone: asyncio.Future[None]) -> list[tuple[int, Piece]]:
        if self.queue.empty() and not gone.done():
            coming = asyncio.ensure_future(self.queue.get())
            await asyncio.wait((coming, gone), return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                return [coming.result()]
            coming.cancel()
        if gone.done():
            raise DisconnectedError
        return [self.queue.get_nowait() for _ in range(self.queue.qsize())]


def _told(error: BaseException) -> Exception:
    if isinstance(error, BusyError):
        return error
    failed = ModelFailedError(f"the model failed on this text: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


async def _disconnected(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
