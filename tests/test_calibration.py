"""When tau is calibrated and to what, over restarts, stages and processes, and what of a Laplacian from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import training_runs
from graphs import weighted
from tolerances import assert_close
from training_runs import (
    SHIFT,
    assert_same_tensors,
    call,
    command,
    configuration,
    curve,
    last_checkpoint,
    mapping,
    metrics,
    options,
    weights,
)

import glissando
from glissando.config import from_dict
from glissando.data.corpora import build_corpus
from glissando.errors import ConfigError, RunError, TrainingError
from glissando.mixers.tau import laplacian as graphs
from glissando.model import LanguageModel
from glissando.presets import load_preset, preset_note
from glissando.runs import Run
from glissando.stages import train_stages
from glissando.training.config import RunConfig
from glissando.training.fit import resume, train
from glissando.training.language_task import LanguageTask

TAU = {"model": {"mixer": {"kind": "tau", "heads": 2}}}
EVERYTHING = {"model.mixer": {"importance": True, "forget_gate": True, "output_gate": True}}
ROWS = {"training": {"steps": 6, "log_every": 1, "save_every": 3, "validate_every": 10**6}}


CALIBRATED = {"model.mixer.calibration": "start"}


def run(folder: Path, name: str, *updates: dict) -> Path:
    return train(configuration(folder, TAU, ROWS, *updates), folder / name).path


def taus(path: Path) -> list[float]:
    return [float(row["tau"]) for row in metrics(path)]


def counts(path: Path) -> list[int]:
    return [int(row["calibrations"]) for row in metrics(path)]


@pytest.fixture(autouse=True)
def no_samples(monkeypatch):
    """They take longer than the training here."""
    monkeypatch.setattr(LanguageTask, "sample", lambda self, model: "")


@pytest.fixture
def crash_in(monkeypatch):
    """Makes training stop dead in the given step, before it is taken."""
    return lambda step: training_runs.crash_in(monkeypatch, step, KeyError("a power cut"))


# ---------------------------------------------------------------------- to what, and when


def first_median(config: RunConfig) -> float:
    """The median of the keys' energies in block 0, over the first batch, by hand."""
    torch.manual_seed(config.training.seed)
    corpus = build_corpus(config.data)
    model = LanguageModel(config.model, corpus.tokenizer)
    batch, block = next(corpus.batches("train")), model.depth.blocks[0]
    energies = block.mixer.energies(block.mixer_norm(model.embedding(batch.ids)))[..., 2:]
    real = torch.ones_like(batch.ids).bool() if batch.mask is None else batch.mask
    return float(np.median(energies[real].detach().numpy()))


@pytest.mark.parametrize(("corpus", "accumulate"), [({}, 1), pytest.param({}, 2, marks=pytest.mark.slow), (SHIFT, 2)])
def test_tau_is_the_median_energy_of_the_first_batch(tmp_path, corpus, accumulate):
    changes = (corpus, {"training": {"steps": 2, "accumulate": accumulate}}, CALIBRATED)
    path = run(tmp_path, "run", *changes)
    expected = first_median(configuration(tmp_path, TAU, *changes))
    assert taus(path) == pytest.approx([expected] * 2, rel=1e-5)
    assert counts(path) == [1, 1]
    layers = [value for name, value in weights(path).items() if name.endswith("mixer.tau")]
    assert len(layers) == 2
    assert all(torch.equal(value, layers[0]) for value in layers)


def test_fixed_stays_to_the_bit(tmp_path, crash_in):
    set_to = {"model.mixer.tau": 0.37}
    crash_in(5)
    with pytest.raises(KeyError):
        run(tmp_path, "run", set_to)
    resume(tmp_path / "run")
    assert counts(tmp_path / "run") == [0] * 6
    for name, value in weights(tmp_path / "run").items():
        assert not name.endswith("mixer.tau") or torch.equal(value, torch.tensor(0.37))


def changes_of(values: list[float]) -> list[int]:
    """The steps (from 1) that were the first on another tau than the step before."""
    return [step + 1 for step in range(1, len(values)) if values[step] != values[step - 1]]


def test_resuming_is_as_if_never_stopped(tmp_path, crash_in):
    run(tmp_path, "whole", EVERYTHING)
    crash_in(5)
    with pytest.raises(KeyError):
        run(tmp_path, "x", EVERYTHING)
    resume(tmp_path / "x")
    assert_same_tensors(weights(tmp_path / "x"), weights(tmp_path / "whole"))
    assert metrics(tmp_path / "x") == metrics(tmp_path / "whole")
    mine, theirs = last_checkpoint(tmp_path / "x"), last_checkpoint(tmp_path / "whole")
    assert_same_tensors(mine.optimizer, theirs.optimizer)


def test_a_restart_recalibrates_as_published(tmp_path, crash_in):
    crash_in(5)
    with pytest.raises(KeyError):
        run(tmp_path, "x", CALIBRATED)
    resume(tmp_path / "x")
    assert counts(tmp_path / "x") == [1] * 3 + [2] * 3
    assert changes_of(taus(tmp_path / "x")) == [4]


def test_another_run_s_weights_are_a_start(tmp_path):
    once = {"training.steps": 1}
    first = run(tmp_path, "first", once, {"model.mixer.tau": 0.37})
    kept = run(tmp_path, "kept", once, {"start_from": str(first)})
    assert taus(kept) == pytest.approx([0.37])
    assert Run.open(kept).read_config()["model"]["mixer"]["tau"] == 0.37
    anew = run(tmp_path, "anew", once, {"start_from": str(first)}, CALIBRATED)
    assert counts(anew) == [1]
    assert taus(anew)[0] != pytest.approx(0.37, rel=1e-3)


@pytest.mark.parametrize("precision", [pytest.param("64-true", marks=pytest.mark.slow), "bf16-mixed"])
def test_other_precisions_calibrate(tmp_path, precision):
    path = run(tmp_path, "run", CALIBRATED, {"training": {"precision": precision, "steps": 1}})
    expected = first_median(configuration(tmp_path, TAU))
    assert taus(path) == pytest.approx([expected], rel=1e-5 if precision == "64-true" else 0.02)


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_calibrate_as_one(tmp_path, strategy):
    plain = {"model.block": {"mixer_dropout": 0.0, "mlp_dropout": 0.0}}
    single = run(tmp_path, "single", CALIBRATED, plain)
    two = {"training": {"devices": 2, "strategy": strategy}}
    arguments = options(mapping(tmp_path, TAU, ROWS, CALIBRATED, plain, two))
    done = call(command(*arguments, f"--out={tmp_path / 'double'}"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert counts(tmp_path / "double") == counts(single) == [1] * 6
    assert taus(tmp_path / "double") == pytest.approx(taus(single), rel=1e-5)
    assert_close(curve(tmp_path / "double"), curve(single), "loss", 1e-5)
    for got, expected in zip(metrics(tmp_path / "double"), metrics(single), strict=True):
        for name in ("energy_p50", "energy_p05/first", "attention_entropy", "calibrations"):
            assert float(got[name]) == pytest.approx(float(expected[name]), rel=2e-4), name


# ---------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"model.mixer.laplacian": "saved"},
            r"of a new model is nowhere `saved`.*`chain`.*glissando laplacian build",
        ),
    ],
)
def test_a_mistake_is_named_and_leaves_nothing(tmp_path, changes, expected):
    with pytest.raises(ConfigError, match=expected):
        run(tmp_path, "run", changes)
    assert not (tmp_path / "run").exists()


def test_energies_of_zero_stop_training(tmp_path, monkeypatch):
    monkeypatch.setattr("glissando.mixers.tau.layer.starting_laplacian", lambda _, size: torch.zeros(size, size))
    with pytest.raises(TrainingError, match=r"before step 1: the median energy of the keys is 0\.0.*above 0.*fixed"):
        run(tmp_path, "run", CALIBRATED)


# ---------------------------------------------------------------------- a Laplacian from a file


@pytest.fixture
def domain(tmp_path) -> Path:
    path = tmp_path / "domain.safetensors"
    graphs.save(path, weighted(8), {"source": "a test"})
    return path


def test_the_file_may_be_gone_once_weights_follow(tmp_path, domain, crash_in):
    """When a run is resumed, loaded, and started from."""
    asked = {"model.mixer.laplacian": str(domain)}
    expected = graphs.normalise(graphs.load(domain)[0])
    crash_in(5)
    with pytest.raises(KeyError):
        run(tmp_path, "run", asked)
    domain.unlink()
    resume(tmp_path / "run")
    path = run(tmp_path, "next", asked, {"training.steps": 1, "start_from": str(tmp_path / "run")})
    for each in (tmp_path / "run", path):
        for name, value in weights(each).items():
            assert not name.endswith("laplacian") or torch.allclose(value.double(), expected, atol=1e-6)
        assert glissando.load(each)(torch.arange(4).unsqueeze(0))[0].isfinite().all()
    with pytest.raises(RunError, match=r"no file .*domain.*glissando laplacian build"):
        run(tmp_path, "anew", asked)


def test_stages_hand_the_laplacian_on(tmp_path, domain):
    stages = [{"name": name, "training": {"steps": 2}} for name in ("one", "two")]
    asked = {"model.mixer.laplacian": str(domain)}
    config = configuration(tmp_path, TAU, ROWS, asked, CALIBRATED, {"stages": stages})
    one, two = train_stages(config, tmp_path / "out")
    assert counts(one.path) == counts(two.path) == [1, 1]
    ours = weights(two)["depth.blocks.0.mixer.laplacian"]
    assert torch.equal(ours, weights(one)["depth.blocks.0.mixer.laplacian"])
    assert not torch.allclose(ours.double(), graphs.chain(8))


def test_another_laplacian_than_the_weights_bring_is_refused(tmp_path, domain):
    first = run(tmp_path, "first", {"training.steps": 1})
    start = {"start_from": str(first)}
    with pytest.raises(ConfigError, match=r"laplacian says.* started from chain: leave it out.*got .*domain"):
        run(tmp_path, "run", start, {"model.mixer.laplacian": str(domain)})
    run(tmp_path, "saved", start, {"training.steps": 1, "model.mixer.laplacian": "saved"})
    with pytest.raises(
        ConfigError, match=r"has no values for depth\.blocks\.2\.mixer\.laplacian.*give both the same layers"
    ):
        run(tmp_path, "deeper", start, {"model.depth.layers": 3})


# ---------------------------------------------------------------------- presets


@pytest.mark.parametrize("name", ["tauformer", "tauformer-100m"])
def test_presets_say_how_large_they_are_and_train_as_published(name):
    preset = load_preset(name)
    with torch.device("meta"):
        count = LanguageModel.from_preset(name).num_parameters()
    assert f"{count:,} parameters" in preset_note(name, "about")
    config = from_dict(RunConfig, {**preset, "training": {**preset["training"], "steps": 5000}})
    config.check(processes=1)
    assert config.data.batch_size * config.data.seq_len * 5000 == 655_360_000
