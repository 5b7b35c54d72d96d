"""Every preset with its own defaults, at its full size, through the command line."""

from __future__ import annotations

import json

import pytest
import yaml
from slow import slow_where

from glissando.cli import main
from glissando.data.base import IGNORED
from glissando.data.corpora import StoriesOptions, build_corpus
from glissando.presets import preset_names, preset_note

#: rows and parts of a step, fewer than published, which takes minutes on a processor: the model is as published
FEWER_ROWS = {"tauformer": (2, 2), "tauformer-100m": (1, 1), "liquid-ssm": (1, 1)}
SLOW = (
    "continuous-transformer", "gpt", "hybrid-ode", "liquid-ssm", "liquid-ssm-dense", "tauformer", "tauformer-100m",
    "transformer", "transformer-plus",
    # Of parts that the quick one trains, too, or test_dials.py and, for tau, test_calibration.py.
    "composite-nano", "continuous-transformer-nano", "delta-nano", "hybrid-ode-nano", "liquid-ssm-nano",
    "minimal-transformer-nano", "spectral-delta-nano", "tauformer-nano", "transformer-nano", "transformer-plus-nano",
)  # fmt: skip


@pytest.mark.serial  # memory: some gigabytes each
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", slow_where(SLOW, (name for name in preset_names() if not name.endswith("-124m"))))
def test_every_preset_trains_evaluates_and_generates(name, tmp_path, capsys):
    run = str(tmp_path / "run")
    given = [] if name == "minimal-transformer" else ["--data.valid_rows", "2"]
    if preset_note(name, "text") is not None:
        given += ["--data.kind", "stories"]
    rows, parts = FEWER_ROWS.get(name, (4, 1))
    given += ["--data.batch_size", str(rows), "--training.accumulate", str(parts)]
    assert main(["train", "--preset", name, *given, "--training.steps", "2", "--out", run]) == 0, capsys.readouterr()
    assert main(["presets", name]) == 0
    published = yaml.safe_load(capsys.readouterr().out)["model"].get("vocab_size", 256)
    trained = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["vocab_size"]
    assert trained == published, "bytes need not fill the published vocabulary"
    few = [] if name == "minimal-transformer" else ["--data.valid_rows", "1"]
    assert main(["evaluate", run, *few, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["bits_per_byte"] < 20
    # Untrained, most of the published vocabulary stands for no byte: none of it may be written.
    assert main(["generate", run, "--prompt", "Once", "--max_tokens", "3", "--temperature", "2"]) == 0
    assert capsys.readouterr().out.startswith("Once")


@pytest.mark.slow
def test_a_comparison_of_two_published_models_takes_rows_that_both_can_read(tmp_path, capsys):
    small = ["--model.hidden_size", "8", "--model.mixer.heads", "2", "--data.batch_size", "2"]
    given = ["--budget", "steps=2", "--allow_unequal", "--contexts", "8", "--data.valid_rows", "1"]
    command = ["compare", "transformer-nano", "hybrid-ode", *small, *given, "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "--data.seq_len 512 is longer than --model.max_length 128: lower it" in capsys.readouterr().err
    assert main([*command, "--data.seq_len", "128", "--data.cut", "true"]) == 0
    assert (tmp_path / "out" / "report.html").is_file()


def cut(**options) -> StoriesOptions:
    return StoriesOptions(valid_rows=3, cut=True, seq_len=64, batch_size=4, **options)


def test_cut_stories_are_one_stream_a_row_and_nothing_is_left_out():
    corpus = build_corpus(cut())
    batches = [batch for batch, _ in zip(corpus.batches("train"), range(300), strict=False)]
    assert {tuple(batch.ids.shape) for batch in batches} == {(4, 64)}
    again = next(corpus.batches("train", start=257))
    assert (again.ids == batches[257].ids).all()
    assert all(batch.mask is None and batch.n_bytes == 4 * 64 for batch in batches)
    row = [token for batch in batches[:256] for token in batch.targets[2].tolist()]
    stories = bytes(row).decode().split("\n")[:-1]
    assert len(stories) > 15
    whole = build_corpus(StoriesOptions())
    held = [story.removesuffix("\n") for story in whole.texts("valid")]
    assert all(story[0].isupper() and story.endswith((".", '"')) for story in stories), "no story lacks its beginning"
    assert not set(stories) & set(held)


@pytest.mark.parametrize("labelled", [False, True])
def test_held_out_stories_are_scored_whole_window_by_window(labelled):
    corpus = build_corpus(cut(labelled=labelled))
    whole = build_corpus(StoriesOptions(valid_rows=3))
    text = "".join(
        bytes(row[row != IGNORED].tolist()).decode() for batch in corpus.batches("valid") for row in batch.targets
    )
    assert text == "".join(whole.texts("valid"))
    assert sum(batch.n_bytes for batch in corpus.batches("valid")) == len(text.encode())
    labels = [batch.control for batch in corpus.batches("valid")]
    assert all((label is not None) == labelled for label in labels)


def test_training_windows_of_labelled_stories_hold_one_story_each():
    batches = [b for b, _ in zip(build_corpus(cut(labelled=True)).batches("train"), range(200), strict=False)]
    pairs = [pair for b in batches for pair in zip(b.targets, b.control, strict=True)]
    rows = [(row[row != IGNORED].tolist(), tuple(label.tolist())) for row, label in pairs]
    assert all(10 not in row[:-1] for row, _ in rows), "an end only stands at the end of a window"
    assert {label for _, label in rows} >= {(1.0, 1.0), (-1.0, -1.0)}
