"""Comparisons: what is planned, and a whole one at toy size; test_compare_results.py has the figures."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from training_runs import started

from glissando.cli import main
from glissando.data import corpora
from glissando.errors import ConfigError, DataError, RunError, UnknownNameError
from glissando.lab import compare, compare_plan
from glissando.lab.compare_measure import MEASURED, _digest, read_measured, training_digest
from glissando.lab.compare_plan import Amount, Comparison, Job
from glissando.lab.compare_report import Runs
from glissando.lab.compare_results import Finished, beyond, bits_on, choose
from glissando.lab.compare_results import finished as measured_of
from glissando.lab.compare_speed import _Entry, warm_up
from glissando.lab.compare_table import Table
from glissando.lab.probes import PROBES, select_probes
from glissando.runs import latest_checkpoint
from glissando.training.callbacks import read_metrics

#: two processes are started and a few models trained: seconds on a machine of one's own, minutes on a busy one
pytestmark = pytest.mark.timeout(900)

TOY = [
    "transformer-nano", "liquid-ssm-nano", "--budget", "steps=6", "--seeds", "2", "--learning_rates", "1e-3,1e-2",
    "--sweep_share", "0.5", "--sweep_beyond", "1", "--contexts", "8,24", "--allow_unequal", "--model.hidden_size", "16",
    "--model.depth.layers", "1", "--data.seq_len", "32", "--data.batch_size", "2", "--data.stories.valid_stories", "4",
    "--training.accelerator", "cpu", "--training.log_every", "2", "--training.schedule.warmup_steps", "2",
]  # fmt: skip
PROBED = ["--probes", "recall-8", "--probe_budget", "steps=2"]


def comparison(tmp_path: Path, **changes: Any) -> Comparison:
    values: dict[str, Any] = {"model": {"hidden_size": 16, "depth.layers": 1}, "allow_unequal": True}
    return Comparison(
        ["transformer-nano", "tauformer-nano"], tmp_path / "out", Amount("steps", 4), **(values | changes)
    )


# ---------------------------------------------------------------------- the plan


def test_amounts():
    assert Amount.parse("tokens=2e6", "--budget").options() == {"tokens": 2_000_000}
    assert Amount.parse("seconds=1.5", "--budget").times(0.5).options() == {"seconds": 0.75}
    assert Amount("steps", 1).times(0.1).options() == {"steps": 1}
    for text in ("tokens", "tokens=many", "hours=3", "tokens=-1", "tokens=nan"):
        with pytest.raises(ConfigError, match=re.escape(repr(text))):
            Amount.parse(text, "--budget")


def test_models_read_the_same_batches_under_the_same_seed(tmp_path):
    asked = comparison(tmp_path, data={"seed": 5}, seeds=2)
    for seed in (0, 1):
        jobs = [Job("run", name, seed, 1e-3) for name in asked.names]
        first, second = (asked.config(job) for job in jobs)
        assert first.data == second.data
        assert first.data.seed == 5 + seed
        assert first.training.seed == second.training.seed == seed
    labelled = comparison(tmp_path)
    labelled.given = ["transformer-nano", "hybrid-ode-nano"]
    assert not labelled.config(Job("run", "hybrid-ode-nano", 0, 1e-3)).data.stories.labelled


def test_options_of_all_come_after_the_presets_own(tmp_path):
    asked = comparison(tmp_path, training={"precision": "64-true", "optimizer": {"beta2": 0.5}})
    config = asked.config(Job("sweep", "tauformer-nano", 0, 0.25))
    assert (config.training.precision, config.training.optimizer.beta2) == ("64-true", 0.5)
    assert config.training.optimizer.learning_rate == 0.25
    assert config.training.schedule.final_ratio == 0.02  # the preset's
    assert config.training.steps == 1
    assert config.model.mixer == "tau"
    probe = asked.config(Job("probe", "tauformer-nano", 0, 0.25, "recall-8"))
    assert (probe.data.corpus, probe.data.recall.pairs, probe.training.steps) == ("recall", 8, 500)


def file(tmp_path: Path, text: str, name: str = "mine.yaml") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_a_file_is_a_model_with_the_name_of_the_file(tmp_path):
    """Over the preset that it names, with its own rate; all models' options come after it."""
    mine = file(
        tmp_path,
        "preset: composite-nano\nmodel: {hidden_size: 64, mixer: [spectral, attention]}\n"
        "training: {optimizer: {learning_rate: 0.25}}\n",
    )
    bare = file(tmp_path, "model: {hidden_size: 48}", "bare.yml")
    asked = comparison(tmp_path, model={"depth.layers": 2})
    asked.given = ["transformer-nano", mine, bare]
    assert asked.names == ["transformer-nano", "mine", "bare"]
    asked.check()
    job = Job("run", "mine", 0, asked.rates("mine")[0])
    config = asked.config(job)
    assert job.path(asked.out).parent == asked.out / "runs/mine"
    assert (config.preset, config.model.hidden_size, config.model.mixer) == (
        "composite-nano", 64, ["spectral", "attention"],
    )  # fmt: skip
    assert config.model.block.conv_width == 4  # the preset's
    assert (config.model.depth.layers, config.training.optimizer.learning_rate) == (2, 0.25)
    assert config.data == asked.config(Job("run", "transformer-nano", 0, 0.25)).data
    bared = asked.config(Job("run", "bare", 0, asked.rates("bare")[0]))
    assert (bared.preset, bared.model.hidden_size) == (None, 48)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "must hold a mapping"),
        ("model: {hiden_size: 3}", r"mine\.yaml: unknown option 'model\.hiden_size'\. Did you mean 'hidden_size'"),
        ("preset: transformer-nan", "Did you mean 'transformer-nano'"),
        ("start_from: runs/first", "take start_from out"),
        ("training: {tokens: 5}", r"training\.tokens is given by --budget"),
        ("data: {seq_len: 5}", "all models read the first one's data"),
        (
            "model: {mixers: {tau: {heads: 2}}}",
            r"mine\.yaml: model\.mixers\.tau\.heads would do nothing: model\.mixer is att",
        ),
        ("training: {schedule: {plateau_cuts: 3}}", r"mine\.yaml: training\.schedule\.plateau_cuts would do nothing"),
        ("model: {hidden_size: abc}", r"mine\.yaml: .*hidden_size"),
        ("preset: 5", r"mine\.yaml: "),
    ],
)
def test_mistakes_in_a_file(text, message, tmp_path):
    asked = comparison(tmp_path)
    asked.given = ["transformer-nano", file(tmp_path, text)]
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        asked.check()


def test_files_have_names_of_their_own(tmp_path):
    asked = comparison(tmp_path)
    for text, message in (
        (file(tmp_path, "preset: transformer-nano", "tauformer-nano.yaml"), "has the name of the preset"),
        (str(tmp_path / "missing.yaml"), "cannot read"),
        ("transformer-nano", "two models are called 'transformer-nano'"),
        (file(tmp_path, "preset: transformer-nano", "...yaml"), "gives the model no name"),
    ):
        asked.given = ["transformer-nano", text]
        with pytest.raises(ConfigError, match=message):
            asked.check()
        vars(asked).pop("models", None)


def test_unequal_models_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"transformer-nano .*\(\+0\.0%\), tauformer-nano .*--allow_unequal"):
        comparison(tmp_path, allow_unequal=False).check()
    Comparison(["transformer-nano", "minimal-transformer-nano"], tmp_path, Amount("steps", 1)).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, "--seeds must be at least 1"),
        ({"learning_rates": [1e-3, 0.0]}, "--learning_rates must be positive"),
        ({"learning_rates": [1e-3, 1e-3]}, "given twice"),
        ({"sweep_share": 0.0}, "--sweep_share"),
        ({"sweep_beyond": -1}, "--sweep_beyond must be at least 0"),
        ({"contexts": []}, "--contexts"),
        ({"training": {"optimizer.learning_rate": 1.0}}, "given by --learning_rates"),
        ({"training": {"tokens": 3}}, r"training\.tokens is given by --budget"),
        ({"training": {"devices": 2}}, "in one process on one device"),
        ({"training": {"early_stopping": 3}}, "early_stopping is 3 .* at a budget of its own"),
        ({"model": {"hiden_size": 3}}, "Did you mean 'hidden_size'"),
        ({"data": {"corpus": "text", "batch_size": 0}}, "batch_size"),
        ({"data": {"text.path": "mine.txt"}}, r"--data\.text\.path would do nothing: data\.corpus is stories"),
        ({"model": {"mixers.liquid.state_size": 3}}, r"--model\.mixers\.liquid\.state_size would do nothing"),
        ({"training": {"schedule.plateau_cuts": 3}}, r"--training\.schedule\.plateau_cuts would do nothing"),
        ({"data": {"stories.valid_stories": 1}, "learning_rates": [1e-3, 2e-3]}, "held-out text has a single row"),
        ({"model": {"positions": "learned", "max_length": 64}}, "longer than model.max_length 64"),
        (
            {"model": {"positions": "learned", "max_length": 900}, "probes": ["copy", "selective_copy-4096"]},
            "max_length",
        ),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(changes, message, tmp_path):
    with pytest.raises((ConfigError, DataError, UnknownNameError), match=message):
        comparison(tmp_path, **changes).check()


def bpe(vocab_size: int) -> dict[str, Any]:
    return {"tokenizer.kind": "bpe", "tokenizer.vocab_size": vocab_size, "stories.valid_stories": 4}


def test_seeds_have_one_vocabulary(tmp_path, monkeypatch):
    """Trained once, on what the first seed reads; kept for the next command, and trained anew for other options."""
    monkeypatch.setattr(corpora, "TOKENIZER_TEXT_BYTES", 20_000)
    asked = comparison(tmp_path, data=bpe(300), seeds=2)
    asked.check()
    asked.write_plan()
    read = [corpora.build_corpus(asked.config(Job("run", "transformer-nano", seed, 1e-3)).data) for seed in (0, 1)]
    assert read[0].tokenizer.fingerprint == read[1].tokenizer.fingerprint
    assert asked.with_vocabulary(Job("run", "transformer-nano", 1, 1e-3)).model.vocab_size == 300
    assert _digest(read[0].batches("valid")) == _digest(read[1].batches("valid"))
    other = comparison(tmp_path, data=bpe(290))
    assert other.tokenizer.vocab_size == 290
    with monkeypatch.context() as patched:
        patched.setattr(compare_plan, "build_tokenizer", None)
        assert comparison(tmp_path, data=bpe(300), seeds=3).tokenizer.vocab_size == 300
    other.write_plan()
    assert other.with_vocabulary(Job("run", "transformer-nano", 0, 1e-3)).model.vocab_size == 290
    kept = (other.out / "tokenizer.json").read_bytes()
    (other.out / "runs/transformer-nano/lr-0.001-seed-0").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"lr-0\.001-seed-0 was trained with another tokenizer"):
        comparison(tmp_path, data=bpe(300)).write_plan()
    assert (other.out / "tokenizer.json").read_bytes() == kept
    other.write_plan()


def test_rows_are_counted_as_they_will_be_read(tmp_path):
    """Two held-out rows of bytes are one of longer tokens, which cannot be dealt out to a sweep."""
    file = tmp_path / "text.txt"
    file.write_text("again and again " * 300)
    data = {"corpus": "text", "text.path": str(file), "seq_len": 256}
    rates = [1e-3, 2e-3]
    comparison(tmp_path, data=data, learning_rates=rates).check()
    pieces = {"tokenizer.kind": "bpe", "tokenizer.vocab_size": 270}
    with pytest.raises(DataError, match="held-out text has a single row"):
        comparison(tmp_path, data=pieces | data, learning_rates=rates).check()


def test_what_was_trained_on_is_told_apart(tmp_path):
    """The same for every seed; another where a byte of the file is."""
    file, found = tmp_path / "text.txt", []
    for end in "ab":
        file.write_text("one and another " * 200 + end)
        data = {"corpus": "text", "text.path": str(file), "seq_len": 16, "batch_size": 2}
        asked = comparison(tmp_path, data=data)
        configs = [asked.config(Job("run", "transformer-nano", seed, 1e-3)) for seed in (0, 1)]
        found.append({training_digest(c.data, seed, asked.tokenizer) for seed, c in enumerate(configs)})
    assert [len(digests) for digests in found] == [1, 1]
    assert found[0] != found[1]


def test_the_seed_that_is_told_is_the_one_that_was_used(tmp_path):
    asked = comparison(tmp_path, training={"seed": 5})
    run = Finished(Job("run", "transformer-nano", 1, 1e-3), tmp_path, {})
    assert Runs(asked, []).seed(run) == 6


def test_probes_are_chosen_by_name_and_by_beginning():
    assert select_probes(["recall", "copy", "recall-8"]) == ["recall-8", "recall-16", "recall-32", "copy"]
    assert select_probes(["selective_copy"]) == ["selective_copy"]
    with pytest.raises(UnknownNameError, match="Did you mean 'induction'"):
        select_probes(["inductoin"])


@pytest.mark.parametrize("name", PROBES)
def test_probes_are_corpora_that_fit_their_rows(name, tmp_path):
    if name.endswith("4096"):
        pytest.skip("rows of 4096 take seconds to draw")
    corpus = corpora.build_corpus(comparison(tmp_path).config(Job("probe", "transformer-nano", 0, 1e-3, name)).data)
    assert next(corpus.batches("train")).ids.shape[0] == PROBES[name].batch_size
    assert 0 < float(corpus.describe()["chance_accuracy"]) < 1  # type: ignore[arg-type]


# ---------------------------------------------------------------------- all of it, at toy size


def stamps(out: Path) -> dict[str, int]:
    """When each file that is not the report was written."""
    kept = [p for p in out.rglob("*") if p.is_file() and p.parent != out]
    return {str(p): p.stat().st_mtime_ns for p in [*kept, out / "speed.json"] if p.parent.name != "pictures"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("compare") / "out"
    assert main(["compare", *TOY, *PROBED, "--out", str(out)]) == 0
    return out


def test_a_whole_comparison(finished):
    page = (finished / "report.html").read_text()
    for name in ("transformer-nano", "liquid-ssm-nano", "entropy floor", "epiplexity", "recall-8", "R1"):
        assert name in page
    assert page.count("<svg") == 7
    assert "<script" not in page
    assert not re.findall(r"""(?:src|href)=["'](?!#)(?!data:)[^"']*["']""", page)
    assert "None" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)
    markdown = (finished / "report.md").read_text()
    assert "## Probes" in markdown
    named = re.findall(r"\]\((pictures/.*?)\)", markdown)
    assert len(named) == 7
    for name in named:
        picture = ElementTree.fromstring((finished / name).read_text())
        told = " ".join(picture.itertext())
        assert "prefers-color-scheme: dark" in told
        assert "liquid-ssm-nano" in told
        assert ("entropy floor" in told) == any(part in name for part in ("bits", "tokens", "flops", "seconds"))


def test_every_figure_is_traced_to_a_run(finished):
    with (finished / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    for line in lines:
        places = [finished / place for place in line["run"].split("; ")]
        assert all((place / "environment.json").is_file() for place in places)
        assert line["commit"]
        assert line["machine"]
    speed = json.loads((finished / "speed.json").read_bytes())["models"]
    assert all(0 < figures["memory_mib"] < 60 for figures in speed.values())
    for line in (
        line for line in lines if line["measure"].startswith(("decode", "state", "peak", "tokens_per_second_in"))
    ):
        timed = speed[line["model"]]
        assert (line["run"], line["date"]) == (timed["run"], timed["provenance"]["date"])
    one = next(row for row in lines if row["section"] == "one run" and row["measure"] == "bits_per_byte")
    figures = read_measured(finished / one["run"])
    assert figures is not None
    assert float(one["value"]) == pytest.approx(bits_on(figures, slice(None)))
    mine = [
        row for row in lines if row["section"] == "one run" and row["model"] == "liquid-ssm-nano"
        and row["measure"] == "epiplexity"
    ]  # fmt: skip
    told = next(
        r for r in lines if r["section"] == "model" and r["model"] == "liquid-ssm-nano" and r["measure"] == "epiplexity"
    )
    assert float(told["value"]) == pytest.approx(np.mean([float(row["value"]) for row in mine]))
    assert len(mine) == 2


def test_what_was_chosen_was_trained(finished):
    sweep = sorted(finished.glob("sweep/liquid-ssm-nano/*"))
    beyond = {"lr-0.0001-seed-0", "lr-0.1-seed-0"} & {path.name for path in sweep}
    assert len(beyond) == 1  # of two rates the best is one at the edge
    assert {path.name for path in sweep} == {"lr-0.001-seed-0", "lr-0.01-seed-0", *beyond}
    assert f"| {next(iter(beyond)).split('-')[1]} |" in (finished / "report.md").read_text()
    bits = {path.name: bits_on(json.loads((path / MEASURED).read_bytes()), slice(0, None, 2)) for path in sweep}
    best = min(bits, key=lambda name: bits[name]).partition("-seed")[0]
    assert sorted(path.name for path in finished.glob("runs/liquid-ssm-nano/*")) == [f"{best}-seed-0", f"{best}-seed-1"]


def test_a_sweep_goes_on_while_the_best_is_at_its_edge(tmp_path, monkeypatch):
    """0.008 is best for one model, 0.0005 for the other; so many beyond at most, and a rate that fails ends it."""
    best = {"transformer-nano": 8e-3, "tauformer-nano": 5e-4}

    def trained(asked, job, table):
        cost = abs(math.log(job.learning_rate / best[job.model])) + 1
        figures = {"held_out": {"nats": [cost, 0.0], "bytes": [1.0, 1.0]}}
        if job.learning_rate == 1.6e-2:
            figures = {"failed": "diverged"}
        path = job.path(asked.out)
        path.mkdir(parents=True)
        (path / MEASURED).write_text(json.dumps(figures))
        return Finished(job, path, figures)

    monkeypatch.setattr(compare, "_finish", trained)
    for further, chosen, tried in (
        (3, best, {1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 5e-4, 2.5e-4}),
        (1, best, {1e-3, 2e-3, 4e-3, 8e-3, 5e-4}),
        (0, {"transformer-nano": 4e-3, "tauformer-nano": 1e-3}, {1e-3, 2e-3, 4e-3}),
    ):
        asked = comparison(tmp_path, learning_rates=[2e-3, 1e-3, 4e-3], sweep_beyond=further)
        asked.out = tmp_path / str(further)
        asked.out.mkdir()
        with contextlib.closing(Table(asked.out)) as table:
            assert compare._chosen(asked, table) == chosen
        assert {run.job.learning_rate for run in measured_of(asked, asked.sweep_jobs())} == tried
        assert compare._may_be_chosen(asked) == [chosen]


def test_what_has_been_tried_is_never_left_out(tmp_path):
    """More rates, fewer, or a gap that others fill: measured ones choose all the same; a model that has failed at every
    rate is tried below them."""
    asked = comparison(tmp_path, learning_rates=[1e-3, 2e-3], sweep_beyond=2)

    def put(job, cost):
        path = job.path(asked.out)
        path.mkdir(parents=True)
        figures = {"held_out": {"nats": [cost, 0.0], "bytes": [1.0, 1.0]}} if cost else {"failed": "diverged"}
        (path / MEASURED).write_text(json.dumps(figures))

    for rate, cost in ((1e-3, 3.0), (2e-3, 2.0), (4e-3, 1.0), (8e-3, 1.5)):
        put(Job("sweep", "transformer-nano", 0, rate), cost)
        if rate < 4e-3:
            put(Job("sweep", "tauformer-nano", 0, rate), 0.0)
    known = measured_of(asked, asked.sweep_jobs())
    assert choose(known) == {"transformer-nano": 4e-3}
    assert [(job.model, job.learning_rate) for job in beyond(asked, known)] == [("tauformer-nano", 5e-4)]
    asked.learning_rates = [1e-3, 2e-3, 3.2e-2]
    assert 8e-3 in {job.learning_rate for job in asked.sweep_jobs()}
    assert compare._may_be_chosen(asked) == [dict.fromkeys(asked.names, r) for r in (1e-3, 2e-3, 4e-3, 8e-3, 3.2e-2)]


def test_weights_without_a_checkpoint_are_not_removed(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "environment.json").write_text("{}")
    compare._clear_stillborn(run)
    assert not run.exists()
    run.mkdir()
    (run / "environment.json").write_text("{}")
    (run / "model.safetensors").write_text("weights")
    with pytest.raises(RunError, match="nothing is removed"):
        compare._clear_stillborn(run)
    assert (run / "model.safetensors").read_text() == "weights"


def test_a_second_run_does_nothing_and_a_wider_one_only_what_is_missing(finished, capsys):
    before = stamps(finished)
    assert main(["compare", *TOY, *PROBED, "--out", str(finished)]) == 0
    assert stamps(finished) == before
    assert (
        main(["compare", *TOY, "--probes", "recall-8,parity", "--probe_budget", "steps=2", "--out", str(finished)]) == 0
    )
    after = stamps(finished)
    assert {name: after[name] for name in before} == before
    assert {Path(name).relative_to(finished).parts[1] for name in set(after) - set(before)} == {"parity"}
    capsys.readouterr()
    other = [a if a != "steps=6" else "steps=7" for a in TOY]
    assert main(["compare", *other, "--out", str(finished)]) == 1
    assert "training.steps was 3 and is 4" in capsys.readouterr().err


def test_other_options_are_told_before_anything_is_trained(finished, capsys):
    """What a sweep chose is known from its measurements: the probes' directories are looked at before new seeds."""
    before, plan = sorted(finished.rglob("*")), (finished / "plan.json").read_bytes()
    wider = [a if a != "2" or TOY[i - 1] != "--seeds" else "3" for i, a in enumerate(TOY)]
    asked = [*wider, *PROBED[:-1], "steps=3"]
    assert main(["compare", *asked, "--out", str(finished)]) == 1
    assert "training.steps was 2 and is 3" in capsys.readouterr().err
    assert sorted(finished.rglob("*")) == before
    assert (finished / "plan.json").read_bytes() == plan


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
    change(second, held_out=other, training_digest="0" * 64, provenance=elsewhere)
    change(failed, failed="its loss is not finite")
    assert main(["compare", *TOY, *PROBED, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize(
    "note",
    [
        r"R\d+: scored on another held-out text than R1, whose file has changed",
        r"R\d+: trained on another text than R1, whose file has changed",
        r"Trained at several commits, .*; R\d+ f{10}\.",
        r"Trained on several machines, .*; R\d+ a faster one, ",
    ],
)
def test_unequal_conditions_are_told(note, changed, finished):
    assert re.search(note, (changed / "report.md").read_text())
    assert not re.search(note, (finished / "report.md").read_text())


def test_figures_come_from_runs_that_ended_well(changed):
    with (changed / "results.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["section"] == "model"]
    mine = [line["run"] for line in lines if line["model"] == "liquid-ssm-nano"]
    assert {run.rpartition("-")[2] for run in mine} == {"0"}
    rows = re.findall(r"\| liquid-ssm-nano \|.*", (changed / "report.md").read_text())
    assert sum(bool(re.search(r"\| R\d+ \(1 of 2 seeds\) \|$", row)) for row in rows) == 2
    page = (changed / "report.html").read_text()
    assert '<span class="range">1 of 2 seeds</span>' in page
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(re.findall(r'\bid="([^"]+)"', page))


def test_an_interrupted_comparison_goes_on(tmp_path):
    """Ctrl-C in the middle of a training: the same command resumes that run and ends as if nothing had been."""
    sweep = TOY.index("--learning_rates")
    options = [*TOY[:1], *TOY[2:sweep], *TOY[TOY.index("--contexts") :]]
    options[options.index("steps=6")] = "steps=200"
    options[options.index("2")] = "1"  # one seed
    options[:1] = [file(tmp_path, "preset: transformer-nano")]
    out = tmp_path / "out"
    options += ["--training.save_every", "5"]
    with started([sys.executable, "-m", "glissando.cli", "compare", *options, "--out", str(out)]) as process:
        path = out / "runs/mine/lr-0.002-seed-0"
        deadline = time.monotonic() + 200
        while latest_checkpoint(path / "checkpoints") is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=100)
    assert process.returncode == 130, told
    assert read_measured(path) is None
    assert main(["compare", *options, "--out", str(out)]) == 0
    figures = read_measured(path)
    assert figures is not None
    assert figures["spent"]["step"] == 200
    assert figures["provenance"]["resumed"] == 1
    assert "| mine |" in (out / "report.md").read_text()


def test_speed_is_measured_on_rows_as_long_as_those_trained_on(finished):
    """A story is read whole, whatever seq_len is."""
    path = finished / "runs/liquid-ssm-nano"
    entry = _Entry.open(next(path.iterdir()))
    rows, length = entry.rows()
    metrics = read_metrics(next(path.iterdir()) / "metrics.csv")
    read = int(metrics[-1]["tokens"]) / int(metrics[-1]["step"])
    assert rows == 2
    assert rows * length == pytest.approx(read, rel=0.4)
    assert length > 10 * entry.config.data.seq_len
    assert re.search(r"2 rows a step, 1,\d{3} scored tokens on average", (finished / "report.html").read_text())


@pytest.mark.parametrize(("kind", "expected"), [("seconds", ["compiled", "trained"]), ("steps", ["trained"])])
def test_no_models_seconds_are_spent_on_compiling(kind, expected, tmp_path, monkeypatch):
    """Compiling takes a new machine as long as the demo lets a model train; what is compiled is what trains."""
    done = []

    def compiled(config):
        warm_up(config)
        done.append("compiled")
        assert config.model.hidden_size == 16

    def trained(*_, **__):
        done.append("trained")
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "warm_up", compiled)
    monkeypatch.setattr(compare, "train", trained)
    asked = comparison(tmp_path, data={"seq_len": 32, "batch_size": 1})
    asked.given, asked.budget = ["liquid-ssm-nano"], Amount(kind, 2)
    asked.out.mkdir()
    with contextlib.closing(Table(asked.out)) as table, pytest.raises(KeyboardInterrupt):
        compare._finish(asked, asked.run_jobs({"liquid-ssm-nano": 1e-3})[0], table)
    assert done == expected


def test_a_training_that_diverges_is_told_and_not_repeated(tmp_path, capsys):
    out = tmp_path / "out"
    options = [a if a != "1e-3,1e-2" else "1e-3,1e30" for a in TOY if a != "liquid-ssm-nano"]
    assert main(["compare", *options, "--training.clip", "null", "--out", str(out)]) == 0
    failed = out / "sweep/transformer-nano/lr-1e+30-seed-0"
    assert "not finite" in json.loads((failed / MEASURED).read_bytes())["failed"]
    assert "diverged" in (out / "report.html").read_text()
    before = stamps(out)
    assert main(["compare", *options, "--training.clip", "null", "--out", str(out)]) == 0
    assert stamps(out) == before


NO_FILE = ["--data.corpus", "text", "--data.text.path", "no"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["transformer-nano", "--budget", "steps=1"], "--out is missing"),
        (["transformer-nano", "--out", "x"], "--budget is missing"),
        (["--budget", "steps=1", "--out", "x"], "name the models"),
        (["transformer-nan", "--budget", "steps=1", "--out", "x"], "Did you mean 'transformer-nano'"),
        (["transformer-nano", "--budget", "weeks=1", "--out", "x"], "steps, tokens, seconds, flops"),
        (["transformer-nano", "--budget", "steps=1", "--data.corpus", "nope", "--out", "x"], "unknown corpus 'nope'"),
        (["transformer-nano", "--budget", "steps=1", *NO_FILE, "--out", "x"], "no file no;"),
        (["transformer-nano", "--budget", "steps=1", "--learning_rates", "a,b", "--out", "x"], "takes numbers"),
        (
            ["transformer-nano", "--budget", "steps=1", "--sweep_beyond", "1", "--out", "x"],
            "without several --learning",
        ),
        (["transformer-nano", "--budget", "steps=1", "--sweep_share=0.1", "--out", "x"], "without several --"),
        (["transformer-nano", "--budget", "steps=1", "--probe_budget", "steps=1", "--out", "x"], "without --probes"),
        (["transformer-nano", "--budget", "steps=1", "--probes", "recal", "--out", "x"], "Did you mean 'recall'"),
        (["transformer-nano", "--budget", "steps=1", "--model.depth", '{"layers": 1}', "--out", "x"], "is a section"),
        (["transformer-nano", "--budget", "steps=1", "--data", "x.yaml", "--out", "x"], "one option at a time"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_nothing_else_is_overwritten(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["compare", *TOY, "--out", str(tmp_path)]) == 1
    assert "holds no plan.json" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt"]


def test_the_example_files_can_be_compared_with_the_baseline(tmp_path):
    """Each is a model of its own, within 5 % of the baseline's size, with two mixers or a flow."""
    files = sorted((Path(__file__).parent.parent / "examples/models").glob("*.yaml"))
    assert len(files) >= 4
    asked = Comparison(["transformer-nano", *map(str, files)], tmp_path / "out", Amount("steps", 1))
    asked.check()
    for name in asked.names[1:]:
        model = asked.config(Job("run", name, 0, 1e-3)).model
        assert isinstance(model.mixer, list) or model.depth.kind == "flow"
