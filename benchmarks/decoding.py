"""Decoding: tokens of one text at temperature 0.8, by the compiled step and by the plain one, and by `generate` and
`stream` beside the compiled step alone; in turns, by the CPU time of one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import torch

from benchmarks.speed import Row, beside, endless, paired, random_bytes
from glissando.decoding.steps import Kind
from glissando.generation import BLOCK, Continuation, Sampling, generate, stream
from glissando.loading import load
from glissando.model import LanguageModel
from glissando.state import State

#: preset and context -> the goal of compiled against plain; none: reported
GOALS = {
    **{("liquid-ssm-nano", context): 4.0 for context in (256, 4096)},
    **{("continuous-transformer-nano", context): 4.0 for context in (256, 4096)},
    **{("composite-nano", context): 4.0 for context in (256, 4096)},
    **{("transformer-nano", context): 2.0 for context in (256, 4096)},
    **{("spectral-delta-nano", context): None for context in (256, 4096)},
    **{("transformer-plus-nano", context): None for context in (256, 4096)},
    **{("tauformer-nano", context): None for context in (256, 4096)},
    **{("hybrid-ode-nano", context): None for context in (256, 4096)},
}
#: tokens between two looks at the clock
_TOKENS = 25


def decoding(preset: str, context: int, rounds: int) -> Row:
    """Tokens/s of the two steps behind `context` random bytes."""
    model = LanguageModel.from_preset(preset).eval()
    prompt = random_bytes(1, context)[0].tolist()

    def texts(step: Kind) -> Iterator[object]:
        return Continuation(model, [prompt], 1 << 20, Sampling(), step=step)

    def rate(text: Iterator[object]) -> float:
        began = time.process_time()
        return len(list(islice(text, _TOKENS))) / (time.process_time() - began)

    compiled, plain = texts("compiled"), texts("plain")
    for text in (compiled, plain):
        list(islice(text, 3))  # reads the prompt, and compiles
    name, goal = f"decoding {preset} behind {context:,}", GOALS[preset, context]
    return beside(name, partial(rate, compiled), partial(rate, plain), rounds, goal, "plain step")


#: presets whose public calls are timed, the public calls, and the least share of the step's own rate
PUBLIC = ("transformer-nano", "liquid-ssm-nano", "spectral-delta-nano", "tauformer-nano", "composite-nano")
CALLS: dict[str, Callable[..., object]] = {"generate": generate, "stream": lambda *a, **o: list(stream(*a, **o))}
_SHARE = 0.7


def public(preset: str, call: str, rounds: int) -> Row:
    """Tokens/s of a public call behind 64 bytes, its prompt not counted, beside those of `Decoder.step`."""
    from glissando.decoding.decoder import Decoder

    model, _ = endless(preset)
    decoder, ids, count = Decoder(model), torch.ones(1, dtype=torch.int64), 8 * _TOKENS

    def public_seconds(tokens: int) -> float:
        began = time.process_time()
        CALLS[call](model, "a" * 64, max_tokens=tokens)
        return time.process_time() - began

    def public_rate() -> float:
        return count / (public_seconds(count + 1) - public_seconds(1))

    def step_rate() -> float:
        with torch.no_grad():
            _, state = model(random_bytes(1, 64), model.init_state(1))
        rows = decoder.rows(state)
        began = time.process_time()
        for _ in range(count):
            decoder.step(ids, rows)
        return count / (time.process_time() - began)

    return beside(f"{call} {preset} behind 64", public_rate, step_rate, rounds, _SHARE, "step alone")


ROWS = {f"decoding-{preset}-{context}": partial(decoding, preset, context) for preset, context in GOALS}
ROWS |= {f"decoding-{call}-{preset}": partial(public, preset, call) for preset in PUBLIC for call in CALLS}

#: texts of `stories`: a single token, a story that its prompt has already, and any story
LOOKUP = ("one-token", "own-story", "plain")


def lookup(case: str, rounds: int) -> Row:
    """Tokens/s of 300 tokens of `stories` at temperature 0 with lookup=16 and without, beyond the ends of stories;
    reading the prompt counts, as it takes another path with lookup."""
    torch.set_num_threads(1)
    model, sampling = load("stories").eval(), Sampling(0)
    assert model.tokenizer is not None
    prompt = [model.tokenizer.eos_id, *model.tokenizer.encode("Once upon a time")]

    def text(ahead: int) -> Continuation:
        return Continuation(model, [prompt], 300, sampling, lookup=ahead, block=BLOCK)

    if case == "own-story":
        prompt = [*prompt, *(token for [token] in text(0) if token is not None), *prompt]
    if case == "one-token":
        sampling = Sampling(0, allowed=(prompt[-1],))

    def rate(ahead: int) -> float:
        began = time.process_time()
        return len(list(text(ahead))) / (time.process_time() - began)

    return beside(f"lookup, {case}", partial(rate, 16), partial(rate, 0), rounds, None, "without")


ROWS |= {f"decoding-lookup-{case}": partial(lookup, case) for case in LOOKUP}


def flat(rounds: int) -> Row:
    """Milliseconds of a compiled step of `delta-nano` behind 64k tokens beside behind 1k."""
    from glissando.decoding.decoder import Decoder

    model = LanguageModel.from_preset("delta-nano").eval()
    decoder, one = Decoder(model), torch.zeros(1, dtype=torch.int64)
    rows = {}
    for length in (1024, 65536):
        with torch.no_grad():
            state: State = model.init_state(1)
            for part in random_bytes(1, length).split(4096, 1):
                _, state = model.features(part, state, donate=True)
        rows[length] = decoder.rows(state)

    def milliseconds(length: int) -> float:
        began = time.perf_counter()
        for _ in range(_TOKENS):
            decoder.step(one, rows[length])
        return 1e3 * (time.perf_counter() - began) / _TOKENS

    far, near, ratio = paired(partial(milliseconds, 65536), partial(milliseconds, 1024), rounds)
    name, goal = "decoding delta-nano behind 64k", "1.0x, within 10 %"
    return Row(name, far, near, "ms", ratio, goal, ratio < 1.1, "behind 1k")
