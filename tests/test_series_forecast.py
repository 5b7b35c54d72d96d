"""Forecasts of new tables: what is asked, written and drawn, and rolling origins."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from glissando.cli import main
from glissando.errors import ConfigError, DataError, RunError
from glissando.series.answers import answers, logits, naive_errors
from glissando.series.asking import ask, draw_paths, origins_of, rolling_answers
from glissando.series.evaluation import evaluate
from glissando.series.forecast import SeriesRun, ahead_of, predict, probabilities, write_table
from glissando.series.options import SeriesData
from glissando.series.scores import ANCHOR, LAST, MEAN, SEASON, score_forecasts
from glissando.series.stream import observe
from glissando.series.task import build, fit_anchor, prepare, windows_of
from glissando.state import state_bytes

SMALL = {"hidden_size": 8, "depth": {"layers": 1}, "pairs": 2, "block": {"mlp": {"hidden": 8}}, "head": "student"}


def visits(seed: int = 0, people: int = 12, steps: int = 30, **more: Any) -> pandas.DataFrame:
    """Two channels at uneven dates with gaps, a static fact and the hour of the day."""
    rng = np.random.default_rng(seed)
    frames = []
    for person in range(people):
        n = steps + person % 3
        hours = rng.integers(1, 9, n).cumsum()
        day = np.sin(2 * np.pi * hours / 24)
        a = np.where(rng.random(n) < 0.2, np.nan, 100 + 5 * day + rng.normal(size=n))
        b = np.where(rng.random(n) < 0.4, np.nan, 0.1 * rng.normal(size=n).cumsum())
        when = pandas.Timestamp("2026-01-31") + pandas.to_timedelta(hours, "h")
        frames.append(
            pandas.DataFrame(
                {
                    "who": f"p{person}",
                    "when": when.astype(str),
                    "a": a,
                    "b": b,
                    "age": 50.0 + person,
                    "hour": hours % 24,
                }
            )
        )
    return pandas.concat(frames, ignore_index=True).assign(**more)


def trained(frame: pandas.DataFrame, **options: Any) -> SeriesRun:
    """A run whose anchor is solved for and whose network is new: what it forecasts is not good, and is exact."""
    torch.manual_seed(0)
    data = {"group": "who", "time": "when", "static": ["age"], "future": ["hour"], "columns": ["a", "b"]}
    model = {**SMALL, **options.pop("model", {})}
    path = Path(options.pop("folder")) / "table.csv"
    frame.to_csv(path, index=False)
    settings = SeriesData(path=str(path), **{**data, **options})
    prepared = prepare(settings)
    made = build(model, prepared).double()
    if made.config.forecast:
        fit_anchor(made, prepared.train)
    return SeriesRun(made.eval(), prepared.encoding, settings)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SeriesRun:
    return trained(visits(), folder=tmp_path_factory.mktemp("run"))


def hours_after(frame: pandas.DataFrame, hours: int) -> pandas.DataFrame:
    """The hour of the day after each person's last visit."""
    last = pandas.to_datetime(frame["when"]).groupby(frame["who"]).max()
    rows = [
        {"who": who, "when": (time + pandas.Timedelta(hours=h)).isoformat(), "hour": (time.hour + h) % 24}
        for who, time in last.items()
        for h in range(1, hours + 1)
    ]
    return pandas.DataFrame(rows)


def test_a_forecast_has_the_users_names_times_and_quantiles(run: SeriesRun, tmp_path: Path) -> None:
    frame = visits(seed=1, people=3)
    found = predict(run, run.read(frame), "6h", "2h", [0.1, 0.5, 0.9], 4, hours_after(frame, 6))
    write_table(found, tmp_path / "forecast.csv")
    with open(tmp_path / "forecast.csv") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "who",
        "when",
        "channel",
        "value",
        "q0.1",
        "q0.5",
        "q0.9",
        *(f"sample_{n}" for n in range(1, 5)),
    ]
    assert len(rows) == 3 * 3 * 2
    assert [row["channel"] for row in rows[:2]] == ["a", "b"]
    last = pandas.to_datetime(frame["when"])[frame["who"] == "p0"].max()
    assert rows[0]["when"] == (last + pandas.Timedelta(hours=2)).isoformat() + "Z"
    assert rows[4]["when"] == (last + pandas.Timedelta(hours=6)).isoformat() + "Z"
    for row in rows:
        assert float(row["q0.1"]) < float(row["q0.5"]) < float(row["q0.9"])
    assert 80 < float(rows[0]["value"]) < 120
    with pytest.raises(RunError, match="nothing is overwritten"):
        write_table(found, tmp_path / "forecast.csv")


def test_a_forecast_is_what_the_model_answers_and_the_same_beside_others(run: SeriesRun) -> None:
    frame = visits(seed=1, people=3)
    future = hours_after(frame, 6)
    found = predict(run, run.read(frame), "6h", "3h", future=future)
    alone = frame[frame["who"] == "p1"]
    assert np.allclose(predict(run, run.read(alone), "6h", "3h", future=future).value, found.value[4:8], rtol=1e-9)
    panel = run.read(alone)
    steps = run.steps(panel)
    x, hour = steps.values.unsqueeze(0), future[future["who"] == "p1"]["hour"].to_numpy(np.float64)
    y, _ = run.model(
        x, observed=~x.isnan(), dt=steps.gaps.unsqueeze(0), static=steps.static, future=steps.future.unsqueeze(0),
        horizon=torch.tensor([3.0, 6.0]).double().mul(3600).expand(1, x.shape[1], 2),
        ahead=torch.tensor(hour[[2, 5]]).unsqueeze(-1).expand(1, x.shape[1], 2, 1),
    )  # fmt: skip
    assert np.allclose(run.model.distribution.mean(y[0, -1]).detach().flatten(), found.value[4:8], rtol=1e-9)


def test_numbers_and_rows_have_their_own_units(tmp_path: Path) -> None:
    frame = visits().assign(when=lambda f: range(len(f)))
    options = {"static": [], "future": [], "folder": tmp_path}
    run = trained(frame, time_unit="h", **options)
    found = predict(run, run.read(frame[frame["who"] == "p0"]), "1d", "12h")
    assert found["when"].tolist() == ["41", "41", "53", "53"]
    assert predict(run, run.read(frame[frame["who"] == "p0"]), 2.5)["when"].tolist() == ["31.5", "31.5"]
    with pytest.raises(ConfigError, match="horizon is 'soon'"):
        predict(run, run.read(frame), "soon")
    with pytest.raises(ConfigError, match="every is '2d'"):
        predict(run, run.read(frame), "1d", "2d")
    with pytest.raises(ConfigError, match="times of each series, and 100,000 are the most"):
        predict(run, run.read(frame), "1d", "1us")
    run = trained(frame, time=None, **options)
    found = predict(run, run.read(frame[frame["who"] == "p0"]), 2, 1)
    assert found["step"].tolist() == ["30", "30", "31", "31"]
    assert list(found) == ["who", "step", "channel", "value"]
    for horizon in (1.5, "2h"):
        with pytest.raises(ConfigError, match="give a whole number of rows"):
            predict(run, run.read(frame), horizon)


def test_known_future_columns_are_needed_at_every_time(run: SeriesRun) -> None:
    frame = visits(seed=1, people=2)
    panel, future = run.read(frame), hours_after(frame, 4)
    with pytest.raises(ConfigError, match="reads hour, which are known in advance"):
        predict(run, panel, "4h")
    with pytest.raises(DataError, match=r"frame has no row of who 'p0' at when 2026-.*Z, which is forecast"):
        predict(run, panel, "5h", future=future)
    with pytest.raises(DataError, match="no column 'hour' in frame"):
        predict(run, panel, "4h", future=future.drop(columns="hour"))
    blank = future.astype({"hour": float})
    blank.loc[3, "hour"] = np.nan
    with pytest.raises(DataError, match="frame row 4, column 'hour': the value is missing"):
        predict(run, panel, "4h", future=blank)
    twice = pandas.concat([future, future.iloc[[2]].assign(hour=25)])
    with pytest.raises(DataError, match=r"frame row 9, column 'hour': .* is 25, and in row 3 it is"):
        predict(run, panel, "4h", future=twice)
    predict(run, panel, "4h", future=pandas.concat([future, future]))
    assert not np.allclose(
        predict(run, panel, "4h", future=future).value, predict(run, panel, "4h", future=future.assign(hour=0)).value
    )


def test_paths_are_drawn_step_by_step(run: SeriesRun) -> None:
    """The marginals of the first time are the head's; a second value follows from the first, read as an observation."""
    frame = visits(seed=1, people=2)
    panel, head = run.read(frame), run.model.distribution
    steps = run.steps(panel)
    at = np.r_[np.flatnonzero(steps.first.numpy())[1:], len(steps.first)] - 1
    ahead = torch.zeros(2, 2, 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    paths = draw_paths(run.model, steps, at, [3600.0, 9000.0], ahead, 64, 400, generator)
    assert paths.shape == (2, 400, 2, 2)
    again = draw_paths(run.model, steps, at, [3600.0, 9000.0], ahead, 64, 400, torch.Generator().manual_seed(3))
    assert torch.equal(paths, again)
    params = ask(run.model, steps, at, torch.full((2, 1), 3600.0).double(), ahead[:, :1])[:, 0]
    low, high = head.quantile(params, [0.2, 0.7]).unbind(-1)
    assert (paths[:, :, 0] < low.unsqueeze(1)).double().mean(1) == pytest.approx(0.2 * np.ones((2, 2)), abs=0.07)
    assert (paths[:, :, 0] < high.unsqueeze(1)).double().mean(1) == pytest.approx(0.7 * np.ones((2, 2)), abs=0.07)
    first, second = paths[0, :, 0, 1], paths[0, :, 1, 1]
    assert torch.corrcoef(torch.stack([first, second]))[0, 1] > 0.3  # b is a walk


def test_a_drawn_value_is_read_as_an_observation_at_its_time(run: SeriesRun) -> None:
    """The second values of three paths, from tables that have their first ones as a row."""
    frame = visits(seed=1, people=1)
    steps, head = run.steps(run.read(frame)), run.model.distribution
    at, ahead = np.array([len(steps.first) - 1]), torch.zeros(1, 2, 1, dtype=torch.float64)
    paths = draw_paths(run.model, steps, at, [3600.0, 9000.0], ahead, 64, 3, torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    params = ask(run.model, steps, at, torch.full((1, 1), 3600.0).double(), ahead[:, :1])[0, 0]
    first = head.sample(params.expand(3, -1, -1), 1, generator)[0]
    later = []
    for values in first:
        row = frame.iloc[[-1]]
        when = (pandas.to_datetime(row["when"]) + pandas.Timedelta(hours=1)).astype(str)
        longer = pandas.concat([frame, row.assign(when=when, a=float(values[0]), b=float(values[1]), hour=0)])
        more = run.steps(run.read(longer))
        last = np.array([len(more.first) - 1])
        later.append(ask(run.model, more, last, torch.full((1, 1), 5400.0).double(), ahead[:, :1])[0, 0])
    second = head.sample(torch.stack(later), 1, generator)[0]
    assert torch.allclose(paths[0], torch.stack([first, second], 1), rtol=1e-8)


@pytest.mark.parametrize("scale", ["all", "series"])
def test_one_observation_after_another_gives_the_forecasts_of_the_table(scale: str, tmp_path: Path) -> None:
    run = trained(visits(), folder=tmp_path, scale=scale)
    frame = visits(seed=4, people=1)
    live, horizon, ahead = None, torch.tensor([3600.0, 7200.0]), torch.tensor([[1.0], [2.0]])
    rows = frame.to_dict("records")
    with pytest.raises(DataError, match="no column 'b'"):
        observe(run, None, {name: value for name, value in rows[0].items() if name != "b"})
    for row in rows:
        y, live = observe(run, live, row, horizon, ahead)
    steps = run.steps(run.read(frame))
    at = np.array([len(steps.first) - 1])
    assert torch.allclose(y, ask(run.model, steps, at, horizon.view(1, 2), ahead.unsqueeze(0))[0], rtol=1e-7)
    with pytest.raises(DataError, match="is not after the one before"):
        observe(run, live, rows[-1])
    sizes = [state_bytes(observe(run, None, row)[1].state) for row in rows[:2]]
    assert state_bytes(live.state) == sizes[0]


def test_rolling_origins_do_not_see_what_they_forecast(run: SeriesRun) -> None:
    frame = visits(seed=2, people=3)
    frame["b"] = np.arange(len(frame)) % 7 / 7  # at every step
    panel = run.read(frame)
    steps = run.steps(panel)
    at, until = origins_of(steps, 3)
    assert len(at) == 9
    assert (until > at + 1).all()
    found = rolling_answers(run.model, panel, steps, 3, 64)
    assert set(found.baselines) >= {LAST, MEAN, ANCHOR}
    assert (found.horizon > 0).all()
    assert (found.gap[~np.isnan(found.gap)] >= found.horizon[~np.isnan(found.gap)] - 1e-9).all()
    series, end = int(steps.series[at[4]]), int(at[4])
    known = int(steps.row[end] - panel.starts[series]) + 1
    cut = panel.choose(np.arange(3), np.where(np.arange(3) == series, known, panel.lengths))
    short = run.steps(cut)
    last = int((short.series == series).nonzero().max())
    horizon = (steps.time[end + 1] - steps.time[end]).view(1, 1)
    expected = ask(run.model, short, np.array([last]), horizon, steps.future[end + 1].view(1, 1, 1))[0, 0]
    changed = replace(
        panel, values=np.where(np.arange(len(panel.values))[:, None] > steps.row[end].item(), 1e3, panel.values)
    )
    other = ask(run.model, run.steps(changed), np.array([end]), horizon, steps.future[end + 1].view(1, 1, 1))[0, 0]
    assert torch.allclose(expected, other, rtol=1e-9)
    chosen = (found.series == series) & np.isclose(found.horizon, horizon.item())
    assert any(np.allclose(found.params[i], expected[found.channel[i]], rtol=1e-9) for i in np.flatnonzero(chosen))
    score = score_forecasts(found, run.model.distribution, run.encoding.target)
    assert list(score.figures) == ["a", "b"]
    wide = rolling_answers(run.model, panel, steps, 3, 64, horizon=36000.0)
    assert wide.horizon.max() <= 36000.0
    assert (panel.values[wide.row, wide.channel] == wide.target).all()
    assert len(np.unique(wide.horizon)) > 3


def test_a_period_is_one_of_the_baselines(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    hours = np.arange(400)
    frame = pandas.concat(
        pandas.DataFrame({"who": who, "when": hours, "a": np.sin(2 * np.pi * hours / 24) + 0.1 * rng.normal(size=400)})
        for who in ("x", "y")
    )
    run = trained(frame, static=[], future=[], columns=["a"], folder=tmp_path)
    panel = run.read(frame)
    found = rolling_answers(run.model, panel, run.steps(panel), 4, 64)
    error = found.baselines[SEASON] - found.target
    assert np.sqrt((error**2).mean()) < 0.2 < np.sqrt(((found.baselines[LAST] - found.target) ** 2).mean())


@pytest.mark.slow
def test_the_commands_forecast_and_roll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    run = trained(visits(people=8), static=[], future=[], folder=tmp_path)
    run.save("run")
    visits(seed=1, people=2).to_csv("new.csv", index=False)
    command = ["series", "predict", "run", "--file", "new.csv", "--out", "f.csv"]
    assert main([*command, "--horizon", "4h", "--every", "2h", "--quantiles", "0.1,0.9", "--samples", "2"]) == 0
    assert "f.csv: 8 rows of 2 series" in capsys.readouterr().out
    assert list(pandas.read_csv("f.csv")) == ["who", "when", "channel", "value", "q0.1", "q0.9", "sample_1", "sample_2"]
    for more, message in (
        (["--horizon", "4h"], "nothing is overwritten"),
        (["--out", "g.csv"], "say how far with --horizon"),
        (["--out", "g.csv", "--every", "1h"], "no horizon was given"),
        (["--out", "g.csv", "--horizon", "1h", "--samples", "-1"], "samples is -1"),
        (["--out", "g.csv", "--horizon", "1h", "--samples", "2", "--seed", "1e20"], "seed must be a whole number from"),
        (["--out", "g.csv", "--horizon", "soon"], "horizon is 'soon'"),
        (["--out", "g.csv", "--horizon", "1h", "--quantiles", "2"], "2.0 is no level of a quantile"),
        (["--out", "g.csv", "--origins", "3"], "--origins is not an option of `series predict`"),
    ):
        assert main([*command[:5], *command[5:] * (message == "nothing is overwritten"), *more]) != 0
        said = capsys.readouterr().err
        assert message in said
        assert "channels: a, b" not in said, "what cannot be asked is refused before the table is read"
    roll = ["series", "evaluate", "run", "--file", "new.csv", "--origins", "3", "--horizon", "10h"]
    assert main([*roll, "--out", "rolled.csv"]) == 0
    assert "scored in 2 series" in capsys.readouterr().out
    panel = run.read("new.csv")
    found = rolling_answers(run.model, panel, run.steps(panel), 3, 64, horizon=36000.0)
    rolled = pandas.read_csv("rolled.csv")
    assert list(rolled) == ["who", "when", "origin", "target", "value", "predicted"]
    span = pandas.to_datetime(rolled["when"]) - pandas.to_datetime(rolled["origin"])
    order = np.argsort(found.row, kind="stable")
    assert np.allclose(span.dt.total_seconds(), found.horizon[order])
    assert np.allclose(rolled["predicted"], run.model.distribution.mean(found.params).numpy()[order])
    assert (Path("run") / "new" / "origins" / "forecasts.png").read_bytes().startswith(b"\x89PNG")
    assert main(["series", "evaluate", "run", "--file", "new.csv", "--origins", "0"]) != 0
    assert "origins is 0" in capsys.readouterr().err
    drawn = sorted(Path("run").rglob("*.png"))
    assert main(["series", "evaluate", "run", "--file", "new.csv", "--out", "f.csv"]) != 0
    assert "f.csv exists; nothing is overwritten" in capsys.readouterr().err
    assert sorted(Path("run").rglob("*.png")) == drawn, "found before anything is scored or drawn"
    assert main(["series", "evaluate", "run", "--horizon", "10h"]) != 0
    assert "add --origins 5" in capsys.readouterr().err


def test_a_new_table_has_its_own_static_facts_delimiter_and_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("glissando.series.pictures.draw", lambda *_: [])
    old, new = visits(people=8), visits(seed=1, people=2).assign(who=lambda frame: "new " + frame["who"])
    for name, frame in (("old", old), ("new", new)):
        frame[["who", "age"]].drop_duplicates().to_csv(
            f"{name}_people.csv", index=False, sep="," if name == "old" else ";"
        )
    path = str(tmp_path / "old_people.csv")
    trained(old.drop(columns="age"), future=[], columns=["a"], static_path=path, folder=tmp_path).save("run")
    Path("old_people.csv").unlink()
    twice = new.drop(columns="age").iloc[[*range(len(new)), -1]].reset_index(drop=True)
    twice.loc[len(new), "a"] += 2
    twice.to_csv("new.csv", index=False, sep=";")
    command = ["series", "predict", "run", "--file", "new.csv", "--horizon", "4h", "--out", "f.csv"]
    for more, message in (
        ("--data.static_path new_people.csv", "--data.delimiter ';'"),
        ("--data.delimiter ;", "old_people.csv: give an existing CSV or Parquet file with --data.static_path FILE"),
        ("--data.delimiter ; --data.static_path new_people.csv", "--data.duplicates mean, first or last"),
    ):
        assert main([*command, *more.split()]) != 0
        assert message in capsys.readouterr().err
    reading = ["--data.delimiter", ";", "--data.static_path", "new_people.csv", "--data.duplicates", "last"]
    assert main([*command, *reading]) == 0
    said = capsys.readouterr()
    assert "2 rows of 2 series" in said.out
    assert "static: age\n" in said.err
    assert main(["series", "evaluate", "run", "--file", "new.csv", *reading]) == 0
    capsys.readouterr()
    assert main(["series", "evaluate", "run", *reading]) != 0
    assert "--data.delimiter is of another table: add --file" in capsys.readouterr().err


def test_names_of_the_table_are_kept_where_ours_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the table repeats is no reason to name an option that predict has not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("glissando.series.pictures.draw", lambda *_: [])
    frame = visits(people=8).rename(columns={"who": "value", "when": "predicted", "a": "target"})
    plain = {"group": "value", "time": "predicted", "columns": ["target"], "static": [], "future": []}
    run = trained(frame, folder=tmp_path, **plain)
    found = predict(run, run.read(frame), "3h", quantiles=[0.5])
    assert list(found) == ["value", "predicted", "channel", "value_", "q0.5"]
    assert found["value"].tolist() == [f"p{number}" for number in range(8)]
    assert found["channel"].unique().tolist() == ["target"]
    run.save("run")
    evaluate("run", "table.csv", "out.csv")
    written = pandas.read_csv("out.csv")
    assert list(written) == ["value", "predicted", "target", "value_", "predicted_"]
    assert written["value"].unique().tolist() == found["value"].tolist()
    run = trained(frame.rename(columns={"target": "channel"}), **{**plain, "columns": ["channel"]}, target=["b"],
        task="regression", folder=tmp_path)  # fmt: skip
    assert list(predict(run, run.read("table.csv"))) == ["value", "predicted", "channel", "value_"]
    alone = trained(frame.iloc[:30], folder=tmp_path, **{**plain, "group": None})
    twice = frame.iloc[[0, 1, 1]].assign(target=[1.0, 2.0, 3.0])
    with pytest.raises(DataError, match=r"correct one, or choose with --data\.duplicates mean, first or last$"):
        alone.read(twice)


@pytest.mark.parametrize("form", ["frame", "text"])
def test_fractional_times_of_a_known_future_match(form: str, tmp_path: Path) -> None:
    """Whatever float64 rounds; the nearest is taken, and one beyond is missing."""
    times = 1738281600.123 + 0.1 * np.arange(40)
    frame = pandas.DataFrame({"when": times, "a": np.sin(np.arange(40)), "hour": np.arange(40.0)})
    run = trained(frame, group=None, static=[], columns=["a"], folder=tmp_path)
    ahead = pandas.DataFrame({"when": times[-1] + 0.1 * np.arange(1, 6), "hour": np.arange(40.0, 45)})
    past, future = frame, ahead
    if form == "text":
        past, future = (part.assign(when=part["when"].map("{:.3f}".format)) for part in (frame, ahead))
    found = ahead_of(run.data, run.encoding, run.read(past), run.horizons("0.5", "0.1"), future)
    assert found[0, :, 0].tolist() == [40, 41, 42, 43, 44]
    with pytest.raises(DataError, match=r"frame has no row at when 1738281604\.6\d+, which is forecast"):
        ahead_of(run.data, run.encoding, run.read(past), np.array([0.6]), future)
    with pytest.raises(DataError, match="has no row at when"):
        ahead_of(run.data, run.encoding, run.read(past), np.array([0.1001]), future)


def test_mase_divides_by_the_last_values_error_in_the_training_data(run: SeriesRun) -> None:
    panel = run.read(visits(seed=1, people=3))
    expected = []
    for k in range(2):
        errors = [np.diff(v[~np.isnan(v)]) for v in np.split(panel.values[:, k], panel.starts[1:-1])]
        expected.append(np.abs(np.concatenate(errors)).mean())
    assert naive_errors(run.steps(panel), [0, 1], by_series=False) == pytest.approx(expected)


def test_numbers_and_classes_of_steps_and_series_have_a_row_each(tmp_path: Path) -> None:
    """As evaluate scores them; a table without the target is predicted, too."""
    frame = visits(people=8)
    frame["b"] = frame["b"].fillna(0.0)
    frame["high"] = np.where(frame["b"] > 0, "yes", "no")
    frame["group"] = np.where(frame["who"] < "p4", "x", "y")
    plain = {"static": [], "future": [], "columns": ["a"], "folder": tmp_path}
    new = frame.drop(columns=["b", "high", "group"])
    run = trained(frame, target=["b"], task="regression", **plain)
    found = predict(run, run.read(new), quantiles=[0.1, 0.9])
    assert list(found) == ["who", "when", "channel", "value", "q0.1", "q0.9"]
    assert len(found.value) == len(frame)
    panel = run.read(frame)
    answered = answers(run.model, windows_of(panel, run.data, run.encoding, run.scales))
    expected = run.model.distribution.mean(answered.params).numpy()
    assert np.allclose(found.value[answered.row], expected)
    for name, count in (("high", len(frame)), ("group", 8)):
        run = trained(frame, target=[name], task="classification", model={"head": "point"}, **plain)
        labels = predict(run, run.read(new))
        p = probabilities(run, run.read(new))
        assert len(labels) == count
        assert list(labels)[-2:] == [f"p_{each}" for each in run.encoding.classes]
        assert np.array_equal(labels.iloc[:, -2:], p)
        assert np.allclose(p.sum(-1), 1)
        panel = run.read(frame)
        scores, _, series, rows = logits(run.model, windows_of(panel, run.data, run.encoding, run.scales))
        place = rows.numpy() if count > 8 else series.numpy()
        assert np.allclose(p[place], scores.softmax(-1).numpy())
    with pytest.raises(ConfigError, match="has no horizon"):
        predict(run, panel, 1)


def test_a_long_table_is_forecast_and_streamed_by_its_own_names(tmp_path: Path) -> None:
    wide = visits(people=8)
    long = wide.melt(["who", "when", "age"], ["a", "b"], "test", "result").dropna(subset="result")
    options = {"columns": [], "future": [], "channel": "test", "value": "result", "folder": tmp_path}
    run = trained(long, **options)
    one = long[long["who"] == "p1"]
    found = predict(run, run.read(one), "3h", quantiles=[0.5])
    assert list(found) == ["who", "when", "test", "result", "q0.5"]
    live = None
    for row in wide[wide["who"] == "p1"].drop(columns="hour").to_dict("records"):
        if row["a"] == row["a"] or row["b"] == row["b"]:
            y, live = observe(run, live, row, torch.tensor([10800.0]))
    assert np.allclose(run.model.distribution.mean(y[0]).numpy(), found["result"], rtol=1e-7)
    with pytest.raises(DataError, match="nothing was observed"):
        observe(run, live, {"who": "p1", "when": "2027-01-01", "age": 1.0, "a": None, "b": float("nan")})
