"""The server as its clients see it: OpenAI's own client, plain HTTP, and who started it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from training_runs import environment

pytest.importorskip("starlette", reason="needs the [serve] extra")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
import httpx2 as httpx  # noqa: E402
from serving import ENDLESS, LIMITS, NAME, ask, connected, head, serving, tiny, wait_until  # noqa: E402

from glissando.cli import main, serve  # noqa: E402
from glissando.errors import GlissandoError  # noqa: E402
from glissando.generation import generate  # noqa: E402

# ---------------------------------------------------------------------- OpenAI's client


def test_a_completion_is_what_generate_writes(client, model):
    answer = ask(client, temperature=0.7, top_p=0.9, extra_body={"top_k": 20})
    text = generate(model, "Once upon a time", max_tokens=12, temperature=0.7, top_p=0.9, top_k=20, seed=3)
    assert [answer.choices[0].text] == text
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 17, "completion_tokens": 12, "total_tokens": 29,
    }  # fmt: skip


def test_a_stream_is_the_same_in_pieces(client):
    whole = ask(client, max_tokens=30)
    pieces = list(ask(client, max_tokens=30, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == whole.choices[0].text
    assert [piece.choices[0].finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 2) + ["length"]
    assert pieces[-1].usage.completion_tokens == 30
    assert len(pieces) > 10, "it came at once"


def test_several_prompts_and_several_texts_of_each(client, model):
    answer = ask(client, ["Once", "The hen"], n=2, temperature=1.0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = [("Once", 3), ("Once", 4), ("The hen", 5), ("The hen", 6)]
    for choice, (prompt, seed) in zip(answer.choices, expected, strict=True):
        assert [choice.text] == generate(model, prompt, max_tokens=12, temperature=1.0, seed=seed)


def test_prompts_of_ids_and_of_text_are_one(client, model):
    ids = model.tokenizer.encode("Once")
    texts = {ask(client, prompt).choices[0].text for prompt in ("Once", ids, [ids], [model.tokenizer.eos_id, *ids])}
    assert len(texts) == 1


def test_echo_and_log_probabilities(client, model):
    """Against one forward."""
    answer = ask(client, "Once upon", max_tokens=6, echo=True, logprobs=2).choices[0]
    ids = [model.tokenizer.eos_id, *model.tokenizer.encode("Once upon")]
    assert answer.text.startswith("Once upon")
    assert answer.logprobs.tokens[:9] == list("Once upon")
    with torch.no_grad():
        logp = model(torch.tensor([ids]))[0][0].log_softmax(-1)
    own = [float(logp[i, token]) for i, token in enumerate(ids[1:])]
    assert answer.logprobs.token_logprobs[:9] == pytest.approx(own)
    assert all(len(top) == 2 for top in answer.logprobs.top_logprobs)
    assert len(answer.logprobs.tokens) == 15
    begun = ask(client, ids, max_tokens=0, echo=True, logprobs=0).choices[0].logprobs  # as lm-eval sends it
    assert begun.token_logprobs[0] is None
    assert begun.top_logprobs[0] is None
    assert begun.token_logprobs[1:] == pytest.approx(own)
    wide = ask(client, "é x", max_tokens=0, echo=True, logprobs=0).choices[0].logprobs
    assert wide.tokens == ["bytes:\\xc3", "bytes:\\xa9", " ", "x"]
    silent = ask(client, "Once upon", max_tokens=0, echo=True, logprobs=0).choices[0]
    assert silent.text == "Once upon"
    assert silent.logprobs.token_logprobs == pytest.approx(own)


def test_stop_texts(client):
    whole = ask(client, max_tokens=40).choices[0].text
    stop = whole[7:9]
    answer = ask(client, max_tokens=40, stop=[stop, "never"]).choices[0]
    assert (answer.text, answer.finish_reason) == (whole[: whole.find(stop)], "stop")
    streamed = "".join(piece.choices[0].text for piece in ask(client, max_tokens=40, stop=stop, stream=True))
    assert streamed == answer.text


def test_without_a_seed_texts_differ(client):
    assert len({ask(client, seed=None, temperature=1.0).choices[0].text for _ in range(3)}) == 3


def test_a_chat_goes_on_behind_its_messages(client, model):
    messages = [
        {"role": "system", "content": "Once upon"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ]
    answer = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=9, seed=1)
    assert [answer.choices[0].message.content] == generate(model, "Once upon a", max_tokens=9, seed=1, temperature=1.0)
    streamed = client.chat.completions.create(
        model=NAME, messages=messages, max_tokens=9, seed=1, stream=True, logprobs=True, top_logprobs=2
    )
    deltas = [piece.choices[0] for piece in streamed]
    assert deltas[0].delta.role == "assistant"
    assert "".join(d.delta.content or "" for d in deltas) == answer.choices[0].message.content
    tokens = [token for d in deltas if d.logprobs for token in d.logprobs.content]
    assert len(tokens) == 9
    assert all(len(token.top_logprobs) == 2 and token.bytes for token in tokens)


def test_models(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="no model 'other' here; choose 'tiny'"):
        client.models.retrieve("other")


@pytest.mark.slow
def test_a_control_and_a_dial_turned_while_text_streams():
    model = tiny("hybrid-ode-nano", mixer={"kind": "attention", "heads": 2}, depth={"layers": 2, "n_steps": 2})
    with serving(model, LIMITS) as (_, url), openai.OpenAI(base_url=url + "/v1", api_key="any") as client:
        answer = ask(client, extra_body={"control": {"speech": -1.0}}, temperature=0.8).choices[0].text
        assert [answer] == generate(model, "Once upon a time", max_tokens=12, seed=3, control={"speech": -1.0})
        plain = ask(client, max_tokens=100).choices[0].text
        text = ""
        for number, piece in enumerate(ask(client, max_tokens=100, stream=True)):
            text += piece.choices[0].text
            if number == 3:
                turned = httpx.post(f"{url}/v1/completions/{piece.id}/control", json={"control": {"mood": 1}})
                assert turned.json() == {"id": piece.id, "control": {"mood": 1.0, "speech": 0.0}, "pace": None}
        assert text[:3] == plain[:3]
        assert text != plain
        gone = httpx.post(f"{url}/v1/completions/{piece.id}/control", json={"control": {"mood": 1}})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
        with pytest.raises(openai.BadRequestError, match=r"unknown control 'mod'\. Did you mean 'mood'"):
            ask(client, extra_body={"control": {"mod": 1.0}})


# ---------------------------------------------------------------------- what the server tells of itself


def test_health_and_what_was_read(client, web, server):
    assert web.get("/health").json() == {"status": "ok"}
    engine = server[0].served[NAME].engine
    before = engine.tokens_read, engine.tokens_reused, engine.tokens_written
    ask(client, "something new", max_tokens=7)
    ask(client, "something new", max_tokens=7, seed=4)
    read, reused, written = (
        after - earlier
        for after, earlier in zip(
            (engine.tokens_read, engine.tokens_reused, engine.tokens_written), before, strict=True
        )
    )
    assert reused >= 14
    assert read + reused == 28
    assert written == 14


def test_a_model_that_fails_is_a_500_and_the_server_lives(model, monkeypatch):
    with (
        serving(model, LIMITS) as (server, url),
        openai.OpenAI(base_url=url + "/v1", api_key="a", max_retries=0) as client,
    ):
        with monkeypatch.context() as broken:
            broken.setattr(
                server.served[NAME].engine, "_write", lambda batch: torch.full((1,), torch.nan).multinomial(1)
            )
            with pytest.raises(openai.InternalServerError, match="the model failed on this text: RuntimeError"):
                ask(client)
            with pytest.raises(openai.APIError, match="the model failed"):
                list(ask(client, stream=True))
        assert len(ask(client, max_tokens=3).choices[0].text) >= 1
        assert httpx.get(url + "/health").status_code == 200


def test_looks_do_not_pile_up(model):
    """They are read one by one; clients that ask and leave must not hold up those who come after."""
    with serving(model, LIMITS) as (server, url), ThreadPoolExecutor(11) as pool:

        def look() -> int:
            return httpx.post(url + "/v1/glissando/look", json={"model": NAME, "text": "Once"}, timeout=30).status_code

        with server.served[NAME].viewing:
            asked = [pool.submit(look) for _ in range(11)]
            wait_until(lambda: sum(each.done() for each in asked) == 3)
        assert sorted(each.result() for each in asked) == [200] * 8 + [429] * 3
        assert look() == 200


def test_a_server_that_lost_its_engine_says_so(model):
    with serving(model, LIMITS) as (server, url):
        server.runner.close()
        wait_until(lambda: httpx.get(url + "/health").status_code == 503)


# ---------------------------------------------------------------------- the verb


def test_the_verb_serves_and_stops(fox, monkeypatch, capsys):
    """In this process, whose Ctrl-C is a program's: both texts under way are cut short, and say so."""
    ends: list[bytes] = []

    def clients(url: str) -> None:
        answer = httpx.post(url + "/v1/completions", json={"model": "fox", "prompt": "Once", "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] <= 3
        body = json.dumps({**ENDLESS, "model": "fox", "stream": True}).encode()
        waits = json.dumps({**ENDLESS, "model": "fox"}).encode()
        with connected(url) as link, connected(url) as other:
            other.sendall(head(len(waits)) + waits)
            link.sendall(head(len(body)) + body)
            assert link.recv(4096).startswith(b"HTTP/1.1 200")
            os.kill(os.getpid(), signal.SIGINT)
            ends.extend(b"".join(iter(partial(each.recv, 4096), b"")) for each in (link, other))

    def visited(url: str) -> None:
        try:
            clients(url)
        finally:
            if not ends:
                os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        visits = []
        with monkeypatch.context() as patched:
            patched.setattr(
                serve, "print", lambda line, **_: visits.append(pool.submit(visited, line.split()[2])), raising=False
            )
            status = main(["serve", str(fox), "--max_tokens", "50000", "--port", "0"])
        visits[0].result(20)
    assert status == 130
    # One that had come to its end would be a whole answer, with no error.
    assert b'data: {"error":{"message":"the server is stopping' in ends[0]
    assert ends[1].startswith(b"HTTP/1.1 503")
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_says_where_it_serves_and_stops(fox, capsys):
    command = [sys.executable, "-m", "glissando", "serve", str(fox), "--port", "0"]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = re.match(r"fox at (http://127\.0\.0\.1:\d+) ", line)
        assert url, line + (process.stderr.read() if process.stderr else "")
        port = url[1].rpartition(":")[2]
        assert main(["serve", str(fox), "--port", port]) == 1
        error = capsys.readouterr().err
        assert f"cannot listen at 127.0.0.1:{port}" in error
        assert "Traceback" not in error
        process.send_signal(signal.SIGINT)
        process.wait(120)
        error = process.stderr.read() if process.stderr else ""
    assert process.returncode in (0, 130), error
    assert "Traceback" not in error


def test_the_port_stays_the_same_and_a_free_one_stands_in_where_it_is_taken(monkeypatch, capsys):
    default, requested = SimpleNamespace(host="127.0.0.1", port=None), SimpleNamespace(host="127.0.0.1", port=7)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(serve, "PORT", port)
        assert serve.port_of(default) == 0
        assert f"port {port} is taken" in capsys.readouterr().out
        with pytest.raises(GlissandoError, match="the port is taken; choose another --port"):
            serve.port_of(SimpleNamespace(host="127.0.0.1", port=port))
    assert serve.port_of(default) == port
    assert serve.port_of(requested) == 7
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def fox(tmp_path_factory):
    """A run, that nothing is written into."""
    folder = tmp_path_factory.mktemp("runs") / "fox"
    tiny().float().save(folder)
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "--port: expected a number from 0 to 65535"),
        (["--max_sessions", "0"], "--max_sessions: expected a whole number of at least 1"),
        (["--host", "192.0.2.1"], "cannot listen at 192.0.2.1:8000"),
        (["--memory", "2 apples"], "--memory: expected a size such as 2GiB"),
        (["--prot", "1"], "Did you mean --port"),
    ],
)
def test_options_that_make_no_sense(fox, capsys, options, message):
    assert main(["serve", str(fox), *options]) == (1 if "cannot listen" in message else 2)
    assert message in capsys.readouterr().err
