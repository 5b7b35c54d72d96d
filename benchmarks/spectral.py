"""Speed of the Continuous Transformer beside its published form and beside attention."""

from __future__ import annotations

import time

import torch

from benchmarks.speed import Row, beside, random_bytes
from glissando.compare.speed import trainer
from glissando.mixers import Memo
from glissando.model import LanguageModel
from research.published.continuous_transformer import PublishedContinuousTransformer

#: the size at which the published formulation is measured
WIDTH, LENGTH, CONTEXT = 256, 8192, 1024


def _ours(checkpoint: bool = True, hidden_size: int = WIDTH) -> LanguageModel:
    model = LanguageModel.from_preset("continuous-transformer", hidden_size=hidden_size)
    model.depth.gradient_checkpointing = checkpoint  # type: ignore[assignment]
    return model


def training(rounds: int) -> Row:
    """Training tokens/s at D = 256, S = 6, T = 8192 beside the published formulation, both with checkpoints."""
    ids = random_bytes(1, LENGTH + 1)
    published = PublishedContinuousTransformer(WIDTH, checkpoint=True)
    ours = trainer(_ours(), ids)
    return beside("spectral training, T 8192", ours, trainer(published, ids), rounds, 3, "published")


def decoding(rounds: int) -> Row:
    """Characters/s behind a context of 1024, beside the published form, which computes all of it again each time."""
    model, ids = _ours().eval(), random_bytes(1, CONTEXT)
    published = PublishedContinuousTransformer(WIDTH).eval()

    def theirs() -> float:
        began = time.perf_counter()
        for _ in range(3):
            published.next_logits(ids)
        return 3 / (time.perf_counter() - began)

    name = "spectral decoding, context 1024"
    return beside(name, lambda: 1 / seconds_a_token(model, CONTEXT), theirs, rounds, 50, "published", "characters/s")


def seconds_a_token(model: LanguageModel, context: int, tokens: int = 64) -> float:
    """Greedy decoding behind `context` random bytes."""
    with torch.no_grad():
        logits, state = model(random_bytes(1, context), model.init_state(1))
        latest = logits[:, -1:].argmax(-1)
        memo: Memo = {}
        began = time.perf_counter()
        for _ in range(tokens):
            logits, state = model(latest, state, donate=True, memo=memo)
            latest = logits[:, -1:].argmax(-1)
        return (time.perf_counter() - began) / tokens


def long_text(rounds: int) -> Row:
    """Training tokens/s at T = 8192 of the published size beside `transformer` with about its parameters."""
    peer = LanguageModel.from_preset("transformer", hidden_size=240, block={"mlp": {"hidden": 664}})
    ours, ids = _ours(checkpoint=False, hidden_size=1024), random_bytes(1, LENGTH + 1)
    label = f"attention ({peer.num_parameters():,} parameters; ours {ours.num_parameters():,})"
    return beside("spectral, 2.9M, T 8192", trainer(ours, ids), trainer(peer, ids), rounds, 1, label)
