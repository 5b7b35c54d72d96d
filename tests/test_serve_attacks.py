"""What costs a client little must not cost the server much: nobody else waits for it, and /health answers meanwhile."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette", reason="needs the [serve] extra")
import h11
import httpx2 as httpx
from serving import ENDLESS, NAME, connected, serving, tiny, wait_until

from glissando.cli import serve as verb
from glissando.errors import ConfigError
from glissando.model import LanguageModel
from glissando.serving.api import Server
from glissando.serving.http import BoundedConnection, Limits

LIMITS = Limits(max_prompt=2000, max_tokens=50_000, max_copies=8, patience=2.0)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny()


@pytest.fixture(scope="module")
def url(model) -> Iterator[str]:
    with serving(model, LIMITS) as (_, url):
        yield url


@contextlib.contextmanager
def healthy(url: str) -> Iterator[None]:
    """/health answers within 0.1 s, or as slowly as it does on this machine without an attack, at every time."""

    def probe() -> float:
        began = time.monotonic()
        assert httpx.get(url + "/health", timeout=30).status_code == 200
        return time.monotonic() - began

    slowest, took, over = max(probe() for _ in range(20)), [], threading.Event()

    def watch() -> None:
        took.append(probe())  # an attack may be over before the first wait
        while not over.wait(0.01):
            took.append(probe())

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield
        finally:
            over.set()
        watching.result()
    # A tenth may be slower: others use this machine too.
    assert sorted(took)[len(took) * 9 // 10] < max(0.1, 5 * slowest)
    assert max(took) < max(2.0, 20 * slowest)


# ---------------------------------------------------------------------- what is sent

LONG = 2**18 - 100
LISTS = [
    b'{"model":"tiny","prompt":[' + b"{}," * (LONG // 3) + b"1]}",
    b'{"model":"tiny","prompt":[' + b"-1," * (LONG // 3) + b"1]}",
    b'{"model":"tiny","prompt":"a","stop":[' + b"1," * (LONG // 2) + b"1]}",
    b'{"model":"tiny","prompt":"a","control":{' + b",".join(b'"%d":"x"' % n for n in range(20_000)) + b"}}",
    b"{" + b",".join(b'"%d":1' % n for n in range(25_000)) + b"}",
    b'{"model":"tiny","messages":[' + b"{}," * (LONG // 3) + b"{}]}",
    b'{"model":"tiny","messages":[' + b"1," * (LONG // 2) + b"1]}",
    b'{"model":"tiny","messages":[{"role":"user","content":[' + b"1," * (LONG // 2) + b"1]}]}",
    b'{"model":"tiny","prompt":' + b"[[[[]]]]," * (LONG // 9) + b"1]}",
    b'{"model":"tiny","prompt":' + b"9" * LONG + b"}",
    b'{"model":"tiny","prompt":"' + b"\\n" * (LONG // 2),
    b'"' * LONG,
]


def test_a_long_body_of_wrong_json_holds_nobody_up(url):
    """An error for each of 349,000 items took 6 to 11 s, in which no other client was answered."""
    with healthy(url):
        for body in LISTS:
            path = "/v1/chat/completions" if b"messages" in body else "/v1/completions"
            began = time.monotonic()
            got = httpx.post(url + path, content=body, headers={"content-type": "application/json"}, timeout=60)
            assert got.status_code == 400
            assert len(got.text) < 500
            assert time.monotonic() - began < 2


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A request as the schema has it, with values of other kinds here and there, and bytes that are none of it."""
    values: list[Any] = [None, True, 0, -1, 1.5, 1e300, "", "a", "\x00", [], [[]], [1, 2], ["a"], [[1], [2]], {}]
    values += [{"a": 1}, 2**70, "x" * 3000, [{"type": "text", "text": "a"}], [{"role": "user", "content": "a"}]]
    chat = rng.random() < 0.4
    body: dict[str, Any] = {"model": NAME, "max_tokens": 2}
    body |= {"messages": [{"role": "user", "content": "Once"}]} if chat else {"prompt": "Once"}
    names = [*body, "temperature", "top_p", "top_k", "n", "seed", "stop", "stream", "stream_options", "control", "user"]
    names += ["logprobs", "echo", "best_of", "suffix", "top_logprobs", "max_completion_tokens", "tools", "x"]
    for name in rng.sample(names, rng.choice([0, 1, 1, 1, 2, 4])):
        body[name] = rng.choice(values)
    content = bytearray(json.dumps(body).encode())
    if rng.random() < 0.4:
        for _ in range(rng.choice([1, 1, 5, 50])):
            at = rng.randrange(len(content) + 1)
            content[at : at + rng.choice([0, 1, 9])] = rng.randbytes(rng.choice([0, 1, 9]))
    return "/v1/chat/completions" if chat else "/v1/completions", bytes(content)


def fuzz(url: str, requests: int) -> None:
    rng, statuses = random.Random(0), []
    with httpx.Client(base_url=url, timeout=60) as web, healthy(url):
        for _ in range(requests):
            path, content = mutated(rng)
            got = web.post(path, content=content, headers={"content-type": "application/json"})
            statuses.append(got.status_code)
            assert got.status_code in (200, 400, 404, 413), (content, got.text)
            if got.status_code != 200:
                assert got.json()["error"]["message"], content
    assert min(statuses.count(200), statuses.count(400)) > requests // 10


@pytest.mark.slow
def test_random_requests_are_answered_or_refused(url):
    fuzz(url, 150)


@pytest.mark.serial
@pytest.mark.slow
def test_two_thousand_random_requests_are_answered_or_refused(url):
    fuzz(url, 2000)


CHUNKED = HEAD.partition(b"content-length")[0] + b"transfer-encoding: chunked\r\n\r\n"
LINES = {
    "chunks": (CHUNKED + b"1\r\nx\r\n" * 60_000, "413", "more than 256 chunks; send larger ones, or a content-length"),
    "headers": (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * 10_000 + b"\r\n", "431", "more than 100 headers"),
    "trailers": (CHUNKED + b"0\r\n" + b"a:\r\n" * 60_000 + b"\r\n", "431", "more than 100 headers; send fewer"),
}


def attack(url: str, sent: bytes) -> bytes:
    """What came back until the connection ended."""
    received = b""
    with connected(url) as link, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        link.sendall(sent)
        while part := link.recv(4096):
            received += part
    return received


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.slow
def test_sixteen_clients_of_many_short_lines_hold_nobody_up(url, kind):
    """60,000 chunks of a byte each, 360 KB on the wire: /health took 9 s."""
    sent = LINES[kind][0]
    with healthy(url), ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: attack(url, sent), range(16)))


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chunks", "million"])
def test_a_hundred_clients_of_many_short_lines_hold_nobody_up(url, kind):
    sent = CHUNKED + b"1\r\nx\r\n" * {"chunks": 60_000, "million": 1_000_000}[kind]
    with healthy(url), ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: attack(url, sent), range(100)))


@pytest.mark.parametrize("kind", LINES)
def test_short_lines_are_counted_before_they_cost(kind):
    """However many there are in what was read, no more than these and those of 4 KiB are parsed."""
    sent, status, message = LINES[kind]
    connection, events = BoundedConnection(h11.SERVER), []

    def parse() -> None:
        for first in range(0, len(sent), 4096):
            connection.receive_data(sent[first : first + 4096])
            while (event := connection.next_event()) is not h11.NEED_DATA:
                events.append(event)

    with pytest.raises(h11.RemoteProtocolError, match=message) as refused:
        parse()
    assert str(refused.value.error_status_hint) == status
    assert len(events) <= 258


def test_few_long_chunks_and_many_requests_are_taken(url):
    """The bounds are a request's, and not a connection's."""
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 1}).encode().ljust(200)
    chunked = CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with connected(url) as link:
        for _ in range(3):
            link.sendall(chunked)
            received = b""
            while not received.endswith(b"}]}"):
                received += link.recv(4096)
            assert received.startswith(b"HTTP/1.1 200")


def test_what_breaks_the_protocol_is_reported_in_json(url):
    received = attack(url, LINES["headers"][0][:3000] + b"\r\n")
    assert received.startswith(b"HTTP/1.1 431")
    assert (
        json.loads(received.partition(b"\r\n\r\n")[2])["error"]["message"]
        == "the request has more than 100 headers; send fewer"
    )
    assert attack(url, b"what\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_a_slow_reader_does_not_make_a_stopping_server_complain(model, caplog):
    asked = {"model": NAME, "prompt": [97] * 1900, "max_tokens": 0, "echo": True, "logprobs": 20}
    body = json.dumps(asked).encode()
    with contextlib.ExitStack() as links, serving(model) as (_, url):
        link = links.enter_context(connected(url, 1))
        logging.getLogger("uvicorn.error").addHandler(caplog.handler)  # which passes nothing on
        link.sendall(HEAD % len(body) + body)
        assert link.recv(12) == b"HTTP/1.1 200", "of a megabyte, which nobody takes"
    logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# ---------------------------------------------------------------------- pages of other origins


ORIGINS: list[tuple[dict[str, str], int]] = [
    ({}, 200),
    ({"origin": "http://HOST"}, 200),
    ({"origin": "http://HOST", "sec-fetch-site": "same-origin"}, 200),
    ({"origin": "https://by.a.proxy", "sec-fetch-site": "same-origin"}, 200),
    ({"sec-fetch-site": "none"}, 200),
    ({"origin": "http://evil.example"}, 403),
    ({"origin": "http://HOST.evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://["}, 403),
    ({"origin": "http://]["}, 403),
    ({"origin": "http://evil.example", "sec-fetch-site": "cross-site"}, 403),
    ({"origin": "http://localhost:1", "sec-fetch-site": "same-site"}, 403),
    ({"sec-fetch-site": "cross-site"}, 403),
]


def test_a_page_of_another_origin_makes_the_server_write_nothing(url):
    with httpx.Client(base_url=url, timeout=60) as web:
        for headers, status in ORIGINS:
            sent = {name: value.replace("HOST", urlsplit(url).netloc) for name, value in headers.items()}
            asked = {"model": NAME, "prompt": "Once", "max_tokens": 1}
            got = web.post("/v1/completions", json=asked, headers=sent)
            assert got.status_code == status, headers
            if status == 403:
                assert got.json()["error"]["code"] == "foreign_origin", headers
            assert web.get("/health", headers=sent).status_code == 200, headers


@pytest.mark.parametrize(
    ("host", "names"),
    [
        ("127.0.0.1", {"127.0.0.1", "localhost", "::1"}),
        ("127.9.9.9", {"127.0.0.1", "localhost", "::1", "127.9.9.9"}),
        ("127.1", {"127.0.0.1", "localhost", "::1", "127.1"}),
        ("::1", {"127.0.0.1", "localhost", "::1"}),
        ("0:0:0:0:0:0:0:1", {"127.0.0.1", "localhost", "::1", "0:0:0:0:0:0:0:1"}),
        ("0.0.0.0", None),
        ("192.0.2.1", None),
    ],
)
def test_every_loopback_host_has_names_of_its_own(host, names):
    """By any other a page elsewhere may have pointed its own name here."""
    found = verb.own_names(host)
    assert (found if found is None else set(found)) == names


# ---------------------------------------------------------------------- connections


@pytest.mark.slow
def test_who_takes_a_trickle_is_cut_off(model):
    """A few bytes now and then kept an answer, and its place, for as long as the reader liked."""
    body = json.dumps({**ENDLESS, "stream": True, "logprobs": 20}).encode()
    with serving(model, LIMITS) as (server, url), connected(url, 1) as link:
        link.sendall(HEAD % len(body) + body)
        wait_until(lambda: server.served[NAME].engine.running == 1)
        until = time.monotonic() + 40
        with contextlib.suppress(ConnectionResetError):
            while server.groups and time.monotonic() < until:
                link.recv(100)
                time.sleep(0.1)
        assert not server.groups
        wait_until(lambda: server.served[NAME].engine.running == 0)


def test_what_clients_send_is_not_logged(model, caplog):
    with serving(model) as (_, url):
        logger = logging.getLogger("uvicorn.error")  # which passes nothing on
        logger.addHandler(caplog.handler)
        logger.setLevel(Server({NAME: model}).config().log_level.upper())
        assert attack(url, b"what\r\n\r\n").startswith(b"HTTP/1.1 400")
        logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_the_proxy_of_the_page_is_one_that_nginx_takes(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "serving.md").read_text("utf-8")
    snippet = page.partition("```nginx\n")[2].partition("```")[0]
    lines = [line.strip() for line in snippet.splitlines()]
    assert all(line.endswith((";", "{", "}")) for line in lines)
    assert snippet.count("{") == snippet.count("}") == 2
    zones = {word.partition(":")[0] for word in snippet.split() if word.startswith("zone=") and ":" in word}
    assert zones == {"zone=clients", "zone=requests"}
    assert "limit_conn clients 8;" in lines
    if (nginx := shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")) is None:
        pytest.skip("nginx is not installed, which would check the rest")
    paths = "".join(f"{kind}_temp_path {tmp_path};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (tmp_path / "all.conf").write_text(f"pid {tmp_path}/pid; events {{}} http {{ access_log off; {paths} {snippet} }}")
    subprocess.run([nginx, "-t", "-p", tmp_path, "-c", tmp_path / "all.conf", "-e", "stderr"], check=True)


# ---------------------------------------------------------------------- signals and keys


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_streams(model, number):
    server, came, received = Server({NAME: model}, limits=LIMITS), [], []

    def client(url: str) -> None:
        with httpx.stream("POST", url + "/v1/completions", json={**ENDLESS, "stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            received.append(next(lines))
            os.kill(os.getpid(), number)
            received.extend(lines)

    def started(line: str, **options: Any) -> None:
        thread.append(threading.Thread(target=client, args=(line.split()[2],)))
        thread[0].start()

    thread: list[threading.Thread] = []
    before = signal.signal(number, lambda *_: came.append(number))
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(verb, "print", started, raising=False)
            verb.listen(server.config(port=0), NAME, server.runner.close, verb.ABOUT)
    finally:
        signal.signal(number, before)
    thread[0].join(20)
    assert came == [number], "what the process would do by itself comes after the streams' end"
    assert [line for line in received if line][-1].startswith('data: {"error":{"message":"the server is stopping')


def test_keys_come_from_the_environment(monkeypatch):
    monkeypatch.delenv(verb.KEY, raising=False)
    assert verb.read_keys() == []
    monkeypatch.setenv(verb.KEY, "one\n\n  two \n")
    assert verb.read_keys() == ["one", "two"]
    monkeypatch.setenv(verb.KEY, " ")
    with pytest.raises(ConfigError, match=f"{verb.KEY} holds no key, so that anyone could use the server"):
        verb.read_keys()


def test_any_of_several_keys_will_do(model):
    with serving(model, LIMITS, api_key=["one", "two"]) as (_, url):
        for key, status in (("one", 200), ("two", 200), ("three", 401), ("onetwo", 401)):
            got = httpx.get(url + "/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=60)
            assert got.status_code == status
