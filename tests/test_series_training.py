"""Series in the loop: training that resumes to the same weights, scores beside what needs no model, by the command."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tolerances import assert_close
from training_runs import call, weights
from training_runs import resume_series as resume
from training_runs import train_series as train

from glissando.cli import main
from glissando.config import merge
from glissando.data.base import WHOLE, Shard
from glissando.errors import DataError, GlissandoError
from glissando.runs import Run
from glissando.series import Forecaster, SeriesData, SeriesModel, read_panel
from glissando.series.answers import answers, shares, shrunk
from glissando.series.batches import Steps, Windows, scales
from glissando.series.evaluation import evaluate
from glissando.series.history import Past
from glissando.series.task import SeriesRunConfig, SeriesTask, build, fit_anchor, prepare

#: of a model that learns the tables below in a second
TINY = {"hidden_size": 8, "depth": {"layers": 1}, "mixer": {"kind": "liquid", "state_size": 8}}


@pytest.fixture(autouse=True)
def draw(monkeypatch):
    """What draws; in these tests nothing does, as pictures take longer than a small training."""
    from glissando.series import pictures

    drawing = pictures.draw
    monkeypatch.setattr(pictures, "draw", lambda *_: [])
    return drawing


def write(path: Path, rows: list, header: str = "g,t,a,b,y,c") -> Path:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def rows(series: int = 6, length: int = 40) -> list[tuple]:
    """a and b turn in time, y is a mix of both a step before, c the sign of a."""
    rng, made = np.random.default_rng(0), []
    for number in range(series):
        t = np.cumsum(rng.exponential(1.0, length))
        a, b = np.sin(t + number), np.cos(t + number)
        y = 20 + 3 * np.roll(a, 1) - b
        made += [(f"s{number}", *v) for v in zip(t, a, b, y, np.where(a > 0, "up", "down"), strict=True)]
    return made


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write(tmp_path / "table.csv", rows())


def options(table: Path, **data) -> dict:
    return {
        "model": TINY,
        "data": {"path": str(table), "time": "t", "group": "g", "window": 16, **data},
        "training": {"steps": 40, "optimizer": {"learning_rate": 0.02}},
    }


def lines_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def windows(table: Path, **data) -> tuple[Windows, Steps]:
    found = prepare(SeriesData(**options(table, **data)["data"])).train
    return found, found.steps


# ---------------------------------------------------------------------- windows


def test_a_step_is_asked_about_the_next_one_and_one_that_follows(table):
    """With its own horizon; the first question comes before the first value, from static facts alone."""
    cut, steps = windows(table, columns="a,b")
    lines = [row.split(",") for row in table.read_text().splitlines()[1:]]
    values = {float(row[1]): (float(row[2]), float(row[3])) for row in lines}
    batch = cut.batch(np.arange(len(cut)), epoch=0)
    at, horizon, target = (part.numpy() for part in (steps.time[batch.index], batch.inputs["horizon"], batch.target))
    asked = 0
    for row, column in zip(*np.nonzero(batch.mask.numpy()), strict=True):
        series = int(steps.series[batch.index[row, column]])
        times = steps.time[(steps.series == series) & (steps.row >= 0)].numpy()
        known = {t: steps.values[(steps.series == series) & (steps.time == t) & (steps.row >= 0)][0] for t in times}
        is_start = int(steps.row[batch.index[row, column]]) < 0
        for question in range(2):
            if np.isnan(target[row, column, question]).all():
                continue
            when = times[np.argmin(np.abs(times - at[row, column] - horizon[row, column, question]))]
            assert when - at[row, column] == pytest.approx(horizon[row, column, question], abs=1e-9)
            assert target[row, column, question].tolist() == known[when].tolist()
            later = np.flatnonzero(times == when)[0] - (-1 if is_start else np.flatnonzero(times == at[row, column])[0])
            assert later == 1 if question == 0 else 1 < later <= 1 + 16
            asked += 1
    assert asked > 350
    assert len(values) == 240
    first = batch.batch if False else cut.batch(np.array([0]))
    assert not first.inputs["observed"][0, 0].any()
    assert first.inputs["horizon"][0, 0, 0] == 0
    assert first.target[0, 0, 0].tolist() == steps.values[1].tolist()


def test_what_is_known_comes_from_the_whole_history_and_not_from_the_window(table):
    cut, steps = windows(table, columns="a,b")
    batch = cut.batch(np.arange(len(cut)))
    inputs = batch.inputs
    model = SeriesModel.from_config(TINY | {"forecast": True, "inputs": 2, "outputs": 2}).double()
    model.set_scales(**scales_of_training(table))
    from glissando.series.history import history

    x = (batch.inputs["x"] - model.input_mean) / model.input_scale
    observed = inputs["observed"] & batch.mask.unsqueeze(-1)
    gaps = torch.where(batch.mask, inputs["dt"] / model.time_scale, 0)
    known = history(x, observed, gaps, inputs["past"])
    for got, expected in zip(known, steps.known, strict=True):
        assert_close(got[batch.mask], expected[batch.index][batch.mask])
    assert float(known.number.max()) > 16


def scales_of_training(table: Path) -> dict:
    return prepare(SeriesData(**options(table, columns="a,b")["data"])).scales._asdict()


def test_order_is_a_function_of_the_step(table):
    """Every window once an epoch, in another order each epoch; parts of a batch are the batch."""
    config = SeriesRunConfig.read({"data": options(table, columns="a", batch_size=4)["data"], "training": {"steps": 1}})
    task = config.task()
    count = task.epoch_rows // 4

    def rows(step: int, batches: int, shard: Shard = WHOLE) -> list[tuple]:
        stream = task.batches("train", step, shard)
        return [tuple(index.tolist()) for _ in range(batches) for index in next(stream).index[:, :1]]

    epochs = [rows(count * epoch, count) for epoch in range(4)]
    every = sorted((begin,) for begin in task.prepared.train.begin.tolist())
    assert all(sorted(epoch) == every for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert rows(count - 1, 2) == epochs[0][-len(rows(count - 1, 1)) :] + rows(count, 1)
    halves = [rows(1, 1, Shard(rank, 2)) for rank in range(2)]
    together = rows(1, 1)
    assert halves == [together[::2], together[1::2]]


def test_short_series_are_put_together(tmp_path):
    """A batch has about as many steps whether series are long or short."""
    lengths = [3] * 200 + [50] * 4
    made = [(f"s{n}", t, np.sin(t)) for n, length in enumerate(lengths) for t in range(length)]
    table = write(tmp_path / "short.csv", made, "g,t,v")
    cut, _ = windows(table, columns="v", window=32, batch_size=4)
    sizes = [cut.training(number).index.shape for number in range(cut.batches)]
    assert cut.batches < 16
    assert all(rows * steps <= 2 * 32 * 4 for rows, steps in sizes)
    assert max(rows for rows, _ in sizes) > 20


def test_scales_are_of_what_is_trained_on(table, tmp_path):
    prepared = prepare(SeriesData(**options(table, columns="a,b", target="y")["data"]))
    y = prepared.train.steps.target.numpy()
    assert prepared.scales.output_mean == pytest.approx(y.mean(0))
    assert prepared.scales.output_scale == pytest.approx(y.std(0))
    gaps = prepared.train.steps.gaps.numpy()
    assert prepared.scales.time_scale == pytest.approx(np.median(gaps[gaps > 0]))
    constant = write(tmp_path / "constant.csv", [(1, 5), (2, 5), (3, 5), (4, 5)], "v,k")
    panel, encoding = read_panel(SeriesData(path=str(constant)))
    assert scales(panel, encoding).input_scale[1] == 1.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1000000.1, 1000000.2, 1000000.3, 1000000.4, 1000000.5], r"float32 does not resolve: subtract a"),
        ([1e-40, 2e-40, 3e-40, 1e-40, 2e-40], r"float32 does not resolve: multiply it by a"),
    ],
)
def test_columns_that_float32_does_not_resolve(values, message, tmp_path):
    path = write(tmp_path / "table.csv", list(enumerate(values)), "t,v")
    with pytest.raises(GlissandoError, match=message):
        train({"data": {"path": str(path), "time": "t"}, "model": TINY}, tmp_path / "run")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [(k, 1e20 if k == 39 else k % 7) for k in range(40)],
            r"t\.csv, line 41, 'v': 1e\+20 is .* deviations from the",
        ),
        (
            [(1e20 if k == 39 else k, k % 7) for k in range(40)],
            r"t\.csv, line 41, 'gap': 1e\+20 is 1e\+20 times the median",
        ),
        (
            [(f"{k}e-33", k % 7) for k in range(40)],
            r"t\.csv: the median step 1e-33 is too small for float32: multiply the",
        ),
    ],
)
def test_values_and_times_that_float32_has_no_room_for(rows, message, tmp_path):
    path = write(tmp_path / "t.csv", rows, "t,v")
    with pytest.raises(DataError, match=message):
        train({"data": {"path": str(path), "time": "t"}, "model": TINY}, tmp_path / "run")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_the_largest_values_are_learned(tmp_path):
    """Near the bounds, errors and gradients are those of the same numbers near 1."""
    losses = []
    for factor in (1.0, 1e29, 1e-29):
        path = write(tmp_path / f"t{factor}.csv", [(k, factor * (k % 7)) for k in range(40)], "t,v")
        data = {"path": str(path), "time": "t"}
        run = train({"data": data, "model": TINY, "training": {"steps": 3}}, tmp_path / f"{factor}")
        losses.append(evaluate(run.path).loss)
    np.testing.assert_allclose(losses, losses[0], rtol=1e-3)


@pytest.fixture(scope="module")
def regression(tmp_path_factory) -> Run:
    """Of y from a and b; it has learned next to nothing."""
    folder = tmp_path_factory.mktemp("regression")
    values = options(write(folder / "table.csv", rows()), columns="a,b", target="y", task="regression")
    return train(values | {"training": {"steps": 2}}, folder / "run")


def test_a_file_far_from_what_was_trained_on_is_refused_with_its_line(regression, tmp_path):
    far = [("s", k, v, 0.5, 20, "up") for k, v in enumerate((0.5, 1e20, 1.0))]
    with pytest.raises(
        DataError, match=r"far\.csv, line 3, 'a': 1e\+20 is .* deviations from the mean of what is trained"
    ):
        evaluate(regression.path, str(write(tmp_path / "far.csv", far)))


# ---------------------------------------------------------------------- units of a series


def levels(path: Path, factor: float = 1.0, offsets: bool = False) -> Path:
    """60 series of one law: with levels over three decades, or offsets as far apart."""
    rng, made = np.random.default_rng(0), []
    for number in range(60):
        t, level = np.cumsum(0.01 + rng.exponential(1.0, 30)), 10 ** rng.uniform(0, 3)
        a = 0.3 * np.sin(t + rng.uniform(0, 6)) + 0.02 * rng.normal(size=30)
        a = factor * (level + a if offsets else level * np.exp(a))
        made += [(f"s{number}", *v) for v in zip(t, a, strict=True)]
    return write(path, made, "g,t,a")


@pytest.mark.parametrize(("offsets", "slope", "share"), [(False, 1.0, 0.6), (True, 0.0, 0.9)])
def test_series_in_their_own_units_are_forecast_whatever_their_level(
    tmp_path, offsets: bool, slope: float, share: float
):
    """In the table's units the anchor does not see the changes of small series; in their own it does."""
    path, errors = levels(tmp_path / "levels.csv", offsets=offsets), {}
    for scale in ("all", "series"):
        config = SeriesRunConfig.read({**options(path, scale=scale), "training": {"steps": 1}})
        task = config.task()
        model = task.new_model().eval()
        model.share.zero_()
        found = answers(model, task.prepared.valid)
        own = 0.3 * (1 if offsets else found.baselines["last value"])
        errors[scale] = np.sqrt(np.mean(((found.baselines["anchor"] - found.target) / own) ** 2))
    assert task.prepared.scales.law[1, 0] == pytest.approx(slope, abs=0.15)
    assert errors["series"] < share * errors["all"], errors


@pytest.mark.slow
def test_units_cancel_in_series_units_too(tmp_path):
    """Forecasts and intervals of the same table in other units are those in its units, and figures are the same."""
    found = []
    for factor in (1.0, 1e-3):
        run = tmp_path / f"run-{factor}"
        path = levels(tmp_path / f"{factor}.csv", factor)
        given = {**options(path, scale="series"), "model": {**TINY, "head": "gaussian"}}
        train(given | {"training": {"steps": 5, "precision": "64-true"}}, run)
        forecaster = Forecaster.load(run)
        value = forecaster.predict(path, horizon=2.0, quantiles=[0.9])[["value", "q0.9"]].to_numpy() / factor
        scored = evaluate(run)
        assert "in units of the deviation of each so far" in scored.table()
        found.append((value, scored.as_dict()["targets"]["a"]["model"]["rmse"]))
    assert_close(torch.from_numpy(found[0][0]), torch.from_numpy(found[1][0]), tolerance=1e-6)
    assert found[0][1] == pytest.approx(found[1][1])


# ---------------------------------------------------------------------- training


@pytest.mark.parametrize(
    ("data", "model", "better"),
    [
        ({"columns": "a,b"}, TINY, 0.6),
        ({"columns": "a,b", "target": "y", "task": "regression"}, TINY, 0.8),
        ({"columns": "a,b"}, TINY | {"mixer": "attention", "head": "student"}, 0.9),
        ({"columns": "a,b", "target": "a", "task": "forecast", "time": None}, TINY, 1.0),
    ],
)
@pytest.mark.slow
def test_a_model_learns_more_than_the_trivial_predictors(data, model, better, table, tmp_path):
    run = train(options(table, **data) | {"model": model}, tmp_path / "run")
    found = evaluate(run.path)
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["best"]["targets"] == found.figures
    assert summary["weights"] == "best"
    for target in found.figures.values():
        trivial = min(values["rmse"] for who, values in target.items() if who not in ("model", "anchor"))
        assert target["model"]["rmse"] < better * trivial
    metrics = lines_of(run.path / "metrics.csv")
    first = 0 if found.figures.keys() <= {"a", "b"} else 4  # only a forecast has an anchor to start from
    assert [int(row["step"]) for row in metrics if row["valid_loss"]] == list(range(first, 41, 4))
    assert float(metrics[-1]["train_loss"]) < float(metrics[1]["train_loss"])


@pytest.mark.slow
def test_a_long_table_with_gaps_and_facts_is_learned(tmp_path):
    """Two channels at times of their own, one of them a half of a static fact at first."""
    rng, made, facts = np.random.default_rng(0), [], []
    for number in range(60):
        level = rng.normal()
        facts.append((number, round(level, 3), "ab"[number % 2]))
        for t in np.cumsum(rng.exponential(1.0, 12)):
            channel = "pq"[int(rng.random() < 0.3)]
            made.append((number, round(t, 3), channel, round(level + (channel == "q") + 0.1 * rng.normal(), 3)))
    table = write(tmp_path / "long.csv", made, "id,t,test,value")
    static = write(tmp_path / "facts.csv", facts, "id,level,arm")
    data = {"path": str(table), "group": "id", "time": "t", "channel": "test", "value": "value", "window": 16}
    data |= {"static": "level,arm", "static_path": str(static)}
    run = train({"data": data, "model": TINY, "training": {"steps": 60}}, tmp_path / "run")
    figures = evaluate(run.path).figures
    for channel in "pq":
        assert figures[channel]["anchor"]["rmse"] < 0.15 < figures[channel]["last value"]["rmse"]
        assert figures[channel]["model"]["rmse"] < 0.2
    saved = yaml.safe_load((run.path / "config.yaml").read_text())
    assert saved["encoding"]["static_categorical"] == {"arm": ["a", "b"]}
    assert (saved["model"]["static"], saved["model"]["static_categories"]) == (1, [4])


def test_one_wrong_value_does_not_spoil_the_anchor(tmp_path):
    """Values that fall back to their mean: the weights are those of the table without the value."""
    rng, values = np.random.default_rng(0), [0.0]
    for _ in range(599):
        values.append(0.7 * values[-1] + rng.normal())
    anchors = []
    for name, wrong in (("right", ""), ("wrong", 300.0)):
        made = [(t, wrong if t == 300 else round(v, 4)) for t, v in enumerate(values)]
        path = str(write(tmp_path / f"{name}.csv", made, "t,v"))
        prepared = prepare(SeriesData(path=path, time="t", valid_path=path))
        model = build(TINY, prepared).double()
        fit_anchor(model, prepared.train)
        steps = prepared.train.steps
        known = Past(*(part[None, :250] for part in steps.known))
        anchors.append(model.anchored(known, torch.ones(1, 250).double(), None, None, None)[0, 5:, 0])
    assert any("the anchor is fitted without them" in line for line in prepared.lines)
    expected = 0.7 * np.array(values[4:249])
    assert_close(anchors[0], torch.tensor(expected), "the mean of what follows", 0.15)
    assert_close(anchors[1], anchors[0], "with a wrong value", 0.2)


def test_a_model_that_is_worse_says_so_in_its_first_line(tmp_path, capsys):
    """A random walk, whose last value is the best forecast."""
    steps = np.random.default_rng(0).normal(size=(8, 60)).cumsum(1)
    made = [(n, t, round(float(v), 4)) for n, row in enumerate(steps) for t, v in enumerate(row)]
    table = write(tmp_path / "walk.csv", made, "g,t,v")
    values = {"data": {"path": str(table), "group": "g", "time": "t"}, "model": TINY}
    run = train(values | {"training": {"steps": 4, "optimizer": {"learning_rate": 0.3}}}, tmp_path / "run")
    printed = capsys.readouterr().err.split("\n")
    at = next(number for number, line in enumerate(printed) if "scored in" in line)
    assert printed[at - 2].startswith("THE NETWORK ADDS NOTHING to the linear anchor")
    assert printed[at - 1].startswith("THE MODEL IS NO BETTER than the anchor")
    best = json.loads((run.path / "summary.json").read_text())["best"]
    figures = best["targets"]["v"]
    assert figures["model"]["rmse"] == pytest.approx(figures["anchor"]["rmse"], rel=1e-6)
    assert best["share"] == {"v": 0.0}


@pytest.mark.parametrize("head", ["point", "quantiles", "gaussian", "student"])
def test_training_starts_from_the_anchor_and_keeps_a_share_of_the_network(head, table):
    prepared = prepare(SeriesData(**options(table, columns="a,b")["data"]))
    model = build(TINY | {"head": head}, prepared)
    fit_anchor(model, prepared.train)
    model.eval()
    start = answers(model, prepared.valid)
    centre = model.distribution.mean(start.params.unsqueeze(1)).squeeze(1).numpy()
    np.testing.assert_allclose(centre, start.baselines["anchor"], atol=1e-6)
    assert (shares(start, model.distribution, 2) == 0).all()

    with torch.no_grad():
        torch.nn.init.normal_(model.head.out.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    whole = answers(model, prepared.valid)
    network = model.distribution.mean(whole.params.unsqueeze(1)).squeeze(1).numpy() - whole.baselines["anchor"]
    right = whole._replace(target=whole.baselines["anchor"] + network)  # the network knows what is left
    np.testing.assert_allclose(shares(right, model.distribution, 2), 1, atol=1e-9)
    wrong = whole._replace(target=whole.baselines["anchor"] - network)
    assert (shares(wrong, model.distribution, 2) == 0).all()
    share = np.array([0.25, 0.0])
    model.share.copy_(torch.from_numpy(share))
    kept = answers(model, prepared.valid)
    np.testing.assert_allclose(kept.params, shrunk(whole, model.distribution, share).params, atol=1e-5)
    np.testing.assert_allclose(
        model.distribution.mean(kept.params.unsqueeze(1)).squeeze(1).numpy(),
        whole.baselines["anchor"] + share[whole.channel] * network, atol=1e-5,
    )  # fmt: skip


def test_classes_are_learned(table, tmp_path):
    data = {"columns": "a,b", "target": "c", "task": "classification", "label": "step"}
    values = options(table, **data)
    values["training"]["validate_every"] = 20
    run = train(values, tmp_path / "run")
    found = evaluate(run.path, out=str(tmp_path / "out.csv"))
    model, always = found.figures["c"].values()
    assert model["accuracy"] > 0.9 > 0.7 > always["accuracy"]
    assert model["log_loss"] == pytest.approx(found.loss)
    written = lines_of(tmp_path / "out.csv")
    assert {row["value"] for row in written} == {"up", "down"}
    assert np.mean([row["value"] == row["predicted"] for row in written]) == pytest.approx(model["accuracy"])


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.slow
def test_classes_of_whole_series_are_learned(pooling, tmp_path):
    """Series of different lengths, whose values rise or fall; each has one label, which is one answer."""
    rng, made = np.random.default_rng(0), []
    for number in range(40):
        length, sign = int(rng.integers(3, 30)), (-1) ** number
        made += [(number, t, sign * t + rng.normal(), "rises" if sign > 0 else "falls") for t in range(length)]
    table = write(tmp_path / "t.csv", made, "g,t,v,way")
    data = {"path": str(table), "group": "g", "time": "t", "target": "way", "window": 8, "valid_fraction": 0.3}
    run = train({"data": data, "model": TINY | {"pooling": pooling}, "training": {"steps": 60}}, tmp_path / "run")
    found = evaluate(run.path, out=str(tmp_path / "out.csv"))
    assert found.scored == found.series == 12
    assert found.figures["way"]["model"]["accuracy"] >= 0.9
    assert list(lines_of(tmp_path / "out.csv")[0]) == ["g", "target", "value", "predicted"]


def test_scores_are_those_of_predictions_by_hand(regression, table, tmp_path):
    """Figures, the CSV of predictions and the model itself agree, in the units of the data."""
    found = evaluate(regression.path, str(table), str(tmp_path / "out.csv"))
    written = lines_of(tmp_path / "out.csv")
    lines = [line.split(",") for line in table.read_text().splitlines()[1:]]
    assert found.scored == len(written) == 240
    for row, line in zip(written[::50], lines[::50], strict=True):
        assert row["g"] == line[0]
        assert float(row["t"]) == pytest.approx(float(line[1]))
        assert float(row["value"]) == pytest.approx(float(line[4]))
    errors = [float(row["predicted"]) - float(row["value"]) for row in written]
    assert found.figures["y"]["model"]["rmse"] == pytest.approx(math.sqrt(np.square(errors).mean()))
    assert found.figures["y"]["model"]["mae"] == pytest.approx(np.abs(errors).mean())
    model = SeriesModel.load(regression.path)
    x = torch.tensor([[[float(v) for v in line[2:4]] for line in lines[:16]]])
    times = torch.tensor([float(line[1]) for line in lines[:16]], dtype=torch.float64)
    dt = torch.cat([torch.zeros(1), times.diff()])[None].float()
    with torch.no_grad():
        y = model.distribution.mean(model(x, dt=dt)[0])[0, :, 0]
    assert y.tolist() == pytest.approx([float(row["predicted"]) for row in written[:16]], rel=1e-4)
    with pytest.raises(GlissandoError, match="exists; nothing is overwritten"):
        evaluate(regression.path, str(table), str(tmp_path / "out.csv"))


@pytest.mark.slow
def test_a_wide_table_with_gaps_is_learned_and_one_of_single_rows_is_no_score(table, tmp_path):
    """A third of the cells is blank: only what was observed is scored."""
    rng, lines = np.random.default_rng(0), [line.split(",") for line in table.read_text().splitlines()]
    for line in lines[1:]:
        line[2:4] = ["" if rng.random() < 0.33 else cell for cell in line[2:4]]
    gaps = tmp_path / "gaps.csv"
    gaps.write_text("\n".join(map(",".join, lines)) + "\n")
    run = train(options(gaps, columns="a,b"), tmp_path / "run")
    found = evaluate(run.path, str(gaps))
    first = {name: sum(1 for _ in group) for name, group in itertools.groupby(line[0] for line in lines[1:])}
    starts = np.cumsum([1, *first.values()])[:-1]
    observed = sum(cell != "" for line in lines[1:] for cell in line[2:4])
    assert found.scored == observed - sum(cell != "" for at in starts for cell in lines[at][2:4])
    for figures in found.figures.values():
        assert figures["model"]["rmse"] < figures["last value"]["rmse"]
    single = write(tmp_path / "single.csv", [("x", 1, 0.1, 0.2), ("y", 2, 0.3, 0.4)], "g,t,a,b")
    with pytest.raises(DataError, match="there is nothing to score: every series has a single step"):
        evaluate(run.path, str(single))


@pytest.mark.slow
def test_the_end_of_each_series_is_forecast_with_its_history(table, tmp_path):
    values = options(table, columns="a,b", split="future")
    run = train(values | {"training": {"steps": 2}}, tmp_path / "run")
    found = evaluate(run.path, out=str(tmp_path / "out.csv"))
    written = lines_of(tmp_path / "out.csv")
    assert found.series == 6
    assert found.scored == len(written) == 6 * 6 * 2
    assert found.figures["a"]["last value"]["rmse"] < 2


def test_a_training_resumes_to_the_same_weights(table, tmp_path, monkeypatch, capsys):
    """Ended by Ctrl-C in the middle, it is saved, said how to go on with, and ends bit for bit where it would have."""
    values = options(table, columns="a,b") | {"model": TINY | {"block": {"mixer_dropout": 0.1}}}
    values["training"] = {"steps": 6, "log_every": 2, "validate_every": 3}
    whole = train(values, tmp_path / "whole")
    taken, real = [], SeriesTask.loss

    def ask(*arguments, **keywords):
        taken.append(1)
        if len(taken) == 4:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments, **keywords)

    monkeypatch.setattr(SeriesTask, "loss", ask)
    with pytest.raises(KeyboardInterrupt, match="and saved"):
        train(values, tmp_path / "cut")
    assert 0 < len(list((tmp_path / "cut" / "checkpoints").glob("step-*"))) <= 2
    assert not (tmp_path / "cut" / "summary.json").exists()
    SeriesModel.load(tmp_path / "cut")
    resume(tmp_path / "cut")
    first, second = SeriesModel.load(whole.path).state_dict(), SeriesModel.load(tmp_path / "cut").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    steps = [[row["step"] for row in lines_of(tmp_path / n / "metrics.csv")] for n in ("whole", "cut")]
    assert steps[0] == steps[1]
    before = (tmp_path / "cut" / "metrics.csv").read_text()
    table = table.rename(tmp_path / "moved.csv")
    with pytest.raises(DataError, match=r"there is no file .*table\.csv, which .*--data\.path FILE"):
        resume(tmp_path / "cut")
    assert main(["series", "train", "--resume", str(tmp_path / "cut"), "--data.path", str(table)]) == 0
    assert evaluate(tmp_path / "cut", str(table)).scored > 0
    assert (tmp_path / "cut" / "metrics.csv").read_text() == before
    table.write_text(table.read_text() + "s0,1e9,1,1,1,up\n")
    capsys.readouterr()
    assert main(["series", "train", "--resume", str(tmp_path / "cut"), "--data.path", str(table)]) == 1
    assert re.search(r"moved\.csv is not the text that .*cut was trained on", capsys.readouterr().err)


def test_patience_ends_a_training_at_its_best(table, tmp_path):
    values = options(table, columns="a,b")
    values["training"] |= {"optimizer": {"learning_rate": 1.0}, "early_stopping": 1}
    run = train(values, tmp_path / "run")
    summary = json.loads((run.path / "summary.json").read_text())
    rows = [r for r in lines_of(run.path / "metrics.csv") if r["valid_loss"]]
    losses = [float(row["valid_loss"]) for row in rows]
    assert summary["steps"] < 40
    assert summary["best"]["step"] == int(rows[-2]["step"])
    assert min(losses) == losses[-2] == pytest.approx(summary["best"]["loss"])


@pytest.mark.slow
def test_series_have_what_the_loop_has(table, tmp_path):
    """Muon and a URL; and a step in two parts is the same step, though windows are padded."""
    values = options(table, columns="a,b", batch_size=4)
    optimizer = {"kind": "muon", "learning_rate": 0.01}
    values["training"] = {"steps": 3, "optimizer": optimizer, "schedule": {"warmup_steps": 0}}
    whole = train(values, tmp_path / "whole")
    more = {"training": {"accumulate": 2}}
    parts = train(merge(SeriesRunConfig, values, more), f"file://{tmp_path}/copied")
    for name, weight in weights(whole).items():
        assert_close(weights(parts)[name], weight, name, 1e-4)
    assert weights(tmp_path / "copied").keys() == weights(whole).keys()


@pytest.mark.slow
def test_two_processes_train_a_series_as_one_does(table, tmp_path):
    common = ["--data.path", str(table), "--data.time=t", "--data.group=g", "--data.columns=a,b", "--training.steps=4"]
    common += ["--model.hidden_size=8", "--data.batch_size=4", "--training.accelerator=cpu"]
    for name, more in (("one", []), ("two", ["--training.devices=2", "--training.strategy=ddp"])):
        line = [sys.executable, "-m", "glissando", "series", "train", *common, *more, "--out", str(tmp_path / name)]
        done = call(line)
        assert done.returncode == 0, done.stderr[-3000:]
    for name, weight in weights(tmp_path / "one").items():
        assert_close(weights(tmp_path / "two")[name], weight, name, 1e-4)


# ---------------------------------------------------------------------- the command


def test_series_of_another_seed(tmp_path, monkeypatch, capsys):
    """They can be read: of seed 1 two rows are nearer in time than the digits that are written."""
    monkeypatch.chdir(tmp_path)
    assert main(["series", "example", "--out", "few.csv", "--count", "12", "--seed", "1"]) == 0
    assert len(read_panel(SeriesData(path="few.csv", time="t", group="series"))[0].names) == 12
    assert main(["series", "example", "--out", "none.csv", "--count", "0"]) == 2
    assert "--count: expected a whole number of at least 1, got 0" in capsys.readouterr().err
    assert not Path("none.csv").exists()


def test_the_documented_example(tmp_path, monkeypatch, capsys, draw):
    """A CSV is written, trained on and scored by commands; a configuration file stands for options."""
    monkeypatch.chdir(tmp_path)
    assert main(["series", "example", "--out", "short.csv", "--count", "2"]) == 0
    assert "2 series of 700 steps" in capsys.readouterr().out
    common = ["--data.path", "short.csv", "--data.time", "t", "--data.group", "series"]
    with monkeypatch.context() as patch:
        patch.setattr("glissando.series.pictures.draw", draw)
        assert main(["series", "train", *common, "--training.steps", "2", "--out", "run"]) == 0
    assert {path.name for path in Path("run").glob("*.png")} == {"errors.png", "forecasts.png"}
    printed = capsys.readouterr().err
    assert "forecast of a, b from a, b; 11 windows of at most 64 steps to train, 11 held out" in printed
    assert "try: glissando series evaluate run" in printed
    assert main(["series", "evaluate", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["targets"]["a"].keys() == {"model", "last value", "mean", "anchor"}
    assert main(["series", "evaluate", "run"]) == 0
    assert "last value" in capsys.readouterr().out
    Path("run.yaml").write_text(
        "preset: attention-series\ndata: {path: short.csv, columns: [a], time: t, group: series}\n"
    )
    assert main(["series", "train", "--config", "run.yaml", "--training.steps", "1", "--out", "run2"]) == 0
    assert yaml.safe_load(Path("run2/config.yaml").read_text())["model"]["mixer"]["kind"] == "attention"
    assert main(["series", "train", "--resume", "run2"]) == 0
    assert "is finished, at step 1" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["on,a b", '["on", "a b"]'])
def test_columns_are_named_as_the_file_names_them(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("t.csv"), [(k, -k, k % 7) for k in range(40)], "on,a b,y")
    common = ["--data.path", "t.csv", "--data.target", "y", "--training.steps", "1", "--model.hidden_size", "8"]
    assert main(["series", "train", *common, "--data.columns", given, "--out", "run"]) == 0
    assert yaml.safe_load(Path("run/config.yaml").read_text())["data"]["columns"] == ["on", "a b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown action 'trian'. Did you mean 'train'?"),
        (["train"], "--out is missing"),
        (["train", "--out", "x"], "data.path is missing"),
        (["train", "somewhere", "--out", "x"], "`series train` takes no 'somewhere'"),
        (["train", "--json", "--out", "x"], "--json is not an option of `series train`"),
        (["evaluate"], "`series evaluate` needs a run directory"),
        (["evaluate", "nowhere"], "no run at nowhere"),
        (["evaluate", "x", "--data.window", "3"], "--data.window is not an option of `series evaluate`"),
        (["train", "--resume", "x", "--training.steps", "3"], "got --training.steps"),
        (["train", "--preset", "liquid-serie", "--out", "x"], "Did you mean 'liquid-series'?"),
        (
            ["train", "--data.path", "t.csv", "--training.steps", "3", "--training.epochs", "2", "--out", "x"],
            "the budget is one of",
        ),
        (["train", "--model.vocab_size", "3", "--out", "x"], "unknown option --model.vocab_size"),
        (["train", "--data.path", "t.csv", "--data.colums", "a", "--out", "x"], "Did you mean --data.columns?"),
        (
            ["train", "--data.path", "t.csv", "--model.inputs", "4", "--out", "x"],
            "model.inputs is 4, and the table has 5",
        ),
        (
            ["train", "--data.path", "t.csv", "--data.columns", "y", "--data.categorical", "y", "--out", "x"],
            "t.csv has no channel of numbers, of which a model of series reads one at least, and texts in y",
        ),
        (
            ["train", "--data.path", "t.csv", "--model.dt", "both", "--out", "x"],
            "--model.dt: expected 'log', 'linear' or 'input', got 'both'",
        ),
        (["train", "--data.path", "t.csv", "--data.columns", "[a", "--out", "x"], "data.columns"),
        (["train", "--data.path", "nowhere.csv", "--out", "x"], "there is no file nowhere.csv: give an existing CSV"),
        (
            ["train", "--data.path", "t.csv", "--data.task", "interpolate", "--out", "x"],
            "a forecast reads the past alone, and nothing is filled in from both sides",
        ),
        (["train", "--data.path", "t.csv", "--training.accelerator", "abacus", "--out", "x"], "'abacus'"),
    ],
)
def test_mistakes_at_the_command_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(Path("t.csv"), [row[1:5] for row in rows(1)], "t,a,b,y")
    if "model.inputs" in message:
        write(Path("t.csv"), [(1, 2, 3, 4, k) for k in range(9)], "p,q,r,s,t")
    assert main(["series", *arguments]) != 0
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed
    assert not Path("x").exists()


@pytest.mark.slow
def test_a_run_of_series_is_not_taken_for_one_of_language(table, tmp_path, capsys):
    run = train(options(table, columns="a"), tmp_path / "run")
    for command in (["generate", str(run.path)], ["evaluate", str(run.path)], ["train", "--resume", str(run.path)]):
        assert main(command) == 1
        assert "predicts numbers: use `glissando series evaluate" in capsys.readouterr().err
