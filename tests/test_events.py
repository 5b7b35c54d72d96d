"""Events: the log that is read, what a model knows at each step, and what it is scored on."""

from __future__ import annotations

import math
import signal
from dataclasses import replace

import numpy as np
import pandas
import pytest
import safetensors.torch
import torch

from glissando.cli import main
from glissando.config import from_dict, to_dict
from glissando.errors import ConfigError, DataError, NotFiniteError, UnknownNameError
from glissando.events import EventForecaster
from glissando.events.batches import After, Steps, Targets, Windows, scales
from glissando.events.forecast import predict, sample
from glissando.events.log import parts
from glissando.events.model import EventModel
from glissando.events.options import EventsData
from glissando.events.reading import read_events
from glissando.events.sample import ahead, futures, presents
from glissando.events.task import EventRun, EventsTask, build, call, prepare


def frame(text: str) -> pandas.DataFrame:
    """A frame of lines `id t kind`."""
    rows = [line.split() for line in text.strip().splitlines()]
    return pandas.DataFrame(rows, columns=["id", "t", "kind"])


def data_of(**more):
    return from_dict(EventsData, {"group": "id", "time": "t", "kind": "kind", "time_unit": "d", **more}, "data")


def read(source, encoding=None, **more):
    return read_events(data_of(**more), source, encoding)


def table(tmp_path, text: str, name: str = "facts.csv") -> str:
    path = tmp_path / name
    path.write_text("\n".join(",".join(line.split()) for line in text.strip().splitlines()) + "\n")
    return str(path)


def logs(count: int = 12, length: int = 30, kinds: int = 3, seed: int = 0, ties: float = 0.1) -> pandas.DataFrame:
    """Random logs of whole days."""
    chance = np.random.default_rng(seed)
    rows = []
    for series in range(count):
        gaps = np.where(chance.random(length) < ties, 0, chance.geometric(0.2, length))
        rows += [
            (series, t, f"k{k}") for t, k in zip(np.cumsum(gaps), chance.integers(kinds, size=length), strict=True)
        ]
    return pandas.DataFrame(rows, columns=["id", "t", "kind"])


def model_of(source, *others, head="mixture", **more):
    """A new model of a frame, in float64, with its windows."""
    prepared = prepare(data_of(batch_size=4, **more), None, source, *others)
    torch.manual_seed(1)
    mixer = {"kind": "delta", "heads": 2, "input": "impulse"}
    options = {"hidden_size": 16, "mixer": mixer, "depth": {"layers": 1}, "head": head}
    model = build(options, prepared.encoding, prepared.scales).double().eval()
    model.set_scales(**prepared.scales._asdict())
    return model, prepared


def total(model, log, prepared, size: int = 128, warm: int = 128) -> float:
    """The log-likelihood of a log."""
    steps = Steps.of(log, prepared.encoding, prepared.scales)
    held = Windows.of(steps, EventsData(window=size, batch_size=4), warm)
    with torch.no_grad():
        found = [call(model, batch) for batch in held.scoring()]
    return sum(float(each.time.sum() + each.kind.sum()) for each in found)


# ---------------------------------------------------------------------- reading


def test_events_are_sorted_merged_and_ordered_as_sets():
    log, encoding = read(frame("a 5 y\na 1 x\na 5 x\na 5 x\nb 2 x\nb 4 x\na 9 x"))
    assert encoding.kinds == ["x", "y"]
    assert encoding.ties
    assert log.names == ["a", "b"]
    assert log.codes.tolist() == [2, 2, 3, 2, 2, 2]
    assert log.times.tolist() == [0, 4, 4, 8, 0, 2]
    assert log.scored.tolist() == [False, True, True, True, False, True]
    assert any("merged" in line for line in log.report)
    shuffled = frame("a 9 x\nb 4 x\na 5 x\na 5 y\na 1 x\nb 2 x")
    again, _ = read(shuffled)
    assert again.codes.tolist() == log.codes.tolist()
    assert again.times.tolist() == log.times.tolist()


def test_rows_after_a_later_one_of_their_series_are_counted_where_series_take_turns():
    """In a, 3 and 2 follow 9; in b, 5 follows 7: none of them stands beside the row that it follows."""
    log, *_ = read(frame("a 9 x\nb 7 x\na 3 x\nb 5 y\na 2 x\nb 8 x"))
    assert "3 rows sorted: a later time of the series stood before" in log.report


def test_a_log_of_single_events_says_why_none_is_predicted():
    log, *_ = read(frame("a 1 x\nb 2 y"))
    with pytest.raises(ConfigError, match=r"of 0 to predict \(the first of a series is not, unless data\.start"):
        parts(log, EventsData())


def test_what_comes_after_each_step():
    log, encoding = read(frame("a 1 x\na 5 x\na 5 y\na 9 x"), end="12", resolution="0")
    after = After.of(log, encoding)
    assert after.tie.tolist() == [-1, 1, 0, 0]
    assert after.kind.tolist() == [0, 1, 0, -1]
    assert after.wait.tolist() == [4, 0, 4, 3]
    assert after.end.tolist() == [False, False, False, True]
    assert after.weight == 4


def test_start_and_end_by_column(tmp_path):
    facts = table(tmp_path, "id stop sex\na 10 f\nb 8 m\nc 6 f\nd 0 m")
    log, encoding = read(
        frame("a -3 x\na 4 x\na 11 x\nb 0 y\nb 2 z"), start=0, end="stop", static_path=facts, static="sex"
    )
    assert log.names == ["a", "b", "c"]  # c has no event and is observed; d is observed for no time
    assert encoding.kinds == ["x", "z"]
    assert encoding.inputs == ["y"]
    assert log.codes.tolist() == [2, 0, 2, 4, 0, 3, 0]
    after = After.of(log, encoding)
    assert after.wait.tolist() == [0, 4, 6, 0, 2, 6, 6]
    assert after.kind.tolist() == [-1, 0, -1, -1, 1, -1, -1]
    assert after.end.sum() == 3
    assert encoding.static_categories == {"sex": ["f", "m"]}
    assert any("1 event after the end" in line for line in log.report)
    assert any("ends at or before its start" in line for line in log.report)


def test_values_come_after_the_events_of_their_time(tmp_path):
    values = table(tmp_path, "id t bp\na 5 120\na 7 110\nz 1 1", "values.csv")
    log, encoding = read(frame("a 1 x\na 5 x\na 9 x"), values_path=values)
    assert log.codes.tolist() == [2, 2, 0, 0, 2]
    np.testing.assert_array_equal(log.values[:, 0], [np.nan, np.nan, 120, 110, np.nan])
    after = After.of(log, encoding)
    assert after.wait.tolist() == [4, 0, 2, 2, 0]  # nothing came until the value, then nothing, then the event
    assert after.kind.tolist() == [0, -1, -1, 0, -1]


def test_kinds_that_are_read_alone_and_unknown_ones():
    log, encoding = read(frame("a 1 x\na 2 visit\na 3 x"), inputs="visit")
    assert encoding.inputs == ["visit"]
    assert log.scored.tolist() == [False, False, True]
    new, _ = read(frame("a 1 x\na 2 strange\na 2 x\na 3 visit"), encoding)
    assert new.codes.tolist() == [2, 2, 1, 3]
    assert any("1 event of kinds" in line and "strange" in line for line in new.report)


def test_resolution_is_found_and_said():
    days, encoding = read(frame("a 1 x\na 4 x\na 9 x"))
    assert encoding.resolution == 1.0
    assert any("resolution 1 d" in line for line in days.report)
    assert read(frame("a 1 x\na 4 x\na 9 x"), resolution="0")[1].resolution == 0
    assert read(frame("a 1 x\na 4 x\na 9 x"), resolution="12h")[1].resolution == 0.5
    assert read(frame("a 1.00001 x\na 4.5 x\na 9 x"))[1].resolution == 0


def test_dates_have_a_clock():
    log, encoding = read(frame("a 2026-01-05T06:00:00Z x\na 2026-01-08T18:00:00Z x"), time_unit=None)
    assert encoding.clock
    np.testing.assert_allclose(log.phases, [[0.25, 0.25 / 7], [0.75, 3.75 / 7]])  # 2026-01-05 is a Monday
    assert log.clock.written([0], [log.times[1]]) == ["2026-01-08T18:00:00Z"]


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"time": None}, ConfigError, "data.time is missing"),
        ({"kind": "knd"}, UnknownNameError, "kind"),
        ({"inputs": "w"}, UnknownNameError, "'w'"),
        ({"start": "soon"}, ConfigError, "neither a column"),
        ({"end": "100", "start": "100"}, DataError, "no event to predict"),
        ({"channel": "c", "value": "v"}, ConfigError, "data.values_path"),
    ],
)
def test_mistakes_say_what_to_do(more, error, words):
    with pytest.raises(error, match=words):
        read(frame("a 1 x\na 2 y"), **more)


def test_a_start_in_the_log_beside_facts_of_a_second_table(tmp_path):
    facts = table(tmp_path, "id age\nb 1\na 2")
    log, _ = read(frame("a 4 x\na 9 x\nb 2 x\nb 3 x").assign(begin=["1", "1", "2", ""]), start="begin",
                  static_path=facts, static="age")  # fmt: skip
    assert log.names == ["a", "b"]
    assert log.since.tolist() == [0, 0]  # which is the first step
    assert log.scored.sum() == 3
    assert log.static.tolist() == [[2], [1]]


def test_an_end_that_no_series_has():
    log, _ = read(frame("a 4 x\na 9 x").assign(stop=""), end="stop")
    assert not log.ended.any()


def test_an_end_that_is_said_twice_differently(tmp_path):
    facts = table(tmp_path, "id stop\na 10\na 12")
    with pytest.raises(DataError, match=r"facts.csv, line 3, column 'stop'.*12, and in line 2 it is 10"):
        read(frame("a 1 x\na 4 x"), start=0, end="stop", static_path=facts)


# ---------------------------------------------------------------------- laws


@pytest.mark.parametrize("end", ["200", None])  # a series that ends with its last event is censored at the cut, too
def test_the_likelihood_of_a_split_by_time_adds_up(end):
    source = logs(ties=0.2)
    model, prepared = model_of(source, split="future", end=end, resolution="1")
    whole, _ = read_events(data_of(end=end), source, prepared.encoding)
    train, held, _ = parts(whole, from_dict(EventsData, {"split": "future"}, "data"), 1.0)
    both = total(model, train, prepared) + total(model, held, prepared)
    assert both == pytest.approx(total(model, whole, prepared), abs=1e-9)


def test_categories_of_the_held_out_part_alone_are_unknown_there():
    """As in another log: an embedding that no step trains would be scored otherwise."""
    source = frame("a 1 k\na 2 k\na 3 k\nb 1 k\nb 2 m\nb 3 k\nc 1 k\nc 2 k\nc 3 k\nd 1 k\nd 2 k\nd 3 k")
    options = {"marks": ["mark"], "static": ["home"], "inputs": ["m"], "valid_fraction": 0.25}
    data = from_dict(EventsData, {"group": "id", "time": "t", "kind": "kind", "seed": 0, **options}, "data")
    alone = "abcd"[np.random.default_rng(0).permutation(4)[0]]
    source["kind"] = np.where((source.id == alone) & (source.t == "2"), "m", "k")
    source["mark"] = np.where((source.id == alone) & (source.t == "3"), "new", "old")
    source["home"] = np.where(source.id == alone, "there", "here")
    log, _ = read_events(data, source)
    train, held, line = parts(log, data)
    assert held.names == [alone]
    assert "3 values of categories that are not trained on" in line
    assert held.codes.tolist() == [2, 1, 2]
    assert held.mark_codes.ravel().tolist() == [2, 2, 1]
    assert held.static_codes.ravel().tolist() == [1]
    assert train.mark_codes.min() == train.static_codes.min() == 2


def test_times_with_all_digits_of_a_float_are_read(tmp_path):
    """As pandas writes them: more digits than an integer has."""
    source = frame("a 0.00012345678901234567 k\na 61.50000000000000012 m\nb 12.3 k\nb 99.25 k")
    source.to_csv(tmp_path / "log.csv", index=False)
    log, _ = read(str(tmp_path / "log.csv"))
    assert log.gaps[[1, 3]] == pytest.approx([61.5 - 0.00012345678901234567, 99.25 - 12.3], rel=1e-15)
    assert log.clock.written([0, 1], [0, 86.95])[1] == "99.25"
    assert read(frame(f"a {-(2**63)} k\na {2**63} k"))[0].gaps[1] == 2.0**64
    old, _ = read(frame("a 1700-01-01 k\na 2026-01-01 k"), time_unit=None)
    assert old.clock.written([0, 0], old.times.tolist()) == ["1700-01-01T00:00:00Z", "2026-01-01T00:00:00Z"]
    with pytest.raises(DataError, match="too far apart"):
        read(frame("a 1e-300 k\na 1e9 k"))


def test_windows_with_a_whole_past_score_as_one():
    source = logs(count=2, length=60)
    model, prepared = model_of(source)
    log = read(source, prepared.encoding)[0]
    assert total(model, log, prepared, size=16, warm=128) == pytest.approx(total(model, log, prepared), abs=1e-9)


def test_nothing_later_changes_what_comes_before():
    model, _ = model_of(logs(ties=0.2))
    codes = torch.tensor([[2, 3, 4, 2, 3]])
    dt = torch.tensor([[0.0, 3, 0, 2, 5]], dtype=torch.float64)
    with torch.no_grad():
        before, _ = model(codes, dt=dt)
        other = codes.clone()
        other[0, 3] = 4
        later = dt.clone()
        later[0, 3:] = 9
        changed, _ = model(other, dt=later)
        tie = codes.clone()
        tie[0, 2] = 3
        tied, _ = model(tie, dt=dt)
    assert torch.equal(before[:, :3], changed[:, :3])
    assert not torch.equal(before[:, 3], changed[:, 3])
    assert not torch.equal(before[:, 3], tied[:, 3])  # an event with dt = 0 changes what follows


def test_the_split_law():
    model, _ = model_of(logs())
    codes, dt = torch.randint(2, 5, (2, 9)), torch.rand(2, 9, dtype=torch.float64)
    with torch.no_grad():
        whole, _ = model(codes, dt=dt)
        one, state = model(codes[:, :4], model.init_state(2), dt=dt[:, :4])
        other, _ = model(codes[:, 4:], state, dt=dt[:, 4:])
    torch.testing.assert_close(torch.cat([one, other], 1), whole, rtol=0, atol=1e-10)


def test_another_unit_of_time_shifts_densities_by_its_logarithm():
    source = logs(ties=0.0)
    model, prepared = model_of(source, resolution="0", end="300")
    log, encoding = read(source, prepared.encoding, end="300")
    hours = replace(log, times=24 * log.times, gaps=24 * log.gaps, since=24 * log.since, until=24 * log.until)
    other = build(to_dict(model.config), encoding, prepared.scales).double().eval()
    other.load_state_dict(model.state_dict())
    found = prepared.scales._replace(time_scale=24 * prepared.scales.time_scale)
    other.set_scales(**found._asdict())
    count = int(log.scored.sum())
    shift = total(model, log, prepared) - total(other, hours, prepared._replace(scales=found))
    assert shift == pytest.approx(count * math.log(24), rel=1e-12)


@torch.no_grad()
def test_ties_and_waits_are_probabilities():
    """What may follow a step within a horizon sums to one: a tie, each whole day and kind, and later."""
    model, prepared = model_of(logs(ties=0.3))
    kinds, days = len(prepared.encoding.kinds), 40
    h = torch.randn(1, 16, dtype=torch.float64)
    every = torch.tensor([(d, k) for d in range(days + 1) for k in range(kinds)])
    tie = (every[:, 0] == 0).long()
    possible = (tie == 0) | (every[:, 1] > 0)
    n = len(every)
    last = torch.zeros(n, dtype=torch.int64)
    targets = Targets(torch.arange(n), every[:, 0].double(), torch.zeros(n).double(), every[:, 1], tie, last)
    found = model.log_likelihood(h.expand(n, -1), targets)
    later = Targets(
        torch.zeros(1).long(), torch.tensor([float(days)]).double(), torch.zeros(1).double(), torch.tensor([-1]),
        torch.tensor([0]), torch.tensor([0]),
    )  # fmt: skip
    rest = model.log_likelihood(h, later)
    p = (found.time + found.kind).exp()
    assert float(p[possible].sum() + (rest.time + rest.kind).exp()) == pytest.approx(1, abs=1e-9)
    assert float(p[~possible].max()) == 0


def test_scales_are_of_the_training_alone():
    source = logs()
    model, prepared = model_of(source)
    assert scales(prepared.train_log, prepared.encoding).time_scale == prepared.scales.time_scale
    assert float(model.time_scale) == prepared.scales.time_scale


# ---------------------------------------------------------------------- the command

TRAIN = ["events", "train", "--data.path", "log.csv", "--data.group", "id", "--data.time", "t", "--data.kind", "kind"]


@pytest.fixture
def undrawn(monkeypatch):
    """Evaluation without its pictures, which take longer than all else of it; test_event_answers.py has them."""
    monkeypatch.setattr("glissando.events.pictures.draw", lambda *_: [])


@pytest.mark.usefixtures("undrawn")
def test_train_and_evaluate(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    logs(count=20).to_csv("log.csv", index=False)
    assert main([*TRAIN, "--training.steps", "3", "--threads", "1", "--out", "run"]) == 0
    capsys.readouterr()
    assert main(["events", "evaluate", "run", "--threads", "1"]) == 0
    assert "nats an event" in capsys.readouterr().out
    assert main(["events", "evaluate", "run", "--file", "log.csv", "--json", "--threads", "1"]) == 0
    assert main(["series", "evaluate", "run", "--threads", "1"]) != 0
    asked = ["run", "--file", "log.csv", "--horizon", "9", "--threads", "1"]
    assert main(["events", "predict", *asked, "--samples", "5", "--quantiles", "0.1,0.9", "--out", "p.csv"]) == 0
    assert list(pandas.read_csv("p.csv"))[:5] == ["id", "t", "kind", "hazard", "survival"]
    assert main(["events", "sample", *asked, "--samples", "3", "--out", "s.csv"]) == 0
    assert set(pandas.read_csv("s.csv")["kind"]) <= {"k0", "k1", "k2"}
    assert main(["events", "sample", *asked, "--samples", "3", "--out", "s.csv"]) != 0  # nothing is overwritten
    assert main(["events", "predict", "run", "--file", "log.csv", "--out", "q.csv"]) != 0
    assert "horizon is missing" in capsys.readouterr().err


# ---------------------------------------------------------------------- what may come


def a_run(source, *others, **more):
    model, prepared = model_of(source, *others, **more)
    return EventRun(model, prepared.encoding, data_of(**more))


@pytest.mark.parametrize("resolution", ["0", "1"])
def test_futures_follow_what_is_known_in_closed_form(resolution):
    source = logs(count=4, ties=0.3)
    run = a_run(source, resolution=resolution)
    log, n = read(source, run.encoding, end="200")[0], 2000
    (present,) = presents(run, log)
    times = torch.tensor([1.0, 2.0, 5.0])
    known = ahead(run.model, present.h, present.after, times)
    found = futures(run.model, present, 5.0, n, torch.Generator().manual_seed(0))
    rows = [int(series) for series in present.series]
    first = {}
    for series, number, time, kind in zip(*found, strict=True):
        first.setdefault((series, number), (time, kind))
    for j, until in enumerate(times.tolist()):
        for place, series in enumerate(rows):
            came = [kind for (s, _), (time, kind) in first.items() if s == series and time <= until]
            assert 1 - len(came) / n == pytest.approx(float(known.survival[place, j]), abs=4 / math.sqrt(4 * n))
            # of a set, the first one is the next event
            for kind in range(3):
                share = float(known.first[place, j, kind])
                assert came.count(kind) / n == pytest.approx(share, abs=4 / math.sqrt(4 * n))
    total_first = known.first.sum(-1)
    torch.testing.assert_close(total_first, 1 - known.survival, rtol=1e-9, atol=1e-9)


def test_the_survival_ahead_is_that_of_the_likelihood():
    """The probability of no event up to a later end is the difference of two log-likelihoods."""
    source = logs(count=3)
    run = a_run(source, resolution="0")
    near, far = (read(source, run.encoding, end=end)[0] for end in ("180", "183"))
    prepared = prepare(data_of(resolution="0"), source=source)._replace(scales=run.model, encoding=run.encoding)
    found = predict(run, near, 3.0)
    known = found.groupby("id", sort=False)["survival"].first().to_numpy(float)
    assert np.log(known).sum() == pytest.approx(
        total(run.model, far, prepared) - total(run.model, near, prepared), abs=1e-9
    )


def test_predict_and_sample_have_the_users_names():
    source = logs(count=3)
    run = a_run(source)
    log = run.read(source)
    found = predict(run, log, "4d", "2d", samples=50, quantiles=[0.1, 0.9])
    assert list(found) == [
        "id", "t", "kind", "hazard", "survival", "first", "expected", "probability", "q0.1", "q0.9"
    ]  # fmt: skip
    assert len(found) == 3 * 2 * 3
    assert (found["probability"] <= found["expected"]).all()
    assert (found["q0.1"] <= found["q0.9"]).all()
    drawn = sample(run, log, "4d", 50)
    assert list(drawn) == ["id", "sample", "t", "kind"]
    counts = drawn.groupby(["id", "kind"]).size() / 50
    last = found[found["t"] == found.groupby("id")["t"].transform("last")].set_index(["id", "kind"])
    for key, count in counts.items():
        assert last.loc[key, "expected"] == pytest.approx(count, abs=1e-12)
    with pytest.raises(ConfigError, match="samples"):
        predict(run, log, "4d", quantiles=[0.5])
    for draw in (predict, sample):
        with pytest.raises(ConfigError, match="seed must be a whole number from"):
            draw(run, log, "4d", samples=2, seed=2**70)


def test_a_future_without_end_is_an_error():
    source = logs(count=2)
    run = a_run(source)
    log = run.read(source)
    (present,) = presents(run, log)
    with pytest.raises(NotFiniteError, match="more than 3 events"):
        futures(run.model, present, 3 * float(run.model.time_scale), 200, torch.Generator().manual_seed(0), most=3)
    with pytest.raises(ConfigError, match="median gap"):
        futures(run.model, present, 1e9, 2, torch.Generator())


@pytest.mark.slow
def test_a_run_goes_on_where_its_tables_are_now(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    logs(count=20).to_csv("log.csv", index=False)
    table(tmp_path, "id age\n" + "\n".join(f"{n} {20 + n}" for n in range(20)), "people.csv")
    line = [
        *TRAIN,
        *["--data.static", "age", "--data.static_path", "people.csv", "--threads", "1", "--training.steps", "6"],
    ]
    assert main([*line, "--out", "whole"]) == 0
    taken, real = [], EventsTask.loss

    def ask(*arguments, **keywords):
        taken.append(1)
        if len(taken) == 4:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(EventsTask, "loss", ask)
        assert main([*line, "--out", "cut"]) == 130
    (tmp_path / "people.csv").rename("moved.csv")
    capsys.readouterr()
    assert main(["events", "train", "--resume", "cut", "--threads", "1"]) != 0
    assert "--data.static_path" in capsys.readouterr().err
    moved = ["--data.static_path", "moved.csv", "--threads", "1"]
    assert main(["events", "train", "--resume", "cut", *moved]) == 0
    one, other = (safetensors.torch.load_file(f"{run}/model.safetensors") for run in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert main(["events", "evaluate", "cut", "--threads", "1"]) == 0
    (tmp_path / "moved.csv").write_text("id,age\n1,2\n")
    assert main(["events", "evaluate", "cut", "--threads", "1"]) != 0
    assert "moved.csv is not the text" in capsys.readouterr().err


# ---------------------------------------------------------------------- the estimator


def test_the_estimator(tmp_path):
    source = logs(count=20)
    facts = pandas.DataFrame({"id": range(21), "age": range(20, 41), "stop": 200})
    options = {"training.steps": 3, "model.hidden_size": 8}
    forecaster = EventForecaster(
        group="id", time="t", kind="kind", time_unit="d", start=0, end="stop", static=["age"], options=options
    )
    assert forecaster.fit(source, facts=facts) is forecaster
    found = forecaster.predict(source, horizon="3d", samples=10, facts=facts)
    assert found["id"].dtype == source["id"].dtype
    assert set(found["id"]) == set(range(21))  # one has no event, and a future
    assert (found["t"] == 203).all()
    assert set(forecaster.sample(source, 30, 20, facts=facts)["kind"]) <= {"k0", "k1", "k2"}
    indexed = source.set_index(["id", "t"])
    pandas.testing.assert_frame_equal(forecaster.predict(indexed, horizon="3d", samples=10, facts=facts), found)
    score = forecaster.score(source, facts=facts)
    assert math.isfinite(score)
    with pytest.raises(DataError, match="no event of a kind that the model predicts"):
        forecaster.score(source.assign(kind="other"), facts=facts)
    assert forecaster.set_params(seed=1).get_params()["seed"] == 1
    forecaster.save(tmp_path / "saved")
    loaded = EventForecaster.load(tmp_path / "saved")
    assert loaded.get_params() == forecaster.get_params()
    assert loaded.score(source, facts=facts) == score
    with pytest.raises(ConfigError, match=r"data\.end is 'stop'"):
        loaded.predict(source, horizon=3)
    with pytest.raises(ConfigError, match="not fitted"):
        EventForecaster(time="t").score(source)


def test_the_estimator_opens_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logs(count=20).to_csv("log.csv", index=False)
    line = "events train --data.path log.csv --data.group id --data.time t --data.kind kind --training.steps 2"
    assert main([*line.split(), "--model.head", "intensity", "--threads", "1", "--out", "run"]) == 0
    forecaster = EventForecaster.load("run")
    assert forecaster.head == "intensity"
    assert forecaster.options == {"training.steps": 2}
    sklearn_base = pytest.importorskip("sklearn.base", reason="needs scikit-learn")
    assert sklearn_base.clone(forecaster).get_params() == forecaster.get_params()


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
@pytest.mark.slow
def test_every_precision_trains(precision, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logs(count=20).to_csv("log.csv", index=False)
    assert main([*TRAIN, "--training.precision", precision, "--training.steps", "2", "--out", "run"]) == 0
    dtype = torch.float64 if precision == "64-true" else torch.float32
    assert EventModel.load("run").entry.weight.dtype == dtype
    assert main(["events", "evaluate", "run", "--json"]) == 0
