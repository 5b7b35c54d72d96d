"""Training speed of models of delta layers beside the strong Transformer."""

from __future__ import annotations

from benchmarks.speed import Row, paired, random_bytes
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
    a, b, ratio = paired(trainer(ours, ids), trainer(peer, ids), rounds)
    goal = TRAINING[preset, length]
    return Row(f"{preset}, T {length}", a, b, "tokens/s", ratio, f"{goal:g}x", ratio >= goal, "transformer-plus-nano")
