"""Events over HTTP and one after another in Python: hazards as of `predict`, errors that name the column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas
import pytest
import torch

pytest.importorskip("starlette", reason="needs the [serve] extra")
import httpx2 as httpx
from serving import running
from test_events import a_run, logs

from glissando.cli import main
from glissando.events.forecast import predict
from glissando.events.stream import observe, what_comes
from glissando.events.task import EventRun
from glissando.series.live import Live
from glissando.serving.tables import EventServer

#: columns of the log, and a second table
OPTIONS: dict[str, Any] = {
    "marks": ["dose", "ward"], "static": ["age"], "start": "begin", "end": "until", "inputs": ["k2"],
}  # fmt: skip


def tables() -> tuple[pandas.DataFrame, pandas.DataFrame]:
    source = logs(count=6, length=12, ties=0.3).astype({"id": str})
    chance = np.random.default_rng(3)
    source["dose"] = chance.normal(size=len(source))
    source["ward"] = chance.choice(["a", "b"], len(source))
    people = sorted(set(source["id"]))
    facts = pandas.DataFrame(
        {
            "id": people,
            "age": chance.normal(50, 9, len(people)),
            "begin": [20] * len(people),
            "until": [400] * len(people),
        }
    )
    return source, facts


@pytest.fixture(scope="module")
def run() -> EventRun:
    source, facts = tables()
    return a_run(source, facts, **OPTIONS)


def happened(who: str) -> Iterator[tuple[int, list[dict[str, Any]], dict[str, Any]]]:
    """Times, events and facts in the order in which they come, with the start of prediction."""
    source, facts = tables()
    age = {"age": float(facts.set_index("id").loc[who, "age"])}
    rows = source[source["id"] == who]
    for time in sorted({*rows["t"], 20}):
        events = [
            {name: row[name] for name in ("kind", "dose", "ward")} for _, row in rows[rows["t"] == time].iterrows()
        ]
        if events:
            yield time, events, age
        if time == 20:
            yield time, [], age


def expected(run: EventRun, who: str, horizon: list[float]) -> pandas.DataFrame:
    source, facts = tables()
    found = predict(run, run.read(source, facts), horizon)
    return found[found["id"] == who]


def read_all(run: EventRun, who: str) -> Live:
    live = None
    for time, events, facts in happened(who):
        live, unknown = observe(run, live, time, events, facts=facts)
        assert not unknown
    assert live is not None
    return live


def test_one_time_after_another_gives_what_the_whole_log_gives(run: EventRun) -> None:
    for who in ("0", "3"):
        found = what_comes(run, read_all(run, who), torch.tensor([5.0, 30.0]), until=400)
        whole = expected(run, who, [5.0, 30.0])
        for name in ("hazard", "first"):
            np.testing.assert_allclose(getattr(found, name)[0].flatten(), whole[name], rtol=1e-9)
        np.testing.assert_allclose(found.survival[0].repeat_interleave(2), whole["survival"], rtol=1e-9)


def test_values_between_events_are_read() -> None:
    source = logs(count=4, length=14).astype({"id": str})
    measured = pandas.DataFrame({"id": ["0", "0", "1"], "t": [7, 40, 3], "pressure": [120.0, 131.0, 99.0]})
    run = a_run(source, None, measured)
    whole = predict(run, run.read(source, None, measured), 3.0)
    rows, live = source[source["id"] == "0"], None
    for time in sorted({*rows["t"], 7, 40}):
        events = [{"kind": kind} for kind in rows[rows["t"] == time]["kind"]]
        values = {7: {"pressure": 120.0}, 40: {"pressure": 131.0}}.get(time, {})
        live, _ = observe(run, live, time, events, values)
    assert live is not None
    found = what_comes(run, live, torch.tensor([3.0]))
    np.testing.assert_allclose(found.hazard[0, 0], whole[whole["id"] == "0"]["hazard"], rtol=1e-9)


@pytest.fixture(scope="module")
def server(run: EventRun) -> Iterator[tuple[EventServer, str]]:
    server = EventServer(run, "wards")
    with running(server) as url:
        yield server, url


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(url + "/v1/observe", json=body, timeout=30)


def test_the_server_answers_what_predict_does(run: EventRun, server: tuple[EventServer, str]) -> None:
    for time, events, facts in happened("1"):
        answer = post(server[1], series="1", time=time, events=events, facts=facts).json()
        assert answer["ahead"] == []
    asked = post(server[1], series="1", until=400, horizon=["5d", "30d"]).json()
    again = post(server[1], series="1", until=400, horizon=["5d", "30d"]).json()
    assert asked == again  # a question changes nothing
    whole = expected(run, "1", [5.0, 30.0])
    hazard = [row["hazard"][kind] for row in asked["ahead"] for kind in run.encoding.kinds]
    np.testing.assert_allclose(hazard, whole["hazard"], rtol=1e-9)
    assert asked["time"] == answer["time"]
    assert (asked["begins"], asked["dropped"], asked["state"]) == (False, [], None)


def test_a_client_may_keep_the_state(server: tuple[EventServer, str]) -> None:
    state, kept = None, len(server[0].kept)
    for time, events, facts in happened("2"):
        body = {"time": time, "events": events, "facts": facts, "state": state, "return_state": True}
        state = post(server[1], series="2", **body).json()["state"]
        post(server[1], series="own", time=time, events=events, facts=facts)
    mine = post(server[1], series="2", state=state, horizon="9d").json()
    assert mine["ahead"] == post(server[1], series="own", horizon="9d").json()["ahead"]
    assert mine["state"] == state
    assert len(server[0].kept) == kept + 1
    refused = post(server[1], series="3", state=state, horizon="9d")
    assert "the state was changed, or is not of the series '3'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"time": 3, "events": [{"kynd": "k0"}]}, "unknown column of an event 'kynd'. Did you mean 'kind'?"),
        ({"time": 3, "events": [{"dose": 1.0}]}, "an event has no 'kind': give each event its kind, one of k1, k0"),
        ({"time": 3, "events": [{"kind": "k0", "dose": "much"}]}, "column 'dose'"),
        ({"time": "soon", "events": [{"kind": "k0"}]}, "column 't'"),
        ({"time": 3, "facts": {"edge": 50}}, "unknown column of facts 'edge'. Did you mean 'age'?"),
        ({"time": 3, "values": {"pressure": 1.0}}, "unknown column of values 'pressure'"),
        ({"events": [{"kind": "k0"}]}, "time: give t, at which that happened"),
        ({"horizon": "5d"}, "the series begins with what happened first, or where prediction starts"),
        ({"time": 3, "horizon": "soon"}, "horizon is 'soon': give a number above 0, in d"),
        ({"time": 3, "until": 1, "horizon": "5d"}, "the observation at t 1 is not after the one before, at 3"),
        ({"tyme": 3}, "'tyme' is not supported by this server; did you mean 'time'?"),
        ({"time": 3, "begin": False}, "the state of 'new' is not here"),
    ],
)
def test_errors_say_what_was_given_and_what_is_expected(
    server: tuple[EventServer, str], body: dict[str, Any], message: str
) -> None:
    answer = post(server[1], series="new", **body)
    assert answer.status_code in (400, 404)
    assert message in answer.json()["error"]["message"]
    assert "new" not in [name for _, name in server[0].kept]


def test_times_go_on_and_unknown_kinds_are_told(server: tuple[EventServer, str]) -> None:
    assert post(server[1], series="x", time=3, events=[{"kind": "k9"}]).json()["unknown"] == ["k9"]
    assert post(server[1], series="x", time=3).status_code == 200  # prediction starts after the events of its time
    for time in (3, 2):
        answer = post(server[1], series="x", time=time, events=[{"kind": "k0"}])
        assert "is not after the one before, at 3" in answer.json()["error"]["message"]


def test_what_the_model_reads_is_described(server: tuple[EventServer, str]) -> None:
    found = httpx.get(server[1] + "/v1/series").json()
    assert found["time"] == {"column": "t", "form": "number", "unit": "d"}
    assert (found["kind"], sorted(found["kinds"]), found["inputs"]) == ("kind", ["k0", "k1"], ["k2"])
    assert (found["marks"], found["static"], found["start"]) == (["dose"], ["age"], "begin")


def test_the_command_serves_a_run(tmp_path: Any, run: EventRun, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run.save(tmp_path / "run")
    served: list[tuple[Any, ...]] = []
    monkeypatch.setattr("glissando.cli.serve.listen", lambda *arguments: served.append(arguments))
    assert main(["events", "serve", str(tmp_path / "run"), "--port", "0"]) == 0
    assert served[0][1] == "run"
    assert "POST events to /v1/observe" in served[0][3]
    assert main(["events", "serve", str(tmp_path / "run"), "--horizon", "3"]) == 2
    assert "--horizon is not an option of `events serve`" in capsys.readouterr().err
