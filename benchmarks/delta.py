"""Training speed of models of delta layers beside the strong Transformer."""

from __future__ import annotations

from benchmarks.speed import Row, beside, random_bytes
from glissando.compare.speed import trainer
from glissando.model import LanguageModel

#: (preset, tokens of a row): the ratio to reach
TRAINING = {
    ("delta-nano", 512): 0.8,
    ("delta-nano", 8192): 3.0,
    ("spectral-delta-nano", 512): 0.8,
    ("spectral-delta-nano", 8192): 3.0,
}


def training(preset: str, length: int, rounds: int) -> Row:
    """Training tokens/s on one row of random bytes beside `transformer-plus-nano`."""
    ids = random_bytes(1, length + 1)
    ours, peer = (LanguageModel.from_preset(name) for name in (preset, "transformer-plus-nano"))
    name, goal = f"{preset}, T {length}", TRAINING[preset, length]
    return beside(name, trainer(ours, ids), trainer(peer, ids), rounds, goal, "transformer-plus-nano")
