"""Rows of training that continue from the state after the row before: lanes of text, gradients, resuming."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import training_runs
from slow import slow_where
from training_runs import PLAIN, assert_same_tensors, configuration, last_checkpoint, loop_for, text_file, weights

from glissando.cli import main
from glissando.config import merge
from glissando.data.base import WHOLE, Shard
from glissando.data.corpora import JsonlOptions, StoriesOptions, TextOptions, build_corpus
from glissando.errors import ConfigError
from glissando.evaluation.carried import score_carried
from glissando.evaluation.scoring import score
from glissando.events.task import EventsRunConfig
from glissando.series.task import SeriesRunConfig
from glissando.state import detach, leaves
from glissando.training.config import RunConfig
from glissando.training.fit import resume, train
from glissando.training.lanes import fresh_rows, restored

CARRY = {"model": {"mixer": {"kind": "delta", "heads": 2}}, **PLAIN, "training": {"carry": 1.0}}
MIXERS = {
    "delta": {"kind": "delta", "heads": 2},
    "liquid": {"kind": "liquid"},
    "spectral": {"kind": "spectral"},
    "window": {"kind": "attention", "heads": 2, "window": 24},
}


def jsonl_file(folder):
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {i} of many"}) + "\n" for i in range(400)))
    return path


def corpora(folder):
    sizes = {"seq_len": 16, "batch_size": 4}
    return {
        "text": build_corpus(TextOptions(path=str(text_file(folder)), **sizes)),
        "jsonl": build_corpus(JsonlOptions(path=str(jsonl_file(folder)), **sizes)),
    }


def listed(state):
    return list(leaves(state))


@pytest.fixture
def two_turns(monkeypatch):
    """Batches of four rows take two turns, so that few steps reach rows that continue."""
    monkeypatch.setattr("glissando.data.text._LANES", 8)


# ---------------------------------------------------------------------- lanes of the data


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_row_goes_on_where_the_row_before_it_ended_unless_it_is_fresh(tmp_path, kind):
    corpus = corpora(tmp_path)[kind]
    assert corpus.turns == (16 if kind == "text" else 1)
    steps = 3 * corpus.epoch_rows // corpus.batch_size
    batches = list(itertools.islice(corpus.lanes(), steps))
    continued = 0
    for before, now in zip(batches, batches[corpus.turns :], strict=False):
        assert now.fresh is not None
        follows = now.ids[:, 0] == before.targets[:, -1]
        assert follows[~now.fresh].all()
        continued += int((~now.fresh).sum())
    assert continued > 0.8 * 4 * len(batches)
    assert any(batch.fresh.any() for batch in batches)


def test_lanes_of_files_read_what_is_trained_on_and_none_of_what_is_held_out(tmp_path):
    corpus = corpora(tmp_path)["jsonl"]
    per_round = -(-corpus.epoch_rows // corpus.batch_size)
    read = {tuple(row.tolist()) for batch in itertools.islice(corpus.lanes(), per_round) for row in batch.targets}
    trained = {
        tuple(row.tolist()) for batch in itertools.islice(corpus.batches("train"), per_round) for row in batch.targets
    }
    held_out = {tuple(row.tolist()) for batch in corpus.batches("valid") for row in batch.targets}
    assert not read & held_out
    assert trained <= read


@pytest.mark.parametrize(
    ("batch_size", "seq_len", "turns"), [(4, 16, 16), (1, 16, 64), (3, 7, 22), (40, 16, 2), (4, 999, 2)]
)
def test_lanes_of_a_text_read_each_token_once_an_epoch(tmp_path, monkeypatch, batch_size, seq_len, turns):
    """All but what is left over below a row; each lane in the order of the text, without a gap."""
    path = str(text_file(tmp_path))
    corpus = build_corpus(TextOptions(path=path, batch_size=batch_size, seq_len=seq_len))
    assert corpus.turns == turns
    first: list[np.ndarray] = []
    original = type(corpus._train).batch

    def watched(self, begin, length):
        first.append(begin)
        return original(self, begin, length)

    monkeypatch.setattr(type(corpus._train), "batch", watched)
    tokens = len(corpus._train) - 2
    windows, lanes = tokens // seq_len, turns * batch_size
    fresh = [batch.fresh.numpy() for batch in itertools.islice(corpus.lanes(), turns * -(-windows // lanes))]
    for before, now, anew in zip(first, first[turns:], fresh[turns:], strict=False):
        np.testing.assert_array_equal(now[~anew], before[~anew] + seq_len)
        assert (now[anew] < seq_len).all()
    whole_rounds = np.concatenate(first[: turns * (windows // lanes)])
    assert len(set(whole_rounds)) == len(whole_rounds)
    in_circle = {int(begin) // seq_len for begin in np.concatenate(first)}
    assert in_circle == set(range(windows))
    assert max(begin.max() for begin in first) + seq_len <= tokens
    if batch_size == 4 and turns == 16:  # not four stretches that are read on, nor neighbours: draws from all lanes
        assert np.mean([np.ptp(begin) for begin in first[:turns]]) > 0.4 * tokens


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_lanes_are_functions_of_the_step_and_shards_partition_them(tmp_path, kind):
    corpus = corpora(tmp_path)[kind]
    whole = next(itertools.islice(corpus.lanes(), 7, None))
    parts = [next(corpus.lanes(start=7, shard=Shard(rank, 2))) for rank in range(2)]
    for rank, part in enumerate(parts):
        assert_same_tensors(part.ids, whole.ids[rank::2])
        assert_same_tensors(part.fresh, whole.fresh[rank::2])


def test_rows_of_whole_documents_are_the_same_in_lanes():
    corpus = build_corpus(StoriesOptions(seq_len=128, batch_size=2, valid_rows=2))
    for one, other in zip(itertools.islice(corpus.lanes(), 2), corpus.batches("train"), strict=False):
        assert_same_tensors(one.ids, other.ids)


def test_the_share_of_rows_that_begin_anew():
    def drawn(carry, step, shard=WHOLE):
        batch = SimpleNamespace(rows=8 // shard.world, fresh=None)
        return fresh_rows(batch, SimpleNamespace(carry=carry, seed=3), step, shard)

    many = torch.cat([drawn(0.75, step) for step in range(500)])
    assert abs(many.double().mean() - 0.25) < 0.03
    assert_same_tensors(drawn(0.75, 9, Shard(1, 2)), drawn(0.75, 9)[1::2])
    assert not drawn(1.0, 1).any()
    own = SimpleNamespace(rows=2, fresh=torch.tensor([True, False]))
    assert fresh_rows(own, SimpleNamespace(carry=1.0, seed=3), 1, WHOLE).tolist() == [True, False]


# ---------------------------------------------------------------------- the loss


DEPTHS = [{"kind": "tied", "layers": 1, "n_steps": 2}, {"kind": "flow", "layers": 3, "n_steps": 2}]


@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param({"model": {"mixer": mixer}}, id=name) for name, mixer in MIXERS.items()),
        *(pytest.param({"model": {"mixer": MIXERS["delta"], "depth": o}}, id=o["kind"]) for o in DEPTHS),
        pytest.param({"model": {"mixer": ["spectral", MIXERS["delta"]]}}, id="list"),
        pytest.param(
            {"model": {"mixer": "spectral", "depth": {"layers": 1}}, "training": {"compile": True}}, id="compiled",
            marks=[pytest.mark.slow, pytest.mark.filterwarnings("default")],  # of the compiler's own
        ),
    ],
)  # fmt: skip
def test_the_loss_and_gradient_are_those_of_the_text_read_on(tmp_path, two_turns, changes):
    """The gradient is that of the second row's part alone: what came before gets none."""
    changes = merge(RunConfig, changes, PLAIN, {"training": {"carry": 1.0, "precision": "64-true"}})
    if "compile" in changes["training"] and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("torch.compile needs a C++ compiler, and none is on the path")
    loop = loop_for(tmp_path, changes)
    model, (lanes,) = loop.model, restored([], loop.model, [Shard()], turns := loop.task.turns)
    states = [model.init_state(4) for _ in range(turns)]
    assert turns == 2
    for step, (batch,) in enumerate(itertools.islice(loop.task.steps(0, [Shard()]), 2 * turns)):
        model.zero_grad()
        loop.objective(batch, False, lanes, batch.fresh).backward()
        got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for p in model.parameters():
            p.grad = None
        logits, states[step % turns] = model(batch.ids, detach(states[step % turns]))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
        (loss * loop.objective.scale).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(got[name], p.grad, rtol=1e-9, atol=1e-12)


def test_a_fresh_row_starts_empty_and_the_others_go_on(tmp_path):
    loop = loop_for(tmp_path, CARRY, {"training": {"precision": "64-true"}})
    model = loop.model
    (lanes,) = restored([], model, [Shard()], 1)
    batches = [batches[0] for batches in itertools.islice(loop.task.steps(1, [Shard()]), 2)]
    loop.objective(batches[0], False, lanes, batches[0].fresh)
    (kept,) = lanes.states
    state = lanes.begin(model, 4, torch.tensor([True, False, True, False]))
    for leaf, before, empty in zip(*map(listed, (state, kept, model.init_state(4))), strict=True):
        assert_same_tensors(leaf[1::2], before[1::2])
        assert_same_tensors(leaf[::2], empty[::2])
    assert any(
        not torch.equal(leaf[::2], before[::2]) for leaf, before in zip(*map(listed, (state, kept)), strict=True)
    )


# ---------------------------------------------------------------------- resuming


@pytest.mark.parametrize("mixer", slow_where(("delta", "liquid"), MIXERS))
def test_resuming_is_as_if_never_stopped(tmp_path, monkeypatch, two_turns, mixer):
    changes = {
        "model": {"mixer": MIXERS[mixer]},
        "training": {"carry": 0.8, "accumulate": 2, "save_every": 2, "steps": 4},
    }
    train(configuration(tmp_path, changes), tmp_path / "whole")
    training_runs.crash_in(monkeypatch, 4, KeyError())
    with pytest.raises(KeyError):
        train(configuration(tmp_path, changes), tmp_path / "x")
    resume(tmp_path / "x")
    assert_same_tensors(weights(tmp_path / "x"), weights(tmp_path / "whole"))
    one, other = (dataclasses.asdict(last_checkpoint(tmp_path / name))["lanes"] for name in ("x", "whole"))
    assert len(one) == 4  # of two parts and two turns
    assert all(one)
    assert_same_tensors(one, other)


@pytest.mark.slow
def test_resuming_before_the_first_turns_are_over(tmp_path, monkeypatch):
    """Turns without a state yet stay so."""
    changes = {"training": {"carry": 0.8, "steps": 20, "save_every": 4}}
    train(configuration(tmp_path, CARRY, changes), tmp_path / "whole")
    training_runs.crash_in(monkeypatch, 11, KeyError())
    with pytest.raises(KeyError):
        train(configuration(tmp_path, CARRY, changes), tmp_path / "x")
    last = last_checkpoint(tmp_path / "x")
    assert 0 < last.step < 16
    assert list(map(bool, last.lanes)) == [False] * (16 - last.step) + [True] * last.step
    resume(tmp_path / "x")
    assert_same_tensors(weights(tmp_path / "x"), weights(tmp_path / "whole"))


@pytest.mark.slow
def test_without_the_lanes_resuming_differs(tmp_path, monkeypatch, two_turns):
    """The test above can fail."""
    train(configuration(tmp_path, CARRY), tmp_path / "whole")
    training_runs.crash_in(monkeypatch, 11, KeyError())
    with pytest.raises(KeyError):
        train(configuration(tmp_path, CARRY, {"training": {"save_every": 4}}), tmp_path / "x")
    monkeypatch.setattr("glissando.training.loop.restored", lambda _, *rest: restored([], *rest))
    resume(tmp_path / "x")
    with pytest.raises(AssertionError):
        assert_same_tensors(weights(tmp_path / "x"), weights(tmp_path / "whole"))


@pytest.mark.parametrize(("before", "now"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2)])
def test_lanes_are_shared_out_anew_among_another_number_of_shards(tmp_path, before, now):
    model = loop_for(tmp_path, CARRY).model
    turns = [listed(model(torch.randint(0, 256, (8, 5)), model.init_state(8))[1]) for _ in range(2)]
    saved = []
    for rank in range(before):
        saved += [[leaf[rank::before].detach() for leaf in turn] for turn in turns] + [[]]
    lanes = restored(saved, model, [Shard(rank, now) for rank in range(now)], 3)
    for rank, part in enumerate(lanes):
        *states, last = part.states
        assert last is None
        for state, turn in zip(states, turns, strict=True):
            for leaf, expected in zip(listed(state), turn, strict=True):
                np.testing.assert_array_equal(leaf.detach(), expected[rank::now].detach())


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2), (2, 4), (4, 2), (3, 2), (4, 1)])
def test_lanes_of_a_batch_that_shards_do_not_share_evenly(rows, before, now):
    """As of windows, of which a small batch gives each shard one, some twice."""

    def parts(world):
        whole = np.resize(np.arange(1.0, rows + 1), max(rows, world))
        return [torch.from_numpy(whole[rank::world]).unsqueeze(1) for rank in range(world)]

    model = SimpleNamespace(init_state=lambda size: (torch.zeros(size, 1, dtype=torch.float64),))
    lanes = restored([[part] for part in parts(before)], model, [Shard(rank, now) for rank in range(now)], 1)
    for part, expected in zip(lanes, parts(now), strict=True):
        (state,) = part.begin(model, len(expected), torch.zeros(len(expected), dtype=torch.bool))
        torch.testing.assert_close(state, expected, rtol=0, atol=0)


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, r"the state of Attention grows with every token.*\(--model\.mixer\.window 256 in training\)"),
        ({"mixer": ["spectral", "attention"]}, r"window \(window: 256 beside its kind in model\.mixer in training\)"),
        ({"mixer": {"kind": "tau", "heads": 2}}, r"Tau grows with every token: use spectral, liquid or delta, as "),
        ({"mixer": {"kind": "delta", "heads": 2}, "max_length": 64}, r"model\.max_length is 64"),
    ],
)
def test_a_state_that_grows_for_ever_is_refused(tmp_path, model, expected):
    with pytest.raises(ConfigError, match=expected):
        loop_for(tmp_path, {"model": model, "training": {"carry": 0.5}})


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_that_is_none_is_refused(tmp_path, share):
    with pytest.raises(ConfigError, match=r"training\.carry"):
        configuration(tmp_path, {"training": {"carry": share}})


# ---------------------------------------------------------------------- measured


def test_a_carried_score_is_that_of_the_rows_read_as_one_text(tmp_path):
    corpus, model = corpora(tmp_path)["text"], loop_for(tmp_path, CARRY, {"training": {"precision": "64-true"}}).model
    ids, targets = (
        torch.cat([getattr(b, name).flatten() for b in corpus.batches("valid")]) for name in ("ids", "targets")
    )
    carried = score_carried(model, corpus.batches("valid"))
    logits, _ = model.eval()(ids[None])
    expected = torch.nn.functional.cross_entropy(logits[0], targets, reduction="none")
    scored = (targets >= 0).numpy()
    np.testing.assert_allclose(carried.carried, expected.detach().numpy()[scored], rtol=1e-9)
    assert carried.bits()["reset"] == pytest.approx(score(model, corpus.batches("valid")).bits_per_byte, rel=1e-9)
    decades = carried.by_position()
    assert [row["from"] for row in decades] == [0, 10, 100, 1000]
    assert sum(row["targets"] for row in decades) == carried.bits()["targets"] == scored.sum()


def test_evaluate_shows_both(tmp_path, capsys):
    run = train(configuration(tmp_path, CARRY, {"training": {"steps": 2}}), tmp_path / "run").path
    assert main(["evaluate", str(run), "--carry"]) == 0
    assert "carried - reset" in capsys.readouterr().out
    assert main(["evaluate", str(run), "--carry", "--json"]) == 0
    carried = json.loads(capsys.readouterr().out)["carried"]
    assert carried["by_position"][0]["targets"] == 10
    plain = train(configuration(tmp_path, {"training": {"steps": 2}}), tmp_path / "plain").path
    assert main(["evaluate", str(plain), "--carry"]) == 2
    assert "--carry reads on for ever, and the state of Attention grows" in capsys.readouterr().err


# ---------------------------------------------------------------------- tables


def table_of(folder, kind):
    """Series of different length; of events, with gaps that a model could not tell from each other."""

    def cell(s, t):
        return "ab"[(s + t) % 2] if kind == "events" else f"{np.sin(t / (3 + s)):.4f}"

    lines = [f"{s},{t},{cell(s, t)}" for s in range(7) for t in range(9, 40 + 11 * s)]
    path = folder / f"{kind}.csv"
    path.write_text("\n".join(["who,t,x", *lines]) + "\n")
    return path


def task_of(folder, kind, carry=1.0, **training):
    data = {"path": str(table_of(folder, kind)), "group": "who", "time": "t", "window": 8, "batch_size": 3}
    mixer = {"kind": "delta", "heads": 2, "input": "impulse"}
    values = {
        "data": data | ({"kind": "x"} if kind == "events" else {}),
        "model": {"hidden_size": 8, "mixer": mixer, "depth": {"layers": 1}},
        "training": {"steps": 12, "precision": "64-true", "accelerator": "cpu", "carry": carry, **training},
    }
    return {"series": SeriesRunConfig, "events": EventsRunConfig}[kind].read(values)


@pytest.mark.parametrize("kind", ["series", "events"])
def test_windows_of_a_lane_follow_each_other_and_every_window_comes_once_an_epoch(tmp_path, kind):
    train = task_of(tmp_path, kind).task().prepared.train
    own = train.scored if kind == "events" else train.begin
    met, before = [], None
    original = type(train).batch

    def watched(self, chosen, epoch=None, goes_on=None):
        nonlocal before
        if goes_on:
            np.testing.assert_array_equal(self.end[before], own[chosen])
        met.extend(chosen.tolist())
        before = chosen
        return original(self, chosen, epoch, goes_on)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(train), "batch", watched)
        for number in range(train.lane_batches):
            train.lanes(number)
        assert sorted(met) == list(range(len(train)))
        first, met = met, []
        for number in range(train.lane_batches, 2 * train.lane_batches):
            train.lanes(number)
        assert sorted(met) == list(range(len(train)))
        assert met != first


@torch.no_grad()
@pytest.mark.parametrize("kind", ["series", "events"])
def test_the_answers_to_a_lane_are_those_to_the_whole_series(tmp_path, kind):
    """The losses of the windows of a lane add up to that of one window."""
    task = task_of(tmp_path, kind).task()
    train, model = task.prepared.train, task.new_model().eval()
    number = next(n for n in range(train.lane_batches) if not train.lanes(n).fresh.any())
    while not train.lanes(number - 1).fresh.all():
        number -= 1
    (lanes,), total = restored([], model, [Shard()], 1), 0.0
    chosen = []
    original = type(train).batch

    def without_random_questions(self, windows, epoch=None, goes_on=None):
        chosen.append(windows)
        return original(self, windows, None, goes_on)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(train), "batch", without_random_questions)
        for step in itertools.count(number - 1):
            batch = train.lanes(step)
            if step >= number and batch.fresh.all():
                chosen.pop()
                break
            state = lanes.begin(model, batch.rows, batch.fresh)
            loss = task.loss(model, batch, state)
            lanes.end(loss.state)
            total += float(loss.total)
    whole = dataclasses.replace(train, size=10**6, end=train.end.copy())
    whole.end[chosen[0]] = train.end[chosen[-1]]
    assert len(chosen) > 1
    expected = task.loss(model, original(whole, chosen[0]))
    assert total == pytest.approx(float(expected.total), rel=1e-9)


@pytest.mark.parametrize("kind", ["series", "events"])
@pytest.mark.slow
def test_a_training_on_a_table_resumes_with_its_lanes(tmp_path, monkeypatch, kind):
    config = task_of(tmp_path, kind, carry=0.8, save_every=4)
    train(config, tmp_path / "whole")
    training_runs.crash_in(monkeypatch, 11, KeyError())
    with pytest.raises(KeyError):
        train(task_of(tmp_path, kind, carry=0.8, save_every=4), tmp_path / "x")
    resume(tmp_path / "x", kind=type(config))
    assert_same_tensors(last_checkpoint(tmp_path / "x").model, last_checkpoint(tmp_path / "whole").model)
    train(task_of(tmp_path, kind, carry=0.0), tmp_path / "without")
    with pytest.raises(AssertionError):
        assert_same_tensors(last_checkpoint(tmp_path / "without").model, last_checkpoint(tmp_path / "whole").model)


@pytest.mark.parametrize("kind", ["series", "events"])
def test_a_state_that_grows_is_refused_of_tables_too(tmp_path, kind):
    config = task_of(tmp_path, kind)
    config.model["mixer"] = {"kind": "attention", "heads": 2}
    with pytest.raises(ConfigError, match="grows with every token"):
        train(config, tmp_path / "run")
