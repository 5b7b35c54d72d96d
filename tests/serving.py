"""A server in a thread, for tests."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from loud import loud

from glissando.model import LanguageModel
from glissando.serving.api import Server
from glissando.serving.http import Limits

with contextlib.suppress(ModuleNotFoundError):
    import httpcore2

    # Each of its clients would read all certificates of the machine for 40 ms, and asks for http.
    httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)

NAME = "tiny"
#: greedily, the model that `tiny` makes never comes to an end
ENDLESS = {"model": NAME, "prompt": "Once", "max_tokens": 50_000, "temperature": 0}
LIMITS = Limits(max_prompt=200, max_tokens=50_000, max_copies=8, max_body=50_000, patience=2.0)


def tiny(preset: str = "liquid-ssm-nano", **options: Any) -> LanguageModel:
    """A small one, whose depth is short unless `options` say otherwise."""
    return loud(preset, **{"hidden_size": 32, "depth": {"layers": 2}} | options)


@contextlib.contextmanager
def serving(model: LanguageModel, limits: Limits | None = None, **options: Any) -> Iterator[tuple[Server, str]]:
    """The server and its address."""
    server = Server({NAME: model}, limits=limits, **options)
    with running(server) as url:
        yield server, url


@contextlib.contextmanager
def running(server: Any) -> Iterator[str]:
    """The address of a server that runs in a thread."""
    config = server.config(port=0, log_level="error", timeout_graceful_shutdown=2)
    web = uvicorn.Server(config)
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not web.started:
            assert thread.is_alive(), "the server does not start"
            assert time.monotonic() < deadline, "the server takes too long to start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{web.servers[0].sockets[0].getsockname()[1]}"
    finally:
        web.should_exit = True
        thread.join(20)
    assert not thread.is_alive(), "the server does not stop"


def wait_until(true: Any, seconds: float = 10.0) -> None:
    """Until `true()` is; fails where that takes too long."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.01)


def ask(client: Any, prompt: Any = "Once upon a time", **options: Any) -> Any:
    """A completion by OpenAI's client."""
    return client.completions.create(model=NAME, prompt=prompt, **{"max_tokens": 12, "seed": 3, **options})


def connected(url: str, receives: int = 4096) -> socket.socket:
    """A connection whose client takes up few bytes at a time."""
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
    link.settimeout(20)
    link.connect((urlsplit(url).hostname, urlsplit(url).port))
    return link


def head(length: int) -> bytes:
    """That of a request whose body has so many bytes."""
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % length
    )
