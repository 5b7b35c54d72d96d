"""One observation of a series after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glissando.backbone import ModelState
from glissando.errors import DataError
from glissando.series.answers import on_device
from glissando.series.forecast import SeriesRun
from glissando.series.live import Live, out_of_order, since


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
    gap, column = 0.0, run.data.time
    if live is not None:
        gap = since(panel.clock, live.moment, column) if column is not None else 1.0
        if not gap:
            raise out_of_order(panel.clock, live.moment, column)
    state: ModelState | None = run.model.init_state(1) if live is None else live.state
    asked = {
        "horizon": None if horizon is None else horizon.view(1, 1, -1),
        "ahead": None if ahead is None else ahead[None, None],
    }
    if live is None and run.encoding.task == "forecast":  # the step before the first, of what does not vary
        _, state = run.model(**on_device(run.model, steps.inputs(torch.tensor([[0]]))), state=state)
    inputs = steps.inputs(torch.tensor([[len(steps.first) - 1]])) | {"dt": torch.full((1, 1), gap).double()} | asked
    y, after = run.model(**on_device(run.model, inputs), state=state)
    assert after is not None
    y = (y if run.encoding.classes else run.model.params(y))[0, 0].cpu()
    if not averages(run):
        return y, Live(after, moment)
    total = y if live is None or live.features is None else live.features + y
    return total / int(after.position), Live(after, moment, total)


def _long(run: SeriesRun, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measurements of one time as rows of a long table. Raises DataError where there are none."""
    data, channels = run.data, {*run.encoding.columns, *run.encoding.categorical}
    same = {name: value for name, value in row.items() if name not in channels}
    cells = {name: value for name, value in row.items() if name in channels and value is not None and value == value}
    if not cells:
        raise DataError(f"nothing was observed: a row has at least one of the channels {', '.join(sorted(channels))}")
    return [{**same, str(data.channel): name, str(data.value): value} for name, value in cells.items()]
