"""Rows of metrics.csv that go to Weights & Biases; TensorBoard's are in test_training_progress.py."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from training_runs import configuration, crash_in, metrics

from glissando.errors import MissingExtraError, TrainingError
from glissando.training.fit import extend, resume, train


class Stranger:
    """Stands for the package wandb: keeps what is logged, by the id of the run there."""

    class errors:
        class Error(Exception):
            pass

    def __init__(self, refuses: str | None = None) -> None:
        self.refuses, self.opened, self.rows, self.ended = (
            refuses,
            list[dict[str, Any]](),
            list[tuple[str, int]](),
            list[int](),
        )

    def init(self, **options: Any) -> Any:
        if self.refuses:
            raise self.errors.Error(self.refuses)
        self.opened.append(options)
        stranger = self

        class There:
            def log(self, values: dict[str, Any], step: int) -> None:
                assert values["train_loss"] > 0
                assert "" not in values.values()
                stranger.rows.append((options["id"], step))

            def finish(self, exit_code: int) -> None:
                stranger.ended.append(exit_code)

        return There()


def test_weights_and_biases(tmp_path, monkeypatch):
    """A resumed training goes on with its run there."""
    monkeypatch.setitem(sys.modules, "wandb", stranger := Stranger())
    changes = {"training": {"save_every": 4, "steps": 14, "wandb": "tides"}}
    with monkeypatch.context() as patched:
        crash_in(patched, 12, RuntimeError("crash"))
        with pytest.raises(RuntimeError, match="crash"):
            train(configuration(tmp_path, changes), tmp_path / "x")
    resume(tmp_path / "x")
    first, second = stranger.opened
    assert first["project"] == "tides"
    assert first["name"] == "x"
    assert first["config"]["training"]["steps"] == 14
    assert first["id"] == second["id"]
    steps = [int(row["step"]) for row in metrics(tmp_path / "x")]
    assert {step for _, step in stranger.rows} == set(steps)
    assert stranger.rows[-1] == (first["id"], steps[-1])
    assert stranger.ended == [1, 0]
    train(configuration(tmp_path, changes), tmp_path / "y")
    assert stranger.opened[-1]["id"] != first["id"]


def test_an_extended_run_has_a_run_of_its_own_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", stranger := Stranger())
    train(configuration(tmp_path, {"training": {"steps": 2, "log_every": 1, "wandb": "tides"}}), tmp_path / "x")
    extend(tmp_path / "x", tmp_path / "longer", {"steps": 4})
    first, second = stranger.opened
    assert first["id"] != second["id"]
    assert [step for name, step in stranger.rows if name == first["id"]] == [1, 2]
    assert [step for name, step in stranger.rows if name == second["id"]] == [3, 4]


def test_without_the_package_or_a_login_weights_and_biases_is_refused(tmp_path, monkeypatch):
    config = configuration(tmp_path, {"training": {"steps": 2, "wandb": "tides"}})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match="pip install wandb"):
        train(config, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    monkeypatch.setitem(sys.modules, "wandb", Stranger("no API key"))
    with pytest.raises(TrainingError, match=r"refused project 'tides': no API key. Log in with `wandb login`"):
        train(config, tmp_path / "x")
    monkeypatch.setitem(sys.modules, "wandb", Stranger())
    train(config, tmp_path / "x")  # nothing stands in its way
