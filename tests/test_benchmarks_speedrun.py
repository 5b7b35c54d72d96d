"""The speedrun: its stories, its score and its ledger, with a model that trains in a second."""

from __future__ import annotations

import csv
import hashlib
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from test_troubleshooting import forgetting

from benchmarks.__main__ import main
from glissando.data.corpora import build_corpus, register_corpus
from glissando.data.stories.oracle import oracle
from glissando.data.stories.stories import generate
from glissando.errors import ConfigError
from glissando.evaluation.scoring import score
from glissando.model import LanguageModel

with forgetting():  # its corpus is not known to the tests of other files
    from benchmarks import speedrun

ROOT = Path(__file__).parent.parent
TOY: dict[str, Any] = {
    "model": {
        "hidden_size": 8,
        "mixer": "spectral",
        "block": {"conv_width": 4, "mlp": {"hidden": 8}},
        "depth": {"layers": 1},
    },
    "data": {"seq_len": 64, "batch_size": 1, "valid_rows": 1},
    "training": {"steps": 3, "validate_every": 1, "carry": 0.5, "sample_every": 1000},
}


@pytest.fixture(scope="module", autouse=True)
def _its_corpus():
    with forgetting():
        register_corpus("respelled", speedrun.RespelledOptions)(speedrun.RespelledStories)
        yield


@pytest.fixture
def toy(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(TOY))
    return path


def rows(ledger: Path) -> list[dict[str, str]]:
    with ledger.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_respelling_keeps_length_and_can_be_undone():
    story = generate(0, "test", 0).text
    assert story.translate(speedrun.respelling(0)) == story
    spelling = speedrun.respelling(3)
    changed = story.translate(spelling)
    assert len(changed) == len(story)
    assert oracle(story) is not None
    assert oracle(changed) is None
    assert changed.translate({new: old for old, new in spelling.items()}) == story
    assert changed != story.translate(speedrun.respelling(4))


def test_training_text_and_tokenizer_are_in_the_other_spelling(toy):
    data = speedrun.read_entry(str(toy), seed=1, lexicon=3).data
    corpus = build_corpus(data)
    spelling = speedrun.respelling(3)
    first = generate(1, "train", 0).text.translate(spelling)
    assert next(corpus.texts()) == first
    assert bytes(next(corpus.batches("train")).targets[0, : len(first)].tolist()).decode() == first


def test_the_excess_is_that_of_all_bytes_and_its_interval_is_over_stories():
    sizes = np.array([100, 300])
    even = speedrun.excess(np.array([30.0, 90.0]), np.array([29.0, 87.0]), sizes)
    assert even == pytest.approx((0.01, 0.01, 0.01))
    uneven = speedrun.excess(np.array([29.0, 91.0]), np.array([29.0, 87.0]), sizes)
    assert uneven == pytest.approx((0.01, 0.0, 4 / 300))


def test_a_check_reads_each_story_from_an_empty_state_and_all_as_one_text(toy):
    config = speedrun.read_entry(str(toy), seed=0, lexicon=2)
    corpus = build_corpus(config.data)
    torch.manual_seed(0)
    model = LanguageModel(config.model, corpus.tokenizer)
    scores = speedrun.check(model, corpus, seed=5, count=3)
    alone = score(model, [corpus.batch_of(generate(5, "test", index)) for index in range(3)])
    assert scores["reset"].mean == pytest.approx(alone.bits_per_byte - alone.floor, abs=1e-5)
    assert scores["carried"].mean != scores["reset"].mean
    assert scores["carried"].mean == pytest.approx(scores["reset"].mean, abs=0.3)
    many = speedrun.check(model, corpus, seed=5, count=40)
    assert many == speedrun.check(model, corpus, seed=5, count=32)  # far from the target: the others are not read


def test_it_stops_at_the_target_and_writes_the_ledger(toy, tmp_path, monkeypatch, capsys):
    ledger = tmp_path / "ledger.csv"
    arguments = ["speedrun", str(toy), "--stories", "2", "--ledger", str(ledger), "--seed", "4", "--check_seed", "7"]
    monkeypatch.setattr(speedrun, "product_rate", lambda dtype: 1.0)
    assert main(arguments) == 0
    assert "NOT within" in capsys.readouterr().out
    monkeypatch.setattr(speedrun, "TARGET", 100.0)
    assert main([*arguments, "--lexicon", "1"]) == 0
    missed, reached = rows(ledger)
    assert (missed["reached"], missed["steps"]) == ("False", "3")
    assert (reached["reached"], reached["steps"]) == ("True", "1")
    assert [reached[name] for name in ("seed", "check_seed", "lexicon", "small_state")] == ["4", "7", "1", "True"]
    assert int(reached["state_bytes"]) > 3 * 8 * 4  # at least the convolution's cache
    assert float(missed["reset_mean"]) > 1
    ledger.write_text("entry\n")
    assert main(arguments) == 1
    assert "has other columns" in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_check_takes_is_not_counted(toy, monkeypatch):
    def slow(*_: Any) -> dict[str, speedrun.Excess]:
        until = time.process_time() + 0.4
        while time.process_time() < until:
            pass
        return {"reset": speedrun.Excess(1.0, 1.0, 1.0)}

    monkeypatch.setattr(speedrun, "check", slow)
    watch = speedrun.Watch(0.0, check_seed=0, stories=1)
    before = speedrun.cpu_seconds()
    speedrun.train(speedrun.read_entry(str(toy), 0, 0), toy.parent / "run", watch)
    assert watch.seconds < speedrun.cpu_seconds() - 1.2  # three checks
    assert watch.seconds > before
    assert not watch.reached


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"data": {"cut": True}}, "data.cut"),
        ({"data": {"kind": "parity"}}, "data.kind"),
        ({"data": {"tokenizer": "gpt2"}}, "data.tokenizer"),
        ({"start_from": "runs/other"}, "start_from"),
        ({"imports": ["mixer.py"]}, "--import FILE"),
        ({"training": {"devices": 2}}, "training.devices is 2.*one process on a CPU; remove training.devices"),
        ({"training": {"accelerator": "cuda"}}, "training.accelerator is cuda"),
        ({"training": {"strategy": "ddp"}}, "training.strategy is ddp"),
        ({"model": {"mixer": {"kind": "tau", "laplacian": "graph.safetensors"}}}, "laplacian"),
        ({"model": {"mixer": ["spectral", {"kind": "tau", "laplacian": "saved"}]}}, "laplacian"),
    ],
)
def test_an_entry_that_breaks_a_rule_is_refused(tmp_path, section, named):
    path = tmp_path / "entry.yaml"
    path.write_text(yaml.safe_dump(section))
    with pytest.raises(ConfigError, match=named):
        speedrun.read_entry(str(path), 0, 0)


def test_processes_of_torchrun_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "entry.yaml"
    path.write_text("preset: transformer-nano")
    for name, value in (("TORCHELASTIC_RUN_ID", "7"), ("LOCAL_WORLD_SIZE", "2"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="one process: start it without torchrun"):
        speedrun.read_entry(str(path), 0, 0)


def test_a_child_process_counts():
    before, alone = speedrun.cpu_seconds(), time.process_time()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    assert speedrun.cpu_seconds() - before > time.process_time() - alone + 0.05


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--ledger", "nodir/l.csv"], "No such file or directory"),
        (["--ledger", "."], "Is a directory"),
        (["--stories", "0"], "--stories must be from 1"),
        (["--threads", "0"], "--threads must be from 1"),
        (["--lexicon", "-1"], "--lexicon must be from 0"),
        (["--seed", "-1"], "--seed must be from 0"),
        (["--seed", str(2**32)], "got 4294967296"),
        (["--check_seed", "-1"], "--check_seed must be from 0"),
    ],
)
def test_what_cannot_be_run_is_refused_before_training(toy, tmp_path, monkeypatch, capsys, options, named):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(speedrun, "train", lambda *_: pytest.fail("it trains"))
    assert main(["speedrun", str(toy), "--ledger", "l.csv", *options]) == 1
    assert named in capsys.readouterr().err


def test_an_entry_has_a_mixer_of_its_own(toy, tmp_path, monkeypatch, capsys):
    short = {"model": {**TOY["model"], "mixer": "average"}, "training": {**TOY["training"], "steps": 1}}
    toy.write_text(yaml.safe_dump({**TOY, **short}))
    ledger, mixer = tmp_path / "ledger.csv", tmp_path / "my mixer.py"
    arguments = ["speedrun", str(toy), "--stories", "1", "--ledger", str(ledger), "--import", str(mixer)]
    source = (ROOT / "examples" / "add_a_mixer.py").read_bytes()
    mixer.write_bytes(source)
    monkeypatch.setattr(speedrun, "product_rate", lambda dtype: 1.0)
    with forgetting():
        assert main(arguments) == 0
    [line] = rows(ledger)
    digest = hashlib.sha256(source).hexdigest()
    assert line["imports"] == f"{mixer}@{digest}"
    assert int(line["parameters"]) > 0

    mixer.write_bytes(source + b"# changed")
    monkeypatch.setattr(speedrun, "train", lambda *_: pytest.fail("it trains"))
    with forgetting():
        assert main(arguments) == 1
    assert f"{mixer.name} is not the file of {ledger}, whose SHA-256 is {digest}" in capsys.readouterr().err
    speedrun.require_ledger(ledger, "another entry", f"{mixer}@{64 * '0'}")
    ledger.write_text(ledger.read_text().replace(f"@{digest}", ""))  # an older line has the path alone
    speedrun.require_ledger(ledger, line["entry_sha256"], f"{mixer}@{64 * '0'}")


@pytest.mark.parametrize(
    "code",
    [
        "import os, glissando.data.stories.stories as s",
        "from glissando.data import stories",
        "def f():\n from glissando.data.stories.grammar import PLOTS",
        "import importlib\nimportlib.import_module('glissando.data.stories.oracle')",
        "from importlib import import_module\nimport_module(name='glissando.data.stories')",
        "__import__('glissando.data.stories')",
    ],
)
def test_a_file_that_imports_the_grammar_is_refused(tmp_path, code):
    file = tmp_path / "grammar.py"
    file.write_text(f"raise RuntimeError('executed')\n{code}")
    with forgetting(), pytest.raises(ConfigError, match=rf"grammar.py:{2 + code.count(chr(10))}: .*remove the import"):
        speedrun.imported_file(str(file))


def test_a_file_with_other_imports_is_executed(tmp_path):
    file = tmp_path / "other.py"
    file.write_text("import glissando.data.base\nfrom glissando.data.corpora import StoriesOptions as s\nprint(s)")
    with forgetting():
        assert speedrun.imported_file(str(file)).startswith(f"{file}@")


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "speedrun").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_entry_is_read(path):
    training = speedrun.read_entry(str(path), seed=3, lexicon=0).training
    assert (training.seed, training.carry) == (3, 0.75)
    assert math.isfinite(training.steps)
