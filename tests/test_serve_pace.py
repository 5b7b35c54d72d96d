"""Texts at a pace, dials that are turned at a token, and several models in one server."""

from __future__ import annotations

import itertools
import json
import threading
import time

import pytest

pytest.importorskip("starlette", reason="needs the [serve] extra")
import httpx2 as httpx
from engines import request_for, run_down, submit
from serving import serving, tiny
from starlette.testclient import TestClient

from glissando.cli import main
from glissando.cli.options import Options
from glissando.cli.serve import _named
from glissando.errors import ConfigError
from glissando.generation import generate, stream
from glissando.model import LanguageModel
from glissando.serving.api import Server
from glissando.serving.engine import Engine

ASKED = {"prompt": "The fox", "max_tokens": 20, "seed": 3, "temperature": 0.8}


@pytest.fixture(scope="module")
def hybrid() -> LanguageModel:
    return small_hybrid()


def small_hybrid() -> LanguageModel:
    return tiny("hybrid-ode-nano", mixer={"kind": "attention", "heads": 2}, depth={"layers": 2, "n_steps": 2})


class Clock:
    """Seconds that a test lets pass."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


# ---------------------------------------------------------------------- pace


def test_a_paced_text_is_written_at_its_pace_and_is_the_same_text(hybrid):
    clock = Clock()
    engine = Engine(hybrid, clock=clock)
    request = request_for(hybrid, "The fox", 12, seed=3, pace=4.0)
    (session,), (paced,) = submit(engine, request)
    _, (free,) = submit(engine, request_for(hybrid, "The fox", 12, seed=3))
    written = []
    for step in range(40):
        clock.now = step / 10
        engine.step()
        written.append(len(session.written))
    assert free.finish == "length", "the other text does not wait for it"
    assert [written[at] for at in (0, 2, 3, 5, 8, 10, 30)] == [1, 1, 2, 3, 4, 5, 12]
    assert paced.text == free.text


def test_a_late_step_does_not_catch_up(hybrid):
    clock = Clock()
    engine = Engine(hybrid, clock=clock)
    (session,), _ = submit(engine, request_for(hybrid, "The fox", 12, pace=4.0))
    for now in (0.0, 5.0, 5.01, 5.02, 5.26):
        clock.now = now
        engine.step()
    assert len(session.written) == 3


@pytest.mark.parametrize(
    ("pace", "options"),
    [pytest.param(100.0, {"step": "plain"}, marks=pytest.mark.slow), (100.0, {"step": "compiled"}),
     (1000.0, {"step": "compiled"}),
     (1000.0, {"step": "compiled", "lookup": 8})],
)  # fmt: skip
def test_a_fast_pace_is_kept_however_many_tokens_a_call_writes(pace, options):
    model, clock = small_hybrid().float(), Clock()
    engine = Engine(model, clock=clock, **options)
    (session,), _ = submit(engine, request_for(model, "The fox", 100, pace=pace, temperature=0))
    while not session.done:
        engine.step()
        clock.now += 0.25 / pace
    assert 67 / pace < clock.now < 105 / pace + 0.01


def test_the_pace_changes_while_a_text_is_written(hybrid):
    clock = Clock()
    engine = Engine(hybrid, clock=clock)
    (session,), (listener,) = submit(engine, request_for(hybrid, "The fox", 12, seed=3, pace=1.0))
    for _ in range(5):
        engine.step()
    assert (len(session.written), engine.idle) == (1, True)
    assert engine.rest() == pytest.approx(1.0)
    session.pace = None
    engine.step()
    assert len(session.written) == 2
    run_down(engine)
    assert [listener.text] == generate(hybrid, "The fox", max_tokens=12, seed=3)


def test_waiting_for_a_paced_text_takes_no_steps(hybrid):
    """A thread that waits for room beside a slow text sleeps, and goes on once there is room."""
    engine, steps = Engine(hybrid, max_sessions=1), itertools.count()
    step = engine.step
    engine.step = lambda: (next(steps), step())
    _, (slow,) = submit(engine, request_for(hybrid, "The fox", 4, pace=20.0))
    _, (other,) = submit(engine, request_for(hybrid, "The hen", 3))
    thread = threading.Thread(target=engine.runner.run)
    thread.start()
    end = time.monotonic() + 30
    while other.finish is None and time.monotonic() < end:
        time.sleep(0.01)
    engine.runner.close()
    thread.join(10)
    assert (slow.finish, other.finish) == ("length", "length")
    assert next(steps) < 40


# ---------------------------------------------------------------------- turns


def chunks(client: httpx.Client, **body) -> list[dict]:
    lines = client.post("/v1/completions", json=ASKED | {"stream": True, **body}).text.splitlines()
    return [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]


@pytest.fixture(scope="module")
def client(hybrid):
    with TestClient(Server({"dial": hybrid, "stories": tiny().double()}).app, base_url="http://127.0.0.1") as client:
        yield client


@pytest.mark.slow
def test_a_turn_acts_at_its_token_and_is_marked_there(client, hybrid):
    """`turns` repeats a text whose dials were moved while it was written: token 7 is the first drawn under them."""
    turns = [{"at": 7, "control": {"mood": 1.0}}, {"at": 12, "control": {"speech": -1.0}}]
    answer = chunks(client, model="dial", control={"mood": 0.0}, turns=turns, logprobs=0)
    asked = itertools.count()

    def control() -> list[float]:
        read = next(asked)  # the prompt, then the tokens one by one: what is read as number n decides token n
        return [float(read >= 7), -float(read >= 12)]

    expected = "".join(stream(hybrid, "The fox", max_tokens=20, seed=3, control=control))
    assert "".join(choice["text"] for choice in answer) == expected
    assert expected != generate(hybrid, "The fox", max_tokens=20, seed=3, control=[0.0, 0.0])[0]
    count, marks = 0, {}
    for choice in answer:
        if "control" in choice:
            marks[count] = choice["control"]
        count += len(choice["logprobs"]["tokens"])
    assert marks == {7: {"mood": 1.0, "speech": 0.0}, 12: {"mood": 1.0, "speech": -1.0}}


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [({"pace": 0.5}, "pace: input should be greater than or equal to 1"),
     ({"turns": [{"at": 0, "control": {"mood": 1}}]}, "turns"),
     ({"turns": [{"at": 5, "control": {"moood": 1}}]}, "'moood'")],
)  # fmt: skip
def test_wrong_paces_and_turns_are_refused(client, wrong, expected):
    answer = client.post("/v1/completions", json=ASKED | {"model": "dial"} | wrong)
    assert answer.status_code == 400
    assert expected in answer.json()["error"]["message"]


def test_pace_and_dials_of_a_text_under_way(hybrid):
    with serving(hybrid) as (_, url), httpx.Client(base_url=url, timeout=30) as web:
        body = ASKED | {"model": "tiny", "stream": True, "pace": 4, "max_tokens": 30}
        with web.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            first = json.loads(next(line for line in lines if line)[6:])
            path = f"/v1/completions/{first['id']}/control"
            assert web.post(path, json={}).json() == {"id": first["id"], "control": None, "pace": 4}
            assert web.post(path, json={"control": {"mood": 1}}).json()["pace"] == 4
            expected = web.post(path, json={"pace": None}).json()
            assert expected == {"id": first["id"], "control": {"mood": 1.0, "speech": 0.0}, "pace": None}
            rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert rest[-1]["choices"][0]["finish_reason"] in ("length", "stop")
        assert any(piece["choices"][0].get("control") == {"mood": 1.0, "speech": 0.0} for piece in rest)


# ---------------------------------------------------------------------- several models


def test_requests_choose_by_model(client, hybrid):
    listed = client.get("/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["dial", "stories"]
    about = client.get("/v1/glissando").json()["models"]
    assert [(each["model"], each["controls"]) for each in about] == [("dial", ["mood", "speech"]), ("stories", [])]
    texts = {name: client.post("/v1/completions", json=ASKED | {"model": name}).json() for name in ("dial", "stories")}
    assert [texts["dial"]["choices"][0]["text"]] == generate(hybrid, "The fox", max_tokens=20, seed=3)
    assert [texts["stories"]["choices"][0]["text"]] == generate(tiny().double(), "The fox", max_tokens=20, seed=3)
    assert texts["stories"]["model"] == "stories"
    chat = {"model": "stories", "messages": [{"role": "user", "content": "The fox"}], "max_tokens": 3}
    assert client.post("/v1/chat/completions", json=chat).json()["model"] == "stories"
    looked = client.post("/v1/glissando/look", json={"model": "stories", "text": "The fox"}).json()
    assert looked["looks"][0]["title"] == "Time constants"


def test_an_unknown_model_is_a_404_that_names_those_there_are(client):
    for path, body in (
        ("/v1/completions", ASKED | {"model": "dail"}),
        ("/v1/glissando/look", {"model": "dail", "text": "a"}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["message"] == "there is no model 'dail' here; choose 'dial' or 'stories'"
        assert (error["code"], error["param"], error["type"]) == (
            "model_not_found", "model", "invalid_request_error",
        )  # fmt: skip
    assert client.get("/v1/models/dail").status_code == 404
    assert client.get("/v1/models/stories").json()["id"] == "stories"


def test_models_share_the_memory_in_equal_parts(hybrid):
    server = Server({"one": hybrid, "other": tiny()}, memory=2**28)
    assert [served.engine.memory for served in server.served.values()] == [2**27, 2**27]


def test_names_of_several_runs():
    def named(*runs: str, name: list[str] | None = None) -> dict[str, str]:
        return _named(Options(run=list(runs), name=name))

    assert named("runs/dial", "runs/stories") == {"dial": "runs/dial", "stories": "runs/stories"}
    assert named("a/x", "b/x", name=["one", "two"]) == {"one": "a/x", "two": "b/x"}
    with pytest.raises(
        ConfigError, match="several models would have the name 'x'; name each of them, as --name x-1 --name x-2"
    ):
        named("a/x", "b/x")
    with pytest.raises(ConfigError, match="2 runs and 1 names are given; give --name once for each run"):
        named("a/x", "b/y", name=["one"])


def test_the_verb_refuses_two_models_of_one_name(tmp_path, capsys):
    for folder in ("a", "b"):
        tiny().save(tmp_path / folder / "fox")
    assert main(["serve", str(tmp_path / "a" / "fox"), str(tmp_path / "b" / "fox")]) == 2
    assert "--name fox-1 --name fox-2" in capsys.readouterr().err
