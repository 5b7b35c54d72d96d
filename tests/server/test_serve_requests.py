"""What clients of several kinds send, and what each receives."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

pytest.importorskip("starlette", reason="needs the [serve] extra")
pytest.importorskip("openai", reason="OpenAI's client is not installed")
import httpx2 as httpx
from serving import LIMITS, NAME, serving, tiny, wait_until

from glissando.data.tokenizers import ByteTokenizer
from glissando.generation import generate
from glissando.model import LanguageModel


def chat(web: httpx.Client, *messages: dict[str, Any], **options: Any) -> httpx.Response:
    body = {"model": NAME, "messages": list(messages), "max_completion_tokens": 5, "seed": 1}
    return web.post("/v1/chat/completions", json=body | options)


# ---------------------------------------------------------------------- a chat that goes on


def test_an_answers_message_can_be_sent_back(client):
    """As OpenAI's own examples do it."""
    messages: list[Any] = [{"role": "user", "content": "Once"}]
    for _ in range(2):
        answer = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=5, seed=1)
        messages += [answer.choices[0].message, {"role": "user", "content": "and"}]
    assert len(messages) == 5


def test_what_is_empty_beside_an_answers_text_is_dropped(web):
    empty = {"refusal": None, "audio": None, "function_call": None, "tool_calls": [], "annotations": []}
    assert chat(web, {"role": "assistant", "content": "a", **empty}).status_code == 200
    reply = chat(
        web, {"role": "user", "content": "a"}, {"role": "assistant", "content": "a", "tool_calls": [{"id": 1}]}
    )
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("messages.1: 'tool_calls' is not supported by this server")
    assert reply.json()["error"]["param"] == "messages"


def test_an_unknown_field_inside_a_message_is_told_by_its_path(web):
    reply = chat(web, {"role": "user", "content": "a", "nam": "Ben"})
    assert "messages.0: 'nam' is not supported by this server; did you mean 'name'?" in reply.json()["error"]["message"]
    reply = chat(web, {"role": "user", "content": [{"type": "text", "text": "a", "txt": "b"}]})
    assert reply.json()["error"]["message"].startswith("messages.0.content.")


# ---------------------------------------------------------------------- tokens


def test_ids_that_the_tokenizer_does_not_know_are_refused():
    grown = LanguageModel.from_preset("transformer-nano", vocab_size=400, hidden_size=16, depth={"layers": 1}).eval()
    grown.tokenizer = ByteTokenizer()
    body = {"model": NAME, "prompt": [65, 350, 66], "max_tokens": 2, "echo": True, "logprobs": 2}
    with serving(grown) as (_, url):
        answer = httpx.post(url + "/v1/completions", json=body, timeout=30)
        assert answer.status_code == 400
        assert "token 350 is outside the vocabulary of 256" in answer.json()["error"]["message"]
        assert httpx.post(url + "/v1/completions", json=body | {"prompt": [65, 66]}, timeout=30).status_code == 200


# ---------------------------------------------------------------------- dials


def hybrid(dtype: torch.dtype) -> LanguageModel:
    return tiny("hybrid-ode-nano", mixer={"kind": "attention", "heads": 2}).to(dtype)


def test_a_look_at_numbers_that_are_not_finite_names_the_control():
    model = hybrid(torch.float32)
    with serving(model, LIMITS) as (_, url):
        body = {"model": NAME, "text": "ab", "control": {"mood": 3e38}}
        refused = httpx.post(url + "/v1/glissando/look", json=body)
        assert refused.status_code == 400
        assert "a number from -1e9 to 1e9, such as 0.7; got mood=3e+38" in refused.json()["error"]["message"]
        model.embedding.weight.data.fill_(torch.inf)
        overflows = httpx.post(url + "/v1/glissando/look", json=body | {"control": {"mood": 0.5}})
        assert overflows.status_code == 500
        assert overflows.json()["error"]["code"] == "model_failed"
        assert "not finite, under the control (0.5, 0.0)" in overflows.json()["error"]["message"]


def test_what_nobody_foresaw_is_reported_as_json(model, monkeypatch):
    with serving(model, LIMITS) as (server, url):
        monkeypatch.setattr(server.served[NAME], "completion", lambda body: 1 / 0)
        reply = httpx.post(url + "/v1/completions", json={"model": NAME, "prompt": "a"})
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "the server failed on this request: ZeroDivisionError"
    assert reply.json()["error"]["type"] == "server_error"


def test_a_dial_turned_leaves_the_others(monkeypatch):
    asked = {"model": NAME, "prompt": "Once", "stream": True}
    with serving(hybrid(torch.float64), LIMITS) as (server, url):
        monkeypatch.setattr(
            server.served[NAME].engine, "_write", lambda batch: time.sleep(0.01)
        )  # so that no text ends
        for control, expected in (
            ({"mood": 0.5, "speech": -1.0}, {"mood": 0.7, "speech": -1.0}),
            (None, {"mood": 0.7, "speech": 0.0}),
        ):
            with httpx.stream("POST", url + "/v1/completions", json=asked | {"control": control}):
                wait_until(lambda: server.groups)
                [id] = server.groups
                answer = httpx.post(f"{url}/v1/completions/{id}/control", json={"control": {"mood": 0.7}})
                assert answer.json()["control"] == expected
                wrong = httpx.post(f"{url}/v1/completions/{id}/control", json={"control": {"mod": 0.7}})
                assert "Did you mean 'mood'" in wrong.json()["error"]["message"]
            wait_until(lambda: not server.groups)


# ---------------------------------------------------------------------- as OpenAI's


def test_equal_prompts_of_one_request_are_texts_of_their_own(client, model):
    """Prompt i of n texts has seed + i n on, as in a list that `generate` is given."""
    answer = client.completions.create(model=NAME, prompt=["hi", "hi"], n=2, seed=3, max_tokens=20, temperature=1.0)
    texts = generate(model, ["hi"] * 4, max_tokens=20, seed=3, temperature=1.0)
    assert [choice.text for choice in answer.choices] == texts
    assert len(set(texts)) == 4


def test_a_request_names_the_only_tokens_that_it_allows(client):
    text = client.completions.create(model=NAME, prompt="hi", max_tokens=20, extra_body={"allowed": [97, 98]})
    assert set(text.choices[0].text) == {"a", "b"}


def test_every_chunk_before_the_usage_says_that_there_is_none_yet(web):
    asked = {"model": NAME, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    chatting = asked | {"messages": [{"role": "user", "content": "Once"}]}
    for path, body in (("completions", asked | {"prompt": "Once", "echo": True}), ("chat/completions", chatting)):
        *chunks, last = events(web, path, body)
        assert chunks
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["usage"]["completion_tokens"] == 4
        plain = events(web, path, {name: value for name, value in body.items() if name != "stream_options"})
        assert not any("usage" in chunk for chunk in plain)


def events(web: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = web.post(f"/v1/{path}", json=body | {"seed": 1}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.mark.parametrize(
    ("nothing", "something"),
    [
        ({"stream_options": {"include_obfuscation": False}}, {"stream_options": {"include_obfuscation": True}}),
        ({"verbosity": "medium"}, {"verbosity": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "high"}),
    ],
    ids=["include_obfuscation", "verbosity", "reasoning_effort"],
)
def test_newer_fields_are_taken_where_they_ask_for_nothing(web, request, nothing, something):
    user = {"role": "user", "content": "Once"}
    assert chat(web, user, stream=True, **nothing).status_code == 200
    refused = chat(web, user, stream=True, **something)
    assert refused.status_code == 400
    assert f"'{request.node.callspec.id}' is not supported by this server" in refused.json()["error"]["message"]


def test_a_chat_beyond_learned_positions_is_reported_of_its_messages():
    small = {"hidden_size": 32, "mixer": {"kind": "attention", "heads": 2, "head_size": 16}}
    model = LanguageModel.from_preset("transformer-nano", **small, max_length=12)
    with serving(model, LIMITS) as (_, url), httpx.Client(base_url=url, timeout=30) as web:
        answer = chat(web, {"role": "user", "content": "x" * 20}).json()["error"]
        other = web.post("/v1/completions", json={"model": NAME, "prompt": "x" * 20}).json()["error"]
    assert (answer["param"], answer["code"]) == ("messages", "context_length_exceeded")
    assert (other["param"], other["code"]) == ("prompt", "context_length_exceeded")
