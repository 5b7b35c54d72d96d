"""The compiled step alone, beside this machine's own rate of matrix products, by CPU time of one thread."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.speed import Row, beside, endless, random_bytes
from glissando.generation import generate
from glissando.model import LanguageModel

#: preset -> the share of the products' rate that one row should reach, and that several should
GOALS = {
    "transformer-nano": (0.13, 0.4),
    "liquid-ssm-nano": (0.2, 0.6),
    "spectral-delta-nano": (0.2, 0.6),
    "tauformer-nano": (0.2, 0.4),
    "composite-nano": (0.2, 0.6),
}
CASES = [(preset, context, count) for preset in GOALS for context in (64, 256) for count in (1, 8, 32)]
#: where caches are compared: many texts, and a long one
CACHES = [
    (preset, context, count)
    for preset in ("transformer-nano", "tauformer-nano", "composite-nano")
    for context, count in ((64, 32), (256, 32), (4096, 1))
]
#: preset -> tokens/s that `generate` should write of 32 texts
TEXTS = {
    "transformer-nano": 15_000,
    "liquid-ssm-nano": 30_000,
    "spectral-delta-nano": 25_000,
    "tauformer-nano": 12_000,
    "composite-nano": 25_000,
}
#: how much faster a step with fewer bytes should be
_SMALLER = 1.15
#: how much faster two threads should write them than one
_TWO = 1.7
#: steps between two looks at the clock, at least
_STEPS = 8


def _product_seconds() -> float:
    """Seconds of one product of 32 x 128 x 512 numbers of float32."""
    x, w = torch.ones(32, 128), torch.ones(128, 512)
    began = time.thread_time()
    for _ in range(200):
        torch.mm(x, w)
    return (time.thread_time() - began) / 200


def step(preset: str, context: int, count: int, rounds: int) -> Row:
    """Tokens/s of `count` rows behind `context` tokens; 2 x parameters x tokens/s as a share of the products' rate."""
    from glissando.decoding.decoder import Decoder

    torch.set_num_threads(1)
    model = LanguageModel.from_preset(preset).eval()
    decoder, ids, goal = Decoder(model), torch.zeros(count, dtype=torch.int64), GOALS[preset][count > 1]
    with torch.no_grad():
        _, state = model.features(random_bytes(count, context), model.init_state(count))
    rows, operations = decoder.rows(state), 2 * sum(p.numel() for p in model.parameters())

    def products() -> float:
        return 2 * 32 * 128 * 512 / _product_seconds() / operations

    name = f"step of {preset}, {count} rows behind {context}"
    return beside(name, lambda: _rate(decoder, rows, ids, context), products, rounds, goal, "products alone")


def _rate(decoder: Any, rows: Any, ids: torch.Tensor, context: int) -> float:
    """Tokens/s of rows of which each has read `context` tokens."""
    rows.filled[:] = context
    steps, began = max(_STEPS, 64 // len(ids)), time.thread_time()
    for _ in range(steps):
        decoder.step(ids, rows)
    return len(ids) * steps / (time.thread_time() - began)


def _writer(preset: str, clock: Callable[[], float]) -> Callable[[int], float]:
    """Tokens/s of `generate` by a clock, on so many threads: 32 texts of 192 tokens behind a prompt of 64, which is
    read, too."""
    model, tokenizer = endless(preset)
    prompts, seeds = ["Once upon a time there was a little fox who lived near the mill."] * 32, itertools.count()

    def rate(threads: int) -> float:
        torch.set_num_threads(threads)
        before, began = tokenizer.decoded, clock()
        generate(model, prompts, max_tokens=192, seed=next(seeds))
        return (tokenizer.decoded - before) / (clock() - began)

    rate(1)
    return rate


def texts(preset: str, rounds: int) -> Row:
    """Tokens/s of CPU time on one thread."""
    write = _writer(preset, time.process_time)
    rate, goal = statistics.median(write(1) for _ in range(rounds)), TEXTS[preset]
    return Row(f"32 texts of {preset}", rate, goal, "tokens/s", rate / goal, "1", rate >= goal, "goal")


def threads(preset: str, rounds: int) -> Row:
    """Tokens/s on two threads against one, by the wall's clock: the machine has to be idle."""
    write = _writer(preset, time.perf_counter)
    name = f"32 texts of {preset}, 2 threads"
    return beside(name, lambda: write(2), lambda: write(1), rounds, _TWO, "one thread")


def caches(preset: str, context: int, count: int, rounds: int) -> Row:
    """Tokens/s of `count` rows behind `context` tokens with caches in bf16, against caches in float32."""
    return _smaller(f"caches of {preset}", preset, context, count, rounds, caches="bf16")


def weights(preset: str, precision: str, count: int, rounds: int) -> Row:
    """Tokens/s of `count` rows behind 64 tokens with weights in bf16 or int8, against weights in float32."""
    return _smaller(f"{precision} weights of {preset}", preset, 64, count, rounds, precision=precision)


def _smaller(name: str, preset: str, context: int, count: int, rounds: int, **options: Any) -> Row:
    """A decoder with such options against one without, in turn."""
    from glissando.decoding.decoder import Decoder

    torch.set_num_threads(1)
    model, ids = LanguageModel.from_preset(preset).eval(), torch.zeros(count, dtype=torch.int64)
    with torch.no_grad():
        _, state = model.features(random_bytes(count, context), model.init_state(count))
    reduced, whole = Decoder(model, **options), Decoder(model)
    few, many = reduced.rows(state), whole.rows(state)
    name = f"{name}, {count} rows behind {context}"
    ours, peer = lambda: _rate(reduced, few, ids, context), lambda: _rate(whole, many, ids, context)
    return beside(name, ours, peer, rounds, _SMALLER, "float32")
