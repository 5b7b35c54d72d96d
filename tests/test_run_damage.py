"""What happens to a run stops at the damage: intact copies are read by name, or the error names the file."""

from __future__ import annotations

import collections
import json
import os
import random
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from training_runs import (
    assert_same_tensors,
    command,
    configuration,
    crash_in,
    environment,
    mapping,
    metrics,
    options,
    weights,
)

import glissando
from glissando import run_files as files
from glissando.checkpoints import latest_checkpoint
from glissando.cli import main
from glissando.config import from_dict
from glissando.data.jsonl import Fields, JsonlSource
from glissando.data.textfile import digested
from glissando.errors import ConfigError, DataError, GlissandoError, RunError
from glissando.loading import load
from glissando.runs import Run
from glissando.storage import MANIFEST, read_manifest, write_manifest
from glissando.training.config import RunConfig
from glissando.training.fit import resume, train
from glissando.training.progress import Progress
from glissando.yaml_files import read_yaml

BPE = {"data.tokenizer": {"kind": "bpe", "vocab_size": 300}, "training": {"steps": 6, "save_every": 2}}
SMALL = ["config.yaml", "environment.json", "tokenizer.json"]


class Crash(Exception):
    """Stands for a power cut."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of six steps."""
    return train(configuration(tmp_path_factory.mktemp("finished"), BPE), tmp_path_factory.mktemp("run") / "run").path


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it, which a test may damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="module")
def cut_short(tmp_path_factory):
    """A run whose newest checkpoint is that of step 4 of 6, behind that of step 2."""
    folder = tmp_path_factory.mktemp("cut")
    with pytest.MonkeyPatch.context() as patched:
        crash_in(patched, 6, Crash())
        with pytest.raises(Crash):
            train(configuration(folder, BPE), folder / "run")
    return folder / "run"


@pytest.fixture
def broken_off(cut_short, tmp_path):
    """A copy of it, which a test may damage."""
    return Path(shutil.copytree(cut_short, tmp_path / "run", symlinks=True))


def flip(path, position=None, bit=1):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= bit
    path.write_bytes(content)


# ---------------------------------------------------------------------- resuming trusts nothing that it has not written


def test_what_a_run_that_is_not_over_has_beside_its_checkpoints_is_written_when_it_ends(broken_off, finished):
    """`latest` and the log alone are read: the rest of the root is what training began with."""
    for name in (*SMALL, MANIFEST, "samples.txt"):
        (broken_off / name).unlink(missing_ok=True)
    resume(broken_off)
    assert_same_tensors(weights(broken_off), weights(finished))
    assert [row["train_loss"] for row in metrics(broken_off)] == [row["train_loss"] for row in metrics(finished)]
    assert (broken_off / "tokenizer.json").read_bytes() == (finished / "tokenizer.json").read_bytes()
    load(broken_off)


@pytest.mark.parametrize("name", [*SMALL, "model.safetensors"])
def test_a_damaged_file_of_a_finished_run_is_named_with_what_is_intact(run, name):
    flip(run / name, 0)
    with pytest.raises(RunError, match=rf"run/{name} is damaged.*checkpoint is intact and loads instead: .*step-\d+6 "):
        load(run)
    load(run / "checkpoints" / "step-00000006")


def test_a_flip_of_a_manifest_is_an_error_that_names_it(run):
    """The run has no checkpoints; what the manifest lists is untouched."""
    shutil.rmtree(run / "checkpoints")
    text = (run / MANIFEST).read_bytes()
    for position in range(0, len(text), 31):
        (run / MANIFEST).write_bytes(text)
        flip(run / MANIFEST, position, 4)
        with pytest.raises(RunError, match=r"manifest\.json is malformed"):
            Run.open(run)


def test_a_damaged_log_is_an_error_that_names_it(broken_off):
    before = (broken_off / "metrics.csv").read_bytes()
    for damage in (flip, lambda path: os.truncate(path, 30), Path.unlink):
        damage(broken_off / "metrics.csv")
        with pytest.raises(
            RunError, match=r"metrics\.csv is (damaged|missing): the checkpoint knows [\d,]+ bytes of it"
        ):
            resume(broken_off)
        (broken_off / "metrics.csv").write_bytes(before + b"5,torn")
    resume(broken_off)


def test_a_run_with_a_damaged_checkpoint_goes_on_from_the_one_that_is_named(broken_off, finished):
    newest = latest_checkpoint(broken_off)
    for name in ("tokenizer.json", "model.safetensors", "trainer.json", "trainer.safetensors"):
        intact = (newest / name).read_bytes()
        flip(newest / name)
        with pytest.raises(RunError, match=rf"{newest.name}/{name} is damaged.*write the line `latest: step-00000002`"):
            resume(broken_off)
        (newest / name).write_bytes(intact)
    flip(newest / name)
    (broken_off / "latest").write_text("latest: step-00000002\n")
    resume(broken_off)
    assert_same_tensors(weights(broken_off), weights(finished))


# ---------------------------------------------------------------------- beginnings


def test_a_run_killed_before_its_first_checkpoint_starts_anew(tmp_path, monkeypatch, capsys, finished):
    out, late = tmp_path / "run", {"training.validate_every": 6}
    crash_in(monkeypatch, 2, Crash())
    with pytest.raises(Crash):
        train(configuration(tmp_path, BPE, late), out)
    with pytest.raises(
        RunError, match=r"stopped before its first checkpoint.*the command that made it.*starts it again"
    ):
        resume(out)
    with files.alone(out), pytest.raises(RunError, match="another process is training"):
        train(configuration(tmp_path, BPE), out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="nothing is overwritten"):
        train(configuration(tmp_path, BPE), out)
    (out / "notes.txt").unlink()
    config = (out / "config.yaml").read_text()
    (out / "config.yaml").write_text(config + "# mine\n")
    with pytest.raises(RunError, match="nothing is overwritten"):
        train(configuration(tmp_path, BPE), out)
    (out / "config.yaml").write_text(config)
    capsys.readouterr()
    train(configuration(tmp_path, BPE), out)
    assert f"{out} was stopped before its first checkpoint: it is started again" in capsys.readouterr().err
    assert_same_tensors(weights(out), weights(finished))


@pytest.mark.slow
def test_of_two_trainings_into_one_directory_one_is_refused(tmp_path):
    """The run is whole and of one of them."""
    values = [options(mapping(tmp_path, BPE, {"data.seed": seed})) for seed in (1, 2)]
    arguments = [command(*each, f"--out={tmp_path / 'run'}") for each in values]
    started = [subprocess.Popen(each, env=environment(), stderr=subprocess.PIPE, text=True) for each in arguments]
    errors = [process.communicate(timeout=250)[1] for process in started]
    assert sorted(process.returncode for process in started) == [0, 1]
    loser = next(number for number, process in enumerate(started) if process.returncode)
    assert "another process is training" in errors[loser] or "nothing is overwritten" in errors[loser]
    assert Run.open(tmp_path / "run").read_config()["data"]["seed"] == 2 - loser
    load(tmp_path / "run")


def test_the_lock_comes_before_anything_is_written(tmp_path, monkeypatch):
    """One of many that begin at one moment makes the directory, and what is there is all its own."""
    done, barrier, refused = [], threading.Barrier(8), threading.Semaphore(0)

    def begin(name):
        barrier.wait()
        try:
            with files.alone(tmp_path / "run") as locked:
                made = Run.create(tmp_path / "run", anew=locked)
                made.write_config({"name": name})
                for _ in range(7):
                    assert refused.acquire(timeout=20)
                done.append(name)
        except RunError:
            refused.release()

    threads = [threading.Thread(target=begin, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 1
    assert Run(tmp_path / "run").read_config() == {"name": done[0]}


# ---------------------------------------------------------------------- hostile files


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model"
    glissando.LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 2}).save(path)
    return path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("hidden_size: 16", "hidden_size: 400000"),
        ("layers: 2", "layers: 1000000000"),
        ("vocab_size: 256", "vocab_size: 9223372036854775807"),
        ("vocab_size: 256", "vocab_size: 257"),
        ("layers: 2", "layers: 1"),
    ],
)
def test_sizes_are_compared_with_the_weights_before_anything_is_built(saved, tmp_path, old, new):
    path = Path(shutil.copytree(saved, tmp_path / "model"))
    text = (path / "config.yaml").read_text()
    assert old in text
    (path / "config.yaml").write_text(text.replace(old, new))
    write_manifest(path)
    began = time.process_time()
    with pytest.raises(RunError, match=rf"the weights in {path} do not fit its configuration"):
        load(path)
    assert time.process_time() - began < 2


def bomb(merge):
    text = "a: &a {x: 1}\n" if merge else "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True):
        aliases = ", ".join([f"*{old}"] * 9)
        text += f"{new}: &{new} {{<<: [{aliases}]}}\n" if merge else f"{new}: &{new} [{aliases}]\n"
    return text


HOSTILE_YAML = {
    "aliases": bomb(False), "merges": bomb(True), "endless": "&a [*a]", "deep": "[\n" * 5000, "long": "- " * 600_000,
    "integer": "a: " + "9" * 5000, "base 60": "a: 1" + ":1" * 10_000, "empty": 'a: !!int ""', "date": "!!timestamp x",
    "latin": "\xe9: 1".encode("latin-1"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_YAML)
def test_yaml_is_bounded(name):
    with pytest.raises(ConfigError):
        read_yaml(HOSTILE_YAML[name])


def test_an_alias_is_read():
    assert read_yaml("a: &x [1]\nb: *x\nc: {<<: {d: 1}}") == {"a": [1], "b": [1], "c": {"d": 1}}


LINES, LISTS, MAPPINGS, LONG = "[\n" * 5000, "[" * 100_000, '{"a": ' * 100_000, '{"files": ' + "9" * 5000 + "}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", LINES), ("config.yaml", LONG), ("tokenizer.json", LISTS), ("tokenizer.json", MAPPINGS),
        ("environment.json", MAPPINGS), (MANIFEST, LISTS), (MANIFEST, LONG), ("summary.json", MAPPINGS),
    ],
)  # fmt: skip
def test_nesting_ends_as_an_error_that_names_the_file(run, name, text):
    """Listed as if it were meant."""
    for folder in (run, latest_checkpoint(run)):
        (folder / name).write_text(text)
        if name != MANIFEST:
            write_manifest(folder, [*read_manifest(folder)])
    calls = {"environment.json": [resume], "summary.json": [Run.own_checkpoint]}.get(name, [resume, load])
    for call in calls:
        with pytest.raises(GlissandoError, match=re.escape(name)):
            call(Run(run) if call is Run.own_checkpoint else run)


def test_a_tokenizer_for_a_larger_model_is_refused(saved, tmp_path):
    path = Path(shutil.copytree(saved, tmp_path / "model"))
    spec = {
        "version": "1.0",
        "model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "</s>": 4_000_000_000}},
    }
    keys = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    (path / "tokenizer.json").write_text(json.dumps(spec | dict.fromkeys(keys) | {"added_tokens": []}))
    write_manifest(path)
    with pytest.raises(DataError, match=r"an id 4,000,000,000"):
        load(path)
    spec["model"]["vocab"]["</s>"] = 256
    (path / "tokenizer.json").write_text(json.dumps(spec | dict.fromkeys(keys) | {"added_tokens": []}))
    write_manifest(path)
    with pytest.raises(RunError, match=r"a tokenizer of 257 tokens and a model of 256"):
        load(path)


# ---------------------------------------------------------------------- texts that do not stay what they are


def replace(path):
    path.with_name("new").write_bytes(path.read_bytes()[::-1])
    os.replace(path.with_name("new"), path)


CHANGES = {
    "truncated": lambda path: os.truncate(path, 10),
    "written over": lambda path: path.write_bytes(path.read_bytes()[::-1]),
    "appended to": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "removed": lambda path: path.unlink(),
    "replaced": replace,
}


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_text_that_changes_under_a_training_is_trained_on_as_it_was(tmp_path, monkeypatch, kind):
    values = mapping(tmp_path, {"training": {"steps": 4}})
    path, original = tmp_path / "words.txt", Progress.after_step
    if kind == "jsonl":
        path.write_text("\n".join([json.dumps({"text": path.read_text()[:200]})] * 200))
        values["data"] = {"kind": "jsonl", "path": str(path), "seq_len": 16, "batch_size": 4}
    expected = weights(train(from_dict(RunConfig, values), tmp_path / "expected"))
    text = path.read_bytes()
    changes = CHANGES if kind == "text" else {name: CHANGES[name] for name in ("written over", "removed")}
    for change in changes.values():
        path.write_bytes(text)

        def after_step(self, loop, change=change):
            original(self, loop)
            if loop.state.step == 2:
                change(path)

        monkeypatch.setattr(Progress, "after_step", after_step)
        assert_same_tensors(weights(train(from_dict(RunConfig, values), tmp_path / "run")), expected)
        shutil.rmtree(tmp_path / "run")


def test_the_cache_of_tokens_is_checked(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("GLISSANDO_CACHE", str(tmp_path / "cache"))
    expected = weights(train(configuration(tmp_path, BPE), tmp_path / "a"))
    cached = sorted((tmp_path / "cache" / "tokens").glob("*/ids"))
    assert len(cached) == 2  # of what is trained on and of what is held out
    for file in cached:
        flip(file, 40)
    assert_same_tensors(weights(train(configuration(tmp_path, BPE), tmp_path / "b")), expected)
    assert caplog.text.count("is damaged: it is made again") == 2


def test_a_file_that_grows_while_it_is_converted_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    pieces = JsonlSource([digested(path)], Fields()).pieces([])
    assert next(pieces).text == "a"
    with path.open("a") as file:
        file.write('{"text": "c"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl has changed while it was read: it had 28 bytes and has 42 now"):
        list(pieces)


# ---------------------------------------------------------------------- everything at random


DAMAGES = 300


def random_damage(rng, folder):
    """Damage to one or two files below `folder`; what was done, in words."""
    names = sorted(
        p.relative_to(folder) for p in folder.rglob("*") if p.is_file() and p.name not in (".lock", "samples.txt")
    )
    name, other = rng.sample(names, 2)
    path, content = folder / name, (folder / name).read_bytes()
    kind = rng.choice(["flip", "flip", "truncate", "swap", "zero", "remove"])
    if kind == "flip":
        flip(path, rng.randrange(len(content)), 1 << rng.randrange(8))
    elif kind == "truncate":
        os.truncate(path, rng.randrange(len(content)))
    elif kind == "swap":
        path.write_bytes((folder / other).read_bytes())
        (folder / other).write_bytes(content)
        return f"{kind} {name} and {other}", [name, other]
    elif kind == "zero":
        start = rng.randrange(len(content))
        path.write_bytes(content[:start] + bytes(len(content[start : start + 512])) + content[start + 512 :])
    else:
        path.unlink()
    return f"{kind} {name}", [name]


def named_or(function, run, done, names):
    """What it returns; None if its error names a file that was damaged."""
    try:
        return function(run)
    except GlissandoError as error:
        assert any(name.name in str(error) for name in names), (done, str(error))
        return None


@pytest.mark.slow
def test_any_damage_to_any_file_is_harmless_or_named(finished, tmp_path, capsys):
    """Loading, generating, evaluating and resuming do what they do with the intact run, or the error names the file."""
    rng, expected, bits = random.Random(0), weights(finished), {}
    commands = {"generate": ["--prompt", "abc", "--max_tokens", "8", "--seed", "0"], "evaluate": ["--json"]}
    for name, arguments in commands.items():
        assert main([name, str(finished), *arguments]) == 0
        bits[name] = capsys.readouterr().out
    outcomes = collections.Counter()
    for number in range(DAMAGES):
        run = Path(shutil.copytree(finished, tmp_path / str(number)))
        done, names = random_damage(rng, run)

        if (model := named_or(load, run, done, names)) is not None:
            assert_same_tensors(dict(model.state_dict()), expected, done)
            outcomes["loaded"] += 1
        for name, arguments in commands.items():
            capsys.readouterr()
            status = main([name, str(run), *arguments])
            out, error = capsys.readouterr()
            if status == 0:
                assert out.replace(str(run), str(finished)) == bits[name], done
            else:
                assert any(each.name in error for each in names), (done, error)
        ended = named_or(lambda run: Run(run).has_ended, run, done, names)
        if named_or(resume, run, done, names) is not None:
            for read in (weights, lambda run: dict(load(run).state_dict())):
                # What had ended is left as it is; else all of it was written.
                if (found := named_or(read, run, done, names) if ended else read(run)) is not None:
                    assert_same_tensors(found, expected, done)
            outcomes["resumed"] += 1
        shutil.rmtree(run)
    assert outcomes["loaded"] > 0.5 * DAMAGES
    assert outcomes["resumed"] > 0.5 * DAMAGES
