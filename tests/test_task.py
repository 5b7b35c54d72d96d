"""A task and a command of one's own, which examples show; losses add up over parts and states."""

from __future__ import annotations

import dataclasses
import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from packages import installed
from slow import slow_where
from tolerances import assert_close
from training_runs import SHIFT, configuration, crash_in, metrics, weights

from glissando import load
from glissando.cli import main
from glissando.config import from_dict
from glissando.data.corpora import build_corpus
from glissando.errors import ConfigError, RunError
from glissando.training.config import TrainingConfig
from glissando.training.fit import resume, train, trained
from glissando.training.language_task import LanguageTask
from glissando.training.task import Objective, Sums

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the example."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("add_a_task")


def test_a_task_of_ones_own(sums, tmp_path, monkeypatch, capsys):
    training = TrainingConfig(steps=12, accelerator="cpu", precision="32-true", validate_every=4, save_every=4)
    training.optimizer.learning_rate, training.schedule.warmup_steps = 0.03, 3
    config = sums.SumsConfig(training=training)
    whole = train(config, tmp_path / "whole")
    printed = capsys.readouterr().err
    assert "running sums (16, 8, 1)" in printed
    assert "step 12: 1 + 2 + 3 = " in printed
    assert "(best validation: step 12)" in printed
    losses = [float(row["valid_loss"]) for row in metrics(whole) if row["valid_loss"]]
    assert losses[-1] < 0.8 * losses[0]
    crash_in(monkeypatch, 7, RuntimeError("a power cut"))
    with pytest.raises(RuntimeError, match="a power cut"):
        train(config, tmp_path / "cut")
    resumed = resume(tmp_path / "cut", kind=sums.SumsConfig)
    for name, weight in weights(whole).items():
        assert torch.equal(weights(resumed)[name], weight), name
    parts = train(dataclasses.replace(config, training=dataclasses.replace(training, accumulate=2)), tmp_path / "parts")
    for name, weight in weights(whole).items():
        assert_close(weights(parts)[name], weight, name, 1e-4)


@pytest.mark.parametrize("optimizer", slow_where({"adamw"}, ["adamw", "muon"]))
def test_any_module_of_pytorch_is_trained(optimizer, sums, tmp_path, monkeypatch):
    """A task whose model knows nothing of glissando: it is resumed to the same weights, and opened. Its own `depth` is
    no depth of ours."""

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.depth = 1
            self.inner, self.out = torch.nn.GRU(1, 8, batch_first=True), torch.nn.Linear(8, 1)

        def forward(self, x: torch.Tensor, state: Any = None) -> Any:
            return self.out(self.inner(x.to(self.out.weight.dtype))[0]), state

    monkeypatch.setattr(sums.Sums, "new_model", lambda task, saved=False: Network())
    training = {"steps": 6, "accelerator": "cpu", "precision": "32-true", "save_every": 3, "optimizer": optimizer}
    config = from_dict(sums.SumsConfig, {"training": training})
    whole = train(config, tmp_path / "whole")
    crash_in(monkeypatch, 5, RuntimeError("a power cut"))
    with pytest.raises(RuntimeError, match="a power cut"):
        train(config, tmp_path / "cut")
    resume(tmp_path / "cut", kind=sums.SumsConfig)
    model = trained(tmp_path / "cut", sums.SumsConfig)
    assert not model.training
    for name, weight in weights(whole).items():
        assert torch.equal(model.state_dict()[name], weight), name
    exact = from_dict(sums.SumsConfig, {"training": training | {"steps": 1, "precision": "64-true"}})
    assert trained(train(exact, tmp_path / "exact").path, sums.SumsConfig).out.weight.dtype is torch.float64
    monkeypatch.setattr(sums.Sums, "new_model", lambda task, saved=False: torch.nn.Linear(1, 8))
    with pytest.raises(RunError, match="do not fit its configuration"):
        trained(tmp_path / "cut", sums.SumsConfig)
    monkeypatch.setattr(sums.Sums, "new_model", lambda task, saved=False: Network())
    config.training.gradient_checkpointing = True
    with pytest.raises(ConfigError, match=r"gradient_checkpointing: Network does not recompute its blocks"):
        train(config, tmp_path / "blocks")
    with pytest.raises(RunError, match=r"holds a model of sums: glissando\.training\.fit\.trained"):
        load(tmp_path / "whole")


def test_a_model_of_ours_in_ones_own_task_has_started(sums, tmp_path):
    """A Laplacian that comes with weights alone is refused before anything is made."""
    config = from_dict(sums.SumsConfig, {"model": {"mixer": {"kind": "tau", "laplacian": "saved"}}})
    with pytest.raises(ConfigError, match="nowhere `saved`"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_command_of_ones_own(sums, tmp_path, monkeypatch, capsys):
    """The package of the examples: its command trains its task with its mixer, which entry points name."""
    package = tomllib.loads((EXAMPLES / "pyproject.toml").read_text())["project"]
    installed(tmp_path, package["name"], package["entry-points"])
    monkeypatch.syspath_prepend(tmp_path)
    steps = ["--training.steps", "3", "--training.accelerator", "cpu"]
    out = tmp_path / "run"
    assert main(["sums", "--model.mixer", "average", "--model.mixer.decay", "0.5", *steps, "--out", str(out)]) == 0
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["kind"] == "sums"
    assert config["model"]["mixer"] == {"kind": "average", "decay": 0.5}
    assert main(["sums", "--resume", str(out)]) == 0
    assert "finished, at step 3: nothing is left to train" in capsys.readouterr().err
    assert main(["sums", "--model.mixer.decai", "0.5"]) == 2
    assert main(["--help"]) == 0
    assert "sums       from add_a_command" in capsys.readouterr().out


@pytest.mark.parametrize("data", [{}, SHIFT], ids=["text", "pairs"])
def test_losses_add_up_over_a_state_that_is_carried(data, tmp_path):
    """The loss of rows is that of their first half, and of the second from the state after it."""
    config = configuration(tmp_path, data, {"training": {"precision": "64-true"}})
    task = LanguageTask(config, build_corpus(config.data))
    model, batch = task.new_model().eval(), next(task.batches("train"))
    whole, half = task.loss(model, batch, logged=True), batch.ids.shape[1] // 2
    sums, state = Sums(), model.init_state(len(batch.ids))
    for part in (slice(0, half), slice(half, None)):
        mask = None if batch.mask is None else batch.mask[:, part]
        piece = batch._replace(ids=batch.ids[:, part], targets=batch.targets[:, part], mask=mask)
        loss = task.loss(model, piece, state, logged=True)
        state = loss.state
        sums.add(Sums(loss.total, loss.weight, also=dict(loss.also)))
    assert sums.targets == whole.weight > 0
    assert sums.also["hits"] == whole.also["hits"]
    assert_close(sums.loss, whole.total, "loss", 1e-9)


def test_a_loss_that_is_no_loss_says_what_to_return():
    class Pair:
        def loss(self, model, batch, state, logged):
            return torch.zeros(()), 1

    with pytest.raises(TypeError, match=r"Pair\.loss returned a tuple: return a .*Loss\(total, weight\)"):
        Objective(torch.nn.Identity(), Pair())(None)
