"""What a comparison shows while it trains and measures, and the runs that it knows again."""

from __future__ import annotations

import contextlib
import io
import math
import re
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import yaml
from comparisons import comparison

from glissando.compare import duration, log, speed
from glissando.compare import run as compare
from glissando.compare.log import JobProgress, Log
from glissando.compare.measure import read_measured
from glissando.compare.plan import Amount, Comparison, Job
from glissando.compare.speed import Cost, measure_speed
from glissando.compare.training import with_vocabulary
from glissando.data.corpora import build_corpus
from glissando.decoding import CompiledStep
from glissando.errors import ConfigError
from glissando.presets import preset_names
from glissando.runs import CONFIG, Run
from glissando.training.fit import train
from glissando.training.language_task import fit_to_corpus

pytestmark = pytest.mark.timeout(600)
TIMED = {"decode": {}, "state": {}, "train": {"median": 1.0, "low": 1.0, "high": 1.0}, "memory_mib": 1.0}
SMALL: dict[str, Any] = {
    "data": {"seq_len": 32, "batch_size": 1, "valid_rows": 2},
    "training": {"log_every": 1, "schedule": {"warmup_steps": 2}},
    "contexts": [8],
}
ASKED = ["transformer-nano", "tauformer-nano", "liquid-ssm-nano", "delta-nano"]


def toy(path: Path) -> Any:
    asked = comparison(path, **SMALL)
    asked.budget = Amount("steps", 6)
    return asked


def measured_and_written_by_nobody(monkeypatch):
    """Neither the speed nor the report is what the test looks at."""
    monkeypatch.setattr(speed, "_TIMED", 0.0)  # seconds for which each model would be timed before any trains
    monkeypatch.setattr(compare, "measure_speed", lambda runs, *_: dict.fromkeys(runs, TIMED))
    monkeypatch.setattr(compare, "write_report", lambda asked, _: asked.out / "report.html")


def test_a_training_that_fails_ends_that_rate_alone(tmp_path, monkeypatch, capsys):
    measured_and_written_by_nobody(monkeypatch)
    asked = toy(tmp_path)
    asked.learning_rates, asked.sweep_beyond, asked.budget = [1e-3, 1e30], 0, Amount("steps", 12)
    asked.training["clip"] = None
    asked.given = ["transformer-nano"]
    compare.compare(asked)
    failed = asked.out / "sweep/transformer-nano/lr-1e+30-seed-0"
    assert "not finite" in read_measured(failed)["failed"]  # type: ignore[index]
    assert capsys.readouterr().err.count("learning rate 1e+30: failed") == 1
    assert Run(next(asked.out.glob("runs/*/*"))).read_config()["training"]["optimizer"]["learning_rate"] == 1e-3


def test_lines_name_what_was_trained_and_the_table_ranks(tmp_path, monkeypatch, capsys):
    measured_and_written_by_nobody(monkeypatch)
    compare.compare(toy(tmp_path))
    printed = capsys.readouterr().err
    # Of each model one figure at the end, the best first.
    ended = printed[printed.rindex("writing the report") :].splitlines()[2:]
    figures = [float(re.findall(r"\d\.\d{4}", line)[0]) for line in ended]
    assert len(figures) == 2
    assert figures == sorted(figures)
    assert len([line for line in printed.splitlines() if "trained in " in line]) == 2


@pytest.mark.parametrize("preset", [name for name in preset_names() if name.endswith("-nano")])
def test_a_run_of_every_preset_is_known_again(tmp_path, preset):
    """Also where training has changed options to fit the corpus."""
    asked = Comparison([preset], tmp_path / "out", Amount("steps", 4), data=SMALL["data"])
    job = Job("run", preset, 0, 1e-3)
    trained = asked.config(job)
    fit_to_corpus(trained, build_corpus(trained.data))
    path = job.path(asked.out)
    path.mkdir(parents=True)
    (path / CONFIG).write_text(yaml.safe_dump(trained.as_dict()))
    asked.require_same(job)
    trained.training.optimizer.learning_rate = 7e-3
    (path / CONFIG).write_text(yaml.safe_dump(trained.as_dict()))
    with pytest.raises(ConfigError, match=r"trained with other options: training\.optimizer\.learning_rate was 0\.007"):
        asked.require_same(job)


# ---------------------------------------------------------------------- what is shown


def test_a_line_says_what_takes_long(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(log.time, "perf_counter", lambda: now[0])
    shown = Log(tmp_path, io.StringIO())
    for now[0] in range(0, 100, 5):
        shown.status(f"at {now[0]}")
    assert shown.file.getvalue().split() == ["at", "20", "at", "40", "at", "60", "at", "80"]  # type: ignore[attr-defined]
    shown.close()


def test_speed_says_what_it_measures(tmp_path, monkeypatch):
    asked = toy(tmp_path)
    asked.budget = Amount("steps", 1)
    asked.check()
    asked.write_plan()
    with contextlib.closing(Log(asked.out, io.StringIO())) as shown:
        for job in asked.run_jobs(dict.fromkeys(asked.names, 1e-3)):
            train(asked.config(job), job.path(asked.out), progress=JobProgress(shown, ""))
    said: list[str] = []
    taken: list[str] = []
    write = CompiledStep.write
    monkeypatch.setattr(CompiledStep, "write", lambda *args: (taken.append("compiled"), write(*args))[1])
    runs = {path.parent.name: path for path in asked.out.glob("runs/*/*")}
    figures = measure_speed(runs, [8], said.append, rounds=1)
    assert {each["step"] for each in figures.values()} == {"compiled"}  # what `generate` takes is what is timed
    assert len(taken) >= 2 * 2 * len(runs)
    assert [line.removeprefix("measuring speed: ") for line in said] == [
        "decoding after 8 tokens", "training steps in turn", *(f"memory of {name}" for name in runs)
    ]  # fmt: skip


@pytest.mark.slow
def test_held_out_text_is_timed_of_a_batch_that_was_scored_before_and_never_held_whole(monkeypatch):
    """The first pass may compile a kernel, and a held-out text may be large."""
    config = Comparison(["transformer-nano"], "out", Amount("steps", 4), data={**SMALL["data"], "valid_rows": 12})
    config = config.config(Job("run", "transformer-nano", 0, 1e-3))
    kind = type(build_corpus(config.data))
    alive, most, scored = [0], [0], []
    valid_batch = kind._valid_batch

    def watched(*args):
        batch = valid_batch(*args)
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        weakref.finalize(batch.ids, lambda: alive.__setitem__(0, alive[0] - 1))
        return batch

    def slow_at_first(*_):
        time.sleep(0.0 if scored else 1.0)
        scored.append(1)

    monkeypatch.setattr(kind, "_valid_batch", watched)
    monkeypatch.setattr(speed, "score", slow_at_first)
    assert speed.cost_of(with_vocabulary(config)).held_out < 1.0
    assert most[0] <= 3


def planning(path: Path, monkeypatch) -> Any:
    """Four models of 13,000 tokens: 13 s of steps each, 10 x 0.5 s of validations, and 1.5 s for the rest."""
    asked = comparison(path, **SMALL)
    asked.given, asked.budget = [*ASKED], Amount("tokens", 13000.0)
    asked.check()
    asked.write_plan()
    monkeypatch.setattr(duration, "cost_of", lambda config: Cost(1e-3, 32e-3, held_out=0.5, start=1.0))
    return asked


def fit(asked: Any, within: float | None, spent: float = 0.0) -> tuple[Any, str]:
    said = io.StringIO()
    with contextlib.closing(Log(asked.out, said)) as shown:
        shorter = duration.fitted(asked, within, shown, time.perf_counter() - spent)
    return shorter, said.getvalue()


def begin_a_training(asked: Any) -> None:
    config = asked.run_jobs(dict.fromkeys(asked.names, 1e-3))[0].path(asked.out) / CONFIG
    config.parent.mkdir(parents=True)
    config.touch()


def test_a_comparison_that_takes_too_long_has_fewer_models_and_a_smaller_budget(tmp_path, monkeypatch):
    asked = planning(tmp_path, monkeypatch)
    whole, said = fit(asked, None)
    assert whole is asked
    assert "for 13,000 tokens: about 78 seconds; for a first look" in said  # 4 x (13 + 5 + 1.5)
    assert fit(asked, 80)[0] is asked
    shorter, said = fit(asked, 42, spent=10)
    assert "more than the 42 seconds of --within" in said
    assert (shorter.names, shorter.budget.kind) == (asked.names[:3], "tokens")
    # 10 s are over; with three validations each in the place of ten, these take less than a fifth of the trainings
    assert shorter.budget.value == pytest.approx(13000 * (32 - 3 * (1.5 + 3 * 0.5)) / (3 * 13), rel=0.05)
    assert "with at most 3 validations each: about 32 seconds from now" in said
    every = {shorter.config(job).training.validate_every for job in shorter.run_jobs(dict.fromkeys(ASKED, 1e-3))}
    assert every == {math.ceil(shorter.budget.value / 32 / 3)}
    # what is there goes on with the budget that it has, and a line says so
    shorter.write_plan()
    again = comparison(tmp_path, **SMALL)
    again.given, again.budget = [*ASKED], Amount("tokens", 13000.0)
    assert duration.resumed(again) is again  # before any training it is sized anew
    begin_a_training(again)
    resumed = duration.resumed(again)
    assert (resumed.names, resumed.budget, resumed.training) == (shorter.names, shorter.budget, shorter.training)
    same, said = fit(resumed, 3)
    assert same is resumed
    assert "--within sizes a comparison before its first training" in said


def test_a_time_that_is_too_short_says_what_is_the_least(tmp_path, monkeypatch):
    least, said = fit(planning(tmp_path, monkeypatch), 5)
    assert (least.names, least.budget.value) == (ASKED[:3], 260)
    assert "with at most 1 validation each" in said
    assert "longer than --within: 2% of --budget is the least" in said


@pytest.mark.parametrize(("budget", "cluster"), [(Amount("flops", 1e9), None), (Amount("tokens", 90), object())])
def test_within_is_refused_where_nothing_would_be_timed(budget, cluster, tmp_path):
    asked = comparison(tmp_path, **SMALL)
    asked.budget = budget
    with pytest.raises(ConfigError, match="--within sizes trainings that follow each other on this machine"):
        compare.compare(asked, cluster, within=60)


@pytest.mark.parametrize(
    ("models", "budget"),
    [
        ([*ASKED[1:], ASKED[0]], Amount("tokens", 13000.0)),
        (ASKED, Amount("steps", 13000.0)),
        (ASKED, Amount("tokens", 90.0)),
    ],
)
def test_a_plan_of_another_command_is_not_taken_up(models, budget, tmp_path):
    before = comparison(tmp_path, **SMALL)
    before.given, before.budget = ASKED[:3], Amount("tokens", 9000.0)
    before.write_plan()
    begin_a_training(before)
    again = comparison(tmp_path, **SMALL)
    again.given, again.budget = models, budget
    assert duration.resumed(again) is again


def test_a_terminal_shows_each_status_in_the_place_of_the_last(tmp_path):
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    with contextlib.closing(Log(tmp_path, terminal)) as shown:
        shown.status("one")
        shown.status("two")
        shown.print("done")
    assert terminal.getvalue() == "\r\x1b[Kone\r\x1b[Ktwo\r\x1b[Kdone\n"
