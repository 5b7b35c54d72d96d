"""A model of tables over HTTP: an observation of a series comes, and what follows is answered.

    POST /v1/observe   what happened to a series; its state is kept here, or by the client
    GET /v1/series     what the model reads: columns, units, categories
    GET /health        200 while it answers

A state has one size however long a series is. Those of all series together stay within a limit of bytes: the one
that was used least recently is dropped first, and the answer that dropped it says so. `SeriesServer` answers forecasts
with intervals, `EventServer` hazards and survival.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from glissando.errors import GlissandoError, NotFiniteError, unknown_name
from glissando.events import stream as events
from glissando.events.task import EventRun
from glissando.machine import readable
from glissando.series import stream as series
from glissando.series.forecast import SeriesRun
from glissando.series.live import Live, Seal
from glissando.series.panel import Clock
from glissando.series.table_model import TableRun
from glissando.serving.http import Limits, application, configuration
from glissando.serving.schema import MOST_TIMES, BadRequestError, EventsBody, ObserveBody, StateBody, read_body
from glissando.serving.session import ModelFailedError, TooLargeError
from glissando.state import leaves, state_bytes

#: bytes of an entry and of each of its tensors, beside their numbers
_ENTRY, _TENSOR = 1024, 512
#: levels that are answered where none are named
_LEVELS = (0.05, 0.5, 0.95)


class TableServer(ABC):
    """A run behind an ASGI application, `app`.

    name     of the model
    memory   bytes for the states of all series
    api_key  required by /v1; of several any one, each with series of its own
    hosts    as in glissando.serving.api.Server
    """

    #: of a request to observe, and options of the data that clients need to know
    _body: type[StateBody]
    _described: tuple[str, ...] = ()

    def __init__(
        self, run: TableRun, name: str, *, memory: int = 2**28, api_key: Sequence[str] = (),
        hosts: Sequence[str] | None = None, limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self.run, self.name, self.memory, self.limits = run, name, memory, limits or Limits()
        #: state and size by the number of the key and the name of the series, the least recently used first
        self.kept: OrderedDict[tuple[int | None, str], tuple[Live, int]] = OrderedDict()
        self.size, self.dropped, self._seal = 0, 0, Seal(run)
        #: one observation after the other: states need no locks, and the event loop waits for none
        self._worker = ThreadPoolExecutor(1, "glissando-tables")
        self.app = application(
            {"POST /v1/observe": self.observe, "GET /v1/series": self.describe, "GET /health": self.health},
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

    async def health(self, request: Request) -> Response:
        """GET /health."""
        return JSONResponse({"status": "ok"})

    async def describe(self, request: Request) -> Response:
        """GET /v1/series: the columns that the model reads, with their categories, and how much is kept."""
        run, encoding = self.run, self.run.encoding
        about = {"model": self.name, "task": "events", **asdict(encoding)}  # of a series model the encoding has a task
        about |= {name: getattr(run.data, name) for name in self._described}
        about["time"] = {"column": run.data.time, "form": encoding.time_form, "unit": encoding.unit}
        about["head"] = None if about.get("classes") else run.model.config.head
        kept = {"kept": len(self.kept), "kept_bytes": self.size, "memory": self.memory, "dropped": self.dropped}
        return JSONResponse(about | kept)

    async def observe(self, request: Request) -> Response:
        """POST /v1/observe."""
        body, key = await request.body(), request.scope["key"]
        answer = await asyncio.get_running_loop().run_in_executor(self._worker, self._observe, body, key)
        return JSONResponse(answer)

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
        place = key, body.series
        try:
            before = self._before(body, place)
            answer, live = self._answered(body, before)
        except NotFiniteError as error:
            raise ModelFailedError(str(error)) from error
        except BadRequestError:
            raise
        except GlissandoError as error:
            raise BadRequestError(re.sub(r"frame row \d+,? ", "", str(error)), None) from error
        returned = body.return_state or body.state is not None
        dropped = [] if returned or live is None else self._keep(place, live)  # once nothing can fail any more
        after = before if live is None else live
        state = self._seal.pack(body.series, after) if returned and after is not None else None
        return {"series": body.series, **answer, "begins": before is None, "dropped": dropped, "state": state}

    def _before(self, body: StateBody, place: tuple[int | None, str]) -> Live | None:
        if body.state is not None:
            return self._seal.unpack(body.series, body.state)
        kept = not (body.return_state or body.begin) and place in self.kept
        if body.begin is False and not kept:
            raise BadRequestError(
                f"series: the state of {body.series!r} is not here: it did not begin, or was dropped for others. Send "
                "its observations again, the first with begin: true, or keep states yourself with return_state",
                "series", "not_found",
            )  # fmt: skip
        return self.kept[place][0] if kept else None

    def _keep(self, place: tuple[int | None, str], live: Live) -> list[str]:
        """Keep a state, and drop others until all fit -> the names of those of the same key."""
        parts = (live.state, live.features)
        size = state_bytes(parts) + _ENTRY + _TENSOR * sum(1 for _ in leaves(parts))
        if size > self.memory:
            raise TooLargeError(
                f"the state of {place[1]!r} takes {readable(size)}, and {readable(self.memory)} are for all series: "
                "serve with more --memory, or a model whose state has one size"
            )
        self.size += size - self.kept.pop(place, (None, 0))[1]
        self.kept[place] = live, size
        gone = []
        while self.size > self.memory:
            (key, name), (_, freed) = self.kept.popitem(last=False)
            self.size -= freed
            self.dropped += 1
            gone += [name] if key == place[0] else []
        return gone

    def _moment(self, live: Live) -> Clock:
        """A clock at the last observation."""
        return self.run.clock(np.array([live.moment], object))

    def _require_finite(self, parts: Sequence[Tensor], body: StateBody) -> None:
        if not all(bool(part.isfinite().all()) for part in parts):
            raise NotFiniteError(f"the answer to {body.series} is not finite: the training of the model diverged")


class SeriesServer(TableServer):
    run: SeriesRun
    _body = ObserveBody

    def _answered(self, body: Any, before: Live | None) -> tuple[dict[str, Any], Live]:
        run = self.run
        row, times = self._row(body), self._times(body)
        ahead = self._ahead(body, len(times))
        params, live = series.observe(run, before, row, torch.from_numpy(times) if len(times) else None, ahead)
        self._require_finite([params], body)
        clock = self._moment(live)
        known = {**run.encoding.categorical, **run.encoding.static_categorical}
        return {
            "time": clock.written([0], [0.0])[0] if run.data.time is not None else None,
            "observations": int(live.state.position) - (run.encoding.task == "forecast"),
            **self._read(params, clock, times, body.quantiles),
            "unknown": [n for n, each in known.items() if row.get(n) is not None and str(row[n]) not in each],
        }, live

    def _row(self, body: ObserveBody) -> dict[str, Any]:
        """The observation as a row of the run's table, whose cells are checked when it is read. Raises BadRequestError
        for a column that the model does not read, and for a time that is missing."""
        data, encoding = self.run.data, self.run.encoding
        channels = [*encoding.columns, *encoding.categorical]
        known = [*channels, *encoding.static, *encoding.static_categorical, *encoding.future]
        for name in body.values:
            if name not in known:
                raise BadRequestError(str(unknown_name("column of values", name[:60], known)), "values")
        if (body.time is None) != (data.time is None):
            fix = f"leave it out: the table had no {body.time!r}" if data.time is None else f"give {data.time}"
            raise BadRequestError(f"time: {fix}", "time")
        row: dict[str, Any] = {} if data.channel is not None else dict.fromkeys(channels)
        row |= body.values
        row |= {} if data.group is None else {data.group: body.series}
        return row | ({} if data.time is None else {data.time: body.time})

    def _times(self, body: StateBody) -> np.ndarray:
        if body.horizon is not None and self.run.encoding.task != "forecast":
            raise BadRequestError(
                f"horizon: the model's task is {self.run.encoding.task}, which has none: leave it out", "horizon"
            )
        return super()._times(body)

    def _ahead(self, body: ObserveBody, count: int) -> Tensor | None:
        """(J, U) the known-future columns at the horizons."""
        names = self.run.encoding.future if count else []
        counts = {name: len(values) for name, values in body.future.items()}
        if counts != dict.fromkeys(names, count):
            raise BadRequestError(
                f"future: the numbers of its values are {counts}: give {dict.fromkeys(names, count)}, one value of "
                "each known-future column for each time that is forecast", "future",
            )  # fmt: skip
        return torch.tensor([body.future[name] for name in names], dtype=torch.float64).T if names else None

    def _read(self, params: Tensor, clock: Clock, times: np.ndarray, levels: Sequence[float] | None) -> dict[str, Any]:
        """Forecasts, numbers or probabilities by their names."""
        encoding, head = self.run.encoding, self.run.model.distribution
        if encoding.classes:
            p = params.double().softmax(-1).tolist()
            return {"classes": dict(zip(encoding.classes, p, strict=True))}
        if levels is None:
            levels = () if self.run.model.config.head == "point" else _LEVELS
        params = params if encoding.task == "forecast" else params.unsqueeze(0)  # (J, O, P)
        means = head.mean(params).tolist()
        spread = head.quantile(params, levels).tolist() if levels else None
        written: Sequence[str | None] = clock.written([0] * len(times), times.tolist())
        rows = []
        for j in range(len(means)):
            at = {"horizon": float(times[j]), "time": written[j]} if encoding.task == "forecast" else {}
            for o, channel in enumerate(encoding.target):
                each = {} if spread is None else {f"q{p:g}": q for p, q in zip(levels, spread[j][o], strict=True)}
                rows.append({**at, "channel": channel, "value": means[j][o], **each})
        return {"forecast" if encoding.task == "forecast" else "predicted": rows}


class EventServer(TableServer):
    run: EventRun
    _body, _described = EventsBody, ("kind", "start")

    def _answered(self, body: Any, before: Live | None) -> tuple[dict[str, Any], Live | None]:
        run, asks = self.run, body.time is None
        if asks and (body.events or body.values):
            raise BadRequestError(f"time: give {run.data.time}, at which that happened", "time")
        if asks and before is None:
            raise BadRequestError(
                "time: the series begins with what happened first, or where prediction starts", "time"
            )
        live, unknown = before, list[str]()
        if not asks:
            live, unknown = events.observe(run, before, body.time, body.events, body.values, body.facts)
        assert live is not None
        times = self._times(body)
        return {
            "time": self._moment(live).written([0], [0.0])[0],
            "steps": int(live.state.position),
            "ahead": self._ahead(live, times, body) if len(times) else [],
            "unknown": unknown,
        }, None if asks else live

    def _ahead(self, live: Live, times: np.ndarray, body: Any) -> list[dict[str, Any]]:
        kinds = self.run.encoding.kinds
        forecast = events.what_comes(self.run, live, torch.from_numpy(times), body.until)
        self._require_finite(forecast, body)
        hazard, survival, first = (part[0].tolist() for part in forecast)
        return [
            {
                "horizon": float(time), "survival": survival[j], "hazard": dict(zip(kinds, hazard[j], strict=True)),
                "first": dict(zip(kinds, first[j], strict=True)),
            }
            for j, time in enumerate(times)
        ]  # fmt: skip


def server_of(run: TableRun, name: str, **options: Any) -> TableServer:
    """The server of a run of series, or of events."""
    return (EventServer if isinstance(run, EventRun) else SeriesServer)(run, name, **options)
