"""Series from files: tables that are read or refused, training that resumes to the same weights, scores beside the
trivial predictors, by the command."""

from __future__ import annotations

import csv
import datetime
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
from glissando.data.series import SeriesData, read_series, resolved, scales, split, windows
from glissando.data.tables import read_table
from glissando.errors import DataError, GlissandoError, MissingExtraError
from glissando.evaluation.series import evaluate
from glissando.series import SeriesModel
from glissando.training.series_task import SeriesRunConfig, SeriesTask, series_config

#: of a model that learns the tables below in a second
TINY = {"hidden_size": 8, "depth": {"layers": 1}, "mixer": {"kind": "liquid", "state_size": 8}}


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


# ---------------------------------------------------------------------- reading


def test_what_a_table_comes_to(table):
    """Gaps belong to the step that they follow in a forecast, and to the step that they lead to else."""
    every = read_table(table)
    forecast = resolved(SeriesData(path=str(table), columns="a, b", time="t", group="g"), every)
    assert (forecast.task, forecast.target) == ("forecast", ["a", "b"])
    first = read_series(forecast, every)[0]
    lines = [row.split(",") for row in table.read_text().splitlines()[1:41]]
    values = np.array([[float(row[2]), float(row[3])] for row in lines])
    times = np.array([float(row[1]) for row in lines])
    assert np.array_equal(first.x, values[:-1])
    assert np.array_equal(first.target, values[1:])
    assert np.array_equal(first.last, values[:-1])
    np.testing.assert_allclose(first.dt, np.diff(times), rtol=1e-12)
    assert first.place.tolist() == list(range(3, 42))
    regression = resolved(SeriesData(path=str(table), columns="a,b", time="t", group="g", target="y"), every)
    assert regression.task == "regression"
    second = read_series(regression, every)[1]
    assert second.name == "s1"
    assert second.x.shape == (40, 2)
    assert second.target.shape == (40, 1)
    assert second.dt[0] == np.median(second.dt[1:])
    assert second.place[0] == 42


def test_series_are_held_out_whole_and_a_single_one_by_its_end(table):
    every = read_table(table)
    data = resolved(SeriesData(path=str(table), columns="a", time="t", group="g", valid_fraction=0.3), every)
    train_part, valid = split(data, read_series(data, every))
    assert {s.name for s in train_part} | {s.name for s in valid} == {f"s{i}" for i in range(6)}
    assert len(valid) == 2
    one = write(table.parent / "one.csv", rows(1))
    data = resolved(SeriesData(path=str(one), columns="a"), read_table(one))
    (before,), (after,) = split(data, read_series(data, read_table(one)))
    assert after.place[0] == before.place[-1] + 1
    assert len(after.x) == round(0.15 * 39)


def test_order_is_a_function_of_the_step(table):
    """Every window once an epoch, in another order each epoch; parts of a batch are the batch."""
    config = series_config({"data": options(table, columns="a", batch_size=4)["data"], "training": {"steps": 1}})
    task = config.task()
    count = task.epoch_rows
    places = {tuple(place.tolist()) for place in task.prepared.train.place}

    def rows(step: int, batches: int, shard: Shard = WHOLE) -> list[tuple]:
        stream = task.batches("train", step, shard)
        return [tuple(place.tolist()) for _ in range(batches) for place in next(stream).place]

    first = rows(0, count)
    epochs = [first[count * epoch : count * (epoch + 1)] for epoch in range(4)]
    assert all(set(epoch) == places for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert rows(count - 2, 2) == first[-8:]
    halves = [rows(1, 1, Shard(rank, 2)) for rank in range(2)]
    assert [halves[0][0], halves[1][0], halves[0][1], halves[1][1]] == first[4:8]


def test_dates_and_parquet_are_read_as_numbers_of_a_csv_are(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    start = datetime.datetime(2026, 1, 31, 23, 59, tzinfo=datetime.UTC)
    times, values = [0, 30, 95, 100], [1.0, 2.5, -1.0, 4.0]
    dates = [start + datetime.timedelta(seconds=t) for t in times]
    found = []
    numbers = write(tmp_path / "numbers.csv", list(zip(times, values, strict=True)), "t,v")
    written = write(tmp_path / "dates.csv", [(d.isoformat(), v) for d, v in zip(dates, values, strict=True)], "t,v")
    columns = pyarrow.table({"t": dates, "v": values})
    parquet.write_table(columns, tmp_path / "table.parquet")
    for path in (numbers, written, tmp_path / "table.parquet"):
        every = read_table(path)
        one = read_series(resolved(SeriesData(path=str(path), time="t"), every), every)[0]
        found.append((one.x.tolist(), one.dt.tolist(), one.target.tolist()))
    assert found[0] == found[1] == found[2] == ([[1.0], [2.5], [-1.0]], [30.0, 65.0, 5.0], [[2.5], [-1.0], [4.0]])
    parquet.write_table(pyarrow.table({"t": [1, 2, 3], "v": [1.0, None, 2.0]}), tmp_path / "hole.parquet")
    with pytest.raises(DataError, match=r"hole.parquet, row 2, column 'v': the value is missing \(1 of its 3 rows\)"):
        train({"data": {"path": str(tmp_path / "hole.parquet")}}, tmp_path / "run")
    (tmp_path / "no.parquet").write_bytes(b"PAR1 or not")
    with pytest.raises(DataError, match="could not be read as Parquet"):
        read_table(tmp_path / "no.parquet")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "t.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"needs pyarrow: pip install"):
        read_table(tmp_path / "t.parquet")


def lines_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


GOOD = [("u", 1, 1.0), ("u", 2, 2.0), ("u", 3, 4.0), ("v", 1, 3.0), ("v", 4, 1.0), ("v", 5, 2.0)]


@pytest.mark.parametrize(
    ("text", "data", "message"),
    [
        ("", {}, r"table.csv is empty: its first line must name the columns"),
        ("g,t,v\n", {}, r"table.csv has no row below the names of its columns"),
        ("g,t,v\nu,1,1\nu,2\n", {}, r"line 3 has 2 values, and line 1 names 3 columns: correct the line"),
        ("g,v,v\nu,1,1\n", {}, r"names the column 'v' more than once: rename one"),
        ("g;t;v\nu;1;1\nu;2;1\n", {"columns": "v"}, r"unknown column of .*'v'.*Known: g;t;v"),
        (None, {"columns": "vv"}, r"unknown column of .*table.csv 'vv'. Did you mean 'v'\? Known: g, t, v"),
        (None, {"time": "T"}, r"unknown column of .*table.csv 'T'"),
        (None, {"columns": "g"}, r"line 2, column 'g': 'u' is no finite number \(6 of its 6 rows\): fill it in"),
        ("t,v\n1,1\n2,\n3,nan\n", {"time": "t"}, r"line 3, column 'v': the value is missing \(2 of its 3 rows\)"),
        ("t,v\n1,1\n2,2\n3,inf\n", {"time": "t"}, r"line 4, column 'v': 'inf' is no finite number"),
        (
            None,
            {"columns": "v", "time": "t"},
            r"line 5, column 't': the time does not increase: 1 comes after 3. Sort the",
        ),
        (
            None,
            {"columns": "v", "time": "t"},
            r"remove duplicate times, or name the column that tells .* --data.group",
        ),
        ("t,v\nsoon,1\nlate,2\n", {"time": "t"}, r"line 2, column 't': 'soon' is not a time: give a number, or a date"),
        ("t,v\n1,1\nlate,2\n", {"time": "t"}, r"line 3, column 't': 'late' is no finite number"),
        ("g,t,v\nu,1,1\nu,2,1\nw,1,1\n", {"columns": "v", "time": "t", "group": "g"}, r"a single row of g 'w'"),
        (None, {"task": "regression"}, r"data.task regression needs data.target, the column to predict"),
        (None, {"columns": "v", "target": "v"}, r"v is both read and predicted at the same step: leave it out of"),
        (None, {"columns": "t", "target": "g"}, r"line 2, column 'g': 'u' is not a number.*--data.task classification"),
        (
            "t,v,k\n1,1,a\n2,2,\n3,3,b\n",
            {"target": "k", "task": "classification"},
            r"line 3, column 'k': the class is mi",
        ),
        (
            "t,v\n1,1000000.1\n2,1000000.2\n3,1000000.3\n4,1000000.4\n5,1000000.5\n",
            {"columns": "v"},
            r"which float32 does not resolve: subtract a",
        ),
        ("v\n1\n2\n", {}, r"has 1 steps, of which data.valid_fraction 0.15 cannot be held out"),
        ("v\n1\n", {}, r"table.csv has a single row, and a series has at least 2"),
        (None, {"columns": "v", "time": "t", "group": "g", "valid_fraction": 0.9}, r"holds all 2 series out: lower it"),
        (
            "v,k\n1,a\n2,b\n3,a\n4,a\n5,c\n",
            {"target": "k", "task": "classification"},
            r"table.csv, line 6, column 'k': the class 'c'",
        ),
        (b"t,v\n1,\xff\n", {}, r"table.csv, line 2: not a CSV in UTF-8"),
    ],
)
def test_tables_that_cannot_be_used(text, data, message, tmp_path):
    path = tmp_path / "table.csv"
    if isinstance(text, bytes):
        path.write_bytes(text)
    elif text is None:
        write(path, GOOD, "g,t,v")
    else:
        path.write_text(text)
    with pytest.raises(GlissandoError, match=message):
        train({"data": {"path": str(path), **data}, "model": TINY}, tmp_path / "run")
    assert list(tmp_path.iterdir()) == [path]


def test_scales_are_of_what_is_trained_on(table, tmp_path):
    every = read_table(table)
    data = resolved(SeriesData(path=str(table), columns="a,b", time="t", group="g", target="y"), every)
    train_part, _ = split(data, read_series(data, every))
    found = scales(data, train_part)
    y = np.concatenate([s.target for s in train_part])
    assert found.output_mean == pytest.approx(y.mean(0))
    assert found.output_scale == pytest.approx(y.std(0))
    assert found.time_scale == pytest.approx(np.median(np.concatenate([s.dt for s in train_part])))
    constant = write(tmp_path / "constant.csv", [(1, 5), (2, 5), (3, 5), (4, 5)], "v,k")
    data = resolved(SeriesData(path=str(constant)), read_table(constant))
    assert scales(data, read_series(data, read_table(constant))).input_scale[1] == 1.0


# ---------------------------------------------------------------------- training


def test_a_window_is_no_longer_than_the_longest_series(table):
    every = read_table(table)
    data = resolved(SeriesData(path=str(table), columns="a", time="t", group="g", window=10**9), every)
    assert windows(data, read_series(data, every), []).mask.shape == (6, 39)


@pytest.mark.parametrize(
    ("data", "model", "better"),
    [
        ({"columns": "a,b"}, TINY, 0.5),
        ({"columns": "a,b", "target": "y"}, TINY, 0.8),
        ({"columns": "a,b"}, TINY | {"mixer": "attention"}, 0.9),
        ({"columns": "b", "target": "a", "task": "forecast", "time": None}, TINY, 1.0),
    ],
)
def test_a_model_learns_more_than_the_trivial_predictors(data, model, better, table, tmp_path):
    run = train(options(table, **data) | {"model": model}, tmp_path / "run")
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    expected = "both" if model["mixer"] != "attention" else "input"
    assert config["model"]["dt"] == (expected if config["data"]["time"] else "step")
    found = evaluate(run.path)
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["best"]["targets"] == found.figures
    assert summary["weights"] == "best"
    for target in found.figures.values():
        trivial = min(values["rmse"] for who, values in target.items() if who != "model")
        assert target["model"]["rmse"] < better * trivial
    metrics = lines_of(run.path / "metrics.csv")
    assert [int(row["step"]) for row in metrics if row["valid_loss"]] == list(range(4, 41, 4))
    assert float(metrics[-1]["train_loss"]) < float(metrics[0]["train_loss"])


def test_classes_are_learned(table, tmp_path):
    data = {"columns": "a,b", "target": "c", "task": "classification"}
    run = train(options(table, **data), tmp_path / "run")
    found = evaluate(run.path, out=str(tmp_path / "out.csv"))
    model, always = found.figures["c"].values()
    assert model["accuracy"] > 0.9 > 0.7 > always["accuracy"]
    assert model["cross_entropy"] == pytest.approx(found.loss)
    written = lines_of(tmp_path / "out.csv")
    assert {row["c"] for row in written} == {"up", "down"}
    assert np.mean([row["c"] == row["c_predicted"] for row in written]) == pytest.approx(model["accuracy"])


def test_scores_are_those_of_predictions_by_hand(table, tmp_path):
    """Figures, the CSV of predictions and the model itself agree, in the units of the data."""
    run = train(options(table, columns="a,b", target="y"), tmp_path / "run")
    found = evaluate(run.path, str(table), str(tmp_path / "out.csv"))
    written = lines_of(tmp_path / "out.csv")
    lines = table.read_text().splitlines()
    assert found.steps == len(written) == 240
    for row in written[::50]:
        assert float(lines[int(row["row"]) - 1].split(",")[4]) == pytest.approx(float(row["y"]))
    errors = [float(row["y_predicted"]) - float(row["y"]) for row in written]
    assert found.figures["y"]["model"]["rmse"] == pytest.approx(math.sqrt(np.square(errors).mean()))
    assert found.figures["y"]["model"]["mae"] == pytest.approx(np.abs(errors).mean())
    model, every = SeriesModel.load(run.path), read_table(table)
    data = resolved(SeriesData(path=str(table), columns="a,b", time="t", group="g", target="y"), every)
    first = read_series(data, every)[0]
    x, dt = (torch.tensor(part[None, :16]).float() for part in (first.x, first.dt))
    with torch.no_grad():
        y = model(x, dt=dt)[0][0, :, 0]
    assert y.tolist() == pytest.approx([float(row["y_predicted"]) for row in written[:16]], rel=1e-4)
    with pytest.raises(GlissandoError, match="exists; nothing is overwritten"):
        evaluate(run.path, str(table), str(tmp_path / "out.csv"))


def test_a_training_resumes_to_the_same_weights(table, tmp_path, monkeypatch, capsys):
    """Ended by Ctrl-C in the middle, it is saved, said how to go on with, and ends bit for bit where it would have."""
    values = options(table, columns="a,b") | {"model": TINY | {"block": {"mixer_dropout": 0.1}}}
    values["training"] = {"steps": 12, "log_every": 3}
    whole = train(values, tmp_path / "whole")
    taken, real = [], SeriesTask.loss

    def ask(*arguments, **keywords):
        taken.append(1)
        if len(taken) == 7:
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
    assert evaluate(tmp_path / "cut", str(table)).steps > 0
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


def test_series_have_what_the_loop_has(table, tmp_path):
    """Muon, TensorBoard and a URL; and a step in two parts is the same step, though windows are padded."""
    values = options(table, columns="a,b", batch_size=4)
    optimizer = {"kind": "muon", "learning_rate": 0.01}
    values["training"] = {"steps": 3, "optimizer": optimizer, "schedule": {"warmup_steps": 0}}
    whole = train(values, tmp_path / "whole")
    more = {"training": {"accumulate": 2, "tensorboard": True}}
    parts = train(merge(SeriesRunConfig, values, more), f"file://{tmp_path}/copied")
    for name, weight in weights(whole).items():
        assert_close(weights(parts)[name], weight, name, 1e-4)
    assert weights(tmp_path / "copied").keys() == weights(whole).keys()
    assert list(parts.path.glob("tensorboard/*"))


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
    table = read_table("few.csv")
    assert len(read_series(resolved(SeriesData(path="few.csv", time="t", group="series"), table), table)) == 12
    assert main(["series", "example", "--out", "none.csv", "--count", "0"]) == 2
    assert "--count is 0: give 1 or more" in capsys.readouterr().err
    assert not Path("none.csv").exists()


def test_the_documented_example(tmp_path, monkeypatch, capsys):
    """A CSV is written, trained on and scored by commands; a configuration file stands for options."""
    monkeypatch.chdir(tmp_path)
    assert main(["series", "example", "--out", "oscillators.csv"]) == 0
    assert "31 series of 700 steps" in capsys.readouterr().out
    short = Path("oscillators.csv").read_text().splitlines()
    Path("short.csv").write_text("\n".join(short[: 1 + 4 * 700]) + "\n")
    common = ["--data.path", "short.csv", "--data.time", "t", "--data.group", "series"]
    assert main(["series", "train", *common, "--training.steps", "20", "--out", "run"]) == 0
    told = capsys.readouterr().err
    assert "forecast of a, b from a, b, time t (both); 33 windows of 64 steps to train, 11 held out" in told
    assert "try: glissando series evaluate run" in told
    assert main(["series", "evaluate", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["targets"]["a"].keys() == {"model", "last value", "mean"}
    assert main(["series", "evaluate", "run"]) == 0
    assert "last value" in capsys.readouterr().out
    Path("run.yaml").write_text(
        "preset: attention-series\ndata: {path: short.csv, columns: [a], time: t, group: series}\n"
    )
    assert main(["series", "train", "--config", "run.yaml", "--training.steps", "2", "--out", "run2"]) == 0
    assert yaml.safe_load(Path("run2/config.yaml").read_text())["model"]["mixer"]["kind"] == "attention"
    assert main(["series", "train", "--resume", "run2"]) == 0
    assert "is finished, at step 2" in capsys.readouterr().err


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
        (["trian"], "action 'trian' is none of train, evaluate, example. Did you mean 'train'?"),
        (["train"], "--out is missing"),
        (["train", "--out", "x"], "data.path is missing"),
        (["train", "somewhere", "--out", "x"], "`series train` takes no 'somewhere'"),
        (["train", "--json", "--out", "x"], "--json is not an option of `series train`"),
        (["evaluate"], "`series evaluate` needs a run directory"),
        (["evaluate", "nowhere"], "no run at nowhere"),
        (["evaluate", "x", "--data.window", "3"], "--data.window is not an option of `series evaluate`"),
        (["train", "--resume", "x", "--training.steps", "3"], "leave --training.steps out"),
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
        (["train", "--data.path", "t.csv", "--model.dt", "both", "--out", "x"], "no column holds times: name it with"),
        (
            [
                "train",
                "--data.path",
                "t.csv",
                "--data.time",
                "t",
                "--preset",
                "attention-series",
                "--model.dt",
                "step",
                "--out",
                "x",
            ],
            "this model does not take time steps",
        ),
        (["train", "--data.path", "t.csv", "--data.columns", "[a", "--out", "x"], "data.columns"),
        (["train", "--data.path", "nowhere.csv", "--out", "x"], "there is no file nowhere.csv"),
        (["train", "--data.path", "t.csv", "--training.accelerator", "abacus", "--out", "x"], "'abacus'"),
    ],
)
def test_mistakes_at_the_command_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(Path("t.csv"), [row[1:5] for row in rows(1)], "t,a,b,y")
    if "model.inputs" in message:
        write(Path("t.csv"), [(1, 2, 3, 4, k) for k in range(9)], "p,q,r,s,t")
    assert main(["series", *arguments]) != 0
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told
    assert not Path("x").exists()


def test_a_run_of_series_is_not_taken_for_one_of_language(table, tmp_path, capsys):
    run = train(options(table, columns="a"), tmp_path / "run")
    for command in (["generate", str(run.path)], ["evaluate", str(run.path)], ["train", "--resume", str(run.path)]):
        assert main(command) == 1
        assert "predicts numbers: use `glissando series evaluate" in capsys.readouterr().err
