"""Series in the training loop: a model that forecasts a table's values, or predicts a column or a class of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from glissando.config import options, recorded, to_dict
from glissando.data.base import WHOLE, Shard, Split
from glissando.errors import ConfigError, DivergenceError
from glissando.runs import Run
from glissando.series.answers import Scored, advance, answers, call, classified, measured, standard
from glissando.series.batches import Batch, Scales, Steps, Windows, require_near, scales
from glissando.series.history import Past, own
from glissando.series.inspection import FAR, robust
from glissando.series.measuring import measure
from glissando.series.model import SeriesConfig, SeriesModel
from glissando.series.options import SeriesData
from glissando.series.panel import Encoding, Panel, parts
from glissando.series.reading import read_panel
from glissando.series.shrinkage import shares, shrunk
from glissando.series.tables import listed
from glissando.training.config import TrainingConfig
from glissando.training.table import TableRunConfig, epoch_batches, table_batches
from glissando.training.task import Loss, Task


@options
class SeriesRunConfig(TableRunConfig):
    """All of a run of series: what config.yaml holds, resolved.

    model     options of SeriesConfig; sizes follow from the table
    encoding  what the table's columns mean
    imports   the Python files that registered what the run is made of (--import on the command line)
    """

    data: SeriesData
    preset: str | None = None
    model: Annotated[dict[str, Any], SeriesConfig] = field(default_factory=dict)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    encoding: Encoding | None = recorded(default=None)
    imports: list[Annotated[str, Field(strict=True)]] = field(default_factory=list)

    kind: ClassVar[str | None] = "series"

    def task(self, resumed: Run | None = None) -> SeriesTask:
        """Read the table."""
        prepared = prepare(self.data, self.encoding)
        self.encoding = prepared.encoding
        return SeriesTask(self, prepared)


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
    found = scales(train, encoding, data.scale == "series")
    for each in (train, valid):
        require_near(each, encoding, found)
    cut = [windows_of(each, data, encoding, found) for each in (train, valid)]
    return Prepared(encoding, found, cut[0], cut[1], valid, lines)


def windows_of(panel: Panel, data: SeriesData, encoding: Encoding, found: Scales) -> Windows:
    """The windows of a panel, as the run trains on them and scores them."""
    targets = None
    if encoding.task == "forecast":
        targets = [encoding.columns.index(name) for name in encoding.target]
    whole = encoding.task == "classification" and encoding.label == "series"
    steps = Steps.of(panel, found, starting=targets is not None)
    return Windows.of(steps, targets, data.window, data.batch_size, data.seed, whole)


class SeriesTask(Task):
    """The head's loss in units of the target's deviation, or the cross-entropy of a class, summed over what is scored:
    of a forecast, over the observed channels of the next step and of one more."""

    keeps_best = True

    def __init__(self, config: SeriesRunConfig, prepared: Prepared) -> None:
        self.config, self.prepared, self.encoding = config, prepared, prepared.encoding
        self.notes: Sequence[str] = prepared.lines
        self.carries = config.training.carry > 0
        self.scores_start = self.encoding.task == "forecast"  # the anchor, to which the network may add nothing
        train = prepared.train
        outputs = len(self.encoding.target) * (2 if train.targets is not None else 1)
        self.nominal = max(1, train.size * train.rows * outputs)
        figures = ("accuracy", "log_loss") if self.encoding.classes else ("rmse", "mae")
        self.columns = tuple(f"valid_{figure}/{target}" for target in self.encoding.target for figure in figures)

    @property
    def epoch_rows(self) -> int:
        return epoch_batches(self.prepared.train, self.config.training) * self.config.data.batch_size

    def new_model(self, saved: bool = False) -> SeriesModel:
        """With the table's sizes and scales, and the anchor solved for; its options become the configuration's."""
        model = build(self.config.model, self.prepared)
        self.config.model = to_dict(model.config)
        if self.carries:
            model.require_constant_state("training.carry")
        if self.config.training.precision == "64-true":
            model.double()
        if model.config.forecast and not saved:
            fit_anchor(model, self.prepared.train)
        with torch.no_grad():  # what does not fit together is found before anything is made
            call(model, self.prepared.train.batch(np.arange(1)))
        return model

    def batches(self, split: Split, step: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        """Every window once an epoch, in an order that is a function of data.seed and the epoch."""
        if split == "valid":
            yield from self.prepared.valid.scoring()
            return
        yield from table_batches(self.prepared.train, self.config.training, step, shard)

    def loss(self, model: SeriesModel, batch: Batch, state: Any = None, logged: bool = False) -> Loss:
        y, state = advance(model, batch, self.config.training.compile, state)
        if batch.labels is not None:
            labels = batch.labels.to(y.device)
            known = labels >= 0
            return Loss(F.cross_entropy(y[known], labels[known], reduction="sum"), int(known.sum()), state=state)
        assert batch.target is not None
        total, count = model.distribution.loss(*standard(model, y, batch))
        return Loss(total, int(count), state=state)

    def score(
        self, model: SeriesModel, device: torch.device, stride: int = 1, shard: Shard = WHOLE
    ) -> dict[str, float]:
        """Every process scores all windows, which are few."""
        figures = self._scored(model, stride)
        if not math.isfinite(figures.loss):
            raise DivergenceError(
                f"the held-out loss is {figures.loss}, and the last checkpoint is kept: train again with a lower "
                "training.optimizer.learning_rate"
            )
        row = {"valid_loss": figures.loss}
        for target, by_predictor in figures.score.figures.items():
            row |= {f"valid_{figure}/{target}": value for figure, value in by_predictor["model"].items()}
        return {name: value for name, value in row.items() if name == "valid_loss" or name in self.columns}

    def _scored(self, model: SeriesModel, stride: int) -> Scored:
        """The score of the model, of a forecast with the share of its network that is fitted here."""
        held, was, forecasts = self.prepared.valid, model.training, model.config.forecast
        model.eval()
        try:
            if self.encoding.classes:
                return classified(model, held, self.encoding, stride)
            if forecasts:
                model.share.fill_(1)
            found, _ = answers(model, held, stride)
        finally:
            model.train(was)
        if forecasts and bool(found.params.isfinite().all()):
            share = shares(found, model.distribution, len(model.share))
            found = shrunk(found, model.distribution, share)
            model.share.copy_(torch.from_numpy(share))
        return measured(model, found, self.encoding)

    def describe(self, batch: Batch) -> str:
        found, train = self.encoding, self.prepared.train
        read = [*found.columns, *found.categorical]
        read += [f"static {name}" for name in (*found.static, *found.static_categorical)]
        read += [f"known in advance {name}" for name in found.future]
        return (
            f"{found.task} of {listed(found.target, 8)} from {listed(read, 8)}; {len(train):,} windows of at most "
            f"{int((train.end - train.begin).max())} steps to train, {len(self.prepared.valid):,} held out"
        )

    def summary(self, run: Run, best_step: int) -> dict[str, Any]:
        """The figures of the best validation's weights on all that is held out."""
        path = run.best_checkpoint()
        if path is None or best_step < 0:
            return {"best": None}
        prepared, model = self.prepared, SeriesModel.load(path)
        self.found = measure(model, prepared.valid, prepared.panel, self.encoding, prepared.train.steps, run.path)
        best = {"step": best_step, **self.found.as_dict()}
        if model.config.forecast:
            best["share"] = dict(zip(self.encoding.target, model.share.tolist(), strict=True))
        return {"best": best}

    def closing(self, summary: Mapping[str, Any], run: Run, name: str) -> list[str]:
        best = summary["best"]
        if best is None or not summary["finished"]:
            return []
        share, lines = best.get("share"), [self.found.score.table()]
        if share is not None and not any(share.values()):
            lines.insert(0, "THE NETWORK ADDS NOTHING to the linear anchor, which the model is: train on more data.")
        elif share is not None:
            each = listed([f"{name} {value:.2f}" for name, value in share.items()], 8)
            lines.append(f"share of what the network adds to the anchor, fitted on what is held out: {each}")
        return [
            *lines,
            f"{summary['steps']} steps, {summary['seconds']:.0f} s; the run's own weights are those of the best "
            f"validation, step {best['step']}",
            f"run: {name}   (try: glissando series evaluate {name})",
        ]


def build(options: Mapping[str, Any], prepared: Prepared) -> SeriesModel:
    """A new model of the table's sizes and scales."""
    found = prepared.encoding
    if not found.classes:
        options = {"head": "quantiles", **options}
    sizes: dict[str, Any] = {
        "inputs": len(found.columns), "outputs": len(found.classes) or len(found.target),
        "targets": prepared.train.targets or [], "forecast": prepared.train.targets is not None,
        "categories": [2 + len(names) for names in found.categorical.values()], "static": len(found.static),
        "static_categories": [2 + len(names) for names in found.static_categorical.values()],
        "future": len(found.future), "scale": "all" if prepared.scales.law is None else "series",
    }  # fmt: skip
    for name, size in sizes.items():
        if options.get(name, size) != size:
            raise ConfigError(f"model.{name} is {options[name]}, and the table has {size}: leave it out")
    if found.classes and options.get("head", "point") != "point":
        raise ConfigError(f"model.head {options['head']} is of numbers, and classes have logits: leave it out")
    model = SeriesModel.from_config({**options, **sizes})
    model.set_scales(**prepared.scales._asdict())
    return model


def fit_anchor(model: SeriesModel, train: Windows) -> None:
    """Solve for the anchor by all questions of an epoch, without those of which an answer, or what is known, is beyond
    FAR robust deviations: the square of one such value would outweigh all others."""
    steps, asked = train.steps, train.asked()
    known = Past(*(part[asked.at].unsqueeze(0) for part in steps.known))
    middle, reach = (torch.from_numpy(part) for part in robust(((steps.values - steps.centre) / steps.scale).numpy()))
    reach, read = FAR * reach, own(known, None if model.law is None else model.law.double().cpu()).known
    far = [((part - middle).abs() > reach) & known.ever for part in (read.value, read.mean)]
    centre, scale = (part[asked.at][:, train.targets] for part in (steps.centre, steps.scale))
    target = (asked.target - centre) / scale
    wrong = (far[0] | far[1]).any(-1)[0, :, None] | ((target - middle[train.targets]).abs() > reach[train.targets])
    model.fit_anchor(
        known,
        (asked.horizon / model.time_scale.double().cpu()).unsqueeze(0),
        target.masked_fill(wrong, torch.nan).unsqueeze(0),
        steps.static[steps.series[asked.at]],
        steps.static_codes[steps.series[asked.at]],
        None if asked.ahead is None else asked.ahead.unsqueeze(0),
    )
