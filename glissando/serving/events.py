"""A model of events over HTTP: what happened to a series comes, hazards and survival are answered."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from glissando.errors import NotFiniteError
from glissando.events.stream import observe, what_comes
from glissando.events.task import EventRun
from glissando.series.live import Live
from glissando.serving.schema import BadRequestError, EventsBody
from glissando.serving.tables import TableServer


class EventServer(TableServer):
    run: EventRun
    _body = EventsBody

    def _described(self) -> dict[str, Any]:
        data, encoding = self.run.data, self.run.encoding
        return {
            "task": "events", "time": {"column": data.time, "form": encoding.time_form, "unit": encoding.unit},
            "kind": data.kind, "kinds": encoding.kinds, "inputs": encoding.inputs, "marks": encoding.marks,
            "mark_categories": encoding.mark_categories, "static": encoding.static,
            "static_categories": encoding.static_categories,
            "values": [] if encoding.values is None else encoding.values.columns, "start": data.start,
            "resolution": encoding.resolution, "head": self.run.model.config.head,
        }  # fmt: skip

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
            live, unknown = observe(run, before, body.time, body.events, body.values, body.facts)
        assert live is not None
        times = self._times(body)
        return {
            "time": run.clock(np.array([live.moment], object)).written([0], [0.0])[0],
            "steps": int(live.state.position),
            "ahead": self._ahead(live, times, body) if len(times) else [],
            "unknown": unknown,
        }, None if asks else live

    def _ahead(self, live: Live, times: np.ndarray, body: Any) -> list[dict[str, Any]]:
        forecast, kinds = what_comes(self.run, live, torch.from_numpy(times), body.until), self.run.encoding.kinds
        if not all(bool(part.isfinite().all()) for part in forecast):
            raise NotFiniteError(f"the answer to {body.series} is not finite: the training of the model diverged")
        hazard, survival, first = (part[0].tolist() for part in forecast)
        return [
            {
                "horizon": float(time), "survival": survival[j], "hazard": dict(zip(kinds, hazard[j], strict=True)),
                "first": dict(zip(kinds, first[j], strict=True)),
            }
            for j, time in enumerate(times)
        ]  # fmt: skip
