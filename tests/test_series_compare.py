"""The comparison of series models: its peer obeys the contract, and what is tested on is not trained on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.series import compare, systems
from glissando.series.options import SeriesData
from glissando.series.task import SeriesRunConfig
from glissando.testing import check_mixer
from glissando.training.fit import train


def test_the_gru_obeys_the_laws():
    check_mixer(compare.GRU)


@pytest.mark.parametrize("name", compare.TASKS)
def test_options_of_tasks_exist(name: str):
    SeriesData(**compare.TASKS[name]["options"]["data"])


def test_a_test_part_is_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [f"{group},{t},{'hdl' if t % 2 else 'sbp'},{100 + t}" for group in range(20) for t in range(4)]
    (tmp_path / "t.csv").write_text("\n".join(["g,t,test,v", *rows, "3,9,sbp,999"]) + "\n")
    data = {"group": "g", "time": "t", "channel": "test", "value": "v"}
    task = {"file": "t.csv", "test": "groups", "drop": {"sbp": [40, 300]}, "options": {"data": data}}
    monkeypatch.setitem(compare.TASKS, "own", task)
    trained, tests = compare.tables("own", tmp_path, tmp_path)
    test = tests[""]
    parts = [path.read_text().splitlines() for path in (trained, test)]
    assert sorted(parts[0][1:] + parts[1][1:]) == sorted(rows)
    groups = [{line.split(",")[0] for line in part[1:]} for part in parts]
    assert not groups[0] & groups[1]
    assert len(groups[1]) == 3
    monkeypatch.setitem(compare.TASKS, "own", {**task, "test": "end"})
    for path in (trained, test):
        path.unlink()
    trained, tests = compare.tables("own", tmp_path, tmp_path)
    test = tests[""]
    assert [line for line in test.read_text().splitlines() if line.startswith("0,")] == ["0,3,hdl,103"]


def test_thinned_rows_keep_two_of_every_group():
    rows = [[str(group), str(t)] for group in range(30) for t in range(20)]
    kept = compare.thinned(rows, 0, 0.7)
    assert 0.28 * len(rows) < len(kept) < 0.35 * len(rows)
    assert {row[0] for row in kept} == {row[0] for row in rows}
    assert kept == [row for row in rows if row in kept]
    assert min(sum(row[0] == str(group) for row in kept) for group in range(30)) >= 2


def test_a_landmark_leaves_out_who_left_before(tmp_path: Path):
    people = [("a", 300, 1), ("b", 400, 1), ("c", 400, 0), ("d", 2000, 1), ("e", 2000, 0)]
    lines = ["id,futime,status", *(",".join(map(str, person)) for person in people)]
    (tmp_path / "people.csv").write_text("\n".join(lines))
    task = {"landmark": {"day": 365, "until": 1826, "people": "people.csv"}, "score": ["died"]}
    rows = [[name, day] for name in "abcde" for day in ("10", "365", "366")]
    header, kept = compare._with_outcome(task, ["id", "days"], rows, tmp_path)
    assert header == ["id", "days", "died"]
    outcome = {"b": "yes", "d": "no", "e": "no"}
    assert kept == [[name, day, outcome[name]] for name in "bde" for day in ("10", "365")]


@pytest.mark.parametrize("name", systems.SYSTEMS)
def test_systems_do_not_depend_on_the_step_of_the_solver(name: str, monkeypatch: pytest.MonkeyPatch):
    def values() -> np.ndarray:
        lines = systems.table(name, 0.5, 1, 8, seed=0)[1:]
        return np.array([[float(cell) for cell in line.split(",")] for line in lines])

    whole = values()
    monkeypatch.setattr(systems, "_STEP", 0.01)
    np.testing.assert_allclose(values(), whole, atol=2e-3 if name == "chaotic" else 1e-5)
    assert 0.1 < np.diff(whole[:8, 1]).mean() < 0.9


def test_tasks_like_another_have_all_of_it() -> None:
    assert compare.TASKS["labs-intervals"]["options"]["data"] == compare.TASKS["labs"]["options"]["data"]
    assert compare.TASKS["labs-intervals"]["options"]["model"] == {"head": "student"}
    assert "model" not in compare.TASKS["labs"]["options"]


def test_forecasts_are_scored_at_each_horizon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glissando.series.pictures.draw", lambda *_: [])  # which takes longer than all else
    rows = [f"a,{hour},{np.sin(hour / 3):.4f}" for hour in range(120)]
    (tmp_path / "t.csv").write_text("\n".join(["who,t,x", *rows]) + "\n")
    values = {"data": {"path": str(tmp_path / "t.csv"), "group": "who", "time": "t", "time_unit": "h"}}
    train(SeriesRunConfig.read({**values, "training": {"steps": 1}}), tmp_path / "run")
    task = {"horizons": {"1 h": "1h", "9 h": "9h"}, "origins": 20}
    found = dict(compare.at_horizons(tmp_path / "run", tmp_path / "t.csv", task))
    assert list(found) == ["1 h", "9 h"]
    assert found["1 h"]["x"]["last value"]["rmse"] < 0.4 < found["9 h"]["x"]["last value"]["rmse"]


def test_what_needs_no_training_is_written_once(tmp_path: Path) -> None:
    lines = [
        {"task": "own", "seed": seed, "tests": {"": {"a": {
            "model": {"rmse": 1.0}, "last value": {"rmse": 2.0}, "anchor": {"rmse": 3.0, "model_minus_low": seed - 3.0},
        }}}}
        for seed in range(2)
    ]  # fmt: skip
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    written = [(one["seed"], *row[2:]) for one, row in compare.figures(tmp_path)]
    assert written == [
        (0, "model", "rmse", 1.0), (0, "last value", "rmse", 2.0), (0, "anchor", "rmse", 3.0),
        (0, "anchor", "model_minus_low", -3.0), (1, "model", "rmse", 1.0), (1, "anchor", "model_minus_low", -2.0),
    ]  # fmt: skip
