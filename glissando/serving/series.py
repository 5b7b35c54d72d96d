"""A series model over HTTP: an observation of a series comes, forecasts with intervals are answered.

    POST /v1/observe   one observation; the series' state is kept here, or by the client
    GET /v1/series     what the model reads: columns, units, categories
    GET /health        200 while it answers

A state has one size however long a series is. Those of all series together stay within a limit of bytes: the one
that was used least recently is dropped first, and the answer that dropped it says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from torch import Tensor

from glissando.errors import GlissandoError, NotFiniteError, nearest
from glissando.machine import readable
from glissando.series.forecast import SeriesRun
from glissando.series.panel import Clock
from glissando.series.stream import Live, Seal, observe
from glissando.serving.http import application, configuration, json_body
from glissando.serving.limits import Limits
from glissando.serving.schema import MOST_TIMES, BadRequestError, ObserveBody, read_body
from glissando.serving.session import ModelFailedError, TooLargeError
from glissando.state import leaves, state_bytes

#: levels that are answered where none are named
_LEVELS = (0.05, 0.5, 0.95)
#: bytes of an entry and of each of its tensors, beside their numbers
_ENTRY, _TENSOR = 1024, 512


class _Entry(NamedTuple):
    live: Live
    size: int


class SeriesServer:
    """A run behind an ASGI application, `app`.

    name     of the model
    memory   bytes for the states of all series
    api_key  required by /v1; of several any one, each with series of its own
    hosts    as in glissando.serving.api.Server
    """

    def __init__(
        self, run: SeriesRun, name: str, *, memory: int = 2**28, api_key: Sequence[str] = (),
        hosts: Sequence[str] | None = None, limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self.run, self.name, self.memory, self.limits = run, name, memory, limits or Limits()
        #: by the number of the key and the name of the series, the least recently used first
        self.kept: OrderedDict[tuple[int | None, str], _Entry] = OrderedDict()
        self.size, self.dropped, self._seal = 0, 0, Seal(run)
        #: one observation after the other: states need no locks, and the event loop waits for none
        self._worker = ThreadPoolExecutor(1, "glissando-series")
        self.app = application(
            [
                ("POST", "/v1/observe", self.observe),
                ("GET", "/v1/series", self.describe),
                ("GET", "/health", self.health),
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
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        yield
        self.close()

    # ------------------------------------------------------------------ routes

    async def health(self) -> Response:
        """GET /health."""
        return JSONResponse({"status": "ok"})

    async def describe(self) -> Response:
        """GET /v1/series."""
        run, encoding, scales = self.run, self.run.encoding, self.run.scales
        numbers = zip(encoding.columns, scales.input_mean, scales.input_scale, strict=True)
        config = run.model.config
        return JSONResponse(
            {
                "model": self.name, "task": encoding.task, "label": encoding.label if encoding.classes else None,
                "time": {"column": run.data.time, "form": encoding.time_form, "unit": encoding.unit},
                "columns": {name: {"mean": float(m), "deviation": float(s)} for name, m, s in numbers},
                "categorical": encoding.categorical, "static": encoding.static,
                "static_categorical": encoding.static_categorical, "future": encoding.future,
                "target": encoding.target, "classes": encoding.classes,
                "head": None if encoding.classes else config.head,
                "kept": len(self.kept), "kept_bytes": self.size, "memory": self.memory, "dropped": self.dropped,
            }
        )  # fmt: skip

    async def observe(self, request: Request) -> Response:
        """POST /v1/observe."""
        body, key = await json_body(request), request.scope["key"]
        answer = await asyncio.get_running_loop().run_in_executor(self._worker, self._observe, body, key)
        return JSONResponse(answer)

    # ------------------------------------------------------------------ an observation

    def _observe(self, content: bytes, key: int | None) -> dict[str, Any]:
        body = read_body(ObserveBody, content)
        try:
            return self._answer(body, key)
        except NotFiniteError as error:
            raise ModelFailedError(str(error)) from error
        except (BadRequestError, TooLargeError):
            raise
        except GlissandoError as error:
            raise BadRequestError(re.sub(r"frame row \d+,? ", "", str(error)), None) from error

    def _answer(self, body: ObserveBody, key: int | None) -> dict[str, Any]:
        run, place = self.run, (key, body.series)
        row, times = self._row(body), self._times(body)
        ahead, before = self._ahead(body, len(times)), self._before(body, place)
        horizon = torch.from_numpy(times) if len(times) else None
        params, live = observe(run, before, row, horizon, ahead)
        if not bool(params.isfinite().all()):
            raise NotFiniteError(f"the answer to {body.series} is not finite: the training of the model diverged")
        clock = run.encoding.clock(np.array([live.moment], object))
        found = self._read(params, clock, times, body.quantiles)
        returned = body.return_state or body.state is not None
        dropped = [] if returned else self._keep(place, live)  # once nothing can fail any more
        return {
            "series": body.series,
            "time": clock.written([0], [0.0])[0] if run.data.time is not None else None,
            "observations": int(live.state.position) - (run.encoding.task == "forecast"),
            "begins": before is None,
            **found,
            "unknown": self._unknown(row),
            "dropped": dropped,
            "state": self._seal.pack(body.series, live) if returned else None,
        }

    def _row(self, body: ObserveBody) -> dict[str, Any]:
        """The observation as a row of the run's table. Raises BadRequestError, with the column, for what is none."""
        data, encoding, scales = self.run.data, self.run.encoding, self.run.scales
        channels = [*encoding.columns, *encoding.categorical]
        needed = [*encoding.static, *encoding.static_categorical, *encoding.future]
        for name in body.values:
            if name not in channels and name not in needed:
                close = nearest(name[:60], [*channels, *needed])
                hint = f"did you mean {close!r}?" if close else f"the model reads {', '.join([*channels, *needed])}"
                raise BadRequestError(f"values: there is no column {name[:60]!r}; {hint}", "values")
        for name in needed:
            if name not in body.values:
                raise BadRequestError(
                    f"values: {name!r} is missing, and the model reads it with every observation: give it"
                    + ("" if name in encoding.future else ", or null where it is not known"),
                    "values",
                )
        numbers = {
            name: (float(mean), float(scale))
            for names, means, deviations in (
                (encoding.columns, scales.input_mean, scales.input_scale),
                (encoding.static, scales.static_mean, scales.static_scale),
                (encoding.future, scales.future_mean, scales.future_scale),
            )
            for name, mean, scale in zip(names, means, deviations, strict=True)
        }
        for name, (mean, scale) in numbers.items():
            value = body.values.get(name)
            if isinstance(value, str | bool) or (value is None and name in encoding.future):
                null = "" if name in encoding.future else ", or null where nothing was observed"
                raise BadRequestError(
                    f"values: {name!r} is {str(value)[:60]!r}, and a number is expected{null}; in training it was "
                    f"{mean:.4g} with a deviation of {scale:.4g}",
                    "values",
                )
        if (body.time is None) != (data.time is None):
            fix = f"leave it out: the table had no {body.time!r}" if data.time is None else f"give {data.time}"
            raise BadRequestError(f"time: {fix}", "time")
        row: dict[str, Any] = {} if data.channel is not None else dict.fromkeys(channels)
        row |= body.values
        row |= {} if data.group is None else {data.group: body.series}
        return row | ({} if data.time is None else {data.time: body.time})

    def _times(self, body: ObserveBody) -> np.ndarray:
        """(J,) the horizons, in the unit of the run's times."""
        asked = body.horizon
        if asked is None:
            return np.zeros(0)
        if self.run.encoding.task != "forecast":
            raise BadRequestError(
                f"horizon: the model's task is {self.run.encoding.task}, which has none: leave it out", "horizon"
            )
        times = np.asarray(self.run.horizons(asked, body.every))
        if len(times) > MOST_TIMES:
            raise BadRequestError(f"horizon: {len(times):,} times are asked about, of {MOST_TIMES:,}", "horizon")
        return times

    def _ahead(self, body: ObserveBody, count: int) -> Tensor | None:
        """(J, U) the known-future columns at the horizons."""
        names = self.run.encoding.future if count else []
        given = {name: len(values) for name, values in body.future.items()}
        if given != dict.fromkeys(names, count):
            raise BadRequestError(
                f"future: the numbers of its values are {given}: give {dict.fromkeys(names, count)}, one value of each "
                "known-future column for each time that is forecast", "future",
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

    def _unknown(self, row: Mapping[str, Any]) -> list[str]:
        """The columns whose category training did not know."""
        known = {**self.run.encoding.categorical, **self.run.encoding.static_categorical}
        return [name for name, each in known.items() if row.get(name) is not None and str(row[name]) not in each]

    # ------------------------------------------------------------------ states

    def _before(self, body: ObserveBody, place: tuple[int | None, str]) -> Live | None:
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
        parts = (live.state, live.logits)
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
