"""The server refuses what it cannot do, what is too much and who may not ask, and says why."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("starlette", reason="needs the [serve] extra")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
import httpx2 as httpx  # noqa: E402
from serving import LIMITS, NAME, ask, serving, tiny, wait_until  # noqa: E402

from glissando.data.tokenizers import NumberTokenizer  # noqa: E402

WRONG = [
    ({"temperature": "1"}, "temperature", "valid number; got '1'"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"max_tokens": True}, "max_tokens", "valid integer"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": 10**6}, "max_tokens", "at most 50,000"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 9}, "n", "more than 8 texts"),
    ({"seed": 10**30}, "seed", "less than or equal"),
    ({"stop": ["x", ""]}, "stop", "at least 1 character"),
    ({"prompt": 5}, "prompt", "a text, a list of texts, token ids"),
    ({"prompt": []}, "prompt", "at least 1 item"),
    ({"prompt": [300]}, "prompt", "token 300 is outside the vocabulary of 256"),
    ({"prompt": "\ud800"}, None, "Invalid JSON"),
    ({"prompt": "x" * 200}, "prompt", "201 tokens with its beginning, and there may be 200; shorten it"),
    ({"model": "other"}, "model", "no model 'other' here"),
    ({"model": None}, "model", "field required"),
    ({"logprobs": 50}, "logprobs", "less than or equal to 20"),
    ({"temprature": 1}, None, "'temprature' is not supported by this server; did you mean 'temperature'?"),
    ({"best_of": 3}, None, "'best_of' is not supported"),
    ({"suffix": "end"}, None, "'suffix' is not supported"),
    ({"temperature": 2.1}, "temperature", "less than or equal to 2; got 2.1"),
    ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
    ({"frequency_penalty": "1"}, "frequency_penalty", "valid number"),
    ({"logit_bias": {"300": 1}}, "logit_bias", "token 300 is outside the vocabulary of 256"),
    ({"logit_bias": {"7": 101}}, "logit_bias", "less than or equal to 100; got 101"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "valid integer"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "at most 1,024 entries"),
    ({"allowed": [300]}, "allowed", "token 300 is outside the vocabulary of 256"),
    ({"allowed": []}, "allowed", "at least 1 item"),
    ({"prompt": [10**3000]}, "prompt", "is outside the vocabulary of 256"),
    ({"tools": [{"type": "function"}]}, None, "'tools' is not supported"),
    ({"store": True}, None, "'store' is not supported"),
    ({"prediction": {"type": "content"}}, None, "'prediction' is not supported"),
    ({"response_format": {"type": "json_object"}}, None, "'response_format' is not supported"),
    ({"control": {"mood": 1.0}}, "control", "takes no control"),
]


def test_what_cannot_be_done_is_reported(web):
    for changed, param, message in WRONG:
        asked = {"model": NAME, "prompt": "Once", "max_tokens": 4} | changed
        got = web.post("/v1/completions", content=json.dumps(asked), headers={"content-type": "application/json"})
        assert got.status_code == (404 if changed == {"model": "other"} else 400), changed
        error = got.json()["error"]
        assert error["type"] == "invalid_request_error", changed
        assert message in error["message"], changed
        assert error["param"] == param, changed


NO_REQUESTS = [
    (b"", "Invalid JSON"),
    (b"{", "Invalid JSON"),
    (b'"text"', "object"),
    (b'{"model": "tiny", "%s": 1}' % (b"x" * 9000), "'xxx"),
    (b"[" * 9_000, "Invalid JSON"),
    (b"[" * 40_000, "Invalid JSON"),
    (b'{"model": "tiny", "prompt": "\xff"}', "Invalid JSON"),
    (b'{"model": "tiny", "temperature": NaN}', "finite"),
    (b'{"model": "tiny", "prompt": [%s]}' % (b"9" * 5000), "Invalid JSON"),
]


def test_bodies_that_are_no_requests(web):
    for content, message in NO_REQUESTS:
        got = web.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert got.status_code == 400, content[:40]
        assert message in got.json()["error"]["message"], content[:40]
        assert len(got.text) < 500, content[:40]


def test_null_is_a_field_left_out(web):
    """As in OpenAI's schema: clients that fill in every field send it."""
    asked = {"model": NAME, "prompt": "Once", "seed": 1}
    names = ("temperature", "top_p", "n", "stop", "stream", "stream_options", "max_tokens", "logprobs", "logit_bias")
    answer = [web.post("/v1/completions", json=asked | extra).json() for extra in ({}, dict.fromkeys([*names, "echo"]))]
    assert answer[0]["choices"] == answer[1]["choices"]
    assert answer[0]["usage"]["completion_tokens"] == 16
    chat = {"model": NAME, "messages": [{"role": "user", "content": "Once"}], "max_completion_tokens": 3}
    assert web.post("/v1/chat/completions", json=chat | dict.fromkeys(names)).status_code == 200
    assert web.post("/v1/completions", json=asked | {"model": None}).json()["error"]["param"] == "model"


def test_fields_that_ask_for_nothing_are_taken(web):
    asked = {"model": NAME, "messages": [{"role": "user", "content": "Once"}], "max_completion_tokens": 3}
    nothing = {"tools": [], "response_format": {"type": "text"}, "store": False, "tool_choice": "auto", "metadata": {}}
    assert web.post("/v1/chat/completions", json=asked | nothing).status_code == 200


def test_a_text_that_a_model_of_numbers_does_not_read_is_refused():
    model = tiny()
    model.tokenizer = NumberTokenizer(model.config.vocab_size)
    with serving(model, LIMITS) as (_, url):
        for words, shown in (("hello", "hello"), ("7 256", "256"), ("9" * 150, "9" * 40)):
            message = f"'{shown}' is no token of this model, which reads numbers from 0 to 255"
            chat = {"messages": [{"role": "user", "content": words}]}
            for path, asked, param in (
                ("completions", {"prompt": words}, "prompt"),
                ("chat/completions", chat, "messages"),
                ("glissando/look", {"text": words}, "text"),
            ):
                refused = httpx.post(f"{url}/v1/{path}", json={"model": NAME, **asked}, timeout=60)
                assert refused.status_code == 400
                assert refused.json()["error"]["message"].startswith(message)
                assert refused.json()["error"]["param"] == param
        read = httpx.post(url + "/v1/completions", json={"model": NAME, "prompt": "7 255"}, timeout=60)
        assert read.status_code == 200


def test_a_page_of_another_origin_cannot_ask(web):
    """Which may send text/plain without being allowed to, and may make its own name point here."""
    body = json.dumps({"model": NAME, "prompt": "Once"})
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"content-type": kind, "origin": "http://evil.example"}
        assert web.post("/v1/completions", content=body, headers=headers).status_code == 403
        assert web.post("/v1/completions", content=body, headers={"content-type": kind}).status_code == 200
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
    reply = web.post("/v1/responses", json={"model": NAME, "input": "Once"})
    assert (reply.status_code, "/v1/chat/completions" in reply.json()["error"]["message"]) == (404, True)
    for path in ("/", "/health", "/v1/models", f"/v1/models/{NAME}"):
        answer = web.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-length"] == web.get(path).headers["content-length"]


def test_the_key(model):
    with serving(model, LIMITS, api_key="right") as (_, url):
        for key, status in (("wrong", 401), ("right", 200), ("rightx", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.get(url + "/v1/models", headers=headers).status_code == status
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
