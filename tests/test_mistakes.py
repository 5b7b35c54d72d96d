"""Mistakes that were made in trying the library out: each is an error in one message that names what to change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_runs import configuration

import glissando
from glissando.cli import main
from glissando.errors import ConfigError, DivergenceError, InputError, Refused, RunError
from glissando.export import export
from glissando.mixers import Mixer, register_mixer
from glissando.model import LanguageModel
from glissando.runs import Run
from glissando.training.fit import train


@dataclass
class NoOptions:
    pass


class Looping(Mixer):
    """A mean of what came before, by a loop over time steps; `broken` decides what it returns."""

    broken: str | None = None

    def __init__(self, hidden_size: int, config: NoOptions) -> None:
        super().__init__()
        self.out = torch.nn.Linear(hidden_size, hidden_size)

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        return torch.zeros(batch_size, self.out.in_features, device=device, dtype=dtype)

    def forward(self, x: Tensor, state: Any = None, ctx: Any = None) -> Any:
        before = self.init_state(len(x)) if state is None else state
        steps = []
        for t in range(x.shape[1]):
            before = 0.5 * before + x[:, t]
            steps.append(before)
        y = self.out(torch.stack(steps, 1))
        wrong = {"alone": y, "narrow": (y[..., :5], None), "one": (y[..., :1], None), "three": (y, None, None)}
        if self.broken == "nan":
            return y * torch.nan, None if state is None else before
        return wrong.get(str(self.broken), (y, None if state is None else before))


@pytest.fixture(autouse=True)
def _registered() -> None:
    """In each test alone (conftest.py): the laws are tried on every mixer that is registered."""
    register_mixer("looping", NoOptions)(Looping)


def model_of_looping() -> LanguageModel:
    return LanguageModel.from_config({"hidden_size": 16, "mixer": "looping", "depth": {"layers": 1}})


# ---------------------------------------------------------------------- mixers of one's own


@pytest.mark.parametrize(
    ("broken", "got"),
    [
        ("alone", "got a Tensor;"),
        ("three", "got a tuple of 3;"),
        ("narrow", r"got y of the shape \(2, 4, 5\);"),
        ("one", r"got y of the shape \(2, 4, 1\);"),  # which would be broadcast
    ],
)
def test_what_a_mixer_returns(broken: str, got: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Looping, "broken", broken)
    with pytest.raises(ConfigError, match=r"mixer Looping must return \(y, state\).*\(2, 4, 16\), " + got):
        model_of_looping()(torch.zeros(2, 4, dtype=torch.int64))


@pytest.mark.slow  # PyTorch's exporter takes seconds to give up
def test_a_mixer_that_cannot_be_traced_is_named(tmp_path):
    model = model_of_looping()
    model.save(tmp_path / "run")
    with pytest.raises(
        Refused, match=r"the model cannot be traced.*[^.]\. Looping is not of this library: a loop over"
    ) as error:
        export(model, Run.open(tmp_path / "run"), "onnx", tmp_path / "out")
    assert "TORCH_LOGS" not in str(error.value)


def test_a_first_step_that_is_not_finite_is_not_the_learning_rates_fault(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Looping, "broken", "nan")
    with pytest.raises(DivergenceError, match=r"Nothing was trained before.*mixers and depths of your own") as error:
        train(configuration(tmp_path, {"model.mixer": {"kind": "looping"}}), tmp_path / "run")
    assert "a lower training.optimizer.learning_rate" not in str(error.value)


def test_a_parameter_that_starts_as_nan_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch):
    def reset(self: Looping) -> None:
        with torch.no_grad():
            self.out.bias.fill_(torch.nan)

    monkeypatch.setattr(Looping, "reset_parameters", reset)
    with pytest.raises(DivergenceError, match=r"parameter depth\.blocks\.0\.mixer\.out\.bias is not finite before"):
        train(configuration(tmp_path, {"model.mixer": {"kind": "looping"}}), tmp_path / "run")


# ---------------------------------------------------------------------- in Python


def test_the_name_of_a_model_is_no_model():
    with pytest.raises(InputError, match=r"got a str; load .* with glissando\.load\('stories'\)"):
        glissando.generate("stories", "a", max_tokens=3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"got a PosixPath; .*glissando\.load\('runs/a'\)"):
        list(glissando.stream(Path("runs/a"), "a"))  # type: ignore[arg-type]


def test_a_number_of_tokens_is_no_text():
    model = LanguageModel.from_config({"hidden_size": 16, "depth": {"layers": 1}})
    with pytest.raises(ConfigError, match="got '5'"):
        glissando.generate(model, "a", max_tokens="5")  # type: ignore[arg-type]


@pytest.mark.parametrize("control", ["mood=1", "ab"])  # two characters for two dials
def test_a_control_is_no_text(control: str):
    depth = {"kind": "flow", "layers": 0, "n_steps": 1, "control": ["mood", "speech"]}
    model = LanguageModel.from_config({"hidden_size": 16, "depth": depth})
    with pytest.raises(ConfigError, match=rf"such as {{'mood': 0.7}}, or 2 numbers .*got '{control}'"):
        list(glissando.stream(model, "a", control=control))  # type: ignore[arg-type]


# ---------------------------------------------------------------------- at the command line


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(list(arguments))
    return status, capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--depth.n_steps", "3", "depth.n_steps"),
    ],
)
def test_an_option_of_another_model_is_named_as_it_was_given(option, value, expected, capsys):
    status, message = said(capsys, "generate", "stories", "--prompt", "a", option, value)
    assert status == 2
    assert expected in message


def test_plots_of_a_model_without_a_log_are_refused_before_it_is_scored(tmp_path, capsys):
    out = tmp_path / "pictures"
    status, message = said(capsys, "evaluate", "stories", "--data.valid_rows", "2", "--plots", str(out))
    assert status == 1
    assert "has no log of a training (metrics.csv) to draw" in message
    assert "bits" not in message
    assert not out.exists()


@pytest.mark.parametrize("option", ["--data.batch_size=1000000000000", "--model.hidden_size=1000000000000"])
def test_what_no_memory_holds_is_reported_in_a_line(option, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time. " * 400)
    small = ["--preset", "transformer-nano", "--data.kind", "text", "--data.path", str(text), "--data.seq_len", "32"]
    status, message = said(capsys, "train", *small, option, "--training.steps", "1", "--out", str(tmp_path / "run"))
    assert status == 1
    assert "not enough memory" in message
    assert "Lower the batch (--data.batch_size)" in message
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_the_text_of_a_laplacian_is_named_by_its_own_option(tmp_path, capsys):
    empty, bad = tmp_path / "empty.txt", tmp_path / "bad.txt"
    empty.touch()
    bad.write_bytes(b"some text \xff and more\n" * 50)
    for text, expected in ((empty, "--text needs a file with text in it"), (bad, "not UTF-8")):
        status, message = said(capsys, "laplacian", "build", "--text", str(text), "--out", str(tmp_path / "l"))
        assert status == 1
        assert expected in message
        assert "--data" not in message
        assert "data.path" not in message


def test_a_file_that_exists_is_one_status_for_all_commands(tmp_path, capsys):
    out = tmp_path / "there.csv"
    out.write_text("mine")
    saved = tmp_path / "run"
    LanguageModel.from_config({"hidden_size": 16, "depth": {"layers": 1}}).save(saved)
    for arguments in (
        ["series", "example", "--out", str(out)],
        ["laplacian", "build", "--corpus", "stories", "--out", str(out)],
        ["train", "--preset", "transformer-nano", "--training.steps", "1", "--out", str(saved)],
    ):
        assert said(capsys, *arguments)[0] == 1, arguments
    assert out.read_text() == "mine"


# ---------------------------------------------------------------------- series


@pytest.fixture
def series(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Options that read a file of oscillators."""
    path = tmp_path / "osc.csv"
    assert main(["series", "example", "--count", "8", "--out", str(path)]) == 0
    return ["--data.path", str(path), "--data.time", "t", "--data.group", "series"]


def test_a_series_that_diverges_is_no_lost_checkpoint(series, tmp_path, capsys):
    run = str(tmp_path / "run")
    options = ["--training.steps", "1", "--training.optimizer.learning_rate", "1e30", "--out", run]
    status, message = said(capsys, "series", "train", *series, *options)
    assert status == 1
    assert "the held-out loss is" in message
    assert "lower --training.optimizer.learning_rate" in message
    assert "lost" not in message


@pytest.mark.slow
def test_predictions_that_are_not_finite_are_no_score(series, tmp_path, capsys, monkeypatch):
    from glissando.series import answers as scoring

    run = tmp_path / "run"
    assert main(["series", "train", *series, "--training.steps", "1", "--out", str(run)]) == 0
    computed = scoring.call
    monkeypatch.setattr(scoring, "call", lambda *given: computed(*given) * torch.inf)
    status, message = said(capsys, "series", "evaluate", str(run))
    assert status == 1
    assert "are not all finite" in message


def test_a_column_of_numbers_is_no_class(series, tmp_path, capsys):
    options = ["--data.task", "classification", "--data.target", "a", "--training.steps", "1"]
    status, message = said(capsys, "series", "train", *series, *options, "--out", str(tmp_path / "run"))
    assert status == 1
    assert "the class of a there is among the held-out ones alone" in message
    assert len(message) < 600
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_run_error_is_what_a_taken_place_is(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    model = LanguageModel.from_config({"hidden_size": 16, "depth": {"layers": 1}})
    model.save(tmp_path / "run")
    with pytest.raises(RunError, match=r"exists and is not empty\. Choose a new name"):
        export(model, Run.open(tmp_path / "run"), "onnx", tmp_path / "out")
