"""Engines for tests: small models, texts asked of them, and listeners."""

from __future__ import annotations

from loud import loud

from glissando.generation import Sampling
from glissando.model import LanguageModel
from glissando.serving.engine import Engine
from glissando.serving.session import Piece, Request, Session

SMALL = {"hidden_size": 32, "depth": {"layers": 2}}
PRESETS = {
    "transformer-nano": SMALL | {"mixer": {"kind": "attention", "heads": 2, "head_size": 16}},
    "tauformer-nano": SMALL,
    "liquid-ssm-nano": SMALL,
    "continuous-transformer-nano": SMALL,
    "hybrid-ode-nano": SMALL | {"mixer": {"kind": "attention", "heads": 2}, "depth": {"layers": 2, "n_steps": 2}},
    "minimal-transformer": {},
}


def model_of(preset: str) -> LanguageModel:
    return loud(preset, **PRESETS[preset])


class Listener:
    """A listener that keeps the pieces it receives."""

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


def submit(engine: Engine, request: Request) -> tuple[list[Session], list[Listener]]:
    listeners = [Listener() for _ in range(request.copies)]
    return engine.submit(request, listeners), listeners


def run_down(engine: Engine) -> None:
    for _ in range(2000):
        if not (engine.running or engine.waiting):
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def alone(model: LanguageModel, request: Request) -> list[Listener]:
    """What comes of a request that nobody shares the model with, and of which nothing is known."""
    engine = Engine(model, prefix_bytes=0)
    _, listener = submit(engine, request)
    run_down(engine)
    return listener
