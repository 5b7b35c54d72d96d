"""A task of one's own is trained, resumed and shown by the loop; losses add up over parts and states."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, ClassVar

import pytest
import torch
from tolerances import assert_close
from training_runs import SHIFT, configuration, crash_in, metrics, weights

from glissando.config import options, to_dict
from glissando.data.base import WHOLE
from glissando.data.corpora import build_corpus
from glissando.series import SeriesModel
from glissando.training.config import TrainingConfig
from glissando.training.fit import resume, train
from glissando.training.language_task import LanguageTask
from glissando.training.task import Loss, Sums, Task


class RunningSum(Task):
    """The sum of all numbers so far."""

    nominal = 4 * 8

    def new_model(self, saved=False):
        sizes = {"hidden_size": 8, "inputs": 1, "outputs": 1, "depth": {"layers": 1}}
        return SeriesModel.from_config({**sizes, "mixer": {"kind": "liquid", "state_size": 8}})

    def batches(self, split, step=0, shard=WHOLE):
        while split == "train" or step < 2:
            seed = step + 10**6 * (split == "valid")
            yield torch.randn(4, 8, 1, generator=torch.Generator().manual_seed(seed))[shard.rank :: shard.world]
            step += 1

    def loss(self, model, batch, state=None, logged=False):
        y, state = model(batch, state)
        return Loss((y - batch.cumsum(1)).square().sum(), batch.numel(), state=state)

    @torch.no_grad()
    def score(self, model, device, stride=1, shard=WHOLE):
        losses = [self.loss(model, batch) for batch in self.batches("valid")]
        return {"valid_loss": float(sum(each.total for each in losses) / sum(each.weight for each in losses))}

    def sample(self, model):
        return f"sum of 1, 2 and 3: {float(model(torch.tensor([[[1.0], [2.0], [3.0]]]))[0][0, -1, 0].detach()):.1f}"

    def describe(self, batch):
        return f"running sums {tuple(batch.shape)}"

    def summary(self, run, best_step):
        return {"best": best_step}

    def closing(self, summary, run, name):
        return [f"done at {summary['best']}"]


@options
class Rows:
    batch_size: int = 4


@options
class SumsConfig:
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: Rows = field(default_factory=Rows)
    kind: ClassVar[str] = "sums"
    other_texts: ClassVar[str | None] = None
    start_from: ClassVar[str | None] = None
    grown: ClassVar[dict[str, Any]] = {}

    def check(self, processes):
        pass

    def task(self, resumed=None):
        return RunningSum()

    def as_dict(self):
        return {"kind": self.kind, **to_dict(self)}


def test_a_task_of_ones_own(tmp_path, monkeypatch, capsys):
    training = TrainingConfig(steps=30, accelerator="cpu", precision="32-true", validate_every=10, save_every=10)
    training.optimizer.learning_rate = 0.03
    whole = train(SumsConfig(training=training), tmp_path / "whole")
    told = capsys.readouterr().err
    assert "running sums (4, 8, 1)" in told
    assert "step 30: sum of 1, 2 and 3: " in told
    assert "done at 30" in told
    losses = [float(row["valid_loss"]) for row in metrics(whole) if row["valid_loss"]]
    assert losses[-1] < 0.97 * losses[0]
    crash_in(monkeypatch, 16, RuntimeError("a power cut"))
    with pytest.raises(RuntimeError, match="a power cut"):
        train(SumsConfig(training=training), tmp_path / "cut")
    again = resume(tmp_path / "cut", kind=SumsConfig)
    for name, weight in weights(whole).items():
        assert torch.equal(weights(again)[name], weight), name
    parts = train(SumsConfig(training=dataclasses.replace(training, accumulate=2)), tmp_path / "parts")
    for name, weight in weights(whole).items():
        assert_close(weights(parts)[name], weight, name, 1e-4)


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
