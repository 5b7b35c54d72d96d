"""How good a model is about what is held out, with all that a person is shown of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from glissando.series.answers import Scored, answers, classified, measured
from glissando.series.asking import with_season
from glissando.series.batches import Floats, Ints, Steps, Windows
from glissando.series.model import SeriesModel
from glissando.series.panel import Encoding, Panel
from glissando.series.scores import Answers


def answered(model: SeriesModel, held: Windows, panel: Panel) -> tuple[Answers, Ints]:
    """Every scored answer about numbers, of a forecast each step's about the next, and the panel's step (N,) that each
    is about."""
    found, rows = answers(model, held)
    return found if held.targets is None else with_season(found, panel, held.targets, panel.times[rows]), rows


def measure(
    model: SeriesModel, held: Windows, panel: Panel, encoding: Encoding, trained: Steps | None = None,
    pictures: Path | None = None, found: tuple[Answers, Ints] | None = None,
) -> Scored:  # fmt: skip
    """Score the model by channel, and draw its pictures.

    Args:
        model: Put into evaluation mode.
        held: The windows that are scored.
        panel: Their series.
        encoding: Of the run.
        trained: Steps of the training, by whose last values' errors MASE divides; None: no MASE.
        pictures: Directory of the pictures; None: none are drawn. Classes have none.
        found: What is scored, as `answered` returns it; None: that.
    """
    if encoding.classes:
        return classified(model.eval(), held, encoding)
    made, rows = answered(model.eval(), held, panel) if found is None else found
    values = panel.target if held.targets is None else panel.values[:, held.targets]
    naive = None if trained is None or held.targets is None else naive_errors(
        trained, held.targets, model.config.scale == "series"
    )  # fmt: skip
    result = measured(model, made, encoding, naive)
    if pictures is not None and np.isfinite(result.loss) and values is not None:
        from glissando.series.pictures import draw  # matplotlib takes a second to import

        draw(made, rows, panel, values, encoding.target, model.distribution, pictures)
    return result


def naive_errors(steps: Steps, targets: list[int], own: bool) -> Floats:
    """(O,) the mean absolute error of the last value as a forecast of the next one, in the units of the data, or of the
    series' own; 0 where a channel has no two values in a series."""
    made = np.zeros(len(targets))
    for output, channel in enumerate(targets):
        seen = np.flatnonzero(~np.isnan(steps.values[:, channel].numpy()))
        series, values = steps.series.numpy()[seen], steps.values[:, channel].numpy()[seen]
        same, scale = np.diff(series) == 0, steps.scale[:, channel].numpy()[seen[:-1]] if own else 1.0
        made[output] = (np.abs(np.diff(values)) / scale)[same].mean() if same.any() else 0.0
    return made
