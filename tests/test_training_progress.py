"""What one sees of a training: lines, a bar, the time left, events; and when it validates and how long that takes."""

from __future__ import annotations

import fcntl
import io
import os
import shlex
import struct
import termios
from types import SimpleNamespace

import pytest
import torch
from lightning_fabric import Fabric
from training_runs import SHIFT, configuration, loop_for

import glissando
from glissando.data.corpora import build_corpus
from glissando.evaluation.scoring import score_part
from glissando.text_row import visible
from glissando.training.budget import Clock
from glissando.training.fit import train
from glissando.training.language_task import LanguageTask
from glissando.training.loop import Loop
from glissando.training.progress import Progress


def run(folder, name, *updates):
    return train(configuration(folder, *updates), folder / name)


@pytest.fixture
def now(monkeypatch):
    """The time in seconds, in a list."""
    now = [100.0]
    monkeypatch.setattr("glissando.training.budget.time.perf_counter", lambda: now[0])
    return now


# ---------------------------------------------------------------------- lines


def test_ordinary_run_says_only_what_matters(tmp_path, capfd):
    done = run(tmp_path, "run", {"training": {"steps": 4, "validate_every": 2, "sample_every": 4}})
    out, error = capfd.readouterr()
    assert out == ""
    first, *lines = error.split("\nstep ")
    assert first.startswith("device cpu, ")
    assert [line[:2] for line in lines] == ["2,", "4,", "4:"]
    assert "Lightning" not in error
    assert "arning" not in error.replace("learning", "")
    samples = (done.path / "samples.txt").read_text()
    assert samples.startswith("--- step 4\n")
    assert not set(samples) & {chr(c) for c in [*range(9), *range(11, 32), *range(127, 160)]}
    assert glissando.load(done.path).num_parameters() > 0


def test_control_characters_are_made_visible():
    assert visible("a\x1b[31mb\tc\nd\r\x7f\x9b\x00é") == "a\ufffd[31mb\tc\nd\ufffd\ufffd\ufffd\ufffdé"


def test_a_vocabulary_that_is_not_used_is_reported(tmp_path, capfd):
    done = run(tmp_path, "run", {"model.vocab_size": 999, "training.steps": 1})
    assert capfd.readouterr().err.startswith(
        "the tokenizer has 256 tokens of the model's 999 (--model.vocab_size 256: no more)"
    )
    assert done.read_config()["model"]["vocab_size"] == 999
    run(tmp_path, "usual", {"training.steps": 1})
    assert "vocab_size" not in capfd.readouterr().err


@pytest.mark.parametrize("corpus", [{}, SHIFT])
def test_the_example_is_the_corpus_s_own_prompt(tmp_path, capfd, corpus):
    """Where that can be typed: the bytes of pairs cannot."""
    config = configuration(tmp_path, corpus, {"training.steps": 1})
    train(config, tmp_path / "run")
    example = capfd.readouterr().err.rpartition("(try: ")[2].rstrip(")\n")
    prompt = build_corpus(config.data).prompts(1)[0]
    typed = [f"--prompt={prompt}"] if prompt.isprintable() else []
    assert bool(typed) == (corpus is not SHIFT)
    assert shlex.split(example) == ["glissando", "generate", str(tmp_path / "run"), *typed]


def test_a_file_has_a_line_now_and_then_between_validations(tmp_path, now):
    """After 20 seconds, and from 400 seconds on after a twentieth of the time."""
    loop, file = loop_for(tmp_path), io.StringIO()
    loop.fabric.launch()
    progress = Progress(file)
    progress.before_step(loop, [next(iter(loop.task.batches("train")))])
    lines = len(file.getvalue().splitlines())
    added = []
    for now[0] in (105, 121, 130, 142, 1100, 1130, 1160):
        progress.logged(loop)
        added.append(len(file.getvalue().splitlines()) - lines)
        lines += added[-1]
    assert added == [0, 1, 0, 1, 1, 0, 1]


def test_rate_leaves_out_what_is_no_step(tmp_path, now):
    loop, progress = loop_for(tmp_path), Progress()
    now[0] += 2
    with loop.clock.aside():
        now[0] += 30
    loop.budget.share, loop.state.tokens = 0.5, 320
    # 320 tokens in 2 seconds; half of the run has taken 32 seconds
    assert progress.line(loop) == "step 0, 0:32 left, 160 tok/s"


@pytest.mark.parametrize(
    ("share", "spent", "shown"), [(0.0, 5, "0:00"), (0.25, 30, "1:30"), (0.5, 4000, "1:06:40"), (1.0, 9, "0:00")]
)
def test_time_left(tmp_path, now, share, spent, shown):
    loop = loop_for(tmp_path, {"training": {"steps": None, "seconds": 100.0}})
    now[0] += spent
    loop.budget.share = share
    assert f", {shown} left, " in Progress().line(loop)


# ---------------------------------------------------------------------- a bar, and events


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_bar_on_a_terminal(tmp_path, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    run(tmp_path, "run", {"training": {"steps": 4, "sample_every": 4}})
    shown = screen.getvalue()
    assert "100%|" in shown
    assert "| validating, step 4, " in shown
    assert "step 4" in shown
    assert "\nstep 4: " in shown or "\rstep 4: " in shown


def test_loss_and_time_left_are_within_80_columns(tmp_path):
    """The bar of a long training whose corpus has a floor."""
    shows, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    loop = loop_for(tmp_path)
    loop.state.step, loop.budget.share, loop.state.tokens = 123_456, 0.01, 10**8
    loop.clock = Clock(3600.0)
    loop.validation = {"entropy_floor": 0.29}
    latest = {"train_loss": 12.345, "train_bits_per_byte": 12.345, "valid_bits_per_byte": 12.345}
    loop.metrics = SimpleNamespace(latest=latest)
    with os.fdopen(terminal, "w") as file, os.fdopen(shows, "rb", 0) as screen:
        progress = Progress(file)
        progress.before_step(loop, [next(loop.task.batches("train"))])
        progress.logged(loop)
        written = b""
        while b"| step" not in written:  # a terminal may hand on less than there is
            written += screen.read(10_000)
        shown = written.decode().split("\r")[-1]
        progress.close()
    assert len(shown) <= 80
    assert "| step 123456, 99:00:0" in shown
    assert " left, train 12.345, held out 12.345 bits" in shown


# ---------------------------------------------------------------------- validations


def validations(tmp_path, monkeypatch, now, cost, updates, step_seconds=5):
    """When a training validates whose steps take so many seconds each, and its validations `cost`."""
    made, began = [], now[0]
    original_step, original_score = torch.optim.AdamW.step, LanguageTask.score

    def step(self, *args, **keywords):
        now[0] += step_seconds
        return original_step(self, *args, **keywords)

    def score(*arguments):
        made.append(now[0] - began)
        now[0] += cost
        return original_score(*arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    monkeypatch.setattr(LanguageTask, "score", score)
    monkeypatch.setattr(LanguageTask, "sample", lambda self, model: "")
    short = {
        "model.hidden_size": 4,
        "data": {"batch_size": 1, "seq_len": 4, "max_valid_bytes": 12},
        "training": {"save_every": 10**6},
    }
    run(tmp_path, "run", short, {"training": {"validate_every": None}}, updates)
    return made


@pytest.mark.parametrize(("seconds", "batch_seconds"), [(100, 1.0), (9, 1.0)])
def test_validations_take_a_fifth_of_the_seconds_at_most(tmp_path, monkeypatch, now, seconds, batch_seconds):
    """The first and the last included; all of them read the same held-out batches, from all over the held-out text."""
    read, original = [], score_part

    def score(model, batches, device):
        read.append([])

        def timed():
            for batch in batches:
                now[0] += batch_seconds
                read[-1].append(batch.ids.tolist())
                yield batch

        return original(model, timed(), device)

    monkeypatch.setattr("glissando.training.language_task.score_part", score)
    limits = {"data.max_valid_bytes": 100, "training": {"steps": None, "seconds": float(seconds)}}
    validations(tmp_path, monkeypatch, now, 0, limits, 1)
    assert read
    assert all(each == read[0] for each in read)
    assert 0 < sum(map(len, read)) * batch_seconds <= max(seconds / 5, batch_seconds)
    corpus = build_corpus(configuration(tmp_path, {"data": {"batch_size": 1, "seq_len": 4}}).data)
    held_out = [batch.ids.tolist() for batch in corpus.batches("valid")]
    assert len(read[0]) < len(held_out)
    assert held_out.index(read[0][0]) + 1 >= len(held_out) // len(read[0]) // 2


@pytest.mark.parametrize(("seconds", "cost", "before_the_end"), [(100, 12, 1), (100, 9, 1), (100, 2, 9), (10, 4, 1)])
def test_validations_leave_most_of_the_seconds_to_steps(tmp_path, monkeypatch, now, seconds, cost, before_the_end):
    budget = {"training": {"steps": None, "seconds": seconds}}
    *before, last = validations(tmp_path, monkeypatch, now, cost, budget, seconds / 20)
    assert last >= seconds
    assert before[0] == seconds / 10
    assert len(before) in (before_the_end - 1, before_the_end)
    assert cost * len(before) <= max(cost, seconds / 5)


def test_validations_that_were_asked_for_are_made(tmp_path, monkeypatch, now):
    every = {"training": {"steps": None, "seconds": 100.0, "validate_every": 2}}
    assert len(validations(tmp_path, monkeypatch, now, 12, every)) == 5 + 1


def test_whether_to_validate_is_the_first_process_s_word(tmp_path, monkeypatch, now):
    monkeypatch.setattr(Fabric, "broadcast", lambda self, word: False if isinstance(word, bool) else word)
    budget = {"training": {"steps": None, "seconds": 100.0}}
    assert len(validations(tmp_path, monkeypatch, now, 2, budget)) == 1


def test_seconds_on_validations_count_over_a_resumption(tmp_path, monkeypatch, now):
    """They are a part of the checkpoint: with 15 spent there is room for one, expected to be short."""
    original = Loop._set_up

    def set_up(self, checkpoint):
        made = original(self, checkpoint)
        self.state.validation_seconds = 15.0
        return made

    monkeypatch.setattr(Loop, "_set_up", set_up)
    budget = {"training": {"steps": None, "seconds": 100.0}}
    assert len(validations(tmp_path, monkeypatch, now, 9, budget, 2)) == 1 + 1
