"""What clients of several kinds send, and what each is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the [serve] extra")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
import httpx2 as httpx  # noqa: E402
from serving import NAME, serving, tiny  # noqa: E402

from glissando.generation import generate  # noqa: E402
from glissando.model import LanguageModel  # noqa: E402
from glissando.serving.limits import Limits  # noqa: E402

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
        told = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=5, seed=1)
        messages += [told.choices[0].message, {"role": "user", "content": "and"}]
    assert len(messages) == 5


def test_what_is_empty_beside_an_answers_text_is_dropped(url):
    empty = {"refusal": None, "audio": None, "function_call": None, "tool_calls": [], "annotations": []}
    assert chat(url, {"role": "assistant", "content": "a", **empty}).status_code == 200
    told = chat(url, {"role": "user", "content": "a"}, {"role": "assistant", "content": "a", "tool_calls": [{"id": 1}]})
    assert told.status_code == 400
    assert told.json()["error"]["message"] == "unknown field 'tool_calls' in messages.1. Leave it out."
    assert told.json()["error"]["param"] == "messages"


def test_an_unknown_field_inside_a_message_is_told_by_its_path(url):
    told = chat(url, {"role": "user", "content": "a", "nam": "Ben"})
    assert told.json()["error"]["message"] == "unknown field 'nam' in messages.0. Did you mean 'name'?"
    told = chat(url, {"role": "user", "content": [{"type": "text", "text": "a", "txt": "b"}]})
    assert told.json()["error"]["message"].startswith("unknown field 'txt' in messages.0.content.0.")


@pytest.mark.parametrize("content", ["On\x0bce\x00", [{"type": "text", "text": "On\x0bce\x00"}]])
def test_what_the_model_wrote_may_hold_control_bytes(url, model, content):
    """An untrained model writes them; what people write must not hold any."""
    told = chat(url, {"role": "assistant", "content": content}).json()["choices"][0]["message"]["content"]
    assert [told] == generate(model, "On\ufffdce\ufffd", max_tokens=5, seed=1, temperature=1.0)
    refused = chat(url, {"role": "user", "content": content})
    assert refused.status_code == 400
    assert "character 2 is the control byte 0x0b" in refused.json()["error"]["message"]
