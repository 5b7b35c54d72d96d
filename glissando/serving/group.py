"""The texts of one HTTP request, between the engine's thread and the server's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial

from glissando.serving.engine import Engine
from glissando.serving.limits import Receive
from glissando.serving.session import ModelFailedError, Piece, Request, Reservation, Session, StoppingError


class DisconnectedError(Exception):
    """The client left."""


class Group:
    """Started texts; `pieces` yields what comes of them. `close` gives up what is not written, and frees the memory of
    what is: call it when the answer is sent.

    whole  wake the reader when a text ends, and not at every token
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], whole: bool) -> None:
        """Raises BusyError if they cannot all wait; then none does."""
        self.sessions: list[Session] = []
        self._requests = requests
        self._engine, self._reservation = engine, Reservation(sum(each.answer_bytes for each in requests))
        self._whole, self._come, self._gone, self._awake = whole, list[tuple[int, Piece]](), False, asyncio.Event()
        self._stopping: StoppingError | None = None
        try:
            for request in requests:
                before = len(self.sessions)
                listeners = [partial(self._receive, before + copy) for copy in range(request.copies)]
                self.sessions += engine.submit(request, listeners, self._reservation)
        except BaseException:
            self.close()
            raise

    def _receive(self, index: int, piece: Piece) -> None:
        """In the server's loop."""
        if isinstance(piece.error, StoppingError):
            self._stopping = piece.error
        self._come.append((index, piece))
        if not self._whole or piece.finish is not None or piece.error is not None:
            self._awake.set()

    def close(self) -> None:
        """Whatever is not done is not written, and nothing is kept."""
        for session in self.sessions:
            session.cancel()
        self._engine.release(self._reservation)

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's count of tokens; a prompt of several texts is read once."""
        read = sum(len(request.ids) for request in self._requests)
        written = sum(len(session.written) for session in self.sessions)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    async def pieces(self, receive: Receive) -> AsyncIterator[tuple[int, Piece]]:
        """(text, what is new of it) until all are done.

        Raises DisconnectedError when the client leaves, StoppingError when the server stops, else ModelFailedError.
        """
        watch = asyncio.ensure_future(self._watch(receive))
        left = len(self.sessions)
        try:
            while left:
                await self._awake.wait()
                self._awake.clear()
                if self._gone:
                    raise DisconnectedError
                come, self._come = self._come, []
                for index, piece in come:
                    if self._stopping is not None:  # and not when a slow reader has taken what comes before it
                        raise self._stopping
                    if piece.error is not None:
                        cause = f"{type(piece.error).__name__}: {piece.error}"
                        raise ModelFailedError(f"the model failed on this text: {cause}") from piece.error
                    left -= piece.finish is not None
                    yield index, piece
        finally:
            watch.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._awake.set()
