"""The server as its clients see it: OpenAI's own client, plain HTTP, and those who mean no good."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from training_runs import environment

pytest.importorskip("fastapi", reason="needs the [serve] extra")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
import httpx2 as httpx  # noqa: E402
from serving import NAME, serving, tiny, wait_until  # noqa: E402

from glissando.cli import main  # noqa: E402
from glissando.generation import generate  # noqa: E402
from glissando.model import LanguageModel  # noqa: E402
from glissando.serving.limits import Limits  # noqa: E402

LIMITS = Limits(max_prompt=200, max_tokens=50_000, max_copies=8, max_body=50_000, patience=2.0)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny()


@pytest.fixture(scope="module")
def server(model) -> Iterator[tuple[Any, str]]:
    with serving(model, LIMITS) as both:
        yield both


@pytest.fixture(scope="module")
def client(server) -> Iterator[Any]:
    with openai.OpenAI(base_url=server[1] + "/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def web(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[1], timeout=30) as web:
        yield web


def ask(client, prompt="Once upon a time", **options):
    return client.completions.create(model=NAME, prompt=prompt, **{"max_tokens": 12, "seed": 3, **options})


# ---------------------------------------------------------------------- OpenAI's client


def test_a_completion_is_what_generate_writes(client, model):
    told = ask(client, temperature=0.7, top_p=0.9, extra_body={"top_k": 20})
    text = generate(model, "Once upon a time", max_tokens=12, temperature=0.7, top_p=0.9, top_k=20, seed=3)
    assert [told.choices[0].text] == text
    assert told.choices[0].finish_reason == "length"
    assert told.choices[0].logprobs is None
    assert told.usage.model_dump(exclude_none=True) == {
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
    told = ask(client, ["Once", "The hen"], n=2, temperature=1.0)
    assert [choice.index for choice in told.choices] == [0, 1, 2, 3]
    expected = [("Once", 3), ("Once", 4), ("The hen", 5), ("The hen", 6)]
    for choice, (prompt, seed) in zip(told.choices, expected, strict=True):
        assert [choice.text] == generate(model, prompt, max_tokens=12, temperature=1.0, seed=seed)


def test_prompts_of_ids_and_of_text_are_one(client, model):
    ids = model.tokenizer.encode("Once")
    texts = {ask(client, prompt).choices[0].text for prompt in ("Once", ids, [ids], [model.tokenizer.eos_id, *ids])}
    assert len(texts) == 1


def test_echo_and_log_probabilities(client, model):
    """Against one forward; text_offset says where in the text each token stands."""
    told = ask(client, "Once upon", max_tokens=6, echo=True, logprobs=2).choices[0]
    ids = [model.tokenizer.eos_id, *model.tokenizer.encode("Once upon")]
    assert told.text.startswith("Once upon")
    assert told.logprobs.tokens[:9] == list("Once upon")
    assert told.logprobs.text_offset[:10] == list(range(10))
    with torch.no_grad():
        logp = model(torch.tensor([ids]))[0][0].log_softmax(-1)
    own = [float(logp[i, token]) for i, token in enumerate(ids[1:])]
    assert told.logprobs.token_logprobs[:9] == pytest.approx(own)
    assert all(len(top) == 2 for top in told.logprobs.top_logprobs)
    assert len(told.logprobs.tokens) == 15
    begun = ask(client, ids, max_tokens=0, echo=True, logprobs=0).choices[0].logprobs  # as lm-eval sends it
    assert begun.token_logprobs[0] is None
    assert begun.top_logprobs[0] is None
    assert begun.token_logprobs[1:] == pytest.approx(own)
    wide = ask(client, "é x", max_tokens=0, echo=True, logprobs=0).choices[0].logprobs
    assert wide.tokens == ["bytes:\\xc3", "bytes:\\xa9", " ", "x"]
    assert wide.text_offset == [0, 0, 1, 2]
    silent = ask(client, "Once upon", max_tokens=0, echo=True, logprobs=0).choices[0]
    assert silent.text == "Once upon"
    assert silent.logprobs.token_logprobs == pytest.approx(own)


def test_stop_texts(client):
    whole = ask(client, max_tokens=40).choices[0].text
    stop = whole[7:9]
    told = ask(client, max_tokens=40, stop=[stop, "never"]).choices[0]
    assert (told.text, told.finish_reason) == (whole[: whole.find(stop)], "stop")
    streamed = "".join(piece.choices[0].text for piece in ask(client, max_tokens=40, stop=stop, stream=True))
    assert streamed == told.text


def test_without_a_seed_texts_differ(client):
    assert len({ask(client, seed=None, temperature=1.0, max_tokens=30).choices[0].text for _ in range(3)}) == 3


def test_a_chat_goes_on_behind_its_messages(client, model):
    messages = [
        {"role": "system", "content": "Once upon"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ]
    told = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=9, seed=1)
    assert [told.choices[0].message.content] == generate(model, "Once upon a", max_tokens=9, seed=1, temperature=1.0)
    streamed = client.chat.completions.create(
        model=NAME, messages=messages, max_tokens=9, seed=1, stream=True, logprobs=True, top_logprobs=2
    )
    deltas = [piece.choices[0] for piece in streamed]
    assert deltas[0].delta.role == "assistant"
    assert "".join(d.delta.content or "" for d in deltas) == told.choices[0].message.content
    tokens = [token for d in deltas if d.logprobs for token in d.logprobs.content]
    assert len(tokens) == 9
    assert all(len(token.top_logprobs) == 2 and token.bytes for token in tokens)


def test_models(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="no model 'other' here; choose 'tiny'"):
        client.models.retrieve("other")


def test_a_control_and_a_dial_turned_while_text_streams():
    model = tiny("hybrid-ode-nano", mixer={"kind": "attention", "heads": 2})
    with serving(model, LIMITS) as (_, url), openai.OpenAI(base_url=url + "/v1", api_key="any") as client:
        told = ask(client, extra_body={"control": {"speech": -1.0}}, temperature=0.8).choices[0].text
        assert [told] == generate(model, "Once upon a time", max_tokens=12, seed=3, control={"speech": -1.0})
        plain = ask(client, max_tokens=400).choices[0].text
        text = ""
        for number, piece in enumerate(ask(client, max_tokens=400, stream=True)):
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


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changed", "param", "message"),
    [
        ({"temperature": "1"}, "temperature", 'valid number; got "1"'),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": 10**6}, "max_tokens", "at most 50,000"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 9}, "n", "more than 8 texts"),
        ({"seed": 10**30}, "seed", "less than or equal"),
        ({"stop": ["x", ""]}, "stop", "at least 1 character"),
        ({"prompt": 5}, "prompt", "a text, a list of texts, token ids"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [300]}, "prompt", "token 300 is outside the vocabulary of 256"),
        ({"prompt": "a\x00b"}, "prompt", "character 1 is the control byte 0x00"),
        ({"prompt": "\x1b[2J"}, "prompt", "control byte 0x1b"),
        ({"prompt": "\ud800"}, "prompt", "half of a surrogate pair"),
        ({"prompt": "x" * 200}, "prompt", "201 tokens with its beginning, and 200 may be sent"),
        ({"model": "other"}, "model", "no model 'other' here"),
        ({"model": None}, "model", "valid string"),
        ({"logprobs": 50}, "logprobs", "less than or equal to 20"),
        ({"temprature": 1}, "temprature", "Did you mean 'temperature'"),
        ({"best_of": 3}, None, "best_of is not supported"),
        ({"suffix": "end"}, None, "left to right"),
        ({"presence_penalty": 1.0}, None, "presence_penalty is not supported"),
        ({"tools": [{"type": "function"}]}, None, "tools is not supported"),
        ({"store": 0}, None, "store is not supported"),
        ({"prediction": {"type": "content"}}, None, "prediction is not supported"),
        ({"response_format": {"type": "json_object"}}, None, "response_format is not supported"),
        ({"stream_options": {"include_usage": True}}, None, "stream: true"),
        ({"control": {"mood": 1.0}}, "control", "takes no control"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_done_is_told(web, changed, param, message):
    asked = {"model": NAME, "prompt": "Once", "max_tokens": 4} | changed
    got = web.post("/v1/completions", content=json.dumps(asked), headers={"content-type": "application/json"})
    assert got.status_code == (404 if changed == {"model": "other"} else 400)
    error = got.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must be a JSON object, sent with the header"),
        (b"{", "not JSON"),
        (b'"text"', "must be a JSON object"),
        (b'{"model": "tiny", "%s": 1}' % (b"x" * 9000), "unknown field 'xxx"),
        (b"[" * 9_000, "not JSON"),
        (b"[" * 40_000, "more than 16,384 strings, lists and objects"),
        (b'{"model": "tiny", "prompt": "\xff"}', "not JSON"),
        (b'{"model": "tiny", "temperature": NaN}', "finite"),
    ],
    ids=["empty", "cut", "string", "long-name", "deep", "parts", "not-utf8", "nan"],
)
def test_bodies_that_are_no_requests(web, content, message):
    got = web.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert got.status_code == 400
    assert message in got.json()["error"]["message"]
    assert len(got.text) < 500


def test_null_is_a_field_left_out(web):
    """As in OpenAI's schema: clients that fill in every field send it."""
    asked = {"model": NAME, "prompt": "Once", "seed": 1}
    names = ("temperature", "top_p", "n", "stop", "stream", "stream_options", "max_tokens", "logprobs", "logit_bias")
    told = [web.post("/v1/completions", json=asked | extra).json() for extra in ({}, dict.fromkeys([*names, "echo"]))]
    assert told[0]["choices"] == told[1]["choices"]
    assert told[0]["usage"]["completion_tokens"] == 16
    chat = {"model": NAME, "messages": [{"role": "user", "content": "Once"}], "max_completion_tokens": 3}
    assert web.post("/v1/chat/completions", json=chat | dict.fromkeys(names)).status_code == 200
    for name in ("model", "prompt"):
        assert web.post("/v1/completions", json=asked | {name: None}).json()["error"]["param"] == name
    assert "temperature" in web.post("/v1/completions", json=asked | {"tempratur": None}).json()["error"]["message"]


def test_fields_that_ask_for_nothing_are_taken(web):
    asked = {"model": NAME, "messages": [{"role": "user", "content": "Once"}], "max_completion_tokens": 3}
    nothing = {"tools": [], "response_format": {"type": "text"}, "store": False, "tool_choice": "auto", "metadata": {}}
    assert web.post("/v1/chat/completions", json=asked | nothing).status_code == 200


def test_a_page_of_another_origin_cannot_ask(web):
    """Which may send text/plain without being allowed to, and may make its own name point here."""
    body = json.dumps({"model": NAME, "prompt": "Once"})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "text/plain; charset=application/json", ""):
        refused = web.post("/v1/completions", content=body, headers={"content-type": kind})
        assert refused.status_code == 415
        assert "send JSON, as application/json" in refused.json()["error"]["message"]
    with serving(tiny(), LIMITS, hosts=["127.0.0.1"]) as (_, url):
        for name in ("evil.example", "127.0.0.1.evil.example", "[::1]", ""):
            refused = httpx.get(url + "/health", headers={"host": name})
            assert refused.status_code == 400
            assert "answers to 127.0.0.1; call it by one of these" in refused.json()["error"]["message"]
        assert httpx.get(url + "/health").status_code == 200
    with serving(tiny(), LIMITS, hosts=["::1", "localhost"]) as (_, url):
        for name in ("[::1]:80", "[::1]", "localhost:80", "LocalHost"):
            assert httpx.get(url + "/health", headers={"host": name}).status_code == 200


def test_bodies_that_are_too_large(web):
    for content in (b"x" * 60_000, (b"x" * 1000 for _ in range(60))):
        got = web.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert got.status_code == 413
        assert "more than 50,000 bytes" in got.json()["error"]["message"]


def test_other_paths_and_methods(web):
    assert web.get("/v1/completion").json()["error"]["message"].startswith("there is no /v1/completion here")
    assert web.get("/v1/completions").status_code == 405
    assert web.get("/docs").status_code == 404
    for path in ("/", "/health", "/v1/models", f"/v1/models/{NAME}"):
        told = web.head(path)
        assert (told.status_code, told.content) == (200, b"")
        assert told.headers["content-length"] == web.get(path).headers["content-length"]


def test_the_key(model):
    with serving(model, LIMITS, api_key="right") as (_, url):
        for key, status in (("wrong", 401), ("right", 200), ("rightx", 401)):
            headers = {"authorization": f"Bearer {key}"}
            for path in ("/v1/models", "/metrics"):
                assert httpx.get(url + path, headers=headers).status_code == status
        for header, status in (("bearer right", 200), ("Basic right", 401), ("right", 401), ("Bearer", 401)):
            assert httpx.get(url + "/v1/models", headers={"authorization": header}).status_code == status
        assert httpx.get(url + "/v1/models").json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(url + "/health").status_code == 200
        with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=url + "/v1", api_key="x") as client:
            ask(client)


def test_too_many_at_once_are_sent_away(model):
    with (
        serving(model, LIMITS, max_sessions=1, max_waiting=1) as (server, url),
        openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client,
        ask(client, max_tokens=50_000, temperature=0, stream=True) as running,
    ):
        next(iter(running))
        with ask(client, max_tokens=50_000, temperature=0, stream=True):
            wait_until(lambda: server.served[NAME].engine.waiting == 1)
            with pytest.raises(openai.RateLimitError, match="1 texts wait already") as refused:
                ask(client)
            assert refused.value.response.headers["retry-after"]


# ---------------------------------------------------------------------- those who leave, and the slow


#: greedily the model never comes to an end
ENDLESS = {"model": NAME, "prompt": "Once", "max_tokens": 50_000, "temperature": 0}


def test_greedily_the_model_never_comes_to_an_end(client):
    assert ask(client, "Once", max_tokens=600, temperature=0).usage.completion_tokens == 600


@pytest.mark.parametrize("stream", [True, False])
def test_who_disconnects_frees_the_place(server, web, stream):
    engine = server[0].served[NAME].engine
    body = json.dumps({**ENDLESS, "stream": stream}).encode()
    with connected(server[1]) as link:
        link.sendall(head(len(body)) + body)
        wait_until(lambda: engine.running == 1)
    written = engine.tokens_written
    wait_until(lambda: engine.running == 0, 2)
    assert engine.tokens_written - written < 20_000
    assert not server[0].groups
    wait_until(lambda: "glissando_disconnects_total 0.0" not in web.get("/metrics").text)


@pytest.mark.parametrize("stream", [True, False])
def test_who_sent_a_further_request_and_leaves_frees_the_place(server, stream):
    """It waits its turn, and the connection is heard all the same."""
    engine = server[0].served[NAME].engine
    body = json.dumps({**ENDLESS, "stream": stream}).encode()
    with connected(server[1]) as link:
        link.sendall(head(len(body)) + body)
        wait_until(lambda: engine.running == 1)
        link.sendall(head(len(body)) + body)
        time.sleep(0.1)
        link.sendall(head(len(body)))
        time.sleep(0.1)
        assert engine.running == 1
    wait_until(lambda: engine.running == 0, 2)
    assert not server[0].groups


def test_further_requests_are_answered_in_turn(server):
    body = json.dumps({**ENDLESS, "max_tokens": 3}).encode()
    with connected(server[1]) as link:
        link.sendall((head(len(body)) + body) * 20)
        told = b""
        while told.count(b"HTTP/1.1 200") < 20 or not told.endswith(b"}"):
            told += link.recv(4096)
    assert told.count(b'"completion_tokens":3') == 20


def test_who_sends_ahead_without_end_is_cut_off(server):
    body = json.dumps(ENDLESS).encode()
    with connected(server[1]) as link:
        link.sendall(head(len(body)) + body)
        wait_until(lambda: server[0].served[NAME].engine.running == 1)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            link.sendall(b"GET /health HTTP/1.1\r\nx: " + b"x" * 2**25)
    wait_until(lambda: server[0].served[NAME].engine.running == 0, 2)


def connected(url: str) -> socket.socket:
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.settimeout(20)
    link.connect((urlsplit(url).hostname, urlsplit(url).port))
    return link


def head(length: int) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % length
    )


@pytest.mark.parametrize("sent", [b"", b"POST /v1/compl", head(500), head(500) + b'{"model":'])
def test_who_sends_slowly_is_cut_off(server, sent):
    began = time.monotonic()
    with connected(server[1]) as link:
        link.sendall(sent)
        try:
            left = link.recv(100)
        except ConnectionResetError:
            left = b""
        assert left == b""
    assert 1.5 < time.monotonic() - began < 8


def drip(link: socket.socket, content: bytes) -> None:
    for byte in content:
        link.sendall(bytes([byte]))
        time.sleep(0.1)


def test_who_drips_is_cut_off(server):
    """A byte now and then is not enough: the whole request has its time."""
    began = time.monotonic()
    with connected(server[1]) as link, pytest.raises((ConnectionResetError, BrokenPipeError)):
        drip(link, head(500) * 10)
    assert time.monotonic() - began < 8


def test_who_reads_slowly_holds_nobody_up(server, client):
    engine = server[0].served[NAME].engine
    body = json.dumps({**ENDLESS, "stream": True, "logprobs": 20}).encode()
    with connected(server[1]) as link:
        link.sendall(head(len(body)) + body)
        wait_until(lambda: engine.running == 1)
        assert ask(client).choices[0].finish_reason == "length"
        wait_until(lambda: not server[0].groups, 40)  # cut off, and given up
        wait_until(lambda: engine.running == 0)


def test_an_idle_connection_serves_again(server):
    """Between requests a connection may rest."""
    with connected(server[1]) as link:
        for _ in range(2):
            link.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += link.recv(1000)
            assert answer.startswith(b"HTTP/1.1 200")
            time.sleep(1.0)


def storm(url: str, model: LanguageModel, server: Any, clients: int, seconds: float) -> int:
    """Clients that ask at random and leave at random; every finished answer is checked. How many were."""
    expected: dict[tuple[str, int, int], str] = {}
    prompts = ["Once upon a time", "The", "A fox and a hen", ""]
    lock, until = threading.Lock(), time.monotonic() + seconds

    def right(prompt: str, seed: int, count: int) -> str:
        with lock:
            if (prompt, seed, count) not in expected:
                expected[prompt, seed, count] = generate(
                    model, prompt, max_tokens=count, seed=seed, temperature=1.0
                )[0]  # fmt: skip
            return expected[prompt, seed, count]

    def one(number: int) -> int:
        rng, done = random.Random(number), 0
        with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=20, timeout=60) as client:
            while time.monotonic() < until:
                prompt, seed, count = rng.choice(prompts), rng.randrange(3), rng.choice([5, 20, 40])
                options = {"seed": seed, "max_tokens": count, "temperature": 1.0}
                if rng.random() < 0.5:
                    assert ask(client, prompt, **options).choices[0].text == right(prompt, seed, count)
                    done += 1
                    continue
                leaves = rng.randrange(1, 10) if rng.random() < 0.5 else None
                with ask(client, prompt, stream=True, **options) as pieces:
                    text = ""
                    for n, piece in enumerate(pieces):
                        text += piece.choices[0].text
                        if n == leaves:
                            break
                    else:
                        assert text == right(prompt, seed, count)
                        done += 1
        return done

    with ThreadPoolExecutor(clients) as pool:
        finished = sum(pool.map(one, range(clients)))
    wait_until(lambda: server.served[NAME].engine.running == server.served[NAME].engine.waiting == 0)
    wait_until(lambda: not server.groups)
    return finished


def test_many_clients_that_come_and_go(model, server):
    assert storm(server[1], model, server[0], clients=12, seconds=4) > 5


@pytest.mark.slow
def test_sixty_four_clients_for_a_minute():
    """Nothing hangs, nothing leaks, and every finished answer is the one that it would be alone."""
    import resource

    model = tiny(depth={"layers": 2})
    with serving(model, max_sessions=64) as (server, url):
        storm(url, model, server, 64, 5)
        before, threads = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, threading.active_count()
        assert storm(url, model, server, 64, 60) > 500
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024
        assert threading.active_count() <= threads


# ---------------------------------------------------------------------- what the server tells of itself


def test_health_and_metrics(client, web):
    assert web.get("/health").json() == {"status": "ok"}
    before = numbers(web)
    ask(client, "something new", max_tokens=7)
    ask(client, "something new", max_tokens=7, seed=4)
    after = numbers(web)
    moved = {name: after[name] - before.get(name, 0) for name in after}
    assert moved["glissando_tokens_reused_total"] >= 14
    assert moved["glissando_tokens_read_total"] + moved["glissando_tokens_reused_total"] == 28
    assert moved["glissando_tokens_written_total"] == 14
    assert moved['glissando_requests_total{path="/v1/completions",status="200"}'] == 2
    assert moved["glissando_first_token_seconds_count"] == 2
    assert after["glissando_texts_running"] == 0


def numbers(web: httpx.Client) -> dict[str, float]:
    lines = web.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_a_model_that_fails_is_a_500_and_the_server_lives(model, monkeypatch):
    with (
        serving(model, LIMITS) as (server, url),
        openai.OpenAI(base_url=url + "/v1", api_key="a", max_retries=0) as client,
    ):
        with monkeypatch.context() as broken:
            broken.setattr(
                server.served[NAME].engine, "_draw", lambda batch: torch.full((1,), torch.nan).multinomial(1)
            )
            with pytest.raises(openai.InternalServerError, match="the model failed on this text: RuntimeError"):
                ask(client)
            with pytest.raises(openai.APIError, match="the model failed"):
                list(ask(client, stream=True))
        assert len(ask(client, max_tokens=3).choices[0].text) >= 1
        assert httpx.get(url + "/health").status_code == 200


def test_looks_do_not_pile_up(model):
    """They are read one by one; clients that ask and leave must not hold up those who come after."""
    with serving(model, LIMITS) as (server, url), ThreadPoolExecutor(20) as pool:

        def look() -> int:
            return httpx.post(url + "/v1/glissando/look", json={"model": NAME, "text": "Once"}, timeout=30).status_code

        with server.served[NAME].viewing:
            asked = [pool.submit(look) for _ in range(20)]
            wait_until(lambda: sum(each.done() for each in asked) == 12)
        assert sorted(each.result() for each in asked) == [200] * 8 + [429] * 12
        assert look() == 200


def test_a_server_that_lost_its_engine_says_so(model):
    with serving(model, LIMITS) as (server, url):
        server.pool.close()
        wait_until(lambda: not server.healthy)
        assert httpx.get(url + "/health").status_code == 503


# ---------------------------------------------------------------------- the verb


def test_the_verb_serves_and_stops(tmp_path):
    run = tmp_path / "fox"
    tiny().float().save(run)
    command = [sys.executable, "-m", "glissando", "serve", str(run), "--max_tokens", "50000", "--port", "0"]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = re.match(r"fox at (http://127\.0\.0\.1:\d+) ", line)
        assert url, line + (process.stderr.read() if process.stderr else "")
        told = httpx.post(url[1] + "/v1/completions", json={"model": "fox", "prompt": "Once", "max_tokens": 3})
        assert told.json()["usage"]["completion_tokens"] <= 3
        port = url[1].rpartition(":")[2]
        taken = subprocess.run(
            [*command[:-1], port], env=environment(), capture_output=True, text=True, check=False, timeout=100
        )
        assert taken.returncode == 1
        assert f"cannot listen at 127.0.0.1:{port}" in taken.stderr
        assert "Traceback" not in taken.stderr
        body = json.dumps({**ENDLESS, "model": "fox", "stream": True}).encode()
        waits = json.dumps({**ENDLESS, "model": "fox"}).encode()
        with connected(url[1]) as link, connected(url[1]) as other:
            other.sendall(head(len(waits)) + waits)
            link.sendall(head(len(body)) + body)
            assert link.recv(4096).startswith(b"HTTP/1.1 200")
            process.send_signal(signal.SIGINT)
            began, ends = time.monotonic(), [b"".join(iter(partial(each.recv, 4096), b"")) for each in (link, other)]
            process.wait(30)
        assert time.monotonic() - began < 4  # it waits for no text to end
        assert b'data: {"error":{"message":"the server is stopping' in ends[0]
        assert ends[1].startswith(b"HTTP/1.1 503")
        error = process.stderr.read() if process.stderr else ""
    assert process.returncode in (0, 130), error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "at most 65535"),
        (["--max_sessions", "0"], "--max_sessions must be at least 1"),
        (["--api_key", ""], "--api_key is empty, so that anyone could use the server"),
        (["--host", "192.0.2.1", "--api_key", "k"], "cannot listen at 192.0.2.1:8000"),
        (["--patience", "0"], "--patience must be a positive number"),
        (["--chat_template", "absent.jinja"], "absent.jinja cannot be used"),
        (["--chat_template", "latin.jinja"], "latin.jinja cannot be used"),
        (["--prot", "1"], "Did you mean --port"),
    ],
)
def test_options_that_make_no_sense(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.jinja").write_bytes(b"caf\xe9")
    run = tmp_path / "fox"
    tiny().float().save(run)
    assert main(["serve", str(run), *options]) == (1 if "cannot listen" in message else 2)
    assert message in capsys.readouterr().err


def test_a_chat_template(tmp_path, model):
    from glissando.serving.planning import ChatTemplate

    source = tmp_path / "chat.jinja"
    refusing = "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    source.write_text("{% for m in messages %}" + refusing + "<{{ m.content }}>{% endfor %}")
    with serving(model, LIMITS, template=ChatTemplate(source)) as (_, url):
        asked = {"model": NAME, "max_tokens": 5, "seed": 1, "messages": [{"role": "user", "content": "a"}]}
        told = httpx.post(url + "/v1/chat/completions", json=asked).json()
        assert [told["choices"][0]["message"]["content"]] == generate(
            model, "<a>", max_tokens=5, seed=1, temperature=1.0
        )
        asked["messages"][0]["role"] = "system"
        refused = httpx.post(url + "/v1/chat/completions", json=asked)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "the server's chat template refuses these messages: no"
