"""What the mixers report to the training log, and the warning where attention has collapsed into an average."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tolerances import assert_close
from training_runs import SHIFT, assert_same_tensors, configuration, metrics, rewind, weights

from glissando.evaluation.observe import columns, observe
from glissando.mixers import EMPTY, Context
from glissando.mixers.tau import Tau
from glissando.mixers.tau.observation import CollapseWarning, attention_entropy, collapses
from glissando.model import LanguageModel
from glissando.training.fit import resume, train
from glissando.training.language_task import LanguageTask
from research.audit.tau.training import key_energies, set_tau, tau_mixers

TAU = {"model": {"mixer": {"kind": "tau", "heads": 2}}}
ROWS = {"training": {"steps": 6, "log_every": 1, "save_every": 3, "validate_every": 10**6}}
OBSERVED = {
    "energy_p05", "energy_p50", "energy_p95", "tau", "temperature", "attention_entropy", "effective_keys",
    "effective_share", "energy_p05/first", "energy_p50/first", "energy_p95/first", "calibrations",
}  # fmt: skip


NAMES = tuple(name for name in Tau.observed if not name.endswith("/first"))


def run(folder: Path, name: str, *updates: dict) -> Path:
    return train(configuration(folder, TAU, ROWS, *updates), folder / name).path


def small(**updates: object) -> LanguageModel:
    values = {"hidden_size": 16, "mixer": {"kind": "tau", "heads": 2}, "depth.layers": 2}
    return LanguageModel.from_preset("transformer-nano", **{**values, **updates})


def some_ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, length))


@pytest.fixture(autouse=True)
def no_samples(monkeypatch):
    """They take longer than the training here."""
    monkeypatch.setattr(LanguageTask, "sample", lambda self, model: "")


# ---------------------------------------------------------------------- what is observed


@pytest.mark.parametrize("masked", [False, True])
def test_entropy_is_that_of_the_definition(masked):
    """Key by key, in Python's own arithmetic, with importance and forget gate."""
    model = small(**{"mixer.importance": True, "mixer.forget_gate": True}).double()
    mixer, x = tau_mixers(model)[0], torch.randn(2, 9, 16, dtype=torch.float64)
    torch.nn.init.normal_(mixer.forget.weight)
    torch.nn.init.normal_(mixer.importance.weight)
    lengths = [9, 5] if masked else [9, 9]
    mask = torch.arange(9) < torch.tensor(lengths).unsqueeze(1)
    with torch.no_grad():
        projected = mixer.project(x, mixer.energies(x))
        measured = mixer.observe(x, Context(mask=mask) if masked else EMPTY)
    entropies, keys, shares = [], [], []
    for b, length in enumerate(lengths):
        # 5 queries from the middle of the row to its end: 4 5 6 7 8, and of 5 tokens 2 2.5 3 3.5 4 to the even one
        for i in range(4, 9) if length == 9 else (2, 2, 3, 4, 4):
            for h in range(2):
                logits = [
                    float(projected.importance[b, h, j] + projected.decay[b, h, i] - projected.decay[b, h, j])
                    - abs(float(projected.q[b, h, i] - projected.k[b, h, j])) / float(projected.temperature[h])
                    for j in range(i + 1)
                ]
                total = sum(map(math.exp, logits))
                p = [math.exp(logit) / total for logit in logits]
                entropies.append(-sum(each * math.log(each) for each in p))
                keys.append(math.exp(entropies[-1]))
                shares.append(keys[-1] / (i + 1))
    for name, expected in (
        ("attention_entropy", entropies),
        ("effective_keys", keys),
        ("effective_share", shares),
    ):
        assert float(measured[name]) == pytest.approx(sum(expected) / len(expected), rel=1e-12), name


def test_entropy_of_equal_weights_counts_the_keys():
    mixer, x = tau_mixers(small())[0], torch.zeros(1, 7, 16)
    queries = torch.tensor([[0, 3, 6]])
    assert_close(
        attention_entropy(mixer.project(x, mixer.energies(x)), queries)[0, 0].exp(),
        torch.tensor([1.0, 4.0, 7.0]).double(),
        "keys",
        1e-12,
    )


def test_energies_are_those_of_real_keys():
    model, ids = small().double(), some_ids(2, 12)
    mixer, given = tau_mixers(model)[0], []
    mixer.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    mask = torch.arange(12) < torch.tensor([[12], [7]])
    mask = mask.flip(1)  # padding on the left, which the model moves to the end
    with torch.no_grad():
        model(ids, mask=mask)
        energies = mixer.energies(given[0])[..., 2:]
    expected = np.concatenate([energies[0].flatten().numpy(), energies[1, :7].flatten().numpy()])
    got = key_energies(model, ids, mask)
    assert np.allclose(np.sort(got.flatten().numpy()), np.sort(expected), rtol=1e-12, atol=0)
    row = observe(model, ids, mask)
    for name, share in (("energy_p05", 5), ("energy_p50", 50), ("energy_p95", 95)):
        assert row[f"{name}/first"] == pytest.approx(np.percentile(expected, share), rel=1e-12)


def test_columns_are_means_over_layers_and_the_first():
    model, ids = small().double(), some_ids(1, 20)
    both = []
    for mixer in tau_mixers(model):
        mixer.register_forward_pre_hook(lambda m, args: both.append(m.observe(args[0], EMPTY)))
    set_tau(model, 0.7)
    row = observe(model, ids)
    assert list(row) == columns(model)
    assert set(row) == OBSERVED - {"calibrations"}
    for name in NAMES:
        mean = sum(float(layer[name]) for layer in both) / 2
        assert row[name] == pytest.approx(mean, rel=1e-12), name
        assert row.get(f"{name}/first", float(both[0][name])) == pytest.approx(float(both[0][name]), rel=1e-12)
    assert row["tau"] == pytest.approx(0.7)


def test_observing_leaves_no_trace():
    model = small(**{"block.mixer_dropout": 0.3, "block.mlp_dropout": 0.3}).train()
    ids = some_ids(2, 20)
    model(ids)[0].sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    first, again = observe(model, ids), observe(model, ids)
    assert first == again
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert_same_tensors(dict(model.state_dict()), before)
    assert_same_tensors({name: p.grad for name, p in model.named_parameters()}, gradients)
    assert not any(module._forward_pre_hooks for module in model.modules())
    model.eval()
    assert observe(model, ids)["attention_entropy"] != first["attention_entropy"]  # dropout was in the second layer


@pytest.mark.parametrize(
    "depth", [{"depth": {"kind": "tied", "layers": 1, "n_steps": 3}}, {"depth": {"kind": "flow", "n_steps": 2}}]
)
def test_every_depth_is_observed(depth):
    assert set(observe(small(**depth), some_ids(1, 20))) == OBSERVED - {"calibrations"}


def test_a_model_without_an_observer_is_not_run(monkeypatch):
    model = small(mixer="attention")
    monkeypatch.setattr(LanguageModel, "forward", None)
    assert columns(model) == []
    assert observe(model, some_ids(1, 4)) == {}


def test_columns_are_there_for_tau_alone(tmp_path):
    short = {"training.steps": 1}
    for name, mixer, present in (
        ("tau", "tau", True),
        ("both", ["attention", "tau"], True),
        ("no", "attention", False),
    ):
        rows = metrics(run(tmp_path, name, short, {"model.mixer": mixer}))
        assert (set(rows[0]) >= OBSERVED) == present, name
        assert bool(set(rows[0]) & OBSERVED) == present, name
        assert all(row[column] for row in rows for column in OBSERVED if present)


def test_padded_rows_are_observed(tmp_path):
    rows = metrics(
        run(
            tmp_path,
            "run",
            SHIFT,
            {"training": {"steps": 2, "accumulate": 2}},
            {"model.mixer.calibration": "start"},
        )
    )
    assert all(math.isfinite(float(row[name])) for row in rows for name in OBSERVED)


def test_observing_changes_no_training(tmp_path, monkeypatch):
    """Dropout is on: a random number drawn would show in the weights."""
    with_it = run(tmp_path, "with")
    monkeypatch.setattr("glissando.training.observation.observe", lambda *_: {})
    without = run(tmp_path, "without")
    assert_same_tensors(weights(without), weights(with_it))


# ---------------------------------------------------------------------- collapse

HEALTHY = {
    "energy_p05": 1.6, "energy_p50": 2.0, "energy_p95": 2.4, "tau": 2.0, "temperature": 0.05, "effective_keys": 350.0,
    "effective_share": 0.92,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, set()),
        ({"effective_share": 0.9999}, {"attention"}),
        ({"effective_share": 0.9999, "effective_keys": 7.0}, set()),  # of 7 keys, even a selective head attends to most
        ({"energy_p05": 1.99, "energy_p95": 2.01}, {"energies"}),
        ({"energy_p05": 1.97, "energy_p95": 2.03}, set()),
    ],
)
def test_collapse_is_distinguished_from_health(changes, kinds):
    assert set(collapses(HEALTHY | changes)) == kinds


def test_mixers_without_tau_cannot_collapse():
    assert collapses({}) == {}
    assert collapses({"time_constant": 1.0}) == {}


AVERAGE = {"data.seq_len": 64, "model.mixer.temperature": 1.0, "training.freeze": ["*.log_temperature"]}


def test_the_published_temperature_warns_once(tmp_path):
    """T = 1: attention is an average, at every step; also over a restart."""
    with pytest.warns(
        CollapseWarning, match=r"nearly an average.*Lower the temperature .* it is 1\), or set tau"
    ) as caught:
        path = run(tmp_path, "run", AVERAGE)
    assert len(caught) == 1
    rewind(path, min(int(each.name.removeprefix("step-")) for each in (path / "checkpoints").glob("step-*")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resume(path)
    assert len(metrics(path)) == 6
    assert all(float(row["effective_share"]) > 0.99 for row in metrics(path))


def test_equal_energies_warn(tmp_path, monkeypatch):
    monkeypatch.setattr("glissando.mixers.tau.layer.starting_laplacian", lambda _, size: torch.eye(size))
    with pytest.warns(CollapseWarning, match=r"energies are nearly all the same.* around 1, .*Learn L"):
        run(tmp_path, "run", {"training.steps": 1})


@pytest.mark.parametrize("preset", ["tauformer-nano", "tauformer"])
@pytest.mark.parametrize("is_calibrated", [False, True])
def test_presets_start_healthy(preset, is_calibrated):
    """On their published number of layers' first two, and 256 tokens as the log does."""
    model = LanguageModel.from_preset(preset, **{"vocab_size": 256, "depth.layers": 2})
    ids = torch.tensor(list(Path(__file__).read_bytes()[:256])).unsqueeze(0)
    if is_calibrated:
        set_tau(model, float(key_energies(model, ids).median()))
    assert collapses(observe(model, ids)) == {}
