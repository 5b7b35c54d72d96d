"""The dial's figures against cases whose answer is known, and the verb as a user meets it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from training_runs import configuration

from glissando.cli import main
from glissando.evaluation.steering import Sweep, crossing_point, spearman
from glissando.training.fit import train

U = (-1.0, 0.0, 1.0)


def made(labels: list[list[float]]) -> Sweep:
    return Sweep("mood", U, np.array(labels, dtype=float), [["x"] * len(row) for row in labels], [1.0, 0.9, 1.1], 0.9)


def test_a_dial_that_works():
    dial = made([[-1, -1, -0.5, -1], [0, 0.5, -0.5, 0], [1, 1, 0.5, 1]])
    assert dial.success(1.0) == dial.success(-1.0) == (4, 4)
    assert dial.anti_steerable() == 0
    assert dial.rank_correlation() == pytest.approx(1)
    at, low, high = dial.crossing()
    assert at == pytest.approx(0)
    assert low <= at <= high


def test_a_dial_that_is_mounted_backward():
    dial = made([[1, 1, 1], [0, 0, 0], [-1, -1, -1]])
    assert dial.success(1.0) == (0, 3)
    assert dial.anti_steerable() == 1
    assert dial.rank_correlation() == pytest.approx(-1)
    assert math.isnan(dial.crossing()[0])


def test_no_evidence_is_no_success():
    dial = made([[math.nan, -1], [0, 0], [math.nan, 1]])
    assert dial.success(1.0) == (1, 2)
    assert dial.as_dict()["evidence"] == [0.5, 1.0, 0.5]


def test_spearman_shares_the_ranks_of_equals():
    """By hand: ranks 0, 1, 2, 3 and 0.5, 0.5, 2, 3 correlate by 4.5 / sqrt(5 * 4.5)."""
    assert spearman(np.array([1.0, 2, 3, 4]), np.array([5.0, 5, 6, 9])) == pytest.approx(4.5 / math.sqrt(5 * 4.5))
    assert math.isnan(spearman(np.array([1.0, 2]), np.array([3.0, 3])))


def test_the_crossing_is_the_one_nearest_to_zero():
    assert crossing_point(np.array([-1.0, 0, 1]), np.array([-1.0, 1, 3])) == pytest.approx(-0.5)
    assert crossing_point(np.array([-1.0, -0.5, 0, 1]), np.array([-1.0, 1, -1, 1])) == pytest.approx(0.5)
    assert math.isnan(crossing_point(np.array([-1.0, 1]), np.array([1.0, 2])))


def test_the_verb_writes_table_texts_and_pictures(tmp_path, capsys):
    data = {"data": {"corpus": "stories", "seq_len": 64, "batch_size": 2, "text": {}}}
    labelled = {"data.stories": {"labelled": True, "valid_stories": 2}}
    depth = {"kind": "flow", "layers": 0, "n_steps": 1, "control": ["mood", "speech"]}
    train(configuration(tmp_path, data, labelled, {"model.depth": depth, "training": {"steps": 2}}), tmp_path / "run")
    out = tmp_path / "dial"
    command = ["steer", str(tmp_path / "run"), "--prompts", "2", "--max_tokens", "8"]
    assert main([*command, "--values", "[-1, 0, 1]", "--out", str(out)]) == 0
    told = json.loads((out / "steering.json").read_text())
    assert [dial["dial"] for dial in told] == ["mood", "speech"]
    assert told[0]["bits_per_byte_uncontrolled"] > 0
    assert len((out / "texts.jsonl").read_text().splitlines()) == 2 * 3 * 2
    assert (out / "mood.png").read_bytes()[:4] == b"\x89PNG"
    assert "success at +1" in capsys.readouterr().out
    for wrong, message in (
        (["--out", str(out)], "nothing is overwritten"),
        ([], "--out is missing"),
        (["--out", str(tmp_path / "b"), "--values", "[0, 1]"], "needs the values -1, 0 and 1"),
        (["--out", str(tmp_path / "b"), "--dials", '["mod"]'], "Did you mean 'mood'"),
    ):
        assert main([*command, *wrong]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_a_model_without_dials_is_told(tmp_path, capsys):
    train(configuration(tmp_path, {"training": {"steps": 1}}), tmp_path / "run")
    assert main(["steer", str(tmp_path / "run"), "--out", str(tmp_path / "b")]) == 1
    assert "has no dials" in capsys.readouterr().err
