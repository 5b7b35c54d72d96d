"""One observation after another: what a model keeps of a series has one size, however long the series is."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glissando.backbone import ModelState
from glissando.config import to_dict
from glissando.errors import DataError
from glissando.series.asking import step_inputs
from glissando.series.forecast import SeriesRun
from glissando.series.panel import Panel
from glissando.state import leaves, map_state


class Live(NamedTuple):
    """What is kept of a series between two observations.

    state   the model's
    moment  the last observation's time, exact, as Clock.origins
    logits  (C,) the sum of those of all steps, of a class of whole series by their mean
    """

    state: ModelState
    moment: Any
    logits: Tensor | None = None


def averages(run: SeriesRun) -> bool:
    """Whether the class of a series is that of the mean over its steps."""
    return run.encoding.task == "classification" and run.encoding.label == "series" and (
        run.model.config.pooling == "mean"
    )  # fmt: skip


@torch.no_grad()
def observe(
    run: SeriesRun,
    live: Live | None,
    row: Mapping[str, Any],
    horizon: Tensor | None = None,
    ahead: Tensor | None = None,
) -> tuple[Tensor, Live]:
    """Read one observation of a series, and answer what follows.

    Args:
        run: The trained model.
        live: What is kept of the series; None: it begins.
        row: The user's columns: the time, values, categories, known-future and static columns; None or NaN where
            nothing was observed. Of a long table, the channels by their names, of which one at least was observed.
        horizon: Times (J,) after the observation, of a model that forecasts, in the unit of run.encoding.
        ahead: Known-future columns (J, U) at these times.

    Returns:
        The forecasts' parameters (J, O, P), or those of the step itself (O, P), or the logits of its class (C,), and
        what is kept from now on. Nothing that was passed changes, so that one may go on from it in several ways.

    Raises:
        DataError: A column is missing, or the time is not after the one before.
    """
    import pandas

    panel = run.read(pandas.DataFrame(_long(run, row) if run.data.channel is not None else [dict(row)]))
    steps = run.steps(panel)
    moment = panel.clock.origins[0]
    gap = 0.0 if live is None else _since(run, panel, live.moment)
    state: ModelState | None = run.model.init_state(1) if live is None else live.state
    questions: dict[str, Any] = (
        {} if horizon is None else {"horizon": horizon.view(1, 1, -1).to(run.model.output_scale)}
    )
    if ahead is not None:
        questions["ahead"] = ahead.unsqueeze(0).unsqueeze(0).to(run.model.output_scale)
    if live is None and run.encoding.task == "forecast":  # the step before the first, of what does not vary
        _, state = run.model(**step_inputs(run.model, steps, torch.tensor([[0]])), state=state)
        assert state is not None
    inputs = step_inputs(run.model, steps, torch.tensor([[len(steps.first) - 1]]))
    inputs["dt"] = torch.full_like(inputs["dt"], gap)
    y, after = run.model(**inputs, state=state, **questions)
    assert after is not None
    y = (y.unsqueeze(-1) if run.model.config.head == "point" and not run.encoding.classes else y)[0, 0].cpu()
    if not averages(run):
        return y, Live(after, moment)
    total = y if live is None or live.logits is None else live.logits + y
    return total / int(after.position), Live(after, moment, total)


#: the types of a moment, see Clock.origins, the last of which reads it
_MOMENTS: dict[str, tuple[Any, ...]] = {"int": (np.integer, int), "float": (np.floating, float), "Decimal": (Decimal,)}


class Seal:
    """What is kept of a run's series as text, which a client may keep in the server's place.

    Who changes it, or takes it for another series or model, gets an error: a code of its bytes is keyed by the run's
    configuration and weights.
    """

    def __init__(self, run: SeriesRun) -> None:
        self.run = run
        parts = [to_dict(part) for part in (run.model.config, run.encoding, run.data)]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
        for name, value in sorted(run.model.state_dict().items()):
            digest.update(name.encode() + value.cpu().numpy().tobytes())
        self._key = digest.digest()

    def pack(self, series: str, live: Live) -> str:
        """The state of the series of this name."""
        parts = [part.cpu() for part in leaves((live.state, live.logits))]
        head = {
            "moment": [next(kind for kind, of in _MOMENTS.items() if isinstance(live.moment, of)), str(live.moment)],
            "parts": [[str(part.dtype).removeprefix("torch."), list(part.shape)] for part in parts],
        }
        body = json.dumps(head).encode() + b"\n" + b"".join(part.numpy().tobytes() for part in parts)
        return base64.b64encode(self._code(series, body) + body).decode()

    def unpack(self, series: str, text: str) -> Live:
        """What `pack` made a text of. Raises DataError for any other text, another series and another model."""
        try:
            data = base64.b64decode(text, validate=True)
        except ValueError:
            data = b""
        code, body = data[:32], data[32:]
        if not hmac.compare_digest(code, self._code(series, body)):
            raise DataError(
                f"the state was changed, or is not of the series {series!r} and of this model: send it as it was "
                "received, or begin the series without one"
            )
        line, _, rest = body.partition(b"\n")
        head, parts, place = json.loads(line), [], 0
        for kind, shape in head["parts"]:
            dtype = np.dtype(kind)
            size = dtype.itemsize * math.prod(shape)
            parts.append(torch.from_numpy(np.frombuffer(rest[place : place + size], dtype).reshape(shape).copy()))
            place += size
        own = iter(part.to(self.run.model.output_scale.device) for part in parts)
        state = map_state(lambda _: next(own), self.run.model.init_state(1))
        kind, written = head["moment"]
        return Live(state, _MOMENTS[kind][-1](written), next(own) if averages(self.run) else None)

    def _code(self, series: str, body: bytes) -> bytes:
        return hmac.digest(self._key, series.encode() + b"\n" + body, "sha256")


def _long(run: SeriesRun, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measurements of one time as rows of a long table. Raises DataError where there are none."""
    data, channels = run.data, {*run.encoding.columns, *run.encoding.categorical}
    same = {name: value for name, value in row.items() if name not in channels}
    found = {name: value for name, value in row.items() if name in channels and value is not None and value == value}
    if not found:
        raise DataError(f"nothing was observed: a row has at least one of the channels {', '.join(sorted(channels))}")
    return [{**same, str(data.channel): name, str(data.value): value} for name, value in found.items()]


def _since(run: SeriesRun, panel: Panel, before: Any) -> float:
    """The time from the last observation to this one. Raises DataError unless it is positive."""
    if run.encoding.time_form == "row":
        return 1.0
    difference = panel.clock.origins[0] - before
    gap = float(difference) / 1e9 if run.encoding.time_form == "date" else float(difference)
    if not gap > 0:
        now, then = panel.clock.written([0], [0.0])[0], panel.clock._replace(origins=np.array([before], object))
        raise DataError(
            f"the observation at {run.data.time} {now} is not after the one before, at {then.written([0], [0.0])[0]}: "
            "give observations in order of time, those of one time together"
        )
    return gap
