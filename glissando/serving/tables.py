"""A model of tables over HTTP: an observation of a series comes, and what follows is answered.

    POST /v1/observe   what happened to a series; its state is kept here, or by the client
    GET /v1/series     what the model reads: columns, units, categories
    GET /health        200 while it answers

A state has one size however long a series is. Those of all series together stay within a limit of bytes: the one
that was used least recently is dropped first, and the answer that dropped it says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from glissando.errors import GlissandoError, NotFiniteError
from glissando.machine import readable
from glissando.series.live import Live, Seal
from glissando.series.table_model import TableRun
from glissando.serving.http import application, configuration, route
from glissando.serving.limits import Limits
from glissando.serving.schema import MOST_TIMES, BadRequestError, StateBody, read_body
from glissando.serving.session import ModelFailedError, TooLargeError
from glissando.state import leaves, state_bytes

#: bytes of an entry and of each of its tensors, beside their numbers
_ENTRY, _TENSOR = 1024, 512


class _Entry(NamedTuple):
    live: Live
    size: int


class TableServer(ABC):
    """A run behind an ASGI application, `app`.

    name     of the model
    memory   bytes for the states of all series
    api_key  required by /v1; of several any one, each with series of its own
    hosts    as in glissando.serving.api.Server
    """

    #: of a request to observe
    _body: type[StateBody]

    def __init__(
        self, run: TableRun, name: str, *, memory: int = 2**28, api_key: Sequence[str] = (),
        hosts: Sequence[str] | None = None, limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self.run, self.name, self.memory, self.limits = run, name, memory, limits or Limits()
        #: by the number of the key and the name of the series, the least recently used first
        self.kept: OrderedDict[tuple[int | None, str], _Entry] = OrderedDict()
        self.size, self.dropped, self._seal = 0, 0, Seal(run)
        #: one observation after the other: states need no locks, and the event loop waits for none
        self._worker = ThreadPoolExecutor(1, "glissando-tables")
        self.app = application(
            [
                route("POST", "/v1/observe", self.observe),
                route("GET", "/v1/series", self.describe),
                route("GET", "/health", self.health),
            ],
            "POST /v1/observe and GET /v1/series are", self.limits, api_key, hosts, self._lifespan,
        )  # fmt: skip

    def config(self, **options: Any) -> uvicorn.Config:
        """How uvicorn is to serve the application, see `configuration`."""
        return configuration(self.app, self.limits, **options)

    def close(self) -> None:
        """Give up what waits."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self.close()

    # ------------------------------------------------------------------ routes

    async def health(self, request: Request) -> Response:
        """GET /health."""
        return JSONResponse({"status": "ok"})

    async def describe(self, request: Request) -> Response:
        """GET /v1/series."""
        kept = {"kept": len(self.kept), "kept_bytes": self.size, "memory": self.memory, "dropped": self.dropped}
        return JSONResponse({"model": self.name, **self._described(), **kept})

    async def observe(self, request: Request) -> Response:
        """POST /v1/observe."""
        body, key = await request.body(), request.scope["key"]
        answer = await asyncio.get_running_loop().run_in_executor(self._worker, self._observe, body, key)
        return JSONResponse(answer)

    # ------------------------------------------------------------------ an observation

    @abstractmethod
    def _described(self) -> dict[str, Any]:
        """What the model reads and answers."""

    @abstractmethod
    def _answered(self, body: Any, before: Live | None) -> tuple[dict[str, Any], Live | None]:
        """The answer to a request from the state before it, and the state after it; None: it is as it was."""

    def _times(self, body: StateBody) -> np.ndarray:
        """(J,) the horizons that are asked about, in the unit of the run's times."""
        times = np.zeros(0) if body.horizon is None else self.run.horizons(body.horizon, body.every)
        if len(times) > MOST_TIMES:
            raise BadRequestError(f"horizon: {len(times):,} times are asked about, of {MOST_TIMES:,}", "horizon")
        return times

    def _observe(self, content: bytes, key: int | None) -> dict[str, Any]:
        body = read_body(self._body, content)
        try:
            return self._answer(body, key)
        except NotFiniteError as error:
            raise ModelFailedError(str(error)) from error
        except (BadRequestError, TooLargeError):
            raise
        except GlissandoError as error:
            raise BadRequestError(re.sub(r"frame row \d+,? ", "", str(error)), None) from error

    def _answer(self, body: StateBody, key: int | None) -> dict[str, Any]:
        place = key, body.series
        before = self._before(body, place)
        answer, live = self._answered(body, before)
        returned = body.return_state or body.state is not None
        dropped = [] if returned or live is None else self._keep(place, live)  # once nothing can fail any more
        after = before if live is None else live
        state = self._seal.pack(body.series, after) if returned and after is not None else None
        return {"series": body.series, **answer, "begins": before is None, "dropped": dropped, "state": state}

    def _before(self, body: StateBody, place: tuple[int | None, str]) -> Live | None:
        if body.state is not None:
            return self._seal.unpack(body.series, body.state)
        entry = None if body.return_state or body.begin else self.kept.get(place)
        if entry is None and body.begin is False:
            raise BadRequestError(
                f"series: the state of {body.series!r} is not here: it did not begin, or was dropped for others. Send "
                "its observations again, the first with begin: true, or keep states yourself with return_state",
                "series", "not_found",
            )  # fmt: skip
        return None if entry is None else entry.live

    def _keep(self, place: tuple[int | None, str], live: Live) -> list[str]:
        """Keep a state, and drop others until all fit -> the names of those of the same key."""
        parts = (live.state, live.features)
        size = state_bytes(parts) + _ENTRY + _TENSOR * sum(1 for _ in leaves(parts))
        if size > self.memory:
            raise TooLargeError(
                f"the state of {place[1]!r} takes {readable(size)}, and {readable(self.memory)} are for all series: "
                "serve with more --memory, or a model whose state has one size"
            )
        if place in self.kept:
            self.size -= self.kept.pop(place).size
        self.kept[place] = _Entry(live, size)
        self.size += size
        gone = []
        while self.size > self.memory:
            (key, name), entry = self.kept.popitem(last=False)
            self.size -= entry.size
            self.dropped += 1
            if key == place[0]:
                gone.append(name)
        return gone


def server_of(run: TableRun, name: str, **options: Any) -> TableServer:
    """The server of a run of series, or of events."""
    from glissando.events.task import EventRun
    from glissando.serving.events import EventServer
    from glissando.serving.series import SeriesServer

    kind: Any = EventServer if isinstance(run, EventRun) else SeriesServer
    return kind(run, name, **options)
