"""What a model of events answers about held-out windows, beside the truth of generated ones; and its pictures."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from test_events import logs, model_of

from glissando.cli import main
from glissando.events.evaluation import predicted, truth_of
from glissando.events.options import EventsData
from glissando.events.pictures import HISTORY, RESIDUALS, draw, track
from glissando.events.processes import drawn, process_of, table
from glissando.events.task import EventRun, call
from glissando.series.tables import read_table

HAWKES = {"group": "series", "time": "time", "time_unit": None, "start": "0", "end": "end"}


def days(dates: bool = False) -> pandas.DataFrame:
    """Random logs of whole days, some of them at one time."""
    made = logs(length=40, ties=0.15)
    if dates:
        made["t"] = pandas.Timestamp("2026-01-05") + pandas.to_timedelta(made["t"], "D")
    return made


@pytest.mark.parametrize("dates", [False, True])
def test_answers_are_those_of_the_likelihood_in_the_order_of_the_log(dates: bool) -> None:
    model, prepared = model_of(days(dates), window=16, head="intensity", time_unit=None)
    held, encoding = prepared.valid, prepared.encoding
    assert encoding.ties
    assert encoding.resolution > 0
    came, found = held.steps.after.scored(), predicted(model, held)
    with torch.no_grad():
        each = [call(model, batch) for batch in held.scoring()]
    assert found.time.sum() == pytest.approx(sum(float(part.time.sum()) for part in each), rel=1e-5)
    assert found.kinds is not None
    assert found.low is not None
    assert found.high is not None
    assert found.median is not None
    event = came.is_event
    assert np.allclose(found.kinds[event, came.kind[event]], found.kind[event], atol=1e-6)
    assert np.allclose(np.exp(found.kinds[event]).sum(1), 1, atol=1e-5)
    alone = came.arrives & (came.tie == 0) & (came.last == 2)  # nothing comes after the last kind at one time
    mass = np.exp(-found.low) - np.exp(-found.high)
    assert np.allclose(np.log(mass[alone]), found.time[alone], atol=1e-4)
    assert (came.phase is not None) == dates
    if came.phase is not None:  # of midnights
        assert np.allclose(7 * came.phase, np.rint(7 * came.phase))


def test_a_window_more_or_less_changes_no_order() -> None:
    one = [model_of(days(), window=window, head="intensity") for window in (8, 64)]
    first, second = (predicted(model, prepared.valid) for model, prepared in one)
    came = one[0][1].valid.steps.after.scored()
    assert len(first.time) == len(second.time) == len(came.wait)
    assert np.allclose(first.time[:8], second.time[:8], atol=1e-5)  # no earlier window is cut off there


def test_the_truth_of_a_generated_table_is_found_for_every_step() -> None:
    process = process_of("hawkes5")
    text = table("hawkes5", 6, seed=2)
    source = pandas.read_csv(io.StringIO(text))
    _, prepared = model_of(source, head="intensity", **HAWKES, valid_fraction=0.5)
    frame = read_table(source)
    truth, lines = truth_of(frame, prepared.valid_log, prepared.valid.steps)
    assert truth is not None
    assert not lines
    series = list(drawn(process, 6, 2))
    expected = [series[int(name)][2] for name in prepared.valid_log.names]
    assert truth.time.sum() == pytest.approx(sum(each.time.sum() + each.end for each in expected), abs=1e-3)
    assert truth.kind.sum() == pytest.approx(sum(each.kind.sum() for each in expected), abs=1e-3)
    count = len(expected[0].time)
    assert np.allclose(truth.time[:count], expected[0].time, atol=1e-5)
    assert truth.time[count] == pytest.approx(expected[0].end, abs=1e-5)
    assert truth_of(read_table(source.drop(columns="truth_end")), prepared.valid_log, prepared.valid.steps)[0] is None
    _, cut = model_of(source, head="intensity", **HAWKES, split="future")
    missing, lines = truth_of(frame, cut.valid_log, cut.valid.steps)
    assert missing is None
    assert "hold whole series out" in lines[0]


def test_the_hazards_of_a_picture_integrate_to_the_residuals(tmp_path: Path) -> None:
    source = pandas.read_csv(io.StringIO(table("hawkes5", 4)))
    model, prepared = model_of(source, head="intensity", **HAWKES)
    held, log = prepared.valid, prepared.valid_log
    came, found = held.steps.after.scored(), predicted(model, held)
    assert found.high is not None
    shown = track(model, held, log, 0)
    assert (np.diff(shown.at) > 0).all()
    points = shown.hazards.sum(1).reshape(-1, 24), shown.at.reshape(-1, 24)
    whole = np.trapezoid(*points, axis=1)
    assert np.allclose(whole, found.high[came.series == 0][-len(whole) :], rtol=0.05, atol=1e-3)
    assert set(shown.times[1:]) <= set(shown.at)  # a wait ends where the next event is
    run = EventRun(model, prepared.encoding, EventsData())
    draw(run, held, log, found, tmp_path / "made")
    assert all((tmp_path / "made" / name).read_bytes().startswith(b"\x89PNG") for name in (HISTORY, RESIDUALS))


def test_an_example_is_written_trained_on_and_scored_beside_the_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folders: list[Path] = []  # of pictures, which take longer than all else; the test above draws them
    monkeypatch.setattr("glissando.events.pictures.draw", lambda run, windows, log, said, out: folders.append(out))
    assert main(["events", "example", "--process", "hawkes5", "--count", "6", "--out", "log.csv"]) == 0
    out = capsys.readouterr().out
    assert "--data.end 160" in out
    assert main(["events", "example", "--out", "log.csv"]) != 0
    assert "nothing is overwritten" in capsys.readouterr().err
    train = out.split("glissando ", 1)[1].split()
    assert main([*train, "--training.steps", "2", "--threads", "1"]) == 0
    run = train[-1]
    capsys.readouterr()
    assert main(["events", "evaluate", run, "--json", "--threads", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["figures"]) == ["model", "poisson", "renewal", "truth"]
    assert found["figures"]["truth"]["model_minus"] < 0
    assert found["figures"]["truth"]["kind"] > found["figures"]["poisson"]["kind"]
    assert main(["events", "example", "--process", "hawkes5", "--count", "2", "--seed", "1", "--out", "new.csv"]) == 0
    assert main(["events", "evaluate", run, "--file", "new.csv", "--threads", "1"]) == 0
    assert "nats an event short of the truth" in capsys.readouterr().out
    assert folders == [Path(run), Path(run) / "new"]
    Path("log.csv").unlink()
    assert main(["events", "evaluate", run, "--file", "new.csv", "--threads", "1", "--json"]) == 0
    printed = capsys.readouterr()
    assert "the training table cannot be read" in printed.err
    assert list(json.loads(printed.out)["figures"]) == ["model", "truth"]
