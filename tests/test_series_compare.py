"""The comparison of series models: its peer obeys the contract, and what is tested on is not trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.series import compare
from glissando.series.options import SeriesData
from glissando.testing import check_mixer


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
    train, test = compare.tables("own", tmp_path, tmp_path)
    parts = [path.read_text().splitlines() for path in (train, test)]
    assert sorted(parts[0][1:] + parts[1][1:]) == sorted(rows)
    groups = [{line.split(",")[0] for line in part[1:]} for part in parts]
    assert not groups[0] & groups[1]
    assert len(groups[1]) == 3
    monkeypatch.setitem(compare.TASKS, "own", {**task, "test": "end"})
    for path in (train, test):
        path.unlink()
    train, test = compare.tables("own", tmp_path, tmp_path)
    assert [line for line in test.read_text().splitlines() if line.startswith("0,")] == ["0,3,hdl,103"]
