"""glissando serve: a run behind OpenAI's HTTP interface, and a page to play with it."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
import re
import socket
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from glissando.cli.inference import open_model, require_step
from glissando.cli.options import COMPUTING, Options, Parser, at_least, choose_threads, parse, whole
from glissando.errors import ConfigError, GlissandoError, MissingExtraError
from glissando.progress import never_silent

EXAMPLE = "glissando serve runs/first --port 8000"
KEY = "GLISSANDO_API_KEY"
ABOUT = "page at /, completions at /v1"
#: texts written at a time, for which the number of threads is chosen
_ROWS = 8
#: the default; links to a page stay valid from one start to the next
PORT = 8000
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main(arguments: Sequence[str]) -> None:
    """Serve until Ctrl-C."""
    parser = Parser("serve", "Serve a run over HTTP, as OpenAI's interface does, and a page at /.", EXAMPLE)
    add = parser.add_argument
    add("run", "run directory or checkpoint; give several for several models", nargs="+")
    host = f"address to listen on, by default only reachable from this machine; {KEY} has the keys to ask for"
    add("--host", host, default="127.0.0.1")
    add("--port", "port, 8000 by default, or a free one where that is taken; 0: a free one", port)
    name = "name of the model, by default that of its folder; once for each run, in the same order"
    add("--name", name, action="append")
    add("--max_sessions", "largest number of active texts; others wait", at_least(1), 64)
    add("--max_prompt", "largest number of tokens of a prompt", at_least(1), 16384)
    add("--max_tokens", "largest number of tokens of a text", at_least(1), 4096)
    add("--prefix_mib", "MiB for cached states of prompts; 0: none", at_least(0), 256)
    memory = "memory limit of the process, such as 2GiB; by default half of the available memory"
    add("--memory", memory, size, metavar="SIZE")
    add("--open", "open the playground in a web browser", action="store_true")
    parser.add_shared("weights", "step", "caches", "lookup", *COMPUTING)
    options = parse(parser, arguments)
    serve(options)


def port(text: str) -> int:
    """A port's number."""
    if not 0 <= (number := whole(text)) <= 65535:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 65535, got {number}")
    return number


def size(text: str) -> int:
    """Bytes of 2GiB or 800MiB."""
    if (parsed := re.fullmatch(r"(\d+(?:\.\d+)?) ?([MG])iB", text)) is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 2GiB or 800MiB, got {text!r}")
    return int(float(parsed[1]) * {"M": 2**20, "G": 2**30}[parsed[2]])


def port_of(o: Options) -> int:
    """The requested port; without a request PORT, or 0, any free one, with a line where PORT is taken.

    Raises GlissandoError where the requested one is taken, before a model is opened.
    """
    number = PORT if o.port is None else o.port
    try:
        socket.create_server((o.host, number), family=socket.AF_INET6 if ":" in o.host else socket.AF_INET).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            if o.port is not None:
                fix = "choose another --port; 0 is a free one"
                raise GlissandoError(f"cannot listen at {o.host}:{number}: the port is taken; {fix}") from error
            print(f"port {PORT} is taken: listening at a free one; --port chooses one that stays the same", flush=True)
            return 0
    return number  # listening says what else is wrong


def read_keys() -> list[str]:
    """The keys that are asked for; none: anyone may come. Raises ConfigError for none where some are announced."""
    text = os.environ.get(KEY)
    keys = (text or "").split()
    if text is not None and not keys:
        raise ConfigError(f"{KEY} holds no key, so that anyone could use the server; write one or several, or unset it")
    return keys


def _named(o: Options) -> dict[str, str]:
    """The runs by the names of their models. Raises ConfigError for names that are not one for each run."""
    names = o.name or [Path(run).resolve().name for run in o.run]
    if len(names) != len(o.run):
        raise ConfigError(f"{len(o.run)} runs and {len(names)} names are given; give --name once for each run")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        fix = " ".join(f"--name {twice}-{number}" for number in range(1, len(names) + 1))
        raise ConfigError(f"several models would have the name {twice!r}; name each of them, as {fix}")
    return dict(zip(names, o.run, strict=True))


def own_names(host: str) -> list[str] | None:
    """What a server on this machine alone is called by; None where others reach it, by names that it cannot know."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:  # no address: listening says so
        return None
    local = all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
    return [*_LOOPBACK, *addresses, host] if local else None


def access(host: str) -> tuple[list[str], list[str] | None]:
    """The keys that are asked for, and the names that requests may call the server by; a line where anyone may come."""
    keys, hosts = read_keys(), own_names(host)
    if hosts is None and not keys:
        print(f"anyone who reaches {host} can use this server: set {KEY} to ask for a key")
    return keys, hosts


def missing(error: ModuleNotFoundError) -> MissingExtraError:
    """The error for a package that serving needs."""
    return MissingExtraError(f"serving needs {error.name}: pip install -e '.[serve]' in a checkout")


def serve(o: Options) -> None:
    """Open the runs and listen. Raises MissingExtraError without the packages, RunError for what is no run."""
    port = port_of(o)
    with never_silent():
        server = _server(o)
    listen(server.config(host=o.host, port=port), ", ".join(_named(o)), server.runner.close, ABOUT, o.open)


def _server(o: Options) -> Any:
    """The models opened, and what serves them; nothing listens yet."""
    try:
        from glissando.machine import readable, resident_bytes
        from glissando.serving.api import Server
        from glissando.serving.http import Limits
        from glissando.serving.memory import Footprint
        from glissando.serving.planning import about
    except ModuleNotFoundError as error:
        raise missing(error) from error
    from glissando.allocator import return_freed_memory

    runs = _named(o)
    keys, hosts = access(o.host)
    memory = o.memory
    models = {name: open_model(o, run) for name, run in runs.items()}
    for model in models.values():
        require_step(o, model)
    choose_threads(o, _ROWS, max(model.config.hidden_size for model in models.values()))
    if memory is not None:
        for model in models.values():
            Footprint.of(model)  # what is made once for all texts is there before they are
        return_freed_memory()
        taken = resident_bytes(model.embedding.weight.device)
        if taken >= memory:
            raise ConfigError(
                f"--memory {readable(memory)} is less than the {readable(taken)} that this process uses before any text"
            )
        memory -= taken
    return Server(
        models, about={name: about(run) for name, run in runs.items()},
        limits=Limits(max_prompt=o.max_prompt, max_tokens=o.max_tokens, max_copies=o.max_sessions), api_key=keys,
        hosts=hosts, max_sessions=o.max_sessions, prefix_bytes=o.prefix_mib * 2**20, memory=memory, step=o.step,
        lookup=o.lookup,
    )  # fmt: skip


def listen(config: Any, name: str, give_up: Callable[[], None], about: str, show: bool = False) -> None:
    """Serve until Ctrl-C.

    Args:
        config: uvicorn's.
        name: What is served.
        give_up: Ends the answers in progress, so that stopping waits for none of them.
        about: What is found at which path.
        show: Whether to open the page in a browser.
    """
    import uvicorn

    class Announcing(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                host, port = self.servers[0].sockets[0].getsockname()[:2]
                host = f"[{host}]" if ":" in host else host
                print(f"{name} at http://{host}:{port} ({about}); Ctrl-C stops", flush=True)
                if show:
                    webbrowser.open(f"http://{host}:{port}")

        async def shutdown(self, sockets: Any = None) -> None:
            give_up()
            await super().shutdown(sockets)

    server = Announcing(config)
    failure: BaseException | None = None
    try:
        server.run()
    except SystemExit as error:  # as uvicorn ends where it cannot listen
        failure = error
    if not server.started:
        raise GlissandoError(
            f"cannot listen at {config.host}:{config.port}: the port is taken or not allowed, or the host is no "
            "address of this machine; choose another --port or --host"
        ) from failure
