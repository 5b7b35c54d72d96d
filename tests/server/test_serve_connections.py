"""Clients that leave, are slow, send too much or come and go hold nobody up, and their places are free again."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the [serve] extra")
from serving import ENDLESS, LIMITS, NAME, ask, connected, head, serving, tiny, wait_until

from glissando.generation import generate
from glissando.model import LanguageModel


@pytest.mark.slow
def test_greedily_the_model_never_comes_to_an_end(client):
    assert ask(client, "Once", max_tokens=600, temperature=0).usage.completion_tokens == 600


@pytest.mark.parametrize("stream", [True, False])
def test_who_disconnects_frees_the_place(server, stream):
    engine = server[0].served[NAME].engine
    body = json.dumps({**ENDLESS, "stream": stream}).encode()
    with connected(server[1]) as link:
        link.sendall(head(len(body)) + body)
        wait_until(lambda: engine.running == 1)
    written = engine.tokens_written
    wait_until(lambda: engine.running == 0, 2)
    assert engine.tokens_written - written < 20_000
    assert not server[0].groups


def test_further_requests_are_answered_in_turn(server):
    body = json.dumps({**ENDLESS, "max_tokens": 3}).encode()
    with connected(server[1]) as link:
        link.sendall((head(len(body)) + body) * 20)
        received = b""
        while received.count(b"HTTP/1.1 200") < 20 or not received.endswith(b"}"):
            received += link.recv(4096)
    assert received.count(b'"completion_tokens":3') == 20


@pytest.fixture(scope="module")
def hasty(model):
    """The address of a server that waits half a second for a request."""
    with serving(model, replace(LIMITS, patience=0.5)) as (_, url):
        yield url


def test_who_sends_slowly_is_cut_off(hasty):
    """Four clients at once, each of which stops at another place of its request."""
    began = time.monotonic()
    with contextlib.ExitStack() as links:
        slow = {
            sent: links.enter_context(connected(hasty))
            for sent in (b"", b"POST /v1/compl", head(500), head(500) + b'{"m')
        }
        for sent, link in slow.items():
            link.sendall(sent)
        for sent, link in slow.items():
            try:
                left = link.recv(100)
            except ConnectionResetError:
                left = b""
            assert left == b"", sent
            assert 0.3 < time.monotonic() - began < 8, sent


def drip(link: socket.socket, content: bytes) -> None:
    for byte in content:
        link.sendall(bytes([byte]))
        time.sleep(0.05)


def test_who_drips_is_cut_off(hasty):
    """A byte now and then is not enough: the whole request has its time."""
    began = time.monotonic()
    with connected(hasty) as link, pytest.raises((ConnectionResetError, BrokenPipeError)):
        drip(link, head(500) * 10)
    assert time.monotonic() - began < 8


@pytest.mark.slow
def test_who_reads_slowly_holds_nobody_up(server, client):
    engine = server[0].served[NAME].engine
    body = json.dumps({**ENDLESS, "stream": True, "logprobs": 20}).encode()
    with connected(server[1]) as link:
        link.sendall(head(len(body)) + body)
        wait_until(lambda: engine.running == 1)
        assert ask(client).choices[0].finish_reason == "length"
        wait_until(lambda: not server[0].groups, 40)  # cut off, and given up
        wait_until(lambda: engine.running == 0)


def test_an_idle_connection_serves_again(hasty):
    """Between requests a connection may rest, for longer than a request may take."""
    with connected(hasty) as link:
        for pause in (0.8, 0):
            link.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += link.recv(1000)
            assert answer.startswith(b"HTTP/1.1 200")
            time.sleep(pause)


def storm(url: str, model: LanguageModel, server: Any, clients: int, seconds: float) -> int:
    """Clients that ask at random and leave at random; every finished answer is checked. How many were."""
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
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


@pytest.mark.slow
def test_many_clients_that_come_and_go(model, server):
    assert storm(server[1], model, server[0], clients=8, seconds=1.0) > 5


@pytest.mark.serial
@pytest.mark.slow
def test_sixty_four_clients_for_a_minute():
    """Nothing hangs, nothing leaks, and every finished answer is the one that it would be alone."""
    import resource

    model = tiny()
    with serving(model, max_sessions=64) as (server, url):
        storm(url, model, server, 64, 5)
        before, threads = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, threading.active_count()
        assert storm(url, model, server, 64, 60) > 500
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024
        assert threading.active_count() <= threads
