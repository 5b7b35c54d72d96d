"""Dials that no label has trained turn noise: they are neither offered nor accepted."""

from __future__ import annotations

from pathlib import Path
from threading import Timer

import numba
import pytest

import glissando
from glissando.cli import main
from glissando.decoding.decoder import Decoder
from glissando.errors import ConfigError

TINY = [
    "--model.hidden_size", "16", "--model.mixer.heads", "2", "--data.batch_size", "2", "--data.valid_rows", "2",
    "--data.seq_len", "32", "--model.depth.n_steps", "2",
    "--training.steps", "1", "--training.schedule.warmup_steps", "0",
]  # fmt: skip
NOT_TRAINED = "the dials of this model (mood, speech) were not trained, because its corpus had no labels"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """One without labels, one that goes on from it with them, and one that goes on from that without."""
    place, before = tmp_path_factory.mktemp("dials"), ["--preset", "hybrid-ode-nano"]
    for name, labelled in (("plain", "false"), ("steered", "true"), ("later", "false")):
        out = str(place / name)
        assert main(["train", *before, *TINY, "--data.labelled", labelled, "--out", out]) == 0
        before = ["--from", out]
    return place


def test_they_are_not_accepted(runs, tmp_path, capsys):
    run = str(runs / "plain")
    for command in (["generate", run, "--control", "mood=1"], ["steer", run, "--out", str(tmp_path / "x")]):
        assert main(command) == 2
        assert NOT_TRAINED in capsys.readouterr().err
    with pytest.raises(ConfigError, match="were not trained"):
        glissando.generate(glissando.load(run), "a", control={"mood": 1.0})
    assert main(["generate", run, "--max_tokens", "3"]) == 0
    assert not (tmp_path / "x").exists()


def test_they_are_not_offered(runs):
    pytest.importorskip("starlette")
    from starlette.testclient import TestClient

    from glissando.serving.api import Server

    expected = {"plain": [], "steered": ["mood", "speech"], "later": ["mood", "speech"]}
    server = Server({name: glissando.load(runs / name) for name in expected})
    with TestClient(server.app, base_url="http://127.0.0.1") as client:
        about = client.get("/v1/glissando").json()["models"]
        assert {each["model"]: each["controls"] for each in about} == expected
        for name, dials in expected.items():
            asked = {"model": name, "prompt": "a", "max_tokens": 2, "control": {"mood": 1.0}}
            answer = client.post("/v1/completions", json=asked)
            assert answer.status_code == (200 if dials else 400)
            assert dials or NOT_TRAINED in answer.json()["error"]["message"]
            turned = [{"control": {"mood": 1e308}}, {"turns": [{"at": 1, "control": {"mood": -1e308}}]}]
            for each in turned if dials else []:
                answer = client.post("/v1/completions", json=asked | each)
                assert answer.status_code == 400
                assert "must be a number from -1e9 to 1e9" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["steered", "later"])
def test_those_that_labels_have_trained_are(runs, name):
    assert main(["generate", str(runs / name), "--control", "mood=1", "--max_tokens", "3"]) == 0


def test_a_model_of_ones_own_loop_is_believed():
    assert glissando.LanguageModel.from_preset("hybrid-ode-nano", hidden_size=16).config.dials == ["mood", "speech"]


@pytest.mark.parametrize("options", [["--control", "moood=1"], ["--control", "mood"], ["--temperature", "-1"]])
def test_a_wrong_dial_is_refused_before_anything_is_compiled(runs, options, monkeypatch, capsys):
    monkeypatch.setattr(Decoder, "warm_up", lambda decoder: pytest.fail("a kernel was compiled"))
    assert main(["generate", str(runs / "steered"), "--max_tokens", "3", *options]) == 2
    assert "compil" not in capsys.readouterr().err


@pytest.mark.parametrize("compiles", [True, False])
def test_only_a_compilation_is_reported_as_one(runs, compiles, monkeypatch, capsys):
    """Kernels that are only loaded take seconds, too, on a busy machine, and a compilation may begin after seconds."""

    class Early(Timer):
        def start(self) -> None:
            self.function()

    monkeypatch.setattr("threading.Timer", Early)
    monkeypatch.setattr(Decoder, "warm_up", lambda decoder: numba.njit(lambda: 1)() if compiles else None)
    assert main(["generate", str(runs / "steered"), "--max_tokens", "3"]) == 0
    assert ("compiling the decoding step" in capsys.readouterr().err) == compiles
