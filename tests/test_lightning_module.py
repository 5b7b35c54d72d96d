"""A Trainer of the user's own takes the steps that `glissando train` takes."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_close
from training_runs import PLAIN, SHIFT, configuration, metrics, weights

from glissando.data.corpora import build_corpus
from glissando.model import LanguageModel
from glissando.training.fit import train


@pytest.mark.filterwarnings("ignore")  # of the Trainer's advice about loaders of its own kind
@pytest.mark.parametrize("corpus", [{}, SHIFT])
def test_three_steps_of_a_trainer_are_those_of_the_loop(tmp_path, corpus):
    import lightning.pytorch as pl  # seconds, which collecting would take in every process

    from glissando.lightning_module import TrainingModule

    config = configuration(
        tmp_path, PLAIN, corpus, {"training": {"steps": 3, "log_every": 1, "clip": 0.5, "precision": "64-true"}}
    )
    done = train(config, tmp_path / "run")
    torch.manual_seed(config.training.seed)
    data = build_corpus(config.data)
    module = TrainingModule(config, LanguageModel(config.model, data.tokenizer), data)
    trainer = pl.Trainer(
        max_steps=3,
        gradient_clip_val=0.5,
        accelerator="cpu",
        precision="64-true",  # in float32, Adam's division makes a rounding of a gradient near 0 a step of the rate
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        val_check_interval=3,
        check_val_every_n_epoch=None,
    )
    trainer.fit(module)
    assert trainer.global_step == 3
    for name, weight in weights(done).items():
        assert_close(module.objective.model.state_dict()[name], weight, name, 1e-8)
    last = metrics(done)[-1]
    assert float(trainer.callback_metrics["valid_loss"]) == pytest.approx(float(last["valid_loss"]), rel=1e-6)
    assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(float(last["train_loss"]), rel=1e-6)
