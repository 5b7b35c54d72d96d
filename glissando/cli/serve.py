"""glissando serve: a run behind OpenAI's HTTP interface, and a page to play with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from glissando.cli.options import Options, add_inference_options, inference_overrides, number, parse, parser_for, whole
from glissando.errors import ConfigError, GlissandoError, MissingExtraError

EXAMPLE = "glissando serve runs/first --port 8000"
KEY = "GLISSANDO_API_KEY"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main(arguments: Sequence[str]) -> None:
    """Serve until Ctrl-C."""
    parser = parser_for("serve", "Serve a run over HTTP, as OpenAI's interface does, and a page at /.", EXAMPLE)
    parser.add_argument("run", help="run directory, or one of its checkpoints")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; the default is this machine alone")
    parser.add_argument("--port", type=whole, default=8000, help="0 takes a free one")
    parser.add_argument("--name", help="the model's name; by default the run's")
    parser.add_argument("--api_key", help=f"asked of clients; also read from {KEY}")
    parser.add_argument("--chat_template", metavar="FILE", help="Jinja file: messages to a prompt")
    parser.add_argument("--max_sessions", type=whole, default=64, help="texts written at a time; others wait")
    parser.add_argument("--max_waiting", type=whole, default=256, help="texts that may wait; beyond, 429")
    parser.add_argument("--max_prompt", type=whole, default=16384, help="tokens of a prompt")
    parser.add_argument("--max_tokens", type=whole, default=4096, help="tokens that a text may ask for")
    parser.add_argument("--max_body", type=whole, default=2**20, help="bytes of a request")
    parser.add_argument("--patience", type=number, default=30.0, help="seconds to send a request and to take an answer")
    parser.add_argument(
        "--prefix_mib", type=whole, default=256, help="kept for prompts' states, to go on from; 0: none"
    )
    parser.add_argument("--threads", type=whole, help="of PyTorch; by default one a core")
    add_inference_options(parser)
    options = parse(parser, arguments)
    _check(options)
    serve(options)


def _check(o: Options) -> None:
    lowest = {"port": 0, "prefix_mib": 0, "max_waiting": 0}
    counts = ("max_sessions", "max_prompt", "max_tokens", "max_body", "threads")
    for name in (*lowest, *counts):
        least = lowest.get(name, 1)
        if getattr(o, name) is not None and getattr(o, name) < least:
            raise ConfigError(f"--{name} must be at least {least}, got {getattr(o, name)}")
    if o.port > 65535:
        raise ConfigError(f"--port must be at most 65535, got {o.port}")
    for given, key in (("--api_key", o.api_key), (KEY, os.environ.get(KEY))):
        if key == "":
            raise ConfigError(f"{given} is empty, and anyone could come in; give a key, or leave {given} out")
    if not 0 < o.patience < float("inf"):
        raise ConfigError(f"--patience must be a positive number of seconds, got {o.patience}")


def serve(o: Options) -> None:
    """Open the run and listen. Raises MissingExtraError without the packages, RunError for what is no run."""
    try:
        import uvicorn

        from glissando.serving.api import Server
        from glissando.serving.limits import Limits, patient_protocol
        from glissando.serving.planning import ChatTemplate
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"serving needs {error.name}: pip install -e '.[serve]' in a checkout") from error
    import torch

    from glissando.loading import load

    if o.threads is not None:
        torch.set_num_threads(o.threads)
    model = load(o.run, inference_overrides(o))
    key = o.api_key or os.environ.get(KEY)
    limits = Limits(
        max_prompt=o.max_prompt, max_tokens=o.max_tokens, max_copies=o.max_sessions, max_body=o.max_body,
        patience=o.patience,
    )  # fmt: skip
    name = o.name or Path(o.run).resolve().name
    local = o.host in _LOOPBACK
    server = Server(
        model, name, limits=limits, api_key=key, template=ChatTemplate(o.chat_template),
        hosts=_LOOPBACK if local else None,
        max_sessions=o.max_sessions, max_waiting=o.max_waiting, prefix_bytes=o.prefix_mib * 2**20,
    )  # fmt: skip
    if not local and key is None:
        print(f"anyone who reaches {o.host} can use this server: set --api_key or {KEY} to ask for a key")
    config = uvicorn.Config(
        server.app, host=o.host, port=o.port, http=patient_protocol(limits.patience), ws="none",
        limit_concurrency=limits.connections, timeout_keep_alive=int(max(1, limits.patience)), access_log=False,
        log_level="warning", server_header=False, timeout_graceful_shutdown=5,
    )  # fmt: skip
    _run(config, name, server.engine.close)


def _run(config: Any, name: str, give_up: Callable[[], None]) -> None:
    """`give_up` ends the answers in progress, so that stopping waits for no text to end."""
    import uvicorn

    class Announcing(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                host, port = self.servers[0].sockets[0].getsockname()[:2]
                host = f"[{host}]" if ":" in host else host
                print(f"{name} at http://{host}:{port} (page at /, completions at /v1); Ctrl-C stops", flush=True)

        async def shutdown(self, sockets: Any = None) -> None:
            give_up()
            await super().shutdown(sockets)

    server = Announcing(config)
    try:
        server.run()
    except SystemExit as error:  # as uvicorn ends where it cannot listen
        raise _not_listening(config) from error
    if not server.started:
        raise _not_listening(config)


def _not_listening(config: Any) -> GlissandoError:
    return GlissandoError(
        f"cannot listen at {config.host}:{config.port}: the port is taken or not allowed, or the host is no address of "
        "this machine; choose another --port or --host"
    )
