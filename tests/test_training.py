"""What a training step does: accumulation, clipping, freezing, budgets, precision; and what cannot be trained."""

from __future__ import annotations

import base64
import math
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from machine import known_precision
from tolerances import assert_close
from training_runs import (
    PLAIN,
    SHIFT,
    assert_same_tensors,
    configuration,
    curve,
    loop_for,
    mapping,
    metrics,
    options,
    weights,
)

from glissando.cli import main
from glissando.data.corpora import build_corpus
from glissando.errors import ConfigError, UnknownNameError
from glissando.model import LanguageModel
from glissando.training.config import OptimizerOptions, RunConfig
from glissando.training.fit import train


def run(folder, name, *updates):
    return train(configuration(folder, *updates), folder / name)


@pytest.fixture
def steps(monkeypatch):
    """What each step applied: (gradient norm after clipping, learning rate)."""
    seen = []
    original = torch.optim.AdamW.step

    def spy(self, *args, **keywords):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        seen.append((torch.nn.utils.get_total_norm(grads).item(), self.param_groups[0]["lr"]))
        return original(self, *args, **keywords)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    return seen


# ---------------------------------------------------------------------- accumulation


def pair_file(folder):
    """Pairs whose answers differ much in length, so that a mean of means is far from the mean."""
    lines = [f"{i:03d}\t{'x' * (1 + (i * i) % 12)}" for i in range(200)]
    path = folder / "pairs.txt"
    path.write_text("\n".join(base64.b64encode(line.encode()).decode() for line in lines))
    return {"data": {"kind": "pairs", "seq_len": 24, "batch_size": 8, "path": str(path)}}


@pytest.mark.parametrize(
    ("corpus", "precision", "bound"),
    [
        ("text", "32-true", 1e-6),
        pytest.param("shift", "64-true", 1e-12, marks=pytest.mark.slow),
        ("pairs", "64-true", 1e-12),
    ],
)
def test_accumulation_changes_nothing(tmp_path, monkeypatch, corpus, precision, bound):
    data = {"text": {}, "shift": SHIFT, "pairs": pair_file(tmp_path)}[corpus]
    # Adam's division by the root of a tiny second moment magnifies rounding; a large eps leaves the sum to be tested.
    monkeypatch.setattr(OptimizerOptions, "eps", 1e-2)
    base = {"training": {"precision": precision, "steps": 4, "log_every": 1}}
    whole = run(tmp_path, "whole", PLAIN, data, base)
    parts = run(tmp_path, "parts", PLAIN, data, base, {"training.accumulate": 4})
    got = weights(parts)
    for name, weight in weights(whole).items():
        assert_close(got[name], weight, name, bound)
    assert_close(curve(parts), curve(whole), "loss", 1e-6)  # metrics.csv holds seven digits
    assert metrics(parts)[-1]["tokens"] == metrics(whole)[-1]["tokens"]


def test_batch_that_does_not_divide_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"multiple of 3"):
        run(tmp_path, "run", {"training.accumulate": 3})
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------- gradients


def test_applied_gradient_is_clipped_and_logged_before_clipping(tmp_path, steps):
    done = run(tmp_path, "run", {"training": {"clip": 0.05, "steps": 6, "log_every": 1, "accumulate": 2}})
    assert len(steps) == 6
    for row, (after, _) in zip(metrics(done), steps, strict=True):
        assert after == pytest.approx(0.05, rel=1e-5)
        assert float(row["grad_norm"]) > 0.1


def test_without_clipping_the_gradient_is_as_it_is(tmp_path, steps):
    done = run(tmp_path, "run", SHIFT, {"training": {"clip": None, "steps": 3, "log_every": 1}})
    logged = [float(row["grad_norm"]) for row in metrics(done)]
    assert [after for after, _ in steps] == pytest.approx(logged, rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_gradient_is_that_of_the_mean_over_scored_targets(tmp_path, accumulate):
    """Against autograd on the whole batch: rows of pairs score different numbers of targets."""
    training = {"training": {"steps": 1, "log_every": 1, "accumulate": accumulate, "clip": None, "save_every": 1}}
    done = run(tmp_path, "run", PLAIN, SHIFT, training)
    config = configuration(tmp_path, PLAIN, SHIFT, training)
    torch.manual_seed(config.training.seed)
    corpus = build_corpus(config.data)
    model = LanguageModel(config.model, corpus.tokenizer)
    batch = next(corpus.batches("train"))
    logits = model(batch.ids, mask=batch.mask)[0]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())  # a mean, -100 ignored
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    (row,) = metrics(done)
    assert float(row["train_loss"]) == pytest.approx(loss.item(), rel=1e-5)
    assert float(row["grad_norm"]) == pytest.approx(norm.item(), rel=1e-4)


def test_parts_in_the_log_add_up(tmp_path):
    # validation falls between the rows of log_every: no row may hold an older step's norms
    done = run(tmp_path, "run", {"training": {"steps": 8, "log_every": 3, "validate_every": 2}})
    rows = metrics(done)
    assert [int(r["step"]) for r in rows] == [2, 3, 4, 6, 8]
    names = [name for name in rows[0] if name.startswith("grad_norm/")]
    assert {"grad_norm/embedding", "grad_norm/depth.blocks.0.mixer", "grad_norm/depth.blocks.1.mlp"} <= set(names)
    for row in rows:
        total = math.hypot(*(float(row[name]) for name in names))
        assert total == pytest.approx(float(row["grad_norm"]), rel=1e-5)


def test_homeostatic_rate_follows_the_norm_before_clipping(tmp_path, steps):
    schedule = {"kind": "homeostatic", "warmup_steps": 0}
    done = run(tmp_path, "run", {"training": {"clip": 0.01, "steps": 4, "log_every": 1, "schedule": schedule}})
    for row, (after, rate) in zip(metrics(done), steps, strict=True):
        before = float(row["grad_norm"])
        assert rate == pytest.approx(0.01 / (1 + math.exp(0.5 - 1 / (before + 1e-6))), rel=1e-6)
        assert after < before / 10


def test_gradient_checkpointing_gives_the_same_weights(tmp_path):
    runs = [run(tmp_path, f"{on}", {"training": {"gradient_checkpointing": on, "steps": 4}}) for on in (False, True)]
    for name, weight in weights(runs[0]).items():
        assert torch.equal(weights(runs[1])[name], weight), name


@pytest.mark.slow
def test_bf16_trains_and_keeps_float32_weights(tmp_path):
    exact = run(tmp_path, "exact", PLAIN, {"training.steps": 30})
    mixed = run(tmp_path, "mixed", PLAIN, {"training": {"steps": 30, "precision": "bf16-mixed"}})
    assert {w.dtype for w in weights(mixed).values()} == {torch.float32}
    assert curve(mixed)[-1] < curve(mixed)[0] - 0.5
    assert_close(curve(mixed), curve(exact), "loss", 0.02)
    assert not torch.equal(weights(mixed)["embedding.weight"], weights(exact)["embedding.weight"])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the compiler's own
@pytest.mark.parametrize("corpus", [{}, SHIFT])  # rows of one length, and of several
def test_compiled_model_trains_to_the_same_weights(tmp_path, corpus):
    import shutil

    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("torch.compile needs a C++ compiler, and none is on the path")
    plain = run(tmp_path, "plain", PLAIN, corpus, {"training": {"steps": 4, "log_every": 1}})
    compiled = run(tmp_path, "compiled", PLAIN, corpus, {"training": {"steps": 4, "log_every": 1, "compile": True}})
    assert weights(compiled).keys() == weights(plain).keys()
    assert_close(curve(compiled), curve(plain), "loss", 1e-4)


@pytest.mark.parametrize(("instruction", "precision"), [("avx512_bf16", "bf16-mixed"), ("avx512_f", "32-true")])
@pytest.mark.slow
def test_precision_follows_the_processor_and_is_kept(tmp_path, monkeypatch, instruction, precision):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {instruction: True})
    monkeypatch.setattr("glissando.training.fit.resolved_precision", known_precision)
    done = run(tmp_path, "run", {"training": {"steps": 2, "precision": "auto"}})
    assert done.read_config()["training"]["precision"] == precision
    asked = run(tmp_path, "asked", {"training": {"steps": 2, "precision": precision}})
    assert_same_tensors(weights(done), weights(asked))
    other = "64-true" if precision == "32-true" else "32-true"
    assert not torch.equal(
        weights(done)["embedding.weight"].double(),
        weights(run(tmp_path, "other", {"training": {"steps": 2, "precision": other}}))["embedding.weight"].double(),
    )


# ---------------------------------------------------------------------- freezing


def test_frozen_parameters_stay_and_others_move(tmp_path):
    config = configuration(tmp_path, {"training": {"freeze": ["embedding.*", "*.0.mixer.*"], "steps": 4}})
    done = train(config, tmp_path / "run")
    torch.manual_seed(config.training.seed)
    start = LanguageModel(config.model, build_corpus(config.data).tokenizer).state_dict()
    for name, weight in weights(done).items():
        frozen = name.startswith("embedding.") or ".0.mixer." in name
        assert torch.equal(weight, start[name]) == frozen, name
    assert not any("embedding" in name for name in metrics(done)[0])


@pytest.mark.parametrize(("patterns", "message"), [(["embeding.*"], "embeding"), (["*"], "nothing to train")])
def test_freezing_nothing_or_everything_is_an_error(tmp_path, patterns, message):
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, "run", {"training.freeze": patterns})


# ---------------------------------------------------------------------- budgets and stopping


def test_steps_and_tokens(tmp_path):
    assert metrics(run(tmp_path, "steps", {"training.steps": 7}))[-1]["step"] == "7"
    # 64 tokens a step: 129 need three
    last = metrics(run(tmp_path, "tokens", {"training": {"steps": None, "tokens": 129}}))[-1]
    assert (last["step"], last["tokens"]) == ("3", "192")


def test_seconds_end_in_time_at_the_final_rate(tmp_path):
    began = time.perf_counter()
    budget = {
        "steps": None,
        "seconds": 1.0,
        "validate_every": 10**6,
        "save_every": 10**6,
        "schedule": {"warmup_steps": 0},
    }
    done = run(tmp_path, "run", {"training": budget})
    taken = time.perf_counter() - began
    rows = metrics(done)
    assert taken < 4
    assert float(rows[0]["learning_rate"]) > 0.0095
    assert 0.001 <= float(rows[-1]["learning_rate"]) < 0.0015  # a loaded machine may take long over the last step
    assert [path.name for path in (done.path / "checkpoints").glob("step-*")] == [f"step-{int(rows[-1]['step']):08d}"]


@pytest.mark.parametrize("budget", [{"steps": 3, "tokens": 5}, {"steps": 3, "epochs": 1.0}])
def test_at_most_one_budget(tmp_path, budget):
    with pytest.raises(ConfigError, match=r"the budget is one of training\.steps, \.epochs, .* got steps and"):
        run(tmp_path, "run", {"training": budget})


def test_counts_are_positive(tmp_path):
    for name in ("validate_every", "save_every", "log_every", "clip", "steps", "accumulate"):
        with pytest.raises(ConfigError, match=name):
            run(tmp_path, "run", {"training": {name: 0}})


def test_early_stopping_stops(tmp_path):
    options = {"steps": 100, "validate_every": 1, "early_stopping": 3, "optimizer": {"learning_rate": 3.0}}
    done = run(tmp_path, "run", PLAIN, {"training": options})
    rows = metrics(done)
    losses = [float(row["valid_loss"]) for row in rows]
    assert len(losses) < 100
    assert min(losses) == losses[-4]
    assert int(rows[-1]["step"]) == len(losses)


# ---------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("model.hidden_size", 0, "at least 1"),
        ("model.max_length", 0, "at least 1"),
        ("model.mixer.heads", 0, "greater than 0"),
        ("model.mixer.kv_heads", 0, "greater than 0"),
        ("model.block.mixer_dropout", 1.5, "less than 1"),
        ("model.block.mlp_dropout", -0.1, "a number of at least 0"),
        ("model.block.mlp.hidden", 0, "greater than 0"),
        ("model.mixer.head_size", -2, "greater than 0"),
        ("model.mixer.dropout", 1.0, "less than 1"),
        ("training.optimizer.learning_rate", 0.0, "greater than 0"),
        ("training.optimizer.learning_rate", math.inf, "finite"),
        ("training.optimizer.beta2", 1.0, "less than 1"),
        ("training.optimizer.beta2", math.nan, "a finite number"),
        ("training.optimizer.weight_decay", -1.0, "a number of at least 0"),
        ("training.clip", -1.0, "greater than 0"),
        ("training.clip", 0, "greater than 0"),
        ("training.validate_every", 0, "greater than 0"),
        ("training.save_every", 0, "greater than 0"),
        ("training.log_every", 0, "greater than 0"),
        ("training.accumulate", 0, "greater than 0"),
        ("training.steps", 0, "greater than 0"),
        ("data.batch_size", 0, "greater than 0"),
        ("training.carry", math.nan, "a finite number"),
        ("training.schedule.kind", "cosine", "warmup-cosine"),
        ("training.schedule.warmup_steps", -1, "a number of at least 0"),
        ("training.schedule.final_ratio", 1.5, "a number of at most 1"),
        ("training.freeze", ["nothing"], "matches no parameter"),
        ("training.accelerator", "foo", "Available here: auto, cpu"),
        ("data.seq_len", 0, "greater than 0"),
    ],
)
def test_a_mistake_is_named_in_one_line_and_leaves_nothing(tmp_path, option, value, expected):
    with pytest.raises((ConfigError, UnknownNameError)) as caught:
        run(tmp_path, "run", {option: value})
    message = str(caught.value)
    named = option.split(".")[-1] if option != "training.schedule.kind" else "schedule"
    assert named in message
    assert str(value).strip("[]") in message
    assert expected in message
    assert "\n" not in message
    assert not (tmp_path / "run").exists()


def test_a_configuration_that_is_no_yaml_leaves_nothing(tmp_path):
    config = configuration(tmp_path)
    config.training.optimizer.beta2 = torch.tensor(0.9)
    with pytest.raises(ConfigError, match="plain values"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


LEARNED = {"model": {"max_length": 40}}


def test_rows_longer_than_the_learned_positions_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.seq_len 64 is longer than model\.max_length 40"):
        run(tmp_path, "run", LEARNED, {"data.seq_len": 64})
    with pytest.raises(ConfigError, match=r"rows of \d+ tokens.* model\.max_length is 40.*--data\.cut true"):
        run(tmp_path, "run", LEARNED, {"data": {"kind": "stories", "seq_len": 32}})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("length", [40, 16])
def test_samples_end_with_the_learned_positions(tmp_path, length):
    loop = loop_for(tmp_path, LEARNED, {"model.max_length": length})
    prompt = loop.task.corpus.prompts(1)[0]
    text = loop.task.sample(loop.model)
    assert text.startswith(f"{prompt}|")
    assert len(text.encode("utf-8", "ignore")) >= len(prompt) + 1


def test_few_functions_receive_the_whole_configuration(tmp_path):
    """A reader of `train` follows it through ten functions, and twelve files that name its type, at most; the others
    get what they need of it."""
    values, found, files = mapping(tmp_path, {"training.steps": 1}), set[str](), set[str]()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and "/glissando/" in code.co_filename:
            files.add(code.co_filename)
            given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if "/cli/" not in code.co_filename and any(
                isinstance(frame.f_locals.get(name), RunConfig) for name in given
            ):
                found.add(code.co_qualname)

    sys.setprofile(note)
    try:
        assert main(["train", *options(values), f"--out={tmp_path}/run"]) == 0
    finally:
        sys.setprofile(None)
    assert {"train", "Loop.__init__"} < found
    named = [file for file in sorted(files) if re.search(r"\bRunConfig\b", Path(file).read_text())]
    assert {"fit.py", "config.py"} <= {Path(file).name for file in named}
    assert len(named) <= 12, named
    assert len(found) <= 10, sorted(found)
