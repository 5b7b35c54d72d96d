"""Threads on a machine that has other work: rates while a busy loop runs on each core, beside those of a quiet machine.

Three processes hold the same model and take turns, quiet and busy in turn:
    chosen     as the program does: waiting briefly, as many threads as a measurement finds fastest now
    spinning   all threads, and OpenMP's own way to wait
    one        one thread
A sample during which other programs used more than a tenth of a core is taken once more.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.speed import Row
from glissando.threads import use_threads

PURPOSES = ("training", "decoding")
_HOWS = ("chosen", "spinning", "one")
_PRESET = "transformer-nano"
_SECONDS = 1.0
#: how threads wait is settled before torch is imported
_WORKER = """
import sys
from glissando.threads import wait_briefly
if sys.argv[1] == "chosen":
    wait_briefly()
from benchmarks.threads import measure
measure(sys.argv[1])
"""
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
_TICK = os.sysconf("SC_CLK_TCK")


def busy(purpose: str, rounds: int) -> Row:
    """Tokens/s with a busy loop on each core, against the quiet machine's."""
    rates = _measured(rounds)
    return _row(f"{purpose}, busy", rates["chosen", purpose, True], rates["chosen", purpose, False], 0.4, "quiet")


def against_spinning(purpose: str, rounds: int) -> Row:
    """The same, against all threads that wait as OpenMP does by itself."""
    rates = _measured(rounds)
    return _row(f"{purpose}, busy", rates["chosen", purpose, True], rates["spinning", purpose, True], 1.0, "spinning")


def quiet(purpose: str, rounds: int) -> Row:
    """Tokens/s of a quiet machine, against the better of one thread and all that spin."""
    rates = _measured(rounds)
    best = max((rates[how, purpose, False] for how in ("spinning", "one")), key=statistics.median)
    return _row(f"{purpose}, quiet", rates["chosen", purpose, False], best, 0.95, "best fixed number")


def _row(name: str, ours: list[float], peer: list[float], goal: float, peer_name: str) -> Row:
    ratio = statistics.median(a / b for a, b in zip(ours, peer, strict=True))
    a, b = statistics.median(ours), statistics.median(peer)
    return Row(f"threads, {name}", a, b, "tokens/s", ratio, f"{goal:g}x", ratio >= goal, peer_name)


@functools.cache
def _measured(rounds: int) -> dict[tuple[str, str, bool], list[float]]:
    """(how, purpose, busy) -> tokens/s of each round."""
    rates: dict[tuple[str, str, bool], list[float]] = {}
    with _processes() as (workers, loops):
        own = [*(worker.pid for worker in workers.values()), *(loop.pid for loop in loops)]
        for number in range(rounds + 1):  # the first one warms up
            for is_busy in (False, True):
                for loop in loops:
                    loop.send_signal(signal.SIGCONT if is_busy else signal.SIGSTOP)
                for purpose in PURPOSES:
                    for how, worker in workers.items():
                        rate = _sample(worker, purpose, own)
                        if number:
                            rates.setdefault((how, purpose, is_busy), []).append(rate)
    return rates


@contextmanager
def _processes() -> Iterator[tuple[dict[str, subprocess.Popen[str]], list[subprocess.Popen[bytes]]]]:
    """One that measures for each way to choose threads, and a busy loop for each core."""
    plain = {name: value for name, value in os.environ.items() if name not in _WAITING}
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    workers = {
        how: subprocess.Popen(
            [sys.executable, "-c", _WORKER, how],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=plain,
        )
        for how in _HOWS
    }  # fmt: skip
    try:
        yield workers, loops
    finally:
        everything: list[subprocess.Popen[Any]] = [*workers.values(), *loops]
        for process in everything:
            process.kill()
            process.wait()


def _sample(worker: subprocess.Popen[str], purpose: str, own: list[int]) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    for _ in range(2):
        before, began = _others(own), time.perf_counter()
        worker.stdin.write(f"{purpose}\n")
        worker.stdin.flush()
        rate = json.loads(worker.stdout.readline())
        if _others(own) - before < 0.1 * (time.perf_counter() - began):
            break
    return rate


def _others(own: list[int]) -> float:
    """Processor seconds of all programs but these and this one."""
    if not sys.platform.startswith("linux"):
        return 0.0

    def ticks(pid: int) -> int:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    with open("/proc/stat", encoding="utf-8") as file:
        user, nice, system, _idle, _wait, *rest = map(int, file.readline().split()[1:9])
    return (user + nice + system + sum(rest) - sum(map(ticks, [*own, os.getpid()]))) / _TICK


def measure(how: str) -> None:
    """Measure as often as a line of stdin asks for it."""
    import torch

    from benchmarks.speed import random_bytes
    from glissando.compare.speed import trainer
    from glissando.generation import Continuation, Sampling
    from glissando.model import LanguageModel

    model, most = LanguageModel.from_preset(_PRESET), torch.get_num_threads()
    train = trainer(model, random_bytes(4, 513))

    def decode() -> float:
        model.eval()
        began = time.perf_counter()
        count = sum(1 for _ in Continuation(model, [[32]], 32, Sampling(temperature=0)))
        rate = count / (time.perf_counter() - began)
        model.train()
        return rate

    for line in sys.stdin:
        torch.set_num_threads(1 if how == "one" else most)
        is_training = line.strip() == "training"
        if how == "chosen":
            use_threads(None, 4 * 512 if is_training else 1, model.config.hidden_size)
        end = time.perf_counter() + _SECONDS
        rates: list[float] = []
        while not rates or time.perf_counter() < end:
            rates.append((train if is_training else decode)())
        print(json.dumps(statistics.harmonic_mean(rates)), flush=True)
