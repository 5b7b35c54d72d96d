"""Runs of a comparison become rows of a record, each once."""

from __future__ import annotations

import csv
import json
import sys

import pytest
import yaml

from research import record


@pytest.fixture
def comparison(tmp_path):
    """Two finished runs and one that failed, as `compare` leaves them."""
    for model, seed, nats in (("a", 0, [6.93147, 6.93147]), ("a", 1, [13.86294, 0.0]), ("b", 0, None)):
        folder = tmp_path / "out" / "runs" / model / f"lr-0.002-seed-{seed}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump({"training": {"precision": "32-true"}}))
        origin = {"commit": "c0ffee", "modified": False, "machine": "abacus", "threads": 1, "date": "2026-11-24"}
        figures = {"kind": "run", "model": model, "seed": seed, "learning_rate": 2e-3, "parameters": 7}
        figures |= {"provenance": origin}
        figures |= {"failed": "diverged"} if nats is None else {"held_out": {"nats": nats, "bytes": [10.0, 10.0]}}
        (folder / "measured.json").write_text(json.dumps(figures))
    return tmp_path / "out"


def test_a_run_is_recorded_once(comparison, tmp_path, monkeypatch):
    into = tmp_path / "recipe.csv"
    for size in ("2e6", "8e6", "2e6"):
        monkeypatch.setattr(
            sys, "argv", ["record", str(comparison), "--corpus", "stories", "--bytes", size, "--into", str(into)]
        )
        record.main()
    rows = list(csv.DictReader(into.read_text().splitlines()))
    assert [(row["bytes"], row["model"], row["seed"]) for row in rows] == [
        ("2000000", "a", "0"), ("2000000", "a", "1"), ("8000000", "a", "0"), ("8000000", "a", "1"),
    ]  # fmt: skip
    assert all(float(row["bits_per_byte"]) == pytest.approx(1.0, abs=1e-5) for row in rows)  # 20 bits on 20 bytes
    assert rows[0]["commit"] == "c0ffee"
    assert rows[0]["held_out_bytes"] == "20"


@pytest.mark.parametrize("name", ["learning_rate", "precision"])
def test_a_run_that_was_trained_in_another_way_replaces_none(comparison, tmp_path, monkeypatch, name):
    into = tmp_path / "recipe.csv"
    options = ["--corpus", "stories", "--bytes", "2e6", "--into", str(into)]
    monkeypatch.setattr(sys, "argv", ["record", str(comparison), *options])
    record.main()
    before = into.read_text()
    run = comparison / "runs" / "a" / "lr-0.002-seed-1"
    if name == "precision":
        (run / "config.yaml").write_text(yaml.safe_dump({"training": {"precision": "bf16-mixed"}}))
    else:
        figures = json.loads((run / "measured.json").read_text())
        (run / "measured.json").write_text(json.dumps(figures | {"learning_rate": 4e-3}))
    with pytest.raises(SystemExit, match=f"a, seed 1, is recorded with {name} .*remove its row"):
        record.main()
    assert into.read_text() == before


def test_a_directory_without_runs_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["record", str(tmp_path), "--corpus", "x", "--bytes", "1", "--into", str(tmp_path / "y.csv")]
    )
    with pytest.raises(SystemExit, match="no finished run"):
        record.main()
    assert not (tmp_path / "y.csv").exists()
