"""What texts take is known before they are taken up: memory has a bound, and requests start in order."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from engines import PRESETS, model_of, request_for, run_down, submit
from slow import slow_where

from glissando.allocator import return_freed_memory
from glissando.errors import ConfigError
from glissando.generation import generate
from glissando.machine import readable, resident_bytes
from glissando.model import LanguageModel
from glissando.serving.engine import Engine, TooLargeError
from glissando.serving.memory import Footprint
from glissando.state import state_bytes

MEBI = 2**20
ENDLESS = [name for name in PRESETS if name != "minimal-transformer"]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return model_of("transformer-nano")


def states(engine: Engine) -> int:
    """Bytes of all states that there are."""
    texts = sum(batch.step.bytes for batch in engine.batches)
    return texts + sum(state_bytes(reading.state) for reading in engine.reading) + engine.prefixes.bytes


# ---------------------------------------------------------------------- what is counted


@pytest.mark.parametrize("preset", slow_where(PRESETS.keys() - {"transformer-nano", "liquid-ssm-nano"}, ENDLESS))
def test_a_states_bytes_are_known_before(preset):
    """Read in pieces, and written to: never more than was said, and of what grows not much less."""
    model = model_of(preset)
    footprint, ids = Footprint(model), torch.randint(256, (1, 700))
    state = model.init_state(1)
    with torch.no_grad():
        for at, size in ((0, 100), (100, 500), (600, 1), (601, 1), (602, 1)):
            _, state = model.features(ids[:, at : at + size], state, donate=True)
            assert state_bytes(state) <= footprint.state(at + size) <= max(5 * state_bytes(state), 200_000)


@pytest.mark.slow
def test_texts_stay_within_the_memory_and_come_out_as_ever(model):
    """Only some of 24 texts behind six prompts fit at a time."""
    engine = Engine(model, chunk=128)
    request = request_for(model, "ab " * 150, 40)
    engine = Engine(model, chunk=128, memory=int(1.5 * engine.needs.alone(replace(request, copies=4))))
    free = Engine(model, chunk=128)
    requests = [replace(request_for(model, f"{n} " + "ab " * 150, 40, seed=n), copies=4) for n in range(6)]
    listener, most, rows = [submit(engine, each)[1] for each in requests], 0, 0
    assert engine.waiting == 24
    for _ in range(3000):
        if not (engine.running or engine.waiting):
            break
        engine.step()
        most, rows = max(most, states(engine)), max(rows, engine.running)
        assert engine.used <= engine.memory
    assert 0.1 * engine.memory < most <= engine.memory
    assert 2 <= rows < 24, "all at once would not fit"
    assert sum(len(r.ids) for r in requests) == engine.tokens_read, "a prompt is read once for all its texts"
    for number, each in enumerate(listener):
        expected = [submit(free, replace(requests[number]))[1]]
        run_down(free)
        assert [one.text for one in each] == [one.text for one in expected[0]]
        assert all(one.finish for one in each)


def test_what_never_fits_is_refused_with_its_number_and_the_budget(model):
    engine = Engine(model, memory=8 * MEBI)
    with pytest.raises(
        TooLargeError, match=r"1 texts behind a prompt of 6,001 tokens, of 20 more each, take [\d.]+ MiB of memory"
    ):
        submit(engine, request_for(model, "x" * 6000))
    with pytest.raises(TooLargeError, match=r"1,000,000 more each, take .* and there are 8\.0 MiB for all texts"):
        submit(engine, request_for(model, "x", 10**6))
    assert (engine.running, engine.waiting) == (0, 0)
    [listener] = submit(engine, request_for(model, "Once", 5))[1]
    run_down(engine)
    assert [listener.text] == generate(model, ["Once"], max_tokens=5)
    with pytest.raises(ConfigError, match=r"the shortest text takes .* and there are 1\.0 KiB"):
        Engine(model, memory=1024)


def test_states_that_are_only_kept_make_room(model):
    request = request_for(model, "ab " * 100, 20)
    alone = Engine(model).needs.alone(request)
    engine = Engine(model, memory=int(1.2 * alone), prefix_bytes=alone)
    for n in range(4):
        [listener] = submit(engine, replace(request, ids=(*request.ids, n)))[1]
        run_down(engine)
        assert listener.finish
        assert states(engine) <= engine.memory


def test_a_waiting_giant_comes_before_later_requests(model):
    small, giant = request_for(model, "a", 8), request_for(model, "ab " * 100, 20)
    engine = Engine(model, max_sessions=4, memory=int(1.05 * Engine(model).needs.alone(giant)))
    submit(engine, small)
    engine.step()
    [listener] = submit(engine, giant)[1]
    for _ in range(200):
        if listener.finish:
            break
        while engine.waiting < 3:
            submit(engine, small)
        engine.step()
    assert listener.finish


def test_freed_memory_goes_back_to_the_system():
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("another C library decides for itself")
    blocks = [torch.ones(4096) for _ in range(4096)]  # 64 MiB in pieces that the allocator keeps
    kept = blocks[::256]
    before = resident_bytes(torch.device("cpu"))
    del blocks
    return_freed_memory()
    assert before - resident_bytes(torch.device("cpu")) > 40 * MEBI
    assert len(kept) == 16


@pytest.mark.parametrize(("length", "times"), [(30, 0), (200, 6)])
def test_freed_memory_goes_back_while_a_long_prompt_is_read(model, monkeypatch, length, times):
    """Without it 32 answers behind 16,384 tokens took up to 452 MiB: `python -m benchmarks serving-memory`."""
    calls: list[None] = []
    monkeypatch.setattr("glissando.serving.engine.return_freed_memory", lambda: calls.append(None))
    engine = Engine(model, chunk=8)
    submit(engine, request_for(model, "a" * length, 200))
    while engine.waiting or engine.reading:
        engine.step()
    assert len(calls) == times


def test_sizes_as_people_read_them():
    sizes = [0, 1023, 1536, 300 * MEBI, 2**41]
    assert [readable(size) for size in sizes] == ["0 bytes", "1,023 bytes", "1.5 KiB", "300 MiB", "2,048 GiB"]


# ---------------------------------------------------------------------- order


def test_requests_start_in_their_order(model):
    """All texts of one before those of the next, which would find places first."""
    engine, pieces = Engine(model, max_sessions=2), []
    for request, copies in enumerate((2, 1, 1)):
        listeners = [partial(lambda text, piece: pieces.append(text), (request, copy)) for copy in range(copies)]
        engine.submit(replace(request_for(model, "a", 4), copies=copies), listeners)
    run_down(engine)
    assert list(dict.fromkeys(pieces)) == [(0, 0), (0, 1), (1, 0), (2, 0)]


def test_prompt_states_are_each_keys_own(model):
    """Or the time that an answer takes would show what others have sent."""
    engine = Engine(model)
    for key, reused in ((0, 0), (1, 0), (1, 10), (None, 0), (0, 10)):
        before = engine.tokens_reused
        submit(engine, request_for(model, "Once upon", 1, key=key))
        run_down(engine)
        assert engine.tokens_reused - before == reused


# ---------------------------------------------------------------------- the server


def test_requests_that_never_fit_are_reported_so_over_http(model):
    pytest.importorskip("starlette", reason="needs the [serve] extra")
    import httpx2 as httpx
    from serving import NAME, serving

    with serving(model, memory=8 * MEBI) as (_, url):
        asked = {"model": NAME, "prompt": "x" * 6000, "n": 32}
        reply = httpx.post(url + "/v1/completions", json=asked, timeout=60)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "memory_exceeded"
        assert "8.0 MiB for all texts" in reply.json()["error"]["message"]


def echoed(lists: int, length: int = 8500) -> dict:
    """Prompts whose every token comes back with the likeliest 20."""
    prompts = [[32 + (7 * n + number) % 60 for n in range(length)] for number in range(lists)]
    return {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 20}


def test_the_memory_of_an_answer_is_free_when_it_is_sent_and_not_before(model):
    pytest.importorskip("starlette", reason="needs the [serve] extra")
    from serving import NAME, connected, head, serving, wait_until

    body = json.dumps({"model": NAME, **echoed(2, 1000)}).encode()
    with serving(model, memory=64 * MEBI) as (server, url):
        engine = server.served[NAME].engine
        with connected(url, 1) as link:
            link.sendall(head(len(body)) + body)
            wait_until(lambda: engine.tokens_read == 2 * 1001 and not engine.running)
            assert engine.used > 2 * 1001 * 20 * 120, "the answer waits for its reader"
        wait_until(lambda: engine.used == 0)


def test_an_answer_that_never_fits_is_refused(model):
    """30 prompts of 8,500 tokens fitted one by one, and their answer did not: 1,524 MiB under a limit of 900."""
    pytest.importorskip("starlette", reason="needs the [serve] extra")
    import httpx2 as httpx
    from serving import NAME, serving

    with serving(model, memory=64 * MEBI) as (server, url):
        for asked, status in ((echoed(20, 1000), 413), (echoed(3, 1000), 200)):
            answer = httpx.post(url + "/v1/completions", json={"model": NAME, **asked}, timeout=60)
            assert answer.status_code == status, answer.text[:300]
        answer = httpx.post(url + "/v1/completions", json={"model": NAME, **echoed(20, 1000)}, timeout=60)
        assert (
            "of memory with the whole answer, and there are 64.0 MiB for all texts" in answer.json()["error"]["message"]
        )
        assert server.served[NAME].engine.used == 0


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.parametrize(("lists", "clients"), [(30, 1), (8, 6), (1, 24)])
def test_long_answers_stay_within_the_memory_of_the_process(tmp_path, lists, clients):
    import http.client

    LanguageModel.from_preset("liquid-ssm-nano").save(tmp_path / "model")
    command = [sys.executable, "-m", "glissando", "serve", str(tmp_path / "model"), "--port", "0"]
    with subprocess.Popen([*command, "--memory", "900MiB"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().partition("127.0.0.1:")[2].split()[0])
            body = json.dumps({"model": "model", **echoed(lists)}, separators=(",", ":"))

            def one(_: int) -> int:
                link = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
                link.request("POST", "/v1/completions", body, {"content-type": "application/json"})
                answer = link.getresponse()
                answer.read()
                link.close()
                return answer.status

            with ThreadPoolExecutor(clients) as pool:
                statuses = set(pool.map(one, range(clients)))
            peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        finally:
            process.terminate()
    assert statuses == ({413} if lists == 30 else {200})
    assert peak
    assert int(peak[1]) < 900 * 1024


@pytest.mark.serial
@pytest.mark.slow
def test_a_thousand_long_requests_of_many_texts_stay_within_the_budget(tmp_path):
    """Each takes nearly all of the memory, and there are always more than may wait."""
    import http.client

    budget = 1400
    LanguageModel.from_preset("transformer-nano").save(tmp_path / "model")
    command = [sys.executable, "-m", "glissando", "serve", str(tmp_path / "model"), "--port", "0"]
    with subprocess.Popen([*command, "--memory", f"{budget}MiB"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().partition("127.0.0.1:")[2].split()[0])
            body = json.dumps({"model": "model", "prompt": "ab " * 1333, "n": 10, "max_tokens": 4})

            def one(_: int) -> tuple[int, int]:
                link = http.client.HTTPConnection("127.0.0.1", port, timeout=3000)
                link.request("POST", "/v1/completions", body, {"content-type": "application/json"})
                answer = link.getresponse()
                answer.read()
                link.close()
                found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
                return answer.status, int(found[1]) * 1024 if found else 0

            with ThreadPoolExecutor(40) as pool:
                response = list(pool.map(one, range(1000)))
            peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        finally:
            process.terminate()
    assert {status for status, _ in response} == {200, 429}
    assert peak
    assert int(peak[1]) * 1024 < 1.2 * budget * MEBI
