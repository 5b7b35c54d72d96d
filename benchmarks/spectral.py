"""Speed of the Continuous Transformer beside its published form and beside attention."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from benchmarks.speed import Row, paired, random_bytes
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
    ours, theirs, ratio = paired(trainer(_ours(), ids), trainer(published, ids), rounds)
    return Row("spectral training, T 8192", ours, theirs, "tokens/s", ratio, "3x", ratio >= 3, "published")


def decoding(rounds: int) -> Row:
    """Characters/s behind a context of 1024, beside the published form, which computes all of it again each time."""
    model, ids = _ours().eval(), random_bytes(1, CONTEXT)
    published = PublishedContinuousTransformer(WIDTH).eval()

    def theirs() -> float:
        began = time.perf_counter()
        for _ in range(3):
            published.next_logits(ids)
        return 3 / (time.perf_counter() - began)

    ours, peer, ratio = paired(lambda: 1 / seconds_a_token(model, CONTEXT), theirs, rounds)
    return Row("spectral decoding, context 1024", ours, peer, "characters/s", ratio, "50x", ratio >= 50, "published")


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
    return _long("spectral, 2.9M, T 8192", _ours(checkpoint=False, hidden_size=1024), peer, rounds)


def long_text_nano(rounds: int) -> Row:
    """Training tokens/s at T = 8192 of the nano size beside `transformer-nano`."""
    ours = LanguageModel.from_preset("continuous-transformer-nano")
    return _long("spectral nano, T 8192", ours, LanguageModel.from_preset("transformer-nano"), rounds)


def _long(name: str, ours: LanguageModel, peer: LanguageModel, rounds: int) -> Row:
    ids = random_bytes(1, LENGTH + 1)
    a, b, ratio = paired(trainer(ours, ids), trainer(peer, ids), rounds)
    label = f"attention ({peer.num_parameters():,} parameters; ours {ours.num_parameters():,})"
    return Row(name, a, b, "tokens/s", ratio, "above 1x", ratio > 1, label)


def context(rounds: int) -> Row:
    """Milliseconds a decoded token behind 64k tokens beside behind 1k."""
    model = LanguageModel.from_preset("continuous-transformer-nano").eval()
    times: dict[int, list[float]] = {1024: [], 8192: [], 65536: []}
    for _ in range(rounds):
        for length, seconds in times.items():
            seconds.append(1e3 * seconds_a_token(model, length))
    near, middle, far = (statistics.median(seconds) for seconds in times.values())
    label = f"behind 1k; {middle:.4g} behind 8k"
    return Row("decoding behind 64k tokens", far, near, "ms", far / near, "1.0x, within 10 %", far / near < 1.1, label)


def memory(rounds: int) -> Row:
    """Bytes kept for the backward pass at T = 8192 for each byte at T = 1024."""
    model = _ours(checkpoint=False)
    small, large = (kept_bytes(model, random_bytes(1, length)) for length in (1024, LENGTH))
    growth = large / small
    met = growth <= 1.02 * LENGTH / 1024
    return Row("kept for the backward, T 8192", large / 2**20, small / 2**20, "MiB", growth, "8x", met, "at T 1024")


def kept_bytes(model: LanguageModel, ids: Tensor) -> int:
    """Bytes of the distinct tensors that autograd keeps for the backward pass of model(ids)."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(ids)
    del output
    return sum(storages.values())
