"""Training that starts from another run, u = 0 tied to a base, and stages from one configuration."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor
from training_runs import (
    PLAIN,
    assert_same_tensors,
    call,
    command,
    configuration,
    crash_in,
    metrics,
    options,
    rewind,
    weights,
)

import glissando
from glissando.cli import main
from glissando.config import from_dict, merge
from glissando.data.base import IGNORED
from glissando.errors import ConfigError, GlissandoError, RunError
from glissando.evaluation.scoring import divergence
from glissando.loading import load_base
from glissando.presets import load_preset
from glissando.runs import Run
from glissando.stages import STAGES, plans, train_stages
from glissando.training.config import RunConfig
from glissando.training.fit import resume, train
from glissando.training.language_task import LanguageTask
from glissando.training.task import Objective

FLOW = {"kind": "flow", "layers": 2, "n_steps": 2}
DIALS = {"model.depth.control": ["mood", "speech"]}
LABELLED = {"data.labelled": True}
SMALL = {
    "data": {"kind": "stories", "seq_len": 64, "batch_size": 2, "valid_rows": 2, "cut": True},
    "model.depth": FLOW,
    "training.steps": 4,
}
STEER = {"neutral_kl": 0.5, "steps": 6}


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    return train(configuration(folder, SMALL), folder / "run").path


def steered(start: Path, folder: Path, *updates: dict, out: str = "run") -> Path:
    config = configuration(folder, SMALL, DIALS, LABELLED, {"training": STEER, "start_from": str(start)}, *updates)
    return train(config, folder / out).path


@pytest.mark.slow
def test_training_starts_with_the_weights_of_the_other_run(start, tmp_path):
    nothing = {"training": {"optimizer": {"learning_rate": 1e-30, "weight_decay": 0.0}}}
    got = weights(steered(start, tmp_path, nothing))
    for name, value in weights(start).items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-12)
    assert set(got) - set(weights(start)) == {"depth.control.weight", "depth.control.bias"}


def test_new_parts_are_named(start, tmp_path, capsys):
    steered(start, tmp_path, {"training.steps": 1})
    assert "so they start with new values: depth.control.bias, depth.control.weight" in capsys.readouterr().err


def test_divergence_by_hand():
    wanted = torch.tensor([[[0.0, math.log(3.0)], [5.0, 5.0]]], dtype=torch.float64)
    got = torch.zeros(1, 2, 2, dtype=torch.float64)
    by_hand = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert divergence(wanted, got, torch.tensor([[1, IGNORED]])).item() == pytest.approx(by_hand, abs=1e-12)
    assert divergence(wanted, wanted + 3.0, torch.tensor([[1, 0]])).item() == pytest.approx(0, abs=1e-12)


def test_the_tie_is_in_the_loss_and_in_the_log(start, tmp_path, monkeypatch):
    losses: list[tuple[Tensor, float]] = []
    original = Objective.forward

    def watch(self, *args):
        loss = original(self, *args)
        losses.append((loss.detach(), float(self.sums.also["nats"] + 0.5 * self.sums.also["neutral"])))
        return loss

    monkeypatch.setattr(Objective, "forward", watch)
    run = steered(start, tmp_path)
    for loss, expected in losses:
        assert float(loss) == pytest.approx(expected / (2 * 64), rel=1e-6)
    first, *_, last = (float(row["neutral_kl"]) for row in metrics(run))
    assert 0 <= first < last  # the base is where training starts, and then it moves


def test_the_tie_weighs_every_target_alike_however_a_step_is_parted(start, tmp_path):
    """One step on two rows at once, and on one after the other: the same weights."""
    once = {"training": {"steps": 1, "neutral_kl": 3.0, "optimizer": {"learning_rate": 0.01}}, "data.seq_len": 64}
    whole = weights(steered(start, tmp_path, PLAIN, once, out="whole"))
    parts = weights(steered(start, tmp_path, PLAIN, once, {"training.accumulate": 2}, out="parts"))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=0, atol=2e-5)


def test_the_base_reads_what_the_model_reads_and_drops_nothing(start, tmp_path, monkeypatch):
    """With its mask, in evaluation mode, without gradients."""
    seen = []

    def watch(self, model, base, batch):
        forward = type(base).forward
        monkeypatch.setattr(type(base), "forward", lambda m, *a, **k: (seen.append((m, k)), forward(m, *a, **k))[1])
        try:
            return original(self, model, base, batch)
        finally:
            monkeypatch.setattr(type(base), "forward", forward)

    original = LanguageTask._neutral_kl
    monkeypatch.setattr(LanguageTask, "_neutral_kl", watch)
    steered(start, tmp_path, {"training.steps": 1, "data.cut": False})  # rows of several lengths
    (base, given), (model, also) = seen
    assert not base.training
    assert not any(p.requires_grad for p in base.parameters())
    assert model.training
    assert torch.equal(given["mask"], also["mask"])
    assert "control" not in given
    assert not also["control"].any()


@pytest.mark.slow
def test_a_strong_tie_keeps_u_of_zero_near_the_base(start, tmp_path):
    fast = {"training": {"steps": 10, "optimizer": {"learning_rate": 0.02}}}
    loose = steered(start, tmp_path, fast, {"training.neutral_kl": 1e-6}, out="loose")
    tight = steered(start, tmp_path, fast, {"training.neutral_kl": 100.0}, out="tight")
    ids = torch.randint(0, 256, (4, 40), generator=torch.Generator().manual_seed(1))

    def distance(run: Path) -> float:
        model, base = glissando.load(run), load_base(run)
        assert base is not None
        with torch.no_grad():
            return float(divergence(base(ids)[0], model(ids, control=torch.zeros(4, 2))[0], ids))

    assert distance(tight) < 0.3 * distance(loose)


@pytest.mark.slow
def test_the_base_is_kept_and_is_what_was_started_from(start, tmp_path):
    run = steered(start, tmp_path)
    assert_same_tensors(weights(run / "base"), weights(start))
    base = load_base(run)
    assert base is not None
    assert base.config.depth.control == []
    assert load_base(start) is None


@pytest.mark.slow
def test_a_steered_run_resumes_to_the_same_weights(start, tmp_path):
    whole = steered(start, tmp_path, {"training.save_every": 3}, out="whole")
    run = steered(start, tmp_path, {"training.save_every": 3}, out="cut")
    rewind(run, min(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir()))
    resume(run)
    assert_same_tensors(weights(run), weights(whole))
    assert metrics(run) == metrics(whole)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ({"model.hidden_size": 32}, "give both the same model options"),
        ({"model.depth": {"kind": "discrete"}}, "does not fit: give both.*Unexpected key.*depth.after"),
        ({"model.depth.alpha": 0.7}, r"model.depth.alpha says where.* from 0.1: leave it out .*; got 0.7"),
        ({"start_from": None}, "it needs --from RUN"),
        ({"data.labelled": False}, r"labels: none"),
        ({"training.neutral_kl": -1.0}, "neutral_kl"),
        ({"start_from": "nowhere"}, "no run at nowhere"),
    ],
)
def test_mistakes_leave_nothing_behind(start, tmp_path, updates, message):
    updates = {"training.neutral_kl": 0.0} | updates if "model.depth" in updates else updates
    with pytest.raises(GlissandoError, match=message):
        steered(start, tmp_path, updates)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------- stages

TWO = [
    {"name": "pretrain", "training": {"tokens": 300}},
    {"name": "steer", "model": {"depth": {"control": ["mood", "speech"]}}, "data": {"labelled": True},
     "training": STEER},
]  # fmt: skip


def staged(folder: Path, stages: list[dict] = TWO, **shared: object):
    return configuration(folder, SMALL, {"stages": stages, **shared})


#: the second stage saves in between
SAVING = [TWO[0], {**TWO[1], "training": {**STEER, "save_every": 2}}]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train_stages(staged(folder, SAVING), folder / "out")
    return folder / "out"


def test_stages_are_runs_that_start_where_the_one_before_ended(whole):
    first, second = (Run.open(path) for path in sorted(path for path in whole.iterdir() if path.is_dir()))
    assert [first.path.name, second.path.name] == ["1-pretrain", "2-steer"]
    assert {k: first.read_config()["training"][k] for k in ("tokens", "steps")} == {"tokens": 300, "steps": None}
    assert second.read_config()["start_from"] == str(first.path)
    assert_same_tensors(weights(second.path / "base"), weights(first))
    assert glissando.load(second.path).config.depth.control == ["mood", "speech"]


@pytest.mark.slow
def test_stages_resume_with_what_is_missing(tmp_path):
    train_stages(staged(tmp_path), tmp_path / "whole")
    config = staged(tmp_path)
    first, first_config, _ = plans(config, tmp_path / "cut")[0]
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / STAGES).write_text(yaml.safe_dump(config.as_dict()))
    train(first_config, first)
    train_stages(config, tmp_path / "cut")
    train_stages(config, tmp_path / "cut")  # nothing is left to do
    assert_same_tensors(weights(tmp_path / "cut" / "2-steer"), weights(tmp_path / "whole" / "2-steer"))
    assert_same_tensors(weights(first), weights(tmp_path / "whole" / "1-pretrain"))


def test_a_stage_that_was_cut_short_goes_on_from_its_checkpoint(whole, tmp_path, monkeypatch):
    # Step 4 is one of the second stage: the first, of 300 tokens, has fewer.
    crash_in(monkeypatch, 4, RuntimeError("power cut"))
    with pytest.raises(RuntimeError, match="power cut"):
        train_stages(staged(tmp_path, SAVING), tmp_path / "cut")
    monkeypatch.undo()
    train_stages(staged(tmp_path, SAVING), tmp_path / "cut")
    assert_same_tensors(weights(tmp_path / "cut" / "2-steer"), weights(whole / "2-steer"))


@pytest.mark.slow
def test_each_of_three_stages_starts_from_the_one_before_with_its_tokenizer(tmp_path):
    bpe = {"tokenizer": {"kind": "bpe", "vocab_size": 300}}
    three = [
        {"name": "a", "training": {"steps": 1}},
        {"name": "b", "data": {"seed": 5}},
        {"name": "c", "data": {"seed": 6}},
    ]
    config = configuration(tmp_path, SMALL, {"data": bpe, "stages": three})
    runs = train_stages(config, tmp_path / "out")
    assert [run.read_config().get("start_from") for run in runs] == [None, str(runs[0].path), str(runs[1].path)]
    assert len({(run.path / "tokenizer.json").read_bytes() for run in runs}) == 1


def test_dials_without_labels_rest_and_that_is_said(tmp_path, capsys):
    train(configuration(tmp_path, SMALL, DIALS, {"training.steps": 1}), tmp_path / "run")
    assert "no labels: the dials mood, speech are not trained" in capsys.readouterr().err


def test_a_stage_without_a_checkpoint_is_reported(tmp_path):
    train_stages(staged(tmp_path, TWO[:1]), tmp_path / "out")
    (tmp_path / "out" / "1-pretrain" / "latest").unlink()
    shutil.rmtree(tmp_path / "out" / "1-pretrain" / "checkpoints")
    with pytest.raises(RunError, match="1-pretrain has no checkpoint to resume from"):
        train_stages(staged(tmp_path, TWO[:1]), tmp_path / "out")


@pytest.mark.slow
def test_a_stage_that_was_killed_early_starts_anew(tmp_path, monkeypatch):
    expected = train_stages(staged(tmp_path), tmp_path / "whole")
    with monkeypatch.context() as patched:
        crash_in(patched, 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            train_stages(staged(tmp_path), tmp_path / "out")
    for run, other in zip(train_stages(staged(tmp_path), tmp_path / "out"), expected, strict=True):
        assert_same_tensors(weights(run), weights(other))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([TWO[0], TWO[0]], "two stages are named 'pretrain'"),
        ([{"name": "../up"}], "letters, digits"),
        ([TWO[0], {"name": "b", "training": {"setps": 3}}], r"stages\[2\] \(b\).*setps"),
        (
            [TWO[0], {"name": "b", "training": {"steps": -3}}],
            r"\(b\)\.training\.steps: expected a number greater than 0, got -3",
        ),
        (
            [TWO[0], {"name": "b", "model": {"depth": {"alpha": 0.3}}}],
            r"stages\[2\] \(b\): model.depth.alpha says .* those of .*1-pretrain started from 0.1",
        ),
    ],
)
def test_mistakes_in_stages_show_before_any_training(tmp_path, stages, message):
    with pytest.raises(ConfigError, match=message):
        train_stages(staged(tmp_path, stages), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_stage_keeps_is_known_to_the_next_before_any_training(tmp_path):
    """A start may be left out later, or given again; another one is refused, in the shared options too."""
    given = {"model": {"depth": {"alpha": 0.3}}}
    three = [{"name": "a", **given}, {"name": "b"}, {"name": "c", **given}]
    found = plans(staged(tmp_path, three), tmp_path / "out")
    assert [config.model.depth.alpha for _, config, _ in found] == [0.3, 0.3, 0.3]
    config = staged(tmp_path, [{"name": "a", **given}, {"name": "b"}])
    config.model.depth.alpha = 0.2
    with pytest.raises(ConfigError, match=r"stages\[2\] \(b\): .* those of .*1-a started from 0.3"):
        plans(config, tmp_path / "out")


def test_what_grows_has_its_starts_already(tmp_path):
    """New layers come of grown ones: they start where those stand."""
    tau = {"model": {"mixer": "tau"}}
    other = {"grow": {"layers": 1}, "model": {"mixer": {"kind": "tau", "temperature": 0.3}}}
    with pytest.raises(ConfigError, match=r"stages\[2\] \(b\): model.mixer.temperature says"):
        plans(staged(tmp_path, [{"name": "a", **tau}, {"name": "b", **other}]), tmp_path / "out")


def test_stages_do_not_overwrite(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(RunError, match="nothing is overwritten"):
        train_stages(staged(tmp_path), tmp_path / "out")
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.slow
def test_other_stages_are_refused_and_another_machine_is_not(tmp_path, capsys):
    train_stages(staged(tmp_path), tmp_path / "out")
    with pytest.raises(RunError, match="holds stages of other options"):
        train_stages(staged(tmp_path, [TWO[0], {**TWO[1], "data": {"seed": 3}}]), tmp_path / "out")
    again = staged(tmp_path)
    again.training.accelerator = "cpu"
    train_stages(again, tmp_path / "out")
    capsys.readouterr()
    assert main(["train", "--resume", str(tmp_path / "out")]) == 2
    assert "the command that began them, given again, goes on" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_line_trains_stages_and_goes_on_from_a_run(tmp_path):
    file = tmp_path / "stages.yaml"
    values = staged(tmp_path).as_dict()
    file.write_text(yaml.safe_dump(values))
    done = call(command("--config", str(file), "--out", str(tmp_path / "out")))
    assert done.returncode == 0, done.stderr
    more = options({"training": {"steps": 2}})
    run = tmp_path / "more"
    done = call(command("--from", str(tmp_path / "out" / "2-steer"), *more, "--out", str(run)))
    assert done.returncode == 0, done.stderr
    config = glissando.load(run).config
    assert config.depth.control == ["mood", "speech"]
    assert config.hidden_size == 16


def test_the_example_of_stages_is_one_that_trains():
    values = yaml.safe_load((Path(__file__).parent.parent / "examples" / "steer.yaml").read_text())
    preset = load_preset(values["preset"])
    (_, pretrain, _), (_, steer, _) = plans(from_dict(RunConfig, merge(RunConfig, preset, values)), Path("out"))
    assert (pretrain.model.depth.control, pretrain.data.labelled) == ([], False)
    assert (steer.model.depth.control, steer.data.labelled) == (["mood", "speech"], True)
    assert steer.training.neutral_kl > 0
