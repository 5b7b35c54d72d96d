"""A server in a thread, for tests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from loud import loud

from glissando.model import LanguageModel
from glissando.serving.api import Server
from glissando.serving.limits import Limits

NAME = "tiny"


def tiny(preset: str = "liquid-ssm-nano", **options: Any) -> LanguageModel:
    """A small one."""
    return loud(preset, hidden_size=32, **options)


@contextlib.contextmanager
def serving(model: LanguageModel, limits: Limits | None = None, **options: Any) -> Iterator[tuple[Server, str]]:
    """The server and its address."""
    server = Server({NAME: model}, limits=limits, **options)
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
        yield server, f"http://127.0.0.1:{web.servers[0].sockets[0].getsockname()[1]}"
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
