"""Observations of series over HTTP: forecasts as in Python, states within bounds, errors that name the column."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

pytest.importorskip("starlette", reason="needs the [serve] extra")
import httpx2 as httpx
from serving import running
from test_series_forecast import trained, visits

from glissando.cli import main
from glissando.errors import DataError
from glissando.series.forecast import SeriesRun, predict, probabilities
from glissando.series.live import Seal
from glissando.series.stream import observe
from glissando.serving.schema import ObserveBody
from glissando.serving.tables import SeriesServer


def float32(run: SeriesRun) -> SeriesRun:
    return SeriesRun(run.model.float(), run.encoding, run.data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SeriesRun:
    frame = visits()
    frame["kind"] = np.where(frame["a"] > 100, "high", "low")
    return float32(trained(frame, folder=tmp_path_factory.mktemp("run"), categorical=["kind"]))


@pytest.fixture(scope="module")
def server(run: SeriesRun) -> Iterator[tuple[SeriesServer, str]]:
    server = SeriesServer(run, "visits")
    with running(server) as url:
        yield server, url


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(url + "/v1/observe", json=body, timeout=30)


def body_of(row: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A row of the table as a request."""
    cells = {name: None if cell != cell else cell for name, cell in row.items() if name not in ("who", "when")}
    return {"series": row["who"], "time": row["when"], "values": cells, **more}


def rows_of(who: str = "p1", seed: int = 1) -> list[dict[str, Any]]:
    frame = visits(seed=seed, people=3)
    frame["kind"] = np.where(frame["a"] > 100, "high", "low")
    return [row.to_dict() for _, row in frame[frame["who"] == who].iterrows()]


ASKED = {"horizon": ["1h", "6h"], "quantiles": [0.1, 0.9], "future": {"hour": [3.0, 8.0]}}


def test_forecasts_are_those_of_python(run: SeriesRun, server: tuple[SeriesServer, str]) -> None:
    _, url = server
    live, rows = None, rows_of()[:9]
    for number, row in enumerate(rows):
        answer = post(url, **body_of(row, **ASKED)).json()
        expected, live = observe(run, live, row, torch.tensor([3600.0, 21600.0]), torch.tensor([[3.0], [8.0]]))
        assert answer["observations"] == number + 1
        assert answer["begins"] == (number == 0)
    head = run.model.distribution
    assert [each["channel"] for each in answer["forecast"]] == ["a", "b", "a", "b"]
    assert np.allclose([each["value"] for each in answer["forecast"]], head.mean(expected).flatten())
    found = [[each["q0.1"], each["q0.9"]] for each in answer["forecast"]]
    assert np.allclose(found, head.quantile(expected, [0.1, 0.9]).flatten(0, 1))
    last = pandas.Timestamp(rows[-1]["when"])
    assert answer["forecast"][3]["time"] == (last + pandas.Timedelta("6h")).isoformat() + "Z"
    assert answer["forecast"][3]["horizon"] == 21600.0


def test_a_client_may_keep_the_state(run: SeriesRun, server: tuple[SeriesServer, str]) -> None:
    made, url = server
    rows = rows_of("p2")[:4]
    kept = len(made.kept)
    state = None
    for row in rows:
        answer = post(url, **body_of(row, return_state=True, state=state, **ASKED)).json()
        state = answer["state"]
    assert len(made.kept) == kept
    assert answer["observations"] == 4
    for row in rows:
        other = post(url, **body_of(row, **ASKED)).json()
    assert other["forecast"] == answer["forecast"]
    assert other["state"] is None
    later = rows_of("p2")[4]
    for wrong in (state[:-8] + "AAAAAAA=", "nothing", "é"):
        answer = post(url, **body_of(later, state=wrong))
        assert answer.status_code == 400
        assert "the state was changed" in answer.json()["error"]["message"]
    assert post(url, **body_of({**later, "who": "p0"}, state=state)).status_code == 400
    answer = post(url, **body_of(later, state=state)).json()
    assert answer.get("observations") == 5, answer
    with pytest.raises(DataError, match="of this model"):
        Seal(SeriesRun(run.model, run.encoding, run.data.__class__(window=3))).unpack("p2", state)


def test_states_stay_within_the_limit_and_the_answer_says_what_was_dropped(run: SeriesRun) -> None:
    first = rows_of()[0]
    made = SeriesServer(run, "visits")
    made._observe(_body(first), None)
    size = made.size
    made = SeriesServer(run, "visits", memory=int(3.5 * size))
    for name in ("a", "b", "c"):
        assert made._observe(_body({**first, "who": name}), None)["dropped"] == []
    made._observe(_body({**rows_of()[1], "who": "a"}), None)
    assert made._observe(_body({**first, "who": "d"}), None)["dropped"] == ["b"]
    assert (
        made._observe(_body({**first, "who": "e"}), 1)["dropped"] == []
    )  # a series of another key is dropped, and not named
    assert (made.size, made.dropped, len(made.kept)) == (3 * size, 2, 3)
    with pytest.raises(ValueError, match="the state of 'b' is not here"):
        made._observe(_body({**first, "who": "b"}, begin=False), None)
    assert made._observe(_body({**first, "who": "a"}, begin=True), None)["observations"] == 1


def _body(row: dict[str, Any], **more: Any) -> bytes:
    return _of(**body_of(row, **more))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": {"aa": 1.0}}, "unknown column of values 'aa'. Did you mean 'a'?"),
        ({"values": {"age": 51.0, "a": 1.0}}, "there is no column 'hour'"),
        ({"values": {"age": 51.0, "hour": 3, "a": "high"}}, "column 'a': 'high' is no finite number"),
        ({"values": {"age": 51.0, "hour": 3, "a": True}}, "column 'a': True is no finite number"),
        ({"values": {"age": 51.0, "hour": None}}, "column 'hour': the value is missing"),
        ({"values": {"age": 51.0, "hour": 3, "a": 1e29}}, "deviations from the mean of what is trained on"),
        ({"time": "yesterday"}, "column 'when': 'yesterday'"),
        ({"time": None}, "time: give when"),
        ({"horizon": "3x", "future": {"hour": [1.0]}}, "horizon is '3x': give a number above 0, in s"),
        ({"horizon": "3h"}, "future: the numbers of its values are {}: give {'hour': 1}"),
        ({"horizon": "3h", "future": {"hour": [1.0, 2.0]}}, "are {'hour': 2}: give {'hour': 1}, one value of each"),
        ({"horizon": "3h", "future": {"hour": [1.0]}, "quantiles": [2.0]}, "2.0 is no level of a quantile"),
        ({"series": "p9", "begin": False}, "the state of 'p9' is not here"),
        ({"seires": "p9"}, "'seires' is not supported by this server; did you mean 'series'?"),
        ({"series": ""}, "series: string should have at least 1 character"),
    ],
)
def test_errors_name_the_column_the_value_and_what_is_expected(
    server: tuple[SeriesServer, str], change: dict[str, Any], message: str
) -> None:
    answer = post(server[1], **{**body_of(rows_of()[0]), "series": "new", **change})
    assert answer.status_code in (400, 404)
    assert message in answer.json()["error"]["message"]
    assert ("new" in [name for _, name in server[0].kept]) is False


def test_times_go_on_and_unknown_categories_are_told(server: tuple[SeriesServer, str]) -> None:
    row = {**rows_of()[0], "who": "again", "kind": "middle"}
    assert post(server[1], **body_of(row)).json()["unknown"] == ["kind"]
    answer = post(server[1], **body_of(row))
    assert answer.status_code == 400
    assert "is not after the one before" in answer.json()["error"]["message"]


def test_what_the_model_reads_is_described(server: tuple[SeriesServer, str]) -> None:
    found = httpx.get(server[1] + "/v1/series").json()
    assert found["time"] == {"column": "when", "form": "date", "unit": "s"}
    assert found["columns"] == ["a", "b"]
    assert sorted(found["categorical"]["kind"]) == ["high", "low"]
    assert (found["static"], found["future"], found["head"]) == (["age"], ["hour"], "student")
    assert httpx.get(server[1] + "/health").json() == {"status": "ok"}
    assert "GET /v1/series are" in httpx.get(server[1] + "/v1/nothing").json()["error"]["message"]


def test_long_tables_and_classes(tmp_path: Path) -> None:
    frame = visits(people=4).drop(columns=["hour", "age"])
    long = frame.melt(["who", "when"], ["a", "b"], "test", "value").dropna()
    options: dict[str, Any] = {"columns": [], "static": [], "future": []}
    run = float32(trained(long, folder=tmp_path, channel="test", value="value", **options))
    made = SeriesServer(run, "labs")
    first = long[long["who"] == "p1"].iloc[0]
    cells = {"series": "p1", "time": first["when"], "values": {"a": first["value"]}}
    found = made._observe(_of(**cells, horizon="1h"), None)
    one = frame[frame["who"] == "p1"].head(1).melt(["who", "when"], ["a"], "test", "value")
    assert np.allclose([each["value"] for each in found["forecast"]], predict(run, run.read(one), "1h")["value"])
    with pytest.raises(ValueError, match="nothing was observed"):
        made._observe(_of(**{**cells, "values": {}, "series": "p2"}), None)
    frame["kind"] = np.where(frame["who"] == "p1", "x", "y")
    run = float32(
        trained(frame, folder=tmp_path, target=["kind"], task="classification", model={"head": "point"}, **options)
    )
    made = SeriesServer(run, "kinds")
    for _, row in frame[frame["who"] == "p1"].iterrows():
        cells = {name: None if row[name] != row[name] else row[name] for name in ("a", "b")}
        answer = made._observe(_of(series="p1", time=row["when"], values=cells), None)
    p = probabilities(run, run.read(frame))[1]
    assert np.allclose([answer["classes"][name] for name in run.encoding.classes], p, atol=1e-6)


def _of(**body: Any) -> bytes:
    return ObserveBody(**body).model_dump_json().encode()


def test_the_pages_request_is_answered_as_printed(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "serving.md").read_text()
    command, printed = re.findall(r"```(?:json)?\n((?:curl|\{).*?)\n```", page, re.DOTALL)[:2]
    frame = visits(people=4).rename(columns={"a": "glucose", "b": "pressure"}).drop(columns="hour")
    run = float32(trained(frame, folder=tmp_path, columns=["glucose", "pressure"], future=[]))
    with running(SeriesServer(run, "visits")) as url:
        text = command.replace("http://127.0.0.1:8000", url)
        found = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=30)
    answer, expected = json.loads(found.stdout), json.loads(printed)
    rows = zip(answer.pop("forecast"), expected.pop("forecast"), strict=True)
    assert answer == expected
    for row, wanted in rows:
        assert list(row) == list(wanted)
        assert [row[name] for name in ("horizon", "time", "channel")] == [
            wanted[name] for name in ("horizon", "time", "channel")
        ]


def test_the_command_serves_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(visits(people=4), folder=tmp_path).save(tmp_path / "run")
    served: list[tuple[Any, ...]] = []
    monkeypatch.setattr("glissando.cli.serve.listen", lambda *arguments: served.append(arguments))
    assert main(["series", "serve", str(tmp_path / "run"), "--port", "0"]) == 0
    config, name, _, about = served[0]
    assert (config.port, config.host, name) == (0, "127.0.0.1", "run")
    assert "/v1/observe" in about
    for arguments, message in {
        ("--memory", "3"): "--memory: expected a size such as 2GiB",
        ("--port", "-1"): "--port: expected a number from 0 to 65535",
        ("--horizon", "3"): "--horizon is not an option of `series serve`",
    }.items():
        assert main(["series", "serve", str(tmp_path / "run"), *arguments]) == 2
        assert message in capsys.readouterr().err
