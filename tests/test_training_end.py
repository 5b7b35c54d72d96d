"""What a training leaves beside its last weights: the best ones, a summary; and when it ends."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from training_runs import PLAIN, SHIFT, assert_same_tensors, configuration, crash_in, text_file, weights

import glissando
from glissando.cli import main
from glissando.data.corpora import build_corpus
from glissando.errors import ConfigError, Stopped
from glissando.metrics import summarize, summary_lines
from glissando.runs import Run
from glissando.stages import train_stages
from glissando.training.fit import resume, train
from glissando.training.loop import Loop
from glissando.training.progress import Progress
from research import fixed_pairs  # noqa: F401  registers `fixed-pairs`

#: a rate at which the held-out loss soon rises again
RISING = {"training": {"steps": 12, "validate_every": 2, "save_every": 4, "log_every": 3}}
RISING["training"] |= {"optimizer": {"learning_rate": 0.1}, "schedule": {"kind": "constant", "warmup_steps": 8}}


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def best_row(run: Path) -> dict[str, str]:
    return min((row for row in rows(run) if row["valid_loss"]), key=lambda row: float(row["valid_loss"]))


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_bytes())


def evaluated(capsys, *arguments: object) -> dict:
    capsys.readouterr()
    assert main(["evaluate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def rising(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rising")
    return train(configuration(folder, PLAIN, RISING), folder / "run").path


# ---------------------------------------------------------------------- the best checkpoint


def test_the_best_validation_is_kept_and_opens_as_a_run(rising, capsys):
    best = best_row(rising)
    assert int(best["step"]) < 12, "the figures of this test are of a loss that rises again"
    loss = evaluated(capsys, rising / "checkpoints" / "best")["loss_nats"]
    assert loss == pytest.approx(float(best["valid_loss"]), rel=1e-5)
    last = float(rows(rising)[-1]["valid_loss"])
    assert evaluated(capsys, rising)["loss_nats"] == pytest.approx(last, rel=1e-5), "the run's own are its last"
    assert evaluated(capsys, rising / "checkpoints" / "step-00000012")["loss_nats"] == pytest.approx(last, rel=1e-5)
    eighth = next(float(row["valid_loss"]) for row in rows(rising) if row["step"] == "8")
    assert evaluated(capsys, rising / "checkpoints" / "step-00000008")["loss_nats"] == pytest.approx(eighth, rel=1e-5)
    assert main(["generate", f"{rising}/checkpoints/best", "--prompt", "ab", "--max_tokens", "3"]) == 0


def test_a_checkpoint_that_is_not_there_names_those_that_are(rising, capsys):
    assert main(["evaluate", f"{rising}/checkpoints/step-00000005"]) == 1
    assert "It has: step-00000006, step-00000008, step-00000012" in capsys.readouterr().err


def test_a_damaged_best_checkpoint_is_refused(tmp_path):
    run = train(configuration(tmp_path, {"training.steps": 2}), tmp_path / "run").path
    (run / "checkpoints" / "step-00000002" / "model.safetensors").write_bytes(b"\0" * 99)
    with pytest.raises(glissando.errors.RunError, match=r"model\.safetensors is damaged"):
        glissando.load(run / "checkpoints" / "best")


def test_best_is_the_same_through_a_crash_and_a_resumption(tmp_path, rising, monkeypatch):
    whole, crashed = int(best_row(rising)["step"]), tmp_path / "run"
    with monkeypatch.context() as patched:
        crash_in(patched, 11, ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            train(configuration(tmp_path, PLAIN, RISING), crashed)
    resume(crashed)
    assert summary(crashed)["best"]["step"] == whole
    for name in (".", "checkpoints/best"):
        assert_same_tensors(Run.open(crashed / name).read_state_dict(), Run.open(rising / name).read_state_dict())


def test_early_stopping_leaves_the_best_weights_as_the_runs_own(tmp_path, capsys):
    stopping = {"training.steps": 100, "training.early_stopping": 3}
    run = train(configuration(tmp_path, PLAIN, RISING, stopping), tmp_path / "run").path
    recorded, best = summary(run), best_row(run)
    assert (recorded["weights"], recorded["best"]["step"], recorded["steps"]) == (
        "best",
        int(best["step"]),
        int(best["step"]) + 6,
    )
    assert_same_tensors(weights(run), Run.open(run / "checkpoints" / "best").read_state_dict())
    assert f"at step {best['step']} of" in capsys.readouterr().err
    kept = (run / "model.safetensors").read_bytes()
    resume(run)
    assert "nothing is left to train" in capsys.readouterr().err
    assert (run / "model.safetensors").read_bytes() == kept
    assert summary(run)["best"] == recorded["best"]
    assert main(["grow", str(run), "--width", "2", "--out", str(tmp_path / "grown")]) == 0
    ids = torch.randint(0, 256, (2, 16))
    small, large = glissando.load(run), glissando.load(tmp_path / "grown")
    torch.testing.assert_close(small(ids)[0], large(ids)[0], atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------- the summary


def test_the_summary_says_how_training_ended(rising):
    recorded, best, end = summary(rising), best_row(rising), rows(rising)[-1]
    assert (recorded["steps"], recorded["finished"], recorded["weights"]) == (12, True, "latest")
    assert recorded["tokens"] == int(end["tokens"])
    assert recorded["learning_rate_scale"] == pytest.approx(float(end["learning_rate"]) / 0.1, rel=1e-5)
    assert recorded["seconds"] == pytest.approx(float(end["seconds"]), rel=1e-3)
    assert recorded["best"]["step"] == int(best["step"])
    assert recorded["best"]["tokens"] == int(best["tokens"])
    assert recorded["best"]["perplexity"] == pytest.approx(math.exp(float(best["valid_loss"])))
    assert recorded["last"]["loss"] == float(end["valid_loss"])
    assert json.loads((rising / "manifest.json").read_bytes())["files"]["summary.json"]


@pytest.mark.parametrize(
    ("rate", "where"), [(0.1, "at step 6 of 12, the best validation"), (0.01, "at the end, the best validation")]
)
def test_the_end_says_where_the_best_stopping_point_was(tmp_path, capsys, rate, where):
    train(configuration(tmp_path, PLAIN, RISING, {"training.optimizer.learning_rate": rate}), tmp_path / "run")
    recorded = capsys.readouterr().err
    assert where in recorded
    assert f"{tmp_path / 'run' / 'checkpoints' / 'best'}" in recorded
    assert ("a longer training gives a better model" in recorded) == (rate == 0.01)
    assert "scores all of them" not in recorded


@pytest.mark.parametrize(("best", "expected"), [(160, "160 of 161, the best"), (150, "150 of 161, the best")])
def test_the_last_validation_of_a_training_that_was_stopped_is_not_at_its_end(best, expected):
    """`evaluate` scores the last step, whose figure is another one."""
    last = {"step": "160", "tokens": "9", "seconds": "1", "valid_loss": "2.5", "valid_bits_per_byte": "3.5"}
    earlier = {**last, "step": "150", "valid_loss": "2.25" if best == 150 else "2.75"}
    ended = {"steps": 161, "tokens": 9, "seconds": 1.0, "finished": False, "weights": "latest", "valid_stride": 1}
    lines = summary_lines({**ended, **summarize([earlier, last], best)}, "run/best")
    assert expected in lines[1]
    assert not any("at the end" in line for line in lines)
    assert any(line.startswith("at step 160 of 161: 3.5000 bits/byte, 0.2500 nats") for line in lines) == (best == 150)


def test_the_end_says_that_a_part_of_what_is_held_out_was_scored(tmp_path, monkeypatch, capsys):
    validate = Loop.validate

    def every_second_batch(self):
        self.state.valid_stride = 2
        validate(self)

    monkeypatch.setattr(Loop, "validate", every_second_batch)
    train(configuration(tmp_path, PLAIN, RISING), tmp_path / "run")
    assert "one of 2 held-out batches was scored: `glissando evaluate` scores all of them" in capsys.readouterr().err


# ---------------------------------------------------------------------- until Ctrl-C, and epochs


def interrupted_at(monkeypatch, last: int) -> None:
    before_step = Progress.before_step

    def interrupt(self, loop, batches):
        before_step(self, loop, batches)
        if loop.state.step == last - 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Progress, "before_step", interrupt)


def test_without_a_budget_training_goes_on_until_it_is_interrupted(tmp_path, monkeypatch, capsys):
    steady = {"kind": "constant", "warmup_steps": 0}  # a warm-up is over after a tenth of a budget
    endless = {"training": {"steps": None, "schedule": steady, "validate_every": 2}}
    with monkeypatch.context() as patched:
        interrupted_at(patched, 5)
        with pytest.raises(Stopped):
            train(configuration(tmp_path, PLAIN, endless), tmp_path / "run")
    assert "no budget: until Ctrl-C" in (error := capsys.readouterr().err)
    assert ", until Ctrl-C, train " in error
    assert Run.open(tmp_path / "run").checkpoint == (tmp_path / "run" / "checkpoints" / "step-00000005").resolve()
    assert not (tmp_path / "run" / "summary.json").exists()  # written when training ends
    interrupted_at(monkeypatch, 8)
    with pytest.raises(Stopped):
        resume(tmp_path / "run")
    fixed = {"training": {"steps": 8, "schedule": steady, "validate_every": 2}}
    assert_same_tensors(
        weights(tmp_path / "run"), weights(train(configuration(tmp_path, PLAIN, fixed), tmp_path / "b"))
    )


def test_a_training_without_a_budget_saves_after_ten_minutes_whatever_its_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("glissando.training.loop.ENDLESS_SECONDS", 0.0)
    interrupted_at(monkeypatch, 4)
    with pytest.raises(Stopped):
        train(
            configuration(tmp_path, PLAIN, {"training": {"steps": None, "schedule": {"kind": "constant"}}}),
            tmp_path / "run",
        )
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(kept) == 2, "every step was saved, and the newest two are kept"


def test_a_schedule_that_needs_an_end_is_refused_without_one(tmp_path):
    with pytest.raises(
        ConfigError, match=r"warmup-cosine needs an end.*training\.steps.*--training\.schedule\.kind const"
    ):
        train(configuration(tmp_path, {"training.steps": None}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_stage_without_an_end_is_refused(tmp_path):
    stages = {"stages": [{"name": "a", "training": {"schedule": {"kind": "constant"}}}], "training.steps": None}
    with pytest.raises(ConfigError, match=r"stages\[1\] \(a\): without a budget the next stage is never reached"):
        train_stages(configuration(tmp_path, stages), tmp_path / "run")


PAIRS = {"data": {"kind": "fixed-pairs", "batch_size": 8, "train_pairs": 20, "valid_rows": 8}}


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        (({"data.stride": 64},), lambda rows: math.ceil(1.5 * rows / 64)),
        ((), lambda rows: math.ceil(1.5 * rows / 64)),
        ((SHIFT, PAIRS), lambda rows: math.ceil(1.5 * 20 / 8)),
    ],
)
def test_epochs_are_passes_over_a_text_or_over_pairs(tmp_path, changes, steps):
    short = {"model.hidden_size": 4, "training": {"steps": None, "epochs": 1.5, "validate_every": 10**6}}
    config = configuration(tmp_path, {"data.batch_size": 64}, *changes, short)
    count = build_corpus(config.data).epoch_rows
    if not changes:  # random windows: as many as hold the text's tokens
        assert count == math.ceil(int(text_file(tmp_path).stat().st_size * 0.9) / 16)
    if len(changes) == 1:  # the order deals each window once before any comes again
        batches = itertools.islice(build_corpus(config.data).batches("train"), math.ceil(count / 64))
        seen = [window for batch in batches for window in map(bytes, batch.targets.tolist())][:count]
        assert len(set(seen)) == count
    run = train(config, tmp_path / "run").path
    end = rows(run)[-1]
    assert int(end["step"]) == steps(count)
    assert 1.5 <= float(end["epoch"]) < 1.5 + config.data.batch_size / count


def test_epochs_of_what_never_ends_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"training\.epochs counts passes .* this corpus has no known end"):
        train(configuration(tmp_path, SHIFT, {"training": {"steps": None, "epochs": 1.0}}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------- what is shown


def test_the_log_has_accuracy_and_epoch(tmp_path, capsys):
    options = {"training": {"steps": 6, "log_every": 3, "validate_every": 2, "accumulate": 2}}
    config = configuration(tmp_path, PLAIN, options)
    run = train(config, tmp_path / "run").path
    table = {int(row["step"]): row for row in rows(run)}
    assert sorted(table) == [2, 3, 4, 6]
    assert [bool(table[step]["train_accuracy"]) for step in sorted(table)] == [False, True, False, True]
    for row in table.values():
        expected = int(row["step"]) * 4 / build_corpus(config.data).epoch_rows
        assert float(row["epoch"]) == pytest.approx(expected, rel=1e-5)
    started = capsys.readouterr().err.splitlines()[0]
    parameters = glissando.load(run).num_parameters()
    for part in ("device cpu", "32-true", f"threads {torch.get_num_threads()}", f"{parameters:,}", "4 rows in 2 parts",
                 "ids (2, 16)"):  # fmt: skip
        assert part in started


def test_the_accuracy_in_the_log_is_that_of_the_steps_own_batch(tmp_path):
    """A first step at rate 0 is taken with the weights that the run was started with, so they say what it must be."""
    frozen = {"training": {"steps": 1, "log_every": 1, "optimizer": {"learning_rate": 1e-30, "weight_decay": 0.0}}}
    config = configuration(tmp_path, PLAIN, frozen)
    run = train(config, tmp_path / "run").path
    batch = next(build_corpus(config.data).batches("train"))
    right = glissando.load(run)(batch.ids)[0].argmax(-1) == batch.targets
    assert float(rows(run)[0]["train_accuracy"]) == pytest.approx(float(right.float().mean()))
