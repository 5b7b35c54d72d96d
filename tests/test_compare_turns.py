"""Trainings of a comparison that take turns, and what is shown meanwhile."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from comparisons import comparison

from glissando.compare import run as compare
from glissando.compare import speed, table
from glissando.compare.measure import read_measured
from glissando.compare.plan import Amount, Comparison, Job
from glissando.compare.speed import measure_speed, training_memory
from glissando.compare.table import Table, Turn
from glissando.data.corpora import build_corpus
from glissando.decoding import CompiledStep
from glissando.errors import ConfigError, GlissandoError
from glissando.presets import preset_names
from glissando.runs import CONFIG, Run
from glissando.training.fit import fit_to_corpus, train

pytestmark = pytest.mark.timeout(600)
TIMED = {"decode": {}, "state": {}, "train": {"median": 1.0, "low": 1.0, "high": 1.0}, "memory_mib": 1.0}
SMALL: dict[str, Any] = {
    "data": {"seq_len": 32, "batch_size": 1, "valid_stories": 2},
    "training": {"log_every": 1, "schedule": {"warmup_steps": 2}},
    "contexts": [8],
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def toy(path: Path, turns: int) -> Any:
    asked = comparison(path, **SMALL, turns=turns)
    asked.budget = Amount("steps", 6)
    return asked


@pytest.fixture
def taken(monkeypatch) -> list[tuple[str, int]]:
    """The model of each turn, and the step at which it ended."""
    turns: list[tuple[str, int]] = []
    monkeypatch.setattr(compare, "measure_speed", lambda runs, *_: dict.fromkeys(runs, TIMED))
    close = Turn.close

    def closed(turn: Turn) -> None:
        if turn.bar is None and turn.loop_step is not None:
            turns.append((turn.title.partition(",")[0], turn.loop_step))
        close(turn)

    step = Turn.after_step

    def stepped(turn: Turn, loop: Any) -> None:
        turn.loop_step = loop.state.step
        step(turn, loop)

    monkeypatch.setattr(Turn, "loop_step", None, raising=False)
    monkeypatch.setattr(Turn, "after_step", stepped)
    monkeypatch.setattr(Turn, "close", closed)
    return turns


def weights(out: Path) -> list[bytes]:
    return [(path / "model.safetensors").read_bytes() for path in sorted(out.glob("runs/*/*"))]


def test_models_take_turns_and_learn_what_they_would_have_learned_without(tmp_path, taken, capsys):
    compare.compare(toy(tmp_path / "turns", 3))
    names = ["transformer-nano", "tauformer-nano"]
    assert taken == [(name, step) for step in (2, 4, 6) for name in names]
    told = capsys.readouterr().err
    assert re.findall(r"^turn (\d) of 3, about", told, re.M) == ["1", "2"]
    page = (tmp_path / "turns/out/report.html").read_text()
    assert "6 steps for each training, 1 seed, in 3 turns" in page
    assert "interrupted" not in page
    compare.compare(toy(tmp_path / "whole", 1))
    assert taken[6:] == [(name, 6) for name in names]
    assert weights(tmp_path / "turns/out") == weights(tmp_path / "whole/out")
    # Of each model one figure at the end, the best first; the lines of its training have none.
    ended = told[told.rindex("writing the report") :].splitlines()[2:]
    figures = [float(re.findall(r"\d\.\d{4}", line)[0]) for line in ended]
    assert len(figures) == 2
    assert figures == sorted(figures)
    lines = [line for line in told.splitlines() if "trained in " in line]
    assert len(lines) == 2
    assert "bits" not in "".join(lines)


def test_ctrl_c_at_the_end_of_a_turn_ends_the_comparison(tmp_path, taken, monkeypatch):
    """The turn is over by itself in that very step; the same command goes on and skips the turns that are done."""
    step = Turn.after_step

    def interrupted(turn: Turn, loop: Any) -> None:
        step(turn, loop)
        if loop.state.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Turn, "after_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compare.compare(toy(tmp_path, 3))
    assert taken == [("transformer-nano", 2), ("tauformer-nano", 2), ("transformer-nano", 4)]
    del taken[:]
    compare.compare(toy(tmp_path, 3))
    assert taken == [("tauformer-nano", 4), ("transformer-nano", 6), ("tauformer-nano", 6)]
    assert all(read_measured(path) for path in (tmp_path / "out/runs").glob("*/*"))


def test_a_failure_in_a_turn_ends_that_model_alone(tmp_path, taken, capsys):
    asked = toy(tmp_path, 3)
    asked.learning_rates, asked.sweep_share, asked.sweep_beyond = [1e-3, 1e30], 1.0, 0
    asked.training["clip"] = None
    asked.given = ["transformer-nano"]
    compare.compare(asked)
    failed = asked.out / "sweep/transformer-nano/lr-1e+30-seed-0"
    assert "not finite" in read_measured(failed)["failed"]  # type: ignore[index]
    assert capsys.readouterr().err.count("learning rate 1e+30: failed") == 1
    assert Run(next(asked.out.glob("runs/*/*"))).read_config()["training"]["optimizer"]["learning_rate"] == 1e-3


@pytest.mark.parametrize("preset", [name for name in preset_names() if name.endswith("-nano")])
def test_a_run_of_every_preset_is_known_again(tmp_path, preset):
    """Also where training has changed options to fit the corpus: for turns, and for a comparison that goes on."""
    asked = Comparison([preset], tmp_path / "out", Amount("steps", 4), data=SMALL["data"])
    job = Job("run", preset, 0, 1e-3)
    trained = asked.config(job)
    fit_to_corpus(trained, build_corpus(trained.data))
    path = job.path(asked.directory)
    path.mkdir(parents=True)
    (path / CONFIG).write_text(yaml.safe_dump(trained.as_dict()))
    asked.require_same(job)
    trained.training.optimizer.learning_rate = 7e-3
    (path / CONFIG).write_text(yaml.safe_dump(trained.as_dict()))
    with pytest.raises(ConfigError, match=r"trained with other options: training\.optimizer\.learning_rate was 0\.007"):
        asked.require_same(job)


def test_a_flow_takes_turns(tmp_path, taken):
    asked = Comparison(
        ["hybrid-ode-nano"], tmp_path / "out", Amount("steps", 4), **SMALL, turns=2, model={"hidden_size": 16},
        allow_unequal=True,
    )  # fmt: skip
    compare.compare(asked)
    assert taken == [("hybrid-ode-nano", 2), ("hybrid-ode-nano", 4)]


def test_turns_are_at_least_one(tmp_path):
    with pytest.raises(ConfigError, match="--turns must be at least 1, got 0"):
        comparison(tmp_path, turns=0).check()


# ---------------------------------------------------------------------- what is shown


def test_a_warning_where_a_model_reads_far_slower_than_before(tmp_path):
    for file in (io.StringIO(), Terminal()):
        shown = Table(tmp_path, file)
        for model, rate in (("a", 900.0), ("a", 1000.0), ("b", 90.0), ("a", 501.0)):
            shown.speed(model, model, rate)
        assert "warning" not in file.getvalue()
        shown.speed("a", "a", 499.0)
        assert "warning: a reads 499 tokens/s, and 1,000 before: the machine is busy" in file.getvalue()
        shown.close()


def test_rows_are_sorted_by_what_was_learned(tmp_path):
    shown = Table(tmp_path, io.StringIO())
    for model, bits in (("none", None), ("worse", "10.5"), ("best", "0.9"), ("middle", "2.25")):
        shown.set(model, **({"state": "failed"} if bits is None else {"bits_byte": bits}))
    assert shown.ranked() == ["best", "middle", "worse", "none"]
    assert [line.split()[0] for line in shown.lines()] == ["model", "best", "middle", "worse", "none"]
    shown.close(show=False)
    assert shown.file.getvalue() == ""  # type: ignore[attr-defined]


def test_without_a_terminal_a_line_says_what_takes_long(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(table.time, "perf_counter", lambda: now[0])
    shown = Table(tmp_path, io.StringIO())
    for now[0] in range(0, 100, 5):
        shown.status(f"at {now[0]}")
    assert shown.file.getvalue().split() == ["at", "20", "at", "40", "at", "60", "at", "80"]  # type: ignore[attr-defined]
    shown.close()


def test_on_a_terminal_a_warning_stays_above_the_table(tmp_path):
    shown = Table(tmp_path, Terminal())
    shown.set("model-a", state="run")
    shown.print("replaced")
    shown.print("stays", stays=True)
    shown.set("model-a", state="done")
    shown.close()
    screen: list[str] = []
    text = re.sub(r"\x1b\[(\d+)F\x1b\[J", r"<\1>", shown.file.getvalue())  # type: ignore[attr-defined]
    for part in re.split(r"(?=<\d+>)|(?<=\n)", text):
        if back := re.match(r"<(\d+)>", part):
            del screen[len(screen) - int(back[1]) :]
            part = part[back.end() :]
        if part:
            screen.append(part)
    assert [line.split() for line in screen] == [["stays"], ["model", "state"], ["model-a", "done"], []]


def test_speed_says_what_it_measures_and_how_long(tmp_path, monkeypatch):
    """Of two runs: every model in every round, with a growing share and the time left."""
    monkeypatch.setattr(speed, "training_memory", lambda paths: iter([1.0] * len(paths)))
    asked = toy(tmp_path, 1)
    asked.budget = Amount("steps", 1)
    asked.check()
    asked.write_plan()
    with contextlib.closing(Table(asked.out, io.StringIO())) as shown:
        for job in asked.run_jobs(dict.fromkeys(asked.names, 1e-3)):
            train(asked.config(job), job.path(asked.out), progress=Turn(shown, "", None))
    said: list[str] = []
    taken: list[str] = []
    stepped = CompiledStep.__call__
    monkeypatch.setattr(CompiledStep, "__call__", lambda *args: (taken.append("compiled"), stepped(*args))[1])
    runs = {path.parent.name: path for path in asked.out.glob("runs/*/*")}
    figures = measure_speed(runs, [8], said.append, rounds=1)
    assert {each["step"] for each in figures.values()} == {"compiled"}  # what `generate` takes is what is timed
    assert len(taken) == 2 * 16 * len(runs)
    shares = [int(re.match(r"measuring speed, (\d+) %: .*; \d+:\d\d elapsed", line)[1]) for line in said]  # type: ignore[index]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert 50 < shares[-1] < 100
    assert all(", about " in line for line in said[1:])
    for name in asked.names:
        for what in (
            f"{name} reads 8 tokens",
            f"{name} decodes after 8 tokens",
            f"in turn, {name}",
            f"memory of {name}",
        ):
            assert any(what in line for line in said), what


def test_a_memory_that_cannot_be_measured_is_an_error_that_says_why(tmp_path):
    with pytest.raises(GlissandoError, match=r"(?s)measuring the memory of .*no-run failed: .*no-run"):
        next(training_memory([tmp_path / "no-run"]))
