"""Whole comparisons at toy size; test_compare_plan.py has what they are made of."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparisons import comparison, model_file
from training_runs import started

from glissando.checkpoints import latest_checkpoint
from glissando.cli import main
from glissando.compare import report, speed, training
from glissando.compare import run as compare
from glissando.compare.log import Log
from glissando.compare.measure import MEASURED, read_measured
from glissando.compare.plan import Amount
from glissando.compare.results import bits_on
from glissando.compare.speed import _Entry, cost_of
from glissando.metrics import read_metrics

#: two processes are started and a few models trained: seconds on a machine of one's own, minutes on a busy one
pytestmark = pytest.mark.timeout(900)

TOY = [
    "transformer-nano", "liquid-ssm-nano", "--budget", "steps=8", "--seeds", "2", "--learning_rates", "1e-3,1e-2",
    "--sweep_beyond", "1", "--contexts", "8,24", "--allow_unequal", "--model.hidden_size", "16",
    "--model.depth.layers", "1", "--data.seq_len", "32", "--data.batch_size", "1", "--data.valid_rows", "2",
    "--training.accelerator", "cpu", "--training.log_every", "2", "--training.schedule.warmup_steps", "2",
    "--training.validate_every", "4",
]  # fmt: skip
PROBED = ["--probes", "induction", "--probe_budget", "steps=2"]


# ---------------------------------------------------------------------- all of it, at toy size


def stamps(out: Path) -> dict[str, int]:
    """When each file that is not the report was written."""
    kept = [p for p in out.rglob("*") if p.is_file() and p.parent != out]
    return {str(p): p.stat().st_mtime_ns for p in [*kept, out / "speed.json"]}


def markdown(out: Path) -> str:
    return (out / "report.md").read_text()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("compare") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "_TIMED", 0.0)  # seconds for which each model would be timed before any trains
        patch.setattr(compare, "measure_speed", partial(speed.measure_speed, rounds=1))
        assert main(["compare", *TOY, *PROBED, "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_a_whole_comparison(finished):
    page = (finished / "report.html").read_text()
    for name in ("transformer-nano", "liquid-ssm-nano", "entropy floor", "induction"):
        assert name in page
    assert page.count("<svg") == 5
    assert re.search(r"<h1>(transformer|liquid-ssm)-nano \w.* bits per byte.*</h1>", page)
    place = r"<h3>(\d)\. ([\w-]+)</h3>.*?dot\" style=\"left: ([\d.]+)%.*?<div class=\"bits\">([\d.]+)"
    ranking = re.findall(place, page, re.DOTALL)
    assert [place for place, *_ in ranking] == ["1", "2"]
    assert float(ranking[0][3]) <= float(ranking[1][3])
    assert float(ranking[0][2]) <= float(ranking[1][2]) <= 100
    assert 'class="floor"' in page
    assert not re.findall(r"https?://(?!www\.w3\.org)", page)
    assert not re.findall(r"""(?:src|href)=["'](?!#)(?!data:)[^"']*["']""", page)
    assert "None" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "## Probes" in markdown(finished)


def test_every_figure_is_traced_to_a_run(finished):
    runs = re.findall(
        r"\| ((?:sweep|runs|probes)/\S+) \| (\S+) \| (\S+) \| 0 \| (\S+)[^|]* \| ([^|]+) \|", markdown(finished)
    )
    assert len(runs) == len([*finished.rglob("measured.json")])
    for place, _, bits, commit, _ in runs:
        figures = read_measured(finished / place)
        assert figures is not None
        assert float(bits) == pytest.approx(bits_on(figures, slice(None)), abs=5e-4)
        assert (figures["provenance"]["commit"] or "unknown")[:10] == commit
    models = json.loads((finished / "speed.json").read_bytes())["models"]
    assert all(0 < figures["memory_mib"] < 60 for figures in models.values())
    mine = [json.loads(file.read_bytes()) for file in finished.glob("runs/liquid-ssm-nano/*/measured.json")]
    assert len(mine) == 2
    spent = [row for row in markdown(finished).splitlines() if row.startswith("| liquid-ssm-nano |")][1]
    printed = float(spent.split(" | ")[4].replace(",", ""))
    assert printed == pytest.approx(np.mean([each["spent"]["seconds"] for each in mine]), abs=0.5)


def test_what_was_chosen_was_trained(finished):
    sweep = sorted(finished.glob("sweep/liquid-ssm-nano/*"))
    beyond = {"lr-0.0001-seed-0", "lr-0.1-seed-0"} & {path.name for path in sweep}
    assert len(beyond) == 1  # of two rates the best is one at the edge
    assert {path.name for path in sweep} == {"lr-0.001-seed-0", "lr-0.01-seed-0", *beyond}
    assert f"| {next(iter(beyond)).split('-')[1]} |" in markdown(finished)
    bits = {path.name: bits_on(json.loads((path / MEASURED).read_bytes()), slice(0, None, 2)) for path in sweep}
    best = min(bits, key=lambda name: bits[name]).partition("-seed")[0]
    assert sorted(path.name for path in finished.glob("runs/liquid-ssm-nano/*")) == [f"{best}-seed-0", f"{best}-seed-1"]


@pytest.mark.slow
def test_a_second_run_does_nothing_and_a_wider_one_only_what_is_missing(finished, capsys):
    before = stamps(finished)
    assert main(["compare", *TOY, *PROBED, "--out", str(finished)]) == 0
    assert stamps(finished) == before
    wider = ["--probes", "induction,parity", "--probe_budget", "steps=2"]
    assert main(["compare", *TOY, *wider, "--out", str(finished)]) == 0
    after = stamps(finished)
    assert {name: after[name] for name in before} == before
    assert {Path(name).relative_to(finished).parts[1] for name in set(after) - set(before)} == {"parity"}
    capsys.readouterr()
    other = [a if a != "steps=8" else "steps=12" for a in TOY]
    assert main(["compare", *other, "--out", str(finished)]) == 2
    assert "training.steps was 2 and is 3" in capsys.readouterr().err


def change(file: Path, **figures: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_bytes()) | figures))


@pytest.fixture(scope="module")
def changed(finished, tmp_path_factory) -> Path:
    """As if the files, the commit and the machine had changed before the second seed, which diverged in one model."""
    out = tmp_path_factory.mktemp("changed") / "out"
    shutil.copytree(finished, out)
    second, failed = (next(out.glob(f"runs/{n}/*-seed-1")) / MEASURED for n in ("transformer-nano", "liquid-ssm-nano"))
    figures = json.loads(second.read_bytes())
    elsewhere = figures["provenance"] | {"commit": "f" * 40, "machine": "a faster one"}
    other = figures["held_out"] | {"digest": "0" * 64}
    change(second, held_out=other, provenance=elsewhere)
    change(failed, failed="its loss is not finite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "figures", lambda *_: {})  # the page without its pictures
        assert main(["compare", *TOY, *PROBED, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize(
    "note",
    [
        "The held-out text has changed between trainings",
        "Trained at several commits",
        "Trained on several machines",
    ],
)
def test_unequal_conditions_are_noted(note, changed, finished):
    assert re.search(note, markdown(changed))
    assert not re.search(note, markdown(finished))


def test_figures_come_from_runs_that_ended_well(changed):
    (first,) = (json.loads(file.read_bytes()) for file in changed.glob("runs/liquid-ssm-nano/*-seed-0/measured.json"))
    rows = re.findall(r"\| liquid-ssm-nano \|.*", markdown(changed))
    assert sum(row.endswith("| 1 of 2 |") for row in rows) == 2
    assert rows[1].split(" | ")[4] == f"{first['spent']['seconds']:,.0f}"


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on(tmp_path):
    """Ctrl-C in the middle of a training: the same command resumes that run and ends as if nothing had been."""
    sweep = TOY.index("--learning_rates")
    options = [*TOY[:1], *TOY[2:sweep], *TOY[TOY.index("--contexts") :]]
    options[options.index("steps=8")] = "steps=200"
    options[options.index("2")] = "1"  # one seed
    options[:1] = [model_file(tmp_path, "preset: transformer-nano")]
    out = tmp_path / "out"
    options += ["--training.save_every", "5", "--training.precision", "32-true"]
    with started([sys.executable, "-m", "glissando", "compare", *options, "--out", str(out)]) as process:
        path = out / "runs/mine/lr-0.004-seed-0"
        deadline = time.monotonic() + 200
        while latest_checkpoint(path) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=100)
    assert process.returncode == 130, printed
    assert read_measured(path) is None
    assert main(["compare", *options, "--out", str(out)]) == 0
    figures = read_measured(path)
    assert figures is not None
    assert figures["spent"]["step"] == 200
    assert figures["provenance"]["resumed"] == 1
    assert "| mine |" in markdown(out)


def test_speed_is_measured_on_rows_as_long_as_those_trained_on(finished):
    """A story is read whole, whatever seq_len is."""
    path = finished / "runs/liquid-ssm-nano"
    entry = _Entry.open(next(path.iterdir()))
    rows, length = entry.rows()
    metrics = read_metrics(next(path.iterdir()) / "metrics.csv")
    read = int(metrics[-1]["tokens"]) / int(metrics[-1]["step"])
    assert rows == 1
    assert rows * length == pytest.approx(read, rel=0.4)
    assert length > 10 * entry.config.data.seq_len
    assert re.search(r"batch size 1, \d{3} scored tokens on average", (finished / "report.html").read_text())


@pytest.mark.parametrize(("kind", "expected"), [("seconds", ["compiled", "trained"]), ("steps", ["trained"])])
def test_no_models_seconds_are_spent_on_compiling(kind, expected, tmp_path, monkeypatch):
    """Compiling takes a new machine as long as the demo lets a model train; what is compiled is what trains."""
    done = []

    def compiled(config):
        cost_of(config)
        done.append("compiled")
        assert config.model.hidden_size == 16

    def trained(*_, **__):
        done.append("trained")
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "cost_of", compiled)
    monkeypatch.setattr(training, "train", trained)
    asked = comparison(tmp_path, data={"seq_len": 32, "batch_size": 1})
    asked.given, asked.budget = ["liquid-ssm-nano"], Amount(kind, 2)
    asked.out.mkdir()
    with contextlib.closing(Log(asked.out)) as log, pytest.raises(KeyboardInterrupt):
        compare._finish_all(asked, asked.run_jobs({"liquid-ssm-nano": 1e-3})[:1], log, None)
    assert done == expected


@pytest.mark.slow
def test_a_training_that_diverges_is_reported_and_not_repeated(tmp_path, capsys):
    out = tmp_path / "out"
    options = [a if a != "1e-3,1e-2" else "1e-3,1e30" for a in TOY if a != "liquid-ssm-nano"]
    assert main(["compare", *options, "--training.clip", "null", "--out", str(out)]) == 0
    failed = out / "sweep/transformer-nano/lr-1e+30-seed-0"
    assert "not finite" in json.loads((failed / MEASURED).read_bytes())["failed"]
    assert "diverged" in (out / "report.html").read_text()
    before = stamps(out)
    assert main(["compare", *options, "--training.clip", "null", "--out", str(out)]) == 0
    assert stamps(out) == before


NO_FILE = ["--data.kind", "text", "--data.path", "no"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["transformer-nano", "--budget", "steps=1"], "--out is missing"),
        (["transformer-nano", "--out", "x"], "--budget is missing"),
        (["--budget", "steps=1", "--out", "x"], "name the models"),
        (["transformer-nan", "--budget", "steps=1", "--out", "x"], "Did you mean 'transformer-nano'"),
        (["transformer-nano", "--budget", "weeks=1", "--out", "x"], "steps, epochs, tokens, seconds, flops"),
        (["transformer-nano", "--budget", "steps=1", "--data.kind", "nope", "--out", "x"], "unknown corpus 'nope'"),
        (["transformer-nano", "--budget", "steps=1", *NO_FILE, "--out", "x"], "no file no;"),
        (["transformer-nano", "--budget", "steps=1", "--learning_rates", "a,b", "--out", "x"], "a list of numbers"),
        (
            ["transformer-nano", "--budget", "steps=1", "--sweep_beyond", "1", "--out", "x"],
            "without --learning_rates",
        ),
        (["transformer-nano", "--budget", "steps=1", "--probe_budget", "steps=1", "--out", "x"], "without --probes"),
        (["transformer-nano", "--budget", "steps=1", "--probes", "recal", "--out", "x"], "Did you mean 'recall'"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *arguments]) == (1 if message == "no file no;" else 2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_nothing_else_is_overwritten(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["compare", *TOY, "--out", str(tmp_path)]) == 1
    assert "holds no plan.json" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt"]
