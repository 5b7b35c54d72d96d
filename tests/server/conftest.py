"""What the tests of the server share: a small model, the server of it, OpenAI's client and plain HTTP."""

from __future__ import annotations

import pytest

from glissando.model import LanguageModel

# Servers and clients need extras, without which these files are skipped: they are imported late.


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    from serving import tiny

    return tiny()


@pytest.fixture(scope="module")
def server(model):
    from serving import LIMITS, serving

    with serving(model, LIMITS) as both:
        yield both


@pytest.fixture(scope="module")
def client(server):
    import openai

    with openai.OpenAI(base_url=server[1] + "/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def web(server):
    import httpx2

    with httpx2.Client(base_url=server[1], timeout=30) as web:
        yield web
