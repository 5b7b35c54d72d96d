"""Series in the training loop: a model that forecasts a table's values, or predicts a column or a class of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from glissando.config import options, recorded
from glissando.errors import ConfigError
from glissando.runs import Run
from glissando.series.answers import (
    advance,
    answers,
    call,
    classified,
    measure,
    measured,
    shares,
    shrunk,
    standard,
)
from glissando.series.batches import Batch, Scales, Steps, Windows, require_near, scales
from glissando.series.history import by_own_past
from glissando.series.inspection import FAR, robust
from glissando.series.model import SeriesConfig, SeriesModel
from glissando.series.options import SeriesData
from glissando.series.panel import Encoding, Panel, parts
from glissando.series.reading import read_panel
from glissando.series.scores import Score
from glissando.series.tables import listed
from glissando.state import map_state
from glissando.training.table import TableRunConfig, TableTask, with_sizes
from glissando.training.task import Loss


@options
class SeriesRunConfig(TableRunConfig):
    """All of a run of series."""

    data: SeriesData
    model: Annotated[dict[str, Any], SeriesConfig] = field(default_factory=dict)
    encoding: Encoding | None = recorded(default=None)

    kind: ClassVar[str | None] = "series"

    def task_of(self, *sources: Any) -> SeriesTask:
        return SeriesTask(self, prepare(self.data, self.encoding, *sources))


class Prepared(NamedTuple):
    """What a configuration and its tables come to."""

    encoding: Encoding
    scales: Scales
    train: Windows
    valid: Windows
    panel: Panel  # of what is held out
    lines: list[str]


def prepare(data: SeriesData, encoding: Encoding | None = None, source: Any = None) -> Prepared:
    """Read and split the table.

    Args:
        data: The options of the table.
        encoding: That of a run that goes on.
        source: A frame in the place of data.path.

    Raises DataError for what cannot be used.
    """
    panel, encoding = read_panel(data, source, encoding)
    if data.valid_path is None:
        train, valid = parts(panel, data)
        lines = valid.report
    else:
        train, (valid, _) = panel, read_panel(data, data.valid_path, encoding)
        lines = [*panel.report, *valid.report]
    units = scales(train, encoding, data.scale == "series")
    for each in (train, valid):
        require_near(each, encoding, units)
    cut = [windows_of(each, data, encoding, units) for each in (train, valid)]
    return Prepared(encoding, units, cut[0], cut[1], valid, lines)


def windows_of(panel: Panel, data: SeriesData, encoding: Encoding, units: Scales) -> Windows:
    """The windows of a panel, as the run trains on them and scores them."""
    targets = None
    if encoding.task == "forecast":
        targets = [encoding.columns.index(name) for name in encoding.target]
    whole = encoding.task == "classification" and encoding.label == "series"
    steps = Steps.of(panel, units, starting=targets is not None)
    return Windows.of(steps, targets, data.window, data.batch_size, data.seed, whole)


class SeriesTask(TableTask):
    """The head's loss in units of the target's deviation, or the cross-entropy of a class, summed over what is scored:
    of a forecast, over the observed channels of the next step and of one more."""

    _call, _model = staticmethod(call), SeriesModel

    def __init__(self, config: SeriesRunConfig, prepared: Prepared) -> None:
        targets, forecasts = prepared.encoding.target, prepared.train.targets is not None
        super().__init__(config, prepared, len(targets) * (2 if forecasts else 1))
        self.scores_start = forecasts  # the anchor, to which the network may add nothing
        figures = ("accuracy", "log_loss") if prepared.encoding.classes else ("rmse", "mae")
        self.columns = tuple(f"valid_{figure}/{target}" for target in targets for figure in figures)

    def _built(self) -> SeriesModel:
        return build(self.config.model, self.prepared)

    def _begin(self, model: SeriesModel) -> None:
        if model.config.forecast:
            fit_anchor(model, self.prepared.train)

    def loss(self, model: SeriesModel, batch: Batch, state: Any = None, logged: bool = False) -> Loss:
        y, state = advance(model, batch, self.config.training.compile, state)
        if batch.labels is not None:
            labels = batch.labels.to(y.device)
            known = labels >= 0
            return Loss(F.cross_entropy(y[known], labels[known], reduction="sum"), int(known.sum()), state=state)
        assert batch.target is not None
        total, count = model.distribution.loss(*standard(model, y, batch))
        return Loss(total, int(count), state=state)

    def _scored(self, model: SeriesModel, stride: int) -> dict[str, float]:
        score = self._scores(model, stride)
        row = {"valid_loss": score.loss}
        for target, by_predictor in score.figures.items():
            row |= {f"valid_{figure}/{target}": value for figure, value in by_predictor["model"].items()}
        return {name: value for name, value in row.items() if name == "valid_loss" or name in self.columns}

    def _scores(self, model: SeriesModel, stride: int) -> Score:
        """The score of the model, of a forecast with the share of its network that is fitted here."""
        if self.encoding.classes:
            return classified(model, self.prepared.valid, self.encoding, stride)
        if model.config.forecast:
            model.share.fill_(1)
        forecast = answers(model, self.prepared.valid, stride)
        if model.config.forecast and bool(forecast.params.isfinite().all()):
            share = shares(forecast, model.distribution, len(model.share))
            forecast = shrunk(forecast, model.distribution, share)
            model.share.copy_(torch.from_numpy(share))
        return measured(model, forecast, self.encoding)

    def _about(self) -> str:
        encoding = self.encoding
        read = [*encoding.columns, *encoding.categorical]
        read += [f"static {name}" for name in (*encoding.static, *encoding.static_categorical)]
        read += [f"known in advance {name}" for name in encoding.future]
        return f"{encoding.task} of {listed(encoding.target, 8)} from {listed(read, 8)}"

    def _measured(self, model: SeriesModel, run: Run) -> dict[str, Any]:
        prepared = self.prepared
        self.best = measure(model, prepared.valid, prepared.panel, self.encoding, prepared.train.steps, run.path)
        best = self.best.as_dict()
        if model.config.forecast:
            best["share"] = dict(zip(self.encoding.target, model.share.tolist(), strict=True))
        return best

    def _results(self, best: Mapping[str, Any]) -> list[str]:
        share, lines = best.get("share"), [self.best.table()]
        if share is not None and not any(share.values()):
            lines.insert(0, "THE NETWORK ADDS NOTHING to the linear anchor, which the model is: train on more data.")
        elif share is not None:
            each = listed([f"{name} {value:.2f}" for name, value in share.items()], 8)
            lines.append(f"share of what the network adds to the anchor, fitted on what is held out: {each}")
        return lines


def build(options: Mapping[str, Any], prepared: Prepared) -> SeriesModel:
    """A new model of the table's sizes and scales."""
    encoding = prepared.encoding
    if not encoding.columns:
        raise ConfigError(
            f"{prepared.panel.source} has no channel of numbers, of which a model of series reads one at least, and "
            f"texts in {listed([*encoding.categorical])}: add one, or read what happened by `glissando events`"
        )
    if not encoding.classes:
        options = {"head": "quantiles", **options}
    sizes: dict[str, Any] = {
        "inputs": len(encoding.columns), "outputs": len(encoding.classes) or len(encoding.target),
        "targets": prepared.train.targets or [], "forecast": prepared.train.targets is not None,
        "categories": [2 + len(names) for names in encoding.categorical.values()], "static": len(encoding.static),
        "static_categories": [2 + len(names) for names in encoding.static_categorical.values()],
        "future": len(encoding.future), "scale": "all" if prepared.scales.law is None else "series",
    }  # fmt: skip
    sized = with_sizes(options, sizes)
    if encoding.classes and options.get("head", "point") != "point":
        raise ConfigError(f"model.head {options['head']} is of numbers, and classes have logits: leave it out")
    model = SeriesModel.from_config(sized)
    model.set_scales(**prepared.scales._asdict())
    return model


def fit_anchor(model: SeriesModel, train: Windows) -> None:
    """Solve for the anchor by all questions of an epoch, without those of which an answer, or what is known, is beyond
    FAR robust deviations: the square of one such value would outweigh all others."""
    steps, batch = train.steps, train.batch(np.arange(len(train)), 0)
    assert batch.target is not None
    use = batch.mask.unsqueeze(-1) & ~batch.target.isnan().all(-1)  # questions that have an answer
    at, ahead = batch.index.unsqueeze(-1).expand_as(use)[use], batch.inputs.get("ahead")
    known, series = map_state(lambda part: part[at].unsqueeze(0), steps.known), steps.series[at]
    middle, reach = (torch.from_numpy(part) for part in robust(((steps.values - steps.centre) / steps.scale).numpy()))
    reach, read = FAR * reach, by_own_past(known, None if model.law is None else model.law.double().cpu()).known
    far = [((part - middle).abs() > reach) & known.ever for part in (read.value, read.mean)]
    centre, scale = (part[at][:, train.targets] for part in (steps.centre, steps.scale))
    target = (batch.target[use] - centre) / scale
    wrong = (far[0] | far[1]).any(-1)[0, :, None] | ((target - middle[train.targets]).abs() > reach[train.targets])
    model.fit_anchor(
        known,
        (batch.inputs["horizon"][use] / model.time_scale.double().cpu()).unsqueeze(0),
        target.masked_fill(wrong, torch.nan).unsqueeze(0),
        steps.static[series],
        steps.static_codes[series],
        None if ahead is None else ahead[use].unsqueeze(0),
    )
