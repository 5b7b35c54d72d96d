"""Values on the command line arrive as they were typed, and what they would do to others' files is an error first."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from glissando.cli import main
from glissando.config import from_dict
from glissando.errors import ConfigError
from glissando.model import ModelConfig

TINY = [
    "--preset", "transformer-nano", "--model.hidden_size", "16", "--model.depth.layers", "1", "--data.kind", "text",
    "--data.seq_len", "16", "--data.batch_size", "4", "--training.steps", "4",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A book, other text, and a run on both: it learns one and is validated on the other."""
    place = tmp_path_factory.mktemp("values")
    (place / "book.txt").write_text("The fox who had a plan went out to find the hen who had none.\n" * 40)
    (place / "other.txt").write_text("Nobody had told the hen of it.\n" * 40)
    texts = ["--data.path", str(place / "book.txt"), "--data.valid_path", str(place / "other.txt")]
    assert main(["train", *TINY, *texts, "--out", str(place / "run")]) == 0
    return place


def fails(capsys, *arguments: object, status: int = 2) -> str:
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == status
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    return printed


@pytest.mark.parametrize("key", ["#s3cret!", "null", "~", "'# '", "1e3"])
def test_a_key_is_what_was_typed(key, monkeypatch):
    """A comment or nothing to YAML: the server would have let everyone in."""
    from glissando.cli import serve

    asked = []
    monkeypatch.setattr(serve, "serve", asked.append)
    for name in ("--name", "--host"):
        assert main(["serve", "run", name, key]) == 0
        assert getattr(asked.pop(), name.removeprefix("--")) == ([key] if name == "--name" else key)


def test_an_empty_key_in_the_environment_is_no_key(monkeypatch, capsys):
    monkeypatch.setenv("GLISSANDO_API_KEY", "")
    assert "GLISSANDO_API_KEY holds no key" in fails(capsys, "serve", "run")


@pytest.mark.parametrize("path", ["#1.txt", "~", "null", "a b.txt", "007", "yes", "2e6", "[a]", "-"])
def test_the_name_of_a_file_is_what_was_typed(path, capsys):
    for given in ([f"--data.path={path}"], ["--data.path", path]):
        assert main(["train", *TINY, *given, "--print_config"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["data"]["path"] == (None if path == "null" else path)


@pytest.mark.parametrize("text", ["a 🎉 b", "日本語\x7f\x85\u2028\ufffe\ufeff", "# '\"\\", "x " * 1500, ""])
def test_any_text_is_a_prompt(text, place, capsys):
    assert main(["generate", str(place / "run"), "--prompt", text, "--stop", "🎉", "--max_tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith(text)


def test_what_is_no_utf_8_is_reported(place, capsys):
    assert "not UTF-8" in fails(capsys, "generate", place / "run", "--prompt", os.fsdecode(b"a\xff"))


@pytest.mark.parametrize("verb", ["evaluate", "train"])
def test_another_text_does_not_keep_the_held_out_one(verb, place, capsys):
    """`evaluate RUN --data.path other` scored the run's own valid_path, and said nothing."""
    run, book, other = (str(place / name) for name in ("run", "book.txt", "other.txt"))
    command = ["evaluate", run] if verb == "evaluate" else ["train", "--from", run, "--print_config"]
    printed = fails(capsys, *command, "--data.path", other)
    assert "would leave the run's" in printed
    assert "--data.valid_path too" in printed
    for held_out in ("null", book):
        assert main([*command, "--data.path", other, "--data.valid_path", held_out]) == 0
    assert main([*command, "--data.path", book]) == 0


def test_a_file_of_options_does_not_keep_it_either(place, capsys):
    options = place / "options.yaml"
    options.write_text(f"start_from: {place / 'run'}\ndata: {{path: {place / 'other.txt'}}}\n")
    assert "would leave the run's" in fails(capsys, "train", "--config", options, "--print_config")


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (["--data.tokenizer.kind", "bpe"], "the run's own tokenizer encodes the text"),
        (["--file", "BOOK", "--data.path", "BOOK"], "--data.path would do nothing"),
        (["--file", "BOOK", "--data.valid_fraction", "0.9"], "--data.valid_fraction would do nothing"),
        (["--prompt", "a"], "--prompt has no effect without --diagnostics"),
    ],
)
def test_evaluating_refuses_what_would_do_nothing(options, printed, place, capsys):
    given = [str(place / "book.txt") if option == "BOOK" else option for option in options]
    assert printed in fails(capsys, "evaluate", place / "run", *given)


def test_pictures_overwrite_nothing(place, tmp_path, capsys):
    mine = tmp_path / "loss.png"
    mine.write_text("mine")
    assert f"{tmp_path} exists and is not empty" in fails(
        capsys, "evaluate", place / "run", "--plots", tmp_path, status=1
    )
    assert mine.read_text() == "mine"


def test_what_the_system_refuses_is_a_line(place, tmp_path, capsys, monkeypatch):
    from glissando.cli import presets

    def refuse(_: object) -> None:
        raise PermissionError(13, "Permission denied", "runs/mine")

    monkeypatch.setattr(presets, "main", refuse)
    assert fails(capsys, "presets", status=1) == "glissando presets: Permission denied: 'runs/mine'\n"
    (tmp_path / "file").write_text("")


def test_closed_output_is_no_defect(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["presets"]) == 0
    sys.stdout.close()


@pytest.mark.parametrize(
    ("name", "error", "status"), [("preset", "unknown preset '5'", 2), ("start_from", "no run at 5", 1)]
)
def test_names_in_a_file_are_texts(name, error, status, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("o.yaml").write_text(f"{name}: 5\n")
    assert error in fails(capsys, "train", "--config", "o.yaml", "--print_config", status=status)


def test_growing_from_damage_leaves_nothing(place, tmp_path, capsys):
    shutil.copytree(place / "run", tmp_path / "run")
    weights = tmp_path / "run/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    out = tmp_path / "grown"
    assert "model.safetensors" in fails(capsys, "grow", tmp_path / "run", "--out", out, "--width", "2", status=1)
    assert not out.exists()


def test_a_run_that_cannot_be_resumed_is_not_said_to_be(place, tmp_path, capsys):
    out = tmp_path / "other"
    out.mkdir()
    (out / "notes").write_text("mine")
    printed = fails(capsys, "grow", place / "run", "--out", out, "--width", "2", status=1)
    assert "Choose a new name" in printed
    assert "Resume" not in printed


def test_a_checkpoint_opens_beside_a_damaged_manifest(place, tmp_path, capsys):
    shutil.copytree(place / "run", tmp_path / "run")
    (tmp_path / "run/manifest.json").write_text("{")
    assert main(["generate", str(tmp_path / "run"), "--max_tokens", "2"]) == 1
    error = capsys.readouterr().err
    assert "manifest.json is malformed" in error
    assert "This checkpoint is intact and loads instead" in error
    checkpoint = max((tmp_path / "run/checkpoints").glob("step-*"))
    assert main(["generate", str(checkpoint), "--max_tokens", "2"]) == 0


def test_labels_that_a_model_is_given_are_named(tmp_path, capsys):
    """They would be seen beside figures of models that are given none."""
    from glissando.model import LanguageModel

    run = tmp_path / "hybrid"
    LanguageModel.from_preset("hybrid-ode-nano", hidden_size=16).save(run)
    few = ["--data.valid_rows", "2", "--json"]
    for labelled, named in (("true", "mood, speech"), ("false", None)):
        assert main(["evaluate", str(run), "--data.labelled", labelled, *few]) == 0
        assert json.loads(capsys.readouterr().out).get("labels_given") == named


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (
            {"depth": {"kind": "flow", "n_steps": 1, "control": "value"}},
            """depth.control: expected a list, got 'value'; a list is written as '["a", "b"]'""",
        ),
        ({"depth": {"layers": '"value'}}, """depth.layers: expected a whole number, got '"value'"""),
    ],
)
def test_what_is_called_value_is_shown_as_it_was_given(options, printed):
    with pytest.raises(ConfigError) as caught:
        from_dict(ModelConfig, options, "model")
    assert str(caught.value) == f"model.{printed}"
