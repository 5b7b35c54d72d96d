"""What is kept of a series between two observations of it, in one size however long it is, and as text.

Series (`glissando.series.stream`) and logs of events (`glissando.events.stream`) are read so, one observation after
another.
"""

from __future__ import annotations

import base64
import hmac
import json
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
from safetensors.torch import load, save
from torch import Tensor

from glissando.backbone import ModelState
from glissando.config import to_dict
from glissando.errors import DataError
from glissando.series.panel import Clock
from glissando.series.table_model import TableRun
from glissando.state import leaf_names, leaves, map_state
from glissando.state_files import digest


class Live(NamedTuple):
    """What is kept of a series between two observations.

    state     the model's
    moment    the last observation's time, exact, as Clock.origins
    features  what else answers need: of events (D,) what the head reads after the last step, of the class of a series
              by the mean over its steps the sum (C,) of their logits
    """

    state: ModelState
    moment: Any
    features: Tensor | None = None


#: the types of a moment, see Clock.origins, the last of which reads it
_MOMENTS: dict[str, tuple[Any, ...]] = {"int": (np.integer, int), "float": (np.floating, float), "Decimal": (Decimal,)}


class Seal:
    """What is kept of a run's series as text, which a client may keep in the server's place.

    Who changes it, or takes it for another series or model, gets an error: a code of its bytes is keyed by the run's
    configuration and weights.
    """

    def __init__(self, run: TableRun) -> None:
        self.run = run
        parts = [to_dict(part) for part in (run.encoding, run.data)]
        self._key = f"{digest(run.model.state_dict(), run.model)} {json.dumps(parts, sort_keys=True)}".encode()

    def pack(self, series: str, live: Live) -> str:
        """The state of the series of this name."""
        kind = next(kind for kind, of in _MOMENTS.items() if isinstance(live.moment, of))
        kept = live.state, live.features
        parts = {
            name: part.cpu().contiguous().clone() for name, part in zip(leaf_names(kept), leaves(kept), strict=True)
        }
        body = json.dumps([kind, str(live.moment)]).encode() + b"\n" + save(parts)
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
        (kind, written), parts = json.loads(line), load(rest)
        start = self.run.model.init_state(1)
        names, device = leaf_names((start,)), self.run.model.entry.weight.device
        state = map_state(lambda _: parts.pop(next(names)).to(device), start)
        features = parts.get("1")
        return Live(state, _MOMENTS[kind][-1](written), None if features is None else features.to(device))

    def _code(self, series: str, body: bytes) -> bytes:
        return hmac.digest(self._key, series.encode() + b"\n" + body, "sha256")


def since(clock: Clock, before: Any, column: str | None) -> float:
    """The time from `before` to the moment of `clock`, read in `column`; a negative one raises DataError."""
    difference = clock.origins[0] - before
    gap = float(difference) / 1e9 if clock.form == "date" else float(difference)
    if gap < 0:
        raise out_of_order(clock, before, column)
    return gap


def out_of_order(clock: Clock, before: Any, column: str | None) -> DataError:
    """The error of an observation that does not come after the one before."""
    now, then = clock.written([0], [0.0])[0], clock._replace(origins=np.array([before], object))
    return DataError(
        f"the observation at {column} {now} is not after the one before, at {then.written([0], [0.0])[0]}: give "
        "observations in order of time, those of one time together"
    )
