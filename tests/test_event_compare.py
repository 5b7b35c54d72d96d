"""The comparison of event models: its options exist, and what is tested on is not trained on."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tuned
from benchmarks.events import compare
from benchmarks.series.compare import GRU, GRUConfig
from glissando.config import from_dict
from glissando.events.options import EventsData
from glissando.events.task import build, prepare
from glissando.mixers import MIXERS, register_mixer


@pytest.mark.parametrize("name", compare.TASKS)
def test_options_of_tasks_exist(name: str) -> None:
    from_dict(EventsData, compare.TASKS[name]["options"]["data"], "data")


def test_fresh_series_of_a_process_are_tested_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compare.TASKS, "own", {**compare.TASKS["hawkes1"], "train": 2, "test": 3})
    read, test, reading = compare.logs("own", tmp_path, tmp_path)
    assert not reading
    trained, tested = (Path(path).read_text().splitlines()[1:] for path in (read["path"], test))
    assert len({row.split(",")[0] for row in tested}) == 3
    assert not {row.split(",", 1)[1] for row in trained} & {row.split(",", 1)[1] for row in tested}


def test_people_and_times_that_are_tested_on_are_not_trained_on(tmp_path: Path) -> None:
    people = [f"{i},{40 + i},{i % 2},0,0,{20 + i},{100 + i},0" for i in range(30)]
    (tmp_path / "nafld_subjects.csv").write_text(
        "\n".join(["id,age,male,weight,height,bmi,futime,status", *people]) + "\n"
    )
    events = [f"{i},{t},{'htn' if t % 2 else 'dm'}" for i in range(0, 30, 2) for t in (-3, 4, 9)]
    (tmp_path / "nafld_events.csv").write_text("\n".join(["id,days,event", *events, "2,0,nafld"]) + "\n")
    read, test, reading = compare.logs("nafld", tmp_path, tmp_path)

    def named(path: str) -> set[str]:
        return {row.split(",")[0] for row in Path(path).read_text().splitlines()[1:]}

    assert len(named(read["static_path"])) == 24
    assert len(named(reading["static_path"])) == 6
    assert not named(read["static_path"]) & named(reading["static_path"])
    assert named(read["path"]) <= named(read["static_path"])
    assert named(test) <= named(reading["static_path"])
    stops = [f"2017-01-{day:02}T06:00:{day:02}Z,suspicious,{day % 3}" for day in range(1, 22)]
    (tmp_path / "stops.csv").write_text("\n".join(["time,problem,precinct", *stops]) + "\n")
    read, test, reading = compare.logs("stops10", tmp_path, tmp_path)
    trained = Path(read["path"]).read_text().splitlines()[1:]
    assert len(trained) == 17
    assert all(row.split(",")[0] <= reading["start"] for row in trained)
    whole = Path(test).read_text().splitlines()
    assert len(whole) == 22  # what comes before the start is history
    assert whole[1].endswith("suspicious 1")


def test_models_have_about_as_many_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MIXERS, "options", dict(MIXERS.options))
    register_mixer("gru", GRUConfig)(GRU)
    monkeypatch.setitem(compare.TASKS, "own", {**compare.TASKS["hawkes5"], "train": 3, "test": 1})
    read, _, _ = compare.logs("own", tmp_path, tmp_path)
    prepared = prepare(from_dict(EventsData, {**compare.TASKS["own"]["options"]["data"], **read}, "data"))
    for name in ("delta", "attention", "gru"):
        chosen = compare.model_of(name, 20_000, prepared, {"head": "intensity"})
        size = build(chosen, prepared.encoding, prepared.scales).num_parameters()
        assert abs(size - 20_000) < 2_500, name


def test_the_table_has_the_mean_over_seeds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = [
        {
            "task": "hawkes1", "model": "gru", "parameters": 20_000, "steps": 10, "seconds": 20.0, "rate": 0.01,
            "figures": {
                "model": {"log_likelihood": -1.0, "time": -1.0 - seed, "kind": 0.0},
                "poisson": {"log_likelihood": -2.0, "time": -2.0, "kind": 0.0},
                "truth": {"model_minus": -0.1 - seed, "time": -0.9, "kind": 0.0},
            },
        }
        for seed in (0, 1)
    ]  # fmt: skip
    compare.show("hawkes1", [made], 20.0)
    printed = capsys.readouterr().out
    assert "0.6000     0.6000     0.0000" in printed
    assert "poisson" in printed


def test_the_rate_of_the_best_validation_is_taken_for_all_seeds_and_nothing_is_trained_twice(tmp_path: Path) -> None:
    made: list[tuple[float, int]] = []

    def trained(task: str, model: str, rate: float, seed: int, _: Any) -> dict[str, Any]:
        made.append((rate, seed))
        return {"parameters": 5, "steps": 7, "valid": abs(rate - 0.2), "figures": {"model": {"time": rate + seed}}}

    settings = argparse.Namespace(out=tmp_path, rates="0.1,0.2,0.5", seeds=3, seconds=1.0)
    found = list(tuned.compared("task", "gru", settings, trained))
    assert [(one["rate"], one["seed"]) for one in found] == [(0.2, 0), (0.2, 1), (0.2, 2)]
    assert list(tuned.compared("task", "gru", settings, trained)) == found
    assert made == [(0.1, 0), (0.2, 0), (0.5, 0), (0.2, 1), (0.2, 2)]
    rows = (
        (one, ("model", "time", one["figures"]["model"]["time"])) for one in tuned.results(tmp_path / "results.jsonl")
    )
    tuned.write_figures(tmp_path / "results.csv", ("who", "figure"), rows)
    lines = (tmp_path / "results.csv").read_text().splitlines()
    assert lines[:2] == [
        "task,model,seed,rate,seconds,parameters,steps,who,figure,value", "task,gru,0,0.1,1.0,5,7,model,time,0.1"
    ]  # fmt: skip
    assert len(lines) == 6
