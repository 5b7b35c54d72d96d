"""What a comparison is made of: its models, its options, the learning rates that it tries, its probes."""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from comparisons import comparison, model_file
from slow import slow_where

import glissando
from glissando.compare import plan as compare_plan
from glissando.compare import run as compare
from glissando.compare.log import Log
from glissando.compare.measure import MEASURED, _digest
from glissando.compare.plan import Amount, Comparison, Job
from glissando.compare.probes import PROBES, select_probes
from glissando.compare.results import Finished, beyond, choose
from glissando.compare.training import with_vocabulary
from glissando.data import corpora
from glissando.data.corpora import RecallOptions
from glissando.depth import FlowConfig
from glissando.errors import ConfigError, DataError, UnknownNameError
from glissando.mixers import AttentionConfig, SpectralConfig
from glissando.mixers.tau import TauConfig


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
    hybrid = comparison(tmp_path)
    hybrid.given = ["transformer-nano", "hybrid-ode-nano"]
    assert not hybrid.config(Job("run", "hybrid-ode-nano", 0, 1e-3)).data.labelled


def test_parameters_are_counted_at_the_published_vocabulary(tmp_path):
    asked = Comparison(["hybrid-ode", "gpt"], tmp_path, Amount("steps", 1))
    assert asked.parameters() == {"hybrid-ode": 29_781_249, "gpt": 30_503_424}
    job = Job("run", "gpt", 0, 1e-3)
    assert with_vocabulary(asked.config(job)).model.vocab_size == 50_257


def test_options_of_all_come_after_the_presets_own(tmp_path):
    asked = comparison(tmp_path, training={"precision": "64-true", "optimizer": {"beta2": 0.5}})
    config = asked.config(Job("sweep", "tauformer-nano", 0, 0.25))
    assert (config.training.precision, config.training.optimizer.beta2) == ("64-true", 0.5)
    assert config.training.optimizer.learning_rate == 0.25
    assert config.training.schedule.final_ratio == 0.02  # the preset's
    assert config.training.steps == 1
    assert isinstance(config.model.mixer, TauConfig)
    probe = asked.config(Job("probe", "tauformer-nano", 0, 0.25, "recall-8"))
    assert isinstance(probe.data, RecallOptions)
    assert (probe.data.pairs, probe.training.steps) == (8, 500)


def test_a_file_is_a_model_with_the_name_of_the_file(tmp_path):
    """Over the preset that it names, with its own rate; all models' options come after it."""
    mine = model_file(
        tmp_path,
        "preset: composite-nano\nmodel: {hidden_size: 64, mixer: [spectral, attention]}\n"
        "training: {optimizer: {learning_rate: 0.25}}\n",
    )
    bare = model_file(tmp_path, "model: {hidden_size: 48}", "bare.yml")
    asked = comparison(tmp_path, model={"depth.layers": 2})
    asked.given = ["transformer-nano", mine, bare]
    assert asked.names == ["transformer-nano", "mine", "bare"]
    asked.check()
    job = Job("run", "mine", 0, asked.rates("mine")[0])
    config = asked.config(job)
    assert job.path(asked.out).parent == asked.out / "runs/mine"
    assert (config.preset, config.model.hidden_size) == ("composite-nano", 64)
    assert [type(mixer) for mixer in config.model.mixer] == [SpectralConfig, AttentionConfig]
    assert config.model.block.conv_width == 4  # the preset's
    assert (config.model.depth.layers, config.training.optimizer.learning_rate) == (2, 0.25)
    assert config.data == asked.config(Job("run", "transformer-nano", 0, 0.25)).data
    bared = asked.config(Job("run", "bare", 0, asked.rates("bare")[0]))
    assert (bared.preset, bared.model.hidden_size) == (None, 48)


def test_a_model_may_be_options(tmp_path):
    asked = comparison(tmp_path)
    asked.given = {
        "baseline": "transformer-nano",
        "wide": {"preset": "transformer-nano", "model": {"block": {"mlp": {"hidden": 96}}}},
        "tau": {"model": {"mixer": {"kind": "tau", "heads": 2}}},
    }
    asked.check()
    models = {name: asked.config(Job("run", name, 0, 1e-3)).model for name in asked.names}
    assert asked.names == ["baseline", "wide", "tau"]
    assert models["wide"].block.mlp.hidden == 96
    assert models["wide"].hidden_size == models["tau"].hidden_size == 16
    assert isinstance(models["tau"].mixer, TauConfig)
    assert json.loads(asked.write_plan().read_bytes())["models"]["tau"]["model"]["mixer"]["heads"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "must hold a mapping"),
        ("model: {hiden_size: 3}", r"mine\.yaml: unknown option 'model\.hiden_size'\. Did you mean 'hidden_size'"),
        ("preset: transformer-nan", "Did you mean 'transformer-nano'"),
        ("start_from: runs/first", "remove start_from"),
        ("training: {tokens: 5}", r"training\.tokens is given by --budget"),
        ("data: {seq_len: 5}", "all models read the first one's data"),
        ("model: {mixer: {kind: spectral, heads: 2}}", r"mine\.yaml: unknown option 'model\.mixer\.heads'"),
        ("training: {sample_every: 3}", r"remove training\.sample_every"),
        ("model: {hidden_size: abc}", r"mine\.yaml: .*hidden_size"),
        ("preset: 5", "unknown preset '5'"),
    ],
)
def test_mistakes_in_a_file(text, message, tmp_path):
    asked = comparison(tmp_path)
    asked.given = ["transformer-nano", model_file(tmp_path, text)]
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        asked.check()


def test_files_have_names_of_their_own(tmp_path):
    asked = comparison(tmp_path)
    for text, message in (
        (model_file(tmp_path, "preset: transformer-nano", "tauformer-nano.yaml"), "is the name of a preset"),
        (str(tmp_path / "missing.yaml"), "cannot read"),
        ("transformer-nano", "two models have the name 'transformer-nano'"),
        (model_file(tmp_path, "preset: transformer-nano", "...yaml"), "gives the model no name"),
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
        ({"contexts": []}, "--contexts"),
        ({"training": {"optimizer.learning_rate": 1.0}}, "given by --learning_rates"),
        ({"training": {"tokens": 3}}, r"training\.tokens is given by --budget"),
        ({"training": {"devices": 2}}, "in one process on one device"),
        ({"training": {"early_stopping": 3}}, "early_stopping is 3 .* a budget of its own"),
        ({"model": {"hiden_size": 3}}, "Did you mean 'hidden_size'"),
        ({"data": {"kind": "text", "batch_size": 0}}, "batch_size"),
        ({"data": {"path": "mine.txt"}}, r"unknown option 'data\.path'"),
        ({"model": {"mixer.state_size": 3}}, r"transformer-nano: unknown option 'model\.mixer\.state_size'"),
        ({"training": {"schedule.cuts": 3}}, r"unknown option 'training\.schedule\.cuts'"),
        ({"data": {"valid_rows": 1}, "learning_rates": [1e-3, 2e-3]}, "held-out text has a single row"),
        (
            {"model": {"max_length": 64}, "data": {"seq_len": 128}},
            "longer than model.max_length 64",
        ),
        (
            {"model": {"max_length": 900}, "probes": ["copy", "selective_copy-4096"]},
            "max_length",
        ),
    ],
)
def test_mistakes_are_reported_before_anything_is_trained(changes, message, tmp_path):
    with pytest.raises((ConfigError, DataError, UnknownNameError), match=message):
        comparison(tmp_path, **changes).check()


def bpe(vocab_size: int) -> dict[str, Any]:
    return {"tokenizer.kind": "bpe", "tokenizer.vocab_size": vocab_size, "valid_rows": 4}


def test_seeds_have_one_vocabulary(tmp_path, monkeypatch):
    """Trained once, on what the first seed reads; kept for the next command, and trained anew for other options."""
    monkeypatch.setattr(corpora, "TOKENIZER_TEXT_BYTES", 20_000)
    asked = comparison(tmp_path, data=bpe(300), seeds=2)
    asked.check()
    asked.write_plan()
    read = [corpora.build_corpus(asked.config(Job("run", "transformer-nano", seed, 1e-3)).data) for seed in (0, 1)]
    assert read[0].tokenizer.fingerprint == read[1].tokenizer.fingerprint
    assert with_vocabulary(asked.config(Job("run", "transformer-nano", 1, 1e-3))).model.vocab_size == 300
    assert _digest(read[0].batches("valid")) == _digest(read[1].batches("valid"))
    with monkeypatch.context() as patched:
        patched.setattr(compare_plan, "build_tokenizer", None)
        assert comparison(tmp_path, data=bpe(300), seeds=3).tokenizer.vocab_size == 300
    kept = (asked.out / "tokenizer.json").read_bytes()
    with pytest.raises(ConfigError, match="has a tokenizer that was trained with other data options"):
        comparison(tmp_path, data=bpe(290)).check()
    assert (asked.out / "tokenizer.json").read_bytes() == kept
    comparison(tmp_path, data=bpe(300), seeds=3).write_plan()


def test_rows_are_counted_as_they_will_be_read(tmp_path):
    """Two held-out rows of bytes are one of longer tokens, which cannot be dealt out to a sweep."""
    file = tmp_path / "text.txt"
    file.write_text("again and again " * 300)
    data = {"kind": "text", "path": str(file), "seq_len": 256}
    rates = [1e-3, 2e-3]
    comparison(tmp_path, data=data, learning_rates=rates).check()
    pieces = {"tokenizer.kind": "bpe", "tokenizer.vocab_size": 270}
    with pytest.raises(DataError, match="held-out text has a single row"):
        comparison(tmp_path, data=pieces | data, learning_rates=rates).check()


def test_probes_are_chosen_by_name_and_by_beginning():
    assert select_probes(["recall", "copy", "recall-8"]) == ["recall-8", "recall-16", "recall-32", "copy"]
    assert select_probes(["selective_copy"]) == ["selective_copy"]
    with pytest.raises(UnknownNameError, match="Did you mean 'induction'"):
        select_probes(["inductoin"])


def test_a_probe_can_be_registered_anywhere(tmp_path):
    data = {"kind": "recall", "pairs": 4, "seq_len": 16}
    glissando.register_probe("few", data, "4 pairs")
    assert select_probes(["few"]) == ["few"]
    assert comparison(tmp_path).config(Job("probe", "transformer-nano", 0, 1e-3, "few")).data.pairs == 4
    glissando.register_probe("few", data, "4 pairs")
    with pytest.raises(ConfigError, match="'few' is registered already"):
        glissando.register_probe("few", {"kind": "copy"})


@pytest.mark.parametrize("name", slow_where({"recall-16", "recall-32", "mqar-256", "selective_copy-4096"}, PROBES))
def test_probes_are_corpora_that_fit_their_rows(name, tmp_path):
    corpus = corpora.build_corpus(comparison(tmp_path).config(Job("probe", "transformer-nano", 0, 1e-3, name)).data)
    assert next(corpus.batches("train")).ids.shape[0] == PROBES[name].data.get("batch_size", 32)
    assert 0 < float(corpus.describe()["chance_accuracy"]) < 1  # type: ignore[arg-type]


def test_the_example_files_can_be_compared_with_the_baseline(tmp_path):
    """Each is a model of its own, within 5 % of the baseline's size, with two mixers or a flow."""
    files = sorted((Path(__file__).parent.parent / "examples/models").glob("*.yaml"))
    files = [file for file in files if "outside_models" not in file.read_text()]
    assert len(files) >= 4
    asked = Comparison(["transformer-nano", *map(str, files)], tmp_path / "out", Amount("steps", 1))
    asked.check()
    for name in asked.names[1:]:
        model = asked.config(Job("run", name, 0, 1e-3)).model
        assert isinstance(model.mixer, list) or isinstance(model.depth, FlowConfig)


def test_a_sweep_goes_on_while_the_best_is_at_its_edge(tmp_path, monkeypatch):
    """0.008 is best for one model, 0.0005 for the other; so many beyond at most, and a rate that fails ends it."""
    best = {"transformer-nano": 8e-3, "tauformer-nano": 5e-4}

    def trained(config, job, path, log):
        cost = abs(math.log(job.learning_rate / best[job.model])) + 1
        figures = {"held_out": {"nats": [cost, 0.0], "bytes": [1.0, 1.0]}, "spent": {"seconds": 1.0}}
        if job.learning_rate == 1.6e-2:
            figures = {"failed": "diverged"}
        path.mkdir(parents=True)
        (path / MEASURED).write_text(json.dumps(figures))
        return figures

    monkeypatch.setattr(compare, "train_and_measure", trained)
    for further, chosen, tried in (
        (3, best, {1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 5e-4, 2.5e-4}),
        (1, best, {1e-3, 2e-3, 4e-3, 8e-3, 5e-4}),
        (0, {"transformer-nano": 4e-3, "tauformer-nano": 1e-3}, {1e-3, 2e-3, 4e-3}),
    ):
        asked = comparison(tmp_path, learning_rates=[2e-3, 1e-3, 4e-3], sweep_beyond=further)
        asked.out = tmp_path / str(further)
        asked.out.mkdir()
        with contextlib.closing(Log(asked.out)) as log:
            found = compare._chosen(asked, log, None)
            assert compare._chosen(asked, log, None) == found, "what was measured is not trained again"
        assert found[1] == chosen
        assert {run.job.learning_rate for run in found[0]} == tried


def test_a_model_that_has_failed_at_every_rate_is_tried_below_them(tmp_path):
    asked, failed = comparison(tmp_path, learning_rates=[1e-3, 2e-3], sweep_beyond=2), {"failed": "diverged"}
    tried = [Finished(job, tmp_path, failed) for job in asked.sweep_jobs()]
    assert choose(tried) == {}
    assert [(job.model, job.learning_rate) for job in beyond(asked, tried)] == [(name, 5e-4) for name in asked.names]
