"""What clients of several kinds send, and what each receives."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="needs the [serve] extra")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
import httpx2 as httpx  # noqa: E402
from serving import NAME, serving, tiny, wait_until  # noqa: E402

from glissando.data.tokenizers import ByteTokenizer  # noqa: E402
from glissando.generation import generate  # noqa: E402
from glissando.model import LanguageModel  # noqa: E402
from glissando.serving.api import Server  # noqa: E402
from glissando.serving.limits import Limits  # noqa: E402
from glissando.serving.planning import BadRequestError, ChatTemplate  # noqa: E402
from glissando.serving.schema import Message  # noqa: E402

LIMITS = Limits(max_prompt=200, max_tokens=50_000, max_copies=8)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny()


@pytest.fixture(scope="module")
def url(model) -> Iterator[str]:
    with serving(model, LIMITS) as (_, url):
        yield url


@pytest.fixture(scope="module")
def client(url) -> Iterator[Any]:
    with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client


def chat(url: str, *messages: dict[str, Any], **options) -> httpx.Response:
    body = {"model": NAME, "messages": list(messages), "max_completion_tokens": 5, "seed": 1}
    return httpx.post(url + "/v1/chat/completions", json=body | options, timeout=30)


# ---------------------------------------------------------------------- a chat that goes on


def test_an_answers_message_can_be_sent_back(client):
    """As OpenAI's own examples do it."""
    messages: list[Any] = [{"role": "user", "content": "Once"}]
    for _ in range(2):
        answer = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=5, seed=1)
        messages += [answer.choices[0].message, {"role": "user", "content": "and"}]
    assert len(messages) == 5


def test_what_is_empty_beside_an_answers_text_is_dropped(url):
    empty = {"refusal": None, "audio": None, "function_call": None, "tool_calls": [], "annotations": []}
    assert chat(url, {"role": "assistant", "content": "a", **empty}).status_code == 200
    answer = chat(
        url, {"role": "user", "content": "a"}, {"role": "assistant", "content": "a", "tool_calls": [{"id": 1}]}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "unknown field 'tool_calls' in messages.1. Leave it out."
    assert answer.json()["error"]["param"] == "messages"


def test_an_unknown_field_inside_a_message_is_reported_by_its_path(url):
    answer = chat(url, {"role": "user", "content": "a", "nam": "Ben"})
    assert answer.json()["error"]["message"] == "unknown field 'nam' in messages.0. Did you mean 'name'?"
    answer = chat(url, {"role": "user", "content": [{"type": "text", "text": "a", "txt": "b"}]})
    assert answer.json()["error"]["message"].startswith("unknown field 'txt' in messages.0.content.0.")


@pytest.mark.parametrize("content", ["On\x0bce\x00", [{"type": "text", "text": "On\x0bce\x00"}]])
def test_what_the_model_wrote_may_hold_control_bytes(url, model, content):
    """An untrained model writes them; what people write must not hold any."""
    answer = chat(url, {"role": "assistant", "content": content}).json()["choices"][0]["message"]["content"]
    assert [answer] == generate(model, "On\ufffdce\ufffd", max_tokens=5, seed=1, temperature=1.0)
    refused = chat(url, {"role": "user", "content": content})
    assert refused.status_code == 400
    assert "character 2 is the control byte 0x0b" in refused.json()["error"]["message"]


# ---------------------------------------------------------------------- chat templates


def rendered(folder: Path, source: str) -> str:
    (folder / "chat.jinja").write_text(source)
    message = Message(role="user", content="Once")
    return ChatTemplate(folder / "chat.jinja").render([message, message])


def test_templates_may_call_what_published_ones_do(tmp_path):
    assert rendered(tmp_path, "{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert rendered(tmp_path, "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}") == "Once"
    assert rendered(tmp_path, "{{ {'a': '<é>'} | tojson }}{{ bos_token }}{{ eos_token }}") == '{"a": "<é>"}'
    with pytest.raises(BadRequestError, match=r"refuses these messages: roles must alternate$"):
        rendered(tmp_path, "{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages | map(attribute='content') | sum }}", "TypeError"),
        ("{{ strftime_now(1) }}", "TypeError"),
    ],
)
def test_a_template_that_fails_is_reported_by_why(tmp_path, source, why):
    with pytest.raises(BadRequestError, match=f"refuses these messages: {why}: ") as answer:
        rendered(tmp_path, source)
    assert answer.value.param == "messages"


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


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 1e300), (torch.float16, 1e5), (torch.bfloat16, -1e39)])
def test_a_dial_beyond_the_models_numbers_is_refused(dtype, far):
    """In float32 1e300 is infinite, which no client asked for."""
    planner = Server({NAME: hybrid(dtype)}).served[NAME].planner
    with pytest.raises(BadRequestError, match="the dial mood is set to") as refused:
        planner.control({"speech": 1.0, "mood": far})
    assert refused.value.param == "control"
    assert planner.control({"mood": 6e4}) == (6e4, 0.0)


def test_dials_too_far_are_reported_on_every_route():
    with serving(hybrid(torch.float32), LIMITS) as (_, url):
        for path, asked in (
            ("/v1/completions", {"model": NAME, "prompt": "a"}),
            ("/v1/glissando/look", {"model": NAME, "text": "ab"}),
        ):
            answer = httpx.post(url + path, json=asked | {"control": {"mood": 1e300}})
            assert answer.status_code == 400
            assert "the dial mood is set to 1e+300" in answer.json()["error"]["message"]
        overflows = httpx.post(
            url + "/v1/glissando/look", json={"model": NAME, "text": "ab", "control": {"mood": 3e38}}
        )
        assert overflows.status_code == 500
        assert overflows.json()["error"]["code"] == "model_failed"
        assert "not finite, under the control (3e+38, 0.0)" in overflows.json()["error"]["message"]


def test_what_nobody_foresaw_is_reported_as_json(model, monkeypatch):
    with serving(model, LIMITS) as (server, url):
        monkeypatch.setattr(server.served[NAME].planner, "completion", lambda body: 1 / 0)
        answer = httpx.post(url + "/v1/completions", json={"model": NAME, "prompt": "a"})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the server failed on this request: ZeroDivisionError"
    assert answer.json()["error"]["type"] == "server_error"


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


def test_every_chunk_before_the_usage_says_that_there_is_none_yet(url):
    asked = {"model": NAME, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    chatting = asked | {"messages": [{"role": "user", "content": "Once"}]}
    for path, body in (("completions", asked | {"prompt": "Once", "echo": True}), ("chat/completions", chatting)):
        *chunks, last = events(url, path, body)
        assert chunks
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["usage"]["completion_tokens"] == 4
        plain = events(url, path, {name: value for name, value in body.items() if name != "stream_options"})
        assert not any("usage" in chunk for chunk in plain)


def events(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = httpx.post(f"{url}/v1/{path}", json=body | {"seed": 1}, timeout=30).text.split("\n\n")
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
def test_newer_fields_are_taken_where_they_ask_for_nothing(url, request, nothing, something):
    user = {"role": "user", "content": "Once"}
    assert chat(url, user, stream=True, **nothing).status_code == 200
    refused = chat(url, user, stream=True, **something)
    assert refused.status_code == 400
    assert f"{request.node.callspec.id} is not supported by this server" in refused.json()["error"]["message"]


def test_a_chat_beyond_learned_positions_is_reported_of_its_messages():
    small = {"hidden_size": 32, "mixer": {"kind": "attention", "heads": 2, "head_size": 16}}
    model = LanguageModel.from_preset("transformer-nano", **small, positions="learned", max_length=12)
    with serving(model, LIMITS) as (_, url):
        answer = chat(url, {"role": "user", "content": "x" * 20}).json()["error"]
        asked = {"model": NAME, "prompt": "x" * 20}
        other = httpx.post(url + "/v1/completions", json=asked).json()["error"]
    assert (answer["param"], answer["code"]) == ("messages", "context_length_exceeded")
    assert (other["param"], other["code"]) == ("prompt", "context_length_exceeded")


def test_a_field_of_the_other_route_names_that_route(url):
    """It was an unknown field 'messages', and was the user's meaning 'messages'?"""
    answer = httpx.post(url + "/v1/completions", json={"model": NAME, "messages": []}).json()["error"]["message"]
    assert answer.startswith("'messages' is a field of /v1/chat/completions, and not of this request.")
    asked = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "prompt": "a"}
    answer = httpx.post(url + "/v1/chat/completions", json=asked).json()
    assert answer["error"]["message"].startswith("'prompt' is a field of /v1/completions")
