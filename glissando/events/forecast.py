"""A run and a log -> what may come after its end, in the user's own names of groups, times and kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from glissando.errors import ConfigError
from glissando.events.log import EventLog
from glissando.events.sample import Futures, ahead, futures, presents
from glissando.events.task import EventRun
from glissando.sampling import require_seed
from glissando.series.forecast import answer_table
from glissando.state import select_rows

#: numbers of events that are held at once
_COUNTS = 20_000_000
#: usual names of the columns of kinds and times
_KIND, _TIME = "kind", "time"


def require_answerable(
    run: EventRun, horizon: Any, every: Any = None, samples: int = 0, quantiles: Sequence[float] = ()
) -> None:
    """Raises ConfigError for options of `predict` that cannot be served, whatever the table."""
    if horizon is None:
        raise ConfigError("horizon is missing: say how far to predict, such as 30d, or a number in the times' unit")
    run.horizons(horizon, every)
    if samples < 0:
        raise ConfigError(f"samples is {samples}: give the number of futures to draw, or 0 for none")
    if quantiles and not samples:
        raise ConfigError("quantiles are of the number of events in simulated futures: give samples too, such as 200")
    if wrong := [level for level in quantiles if not 0 < level < 1]:
        raise ConfigError(f"quantiles are {wrong[0]:g}: give levels between 0 and 1")


def predict(
    run: EventRun, log: EventLog, horizon: Any, every: Any = None, samples: int = 0, quantiles: Sequence[float] = (),
    seed: int = 0,
) -> Any:  # fmt: skip
    """What may come after the end of each series' observation: a frame of pandas, a row a series, time and kind.

    hazard       events of the kind in a unit of time, if none comes before
    survival     probability that no event of any kind comes before
    first        probability that the next event comes before, and is of the kind
    expected     number of events of the kind up to the time; this and the following by simulated futures
    probability  that at least one comes
    q0.1, ...    quantiles of the number

    Args:
        run: The trained model.
        log: As run.read reads a table.
        horizon: How far from the end of observation, such as 30d, or a number in the unit of the times; or several.
        every: The step between the times, up to the horizon; None: the horizon alone.
        samples: Number of futures of each series.
        quantiles: Levels.
        seed: Of the futures.

    Raises ConfigError for a horizon that cannot be read, NotFiniteError for futures without end.
    """
    require_answerable(run, horizon, every, samples, quantiles)
    times = run.horizons(horizon, every)
    kinds, model = run.encoding.kinds, run.model
    shape = (len(log.names), len(times), len(kinds))
    drawn = ["expected", "probability", *(f"q{level:g}" for level in quantiles)] if samples else []
    parts = {name: np.empty(shape) for name in ("hazard", "survival", "first", *drawn)}
    require_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    for present in presents(run, log):
        series = present.series.numpy()
        closed = ahead(model, present.h, present.after, torch.from_numpy(times))
        parts["hazard"][series], parts["first"][series] = closed.hazard.numpy(), closed.first.numpy()
        parts["survival"][series] = closed.survival.unsqueeze(-1).numpy()
        size = max(1, _COUNTS // (len(times) * len(kinds) * max(samples, 1)))
        for chosen in torch.arange(len(series)).split(size) if samples else ():
            paths = futures(model, select_rows(present, chosen), float(times[-1]), samples, generator)
            counts = _counts(paths, series[chosen.numpy()], times, (len(chosen), *shape[1:], samples))
            each = [counts.mean(-1), (counts > 0).mean(-1)]
            each += [np.quantile(counts, level, axis=-1, method="inverted_cdf") for level in quantiles]
            for name, part in zip(drawn, each, strict=True):
                parts[name][series[chosen.numpy()]] = part
    series, _ = np.indices(shape[:2]).reshape(2, -1)
    when = (log.until[:, None] + times).ravel()
    return answer_table(
        [
            (run.data.group, None, np.repeat(np.array(log.names, object)[series], len(kinds))),
            (run.data.time, _TIME, np.repeat(log.clock.written(series.tolist(), when.tolist()), len(kinds))),
            (run.data.kind, _KIND, kinds * len(series)),
            *((None, name, part.ravel()) for name, part in parts.items()),
        ]
    )  # fmt: skip


def _counts(paths: Futures, series: np.ndarray, times: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """How many events each future of these series has up to each time: (series, times, kinds, futures)."""
    counts = np.zeros(shape, np.int32)
    order = np.argsort(series)
    row = order[np.searchsorted(series[order], paths.series)]
    np.add.at(counts, (row, np.searchsorted(times * (1 + 1e-12), paths.time), paths.kind, paths.future), 1)
    return np.cumsum(counts, 1)


def sample(run: EventRun, log: EventLog, horizon: Any, samples: int = 100, seed: int = 0) -> Any:
    """Simulated futures of each series after the end of its observation: a frame of pandas, a row an event, with the
    number of its future; one without an event up to the horizon has no row.

    Args:
        run: The trained model.
        log: As run.read reads a table.
        horizon: How far, such as 30d, or a number in the unit of the times.
        samples: Number of futures of each series.
        seed: Of the futures.

    Raises as `predict`.
    """
    require_answerable(run, horizon, samples=samples)
    end = float(run.horizons(horizon)[-1])
    require_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    parts = [futures(run.model, present, end, samples, generator) for present in presents(run, log)]
    paths = Futures(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    order = np.lexsort((paths.kind, paths.time, paths.future, paths.series))
    paths = Futures(*(part[order] for part in paths))
    when = log.until[paths.series] + paths.time
    return answer_table(
        [
            (run.data.group, None, np.array(log.names, object)[paths.series]),
            (None, "sample", paths.future + 1),
            (run.data.time, _TIME, log.clock.written(paths.series.tolist(), when.tolist())),
            (run.data.kind, _KIND, np.array(run.encoding.kinds, object)[paths.kind]),
        ]
    )
