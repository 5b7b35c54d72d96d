"""A series model over HTTP: an observation of a series comes, forecasts with intervals are answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.errors import NotFiniteError, nearest
from glissando.series.forecast import SeriesRun
from glissando.series.live import Live
from glissando.series.panel import Clock
from glissando.series.stream import observe
from glissando.serving.schema import BadRequestError, ObserveBody, StateBody
from glissando.serving.tables import TableServer

#: levels that are answered where none are named
_LEVELS = (0.05, 0.5, 0.95)


class SeriesServer(TableServer):
    run: SeriesRun
    _body = ObserveBody

    def _described(self) -> dict[str, Any]:
        run, encoding, scales = self.run, self.run.encoding, self.run.scales
        numbers = zip(encoding.columns, scales.input_mean, scales.input_scale, strict=True)
        return {
            "task": encoding.task, "label": encoding.label if encoding.classes else None,
            "time": {"column": run.data.time, "form": encoding.time_form, "unit": encoding.unit},
            "columns": {name: {"mean": float(m), "deviation": float(s)} for name, m, s in numbers},
            "categorical": encoding.categorical, "static": encoding.static,
            "static_categorical": encoding.static_categorical, "future": encoding.future,
            "target": encoding.target, "classes": encoding.classes,
            "head": None if encoding.classes else run.model.config.head,
        }  # fmt: skip

    def _answered(self, body: Any, before: Live | None) -> tuple[dict[str, Any], Live]:
        run = self.run
        row, times = self._row(body), self._times(body)
        ahead = self._ahead(body, len(times))
        params, live = observe(run, before, row, torch.from_numpy(times) if len(times) else None, ahead)
        if not bool(params.isfinite().all()):
            raise NotFiniteError(f"the answer to {body.series} is not finite: the training of the model diverged")
        clock = run.clock(np.array([live.moment], object))
        return {
            "time": clock.written([0], [0.0])[0] if run.data.time is not None else None,
            "observations": int(live.state.position) - (run.encoding.task == "forecast"),
            **self._read(params, clock, times, body.quantiles),
            "unknown": self._unknown(row),
        }, live

    def _row(self, body: ObserveBody) -> dict[str, Any]:
        """The observation as a row of the run's table, whose cells are checked when it is read. Raises BadRequestError
        for a column that the model does not read, and for a time that is missing."""
        data, encoding = self.run.data, self.run.encoding
        channels = [*encoding.columns, *encoding.categorical]
        known = [*channels, *encoding.static, *encoding.static_categorical, *encoding.future]
        for name in body.values:
            if name not in known:
                close = nearest(name[:60], known)
                hint = f"did you mean {close!r}?" if close else f"the model reads {', '.join(known)}"
                raise BadRequestError(f"values: there is no column {name[:60]!r}; {hint}", "values")
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

    def _unknown(self, row: Mapping[str, Any]) -> list[str]:
        """The columns whose category training did not know."""
        known = {**self.run.encoding.categorical, **self.run.encoding.static_categorical}
        return [name for name, each in known.items() if row.get(name) is not None and str(row[name]) not in each]
