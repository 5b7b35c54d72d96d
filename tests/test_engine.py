"""Continuous batching: every text as it would be alone, whoever joins and leaves."""

from __future__ import annotations

import random

import pytest
import torch

from glissando.generation import Sampling, generate
from glissando.model import LanguageModel
from glissando.serving.engine import Engine
from glissando.serving.session import Piece, Request, Session

SMALL = {"hidden_size": 32, "depth": {"layers": 2}}
PRESETS = {
    "transformer-nano": SMALL | {"mixers": {"attention": {"heads": 2, "head_size": 16}}},
    "tauformer-nano": SMALL,
    "liquid-ssm-nano": SMALL,
    "continuous-transformer-nano": SMALL,
    "hybrid-ode-nano": {"hidden_size": 32, "mixers": {"attention": {"heads": 2}}},
    "minimal-transformer": {},
}
PROMPTS = ["Once upon a time", "The", "", "A fox and a hen went to the market to buy a blue hat, and", "Ben said: "]


def model_of(preset: str, seed: int = 0) -> LanguageModel:
    """In float64, where rounding flips no draw; its weights are spread, so that its texts differ."""
    torch.manual_seed(seed)
    model = LanguageModel.from_preset(preset, **PRESETS.get(preset, {}) | {"vocab_size": 256}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.ndim > 1 else None
    return model


@pytest.fixture(scope="module")
def model():
    return model_of("liquid-ssm-nano")


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def __call__(self, piece: Piece) -> None:
        self.pieces.append(piece)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def finish(self) -> str | None:
        return self.pieces[-1].finish if self.pieces else None

    @property
    def error(self) -> BaseException | None:
        return self.pieces[-1].error if self.pieces else None


def request_for(model: LanguageModel, prompt: str, max_tokens: int = 20, seed: int = 0, **options) -> Request:
    assert model.tokenizer is not None
    temperature = options.pop("temperature", 0.8)
    ids = (model.tokenizer.eos_id, *model.tokenizer.encode(prompt))
    return Request(ids, max_tokens, Sampling(temperature, seed=seed), **options)


def submit(engine: Engine, request: Request) -> tuple[list[Session], list[Heard]]:
    heard = [Heard() for _ in range(request.copies)]
    return engine.submit(request, heard), heard


def run_down(engine: Engine) -> None:
    for _ in range(2000):
        if not (engine.running or engine.waiting):
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("preset", PRESETS)
def test_texts_that_join_and_leave_are_those_written_alone(preset):
    model = model_of(preset)
    engine = Engine(model, chunk=7)
    rng, heard = random.Random(0), []
    for turn in range(12):
        prompt, count, seed = rng.choice(PROMPTS), rng.randrange(1, 25), rng.randrange(99)
        heard.append((prompt, count, seed, submit(engine, request_for(model, prompt, count, seed))[1][0]))
        for _ in range(turn % 4):
            engine.step()
    run_down(engine)
    for prompt, count, seed, one in heard:
        assert [one.text] == generate(model, [prompt], max_tokens=count, seed=seed)
        assert one.finish in ("stop", "length")
