"""Speed of the liquid state-space model beside its published form, beside attention and beside CfC.

pip install ncps          the peer of `liquid-cfc`
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.speed import Row, beside, peak_bytes, random_bytes
from glissando.compare.speed import trainer
from glissando.errors import GlissandoError
from glissando.mixers import Liquid
from glissando.model import LanguageModel
from research.published.liquid_ssm import PublishedLiquid

PRESET, DENSE, NANO = "liquid-ssm", "liquid-ssm-dense", "liquid-ssm-nano"
#: rows and tokens at which the published form is measured: its cost a token is the same at any length, as each waits
#: for the one before, and rows share the cost of a call
BATCH, PUBLISHED_LENGTH = 8, 16
LENGTHS = (4096, 8192, 16384)


@dataclass(frozen=True)
class Pair:
    """A preset, the Transformer that is given as many parameters, the length, and what the ratio should reach."""

    preset: str
    peer: str
    length: int
    goal: float


PAIRS: dict[str, Pair] = {
    "512": Pair(PRESET, "transformer", 512, 0.5),
    "8192": Pair(PRESET, "transformer", 8192, 2),
    "nano-512": Pair(NANO, "transformer-nano", 512, 0.5),
    "nano-8192": Pair(NANO, "transformer-nano", 8192, 2),
}


def published(rounds: int) -> Row:
    """Training tokens/s of the diagonal dynamics at T = 512 beside the published form at its published size."""
    return beside_published(PRESET, PublishedLiquid(), 512, rounds, goal=1000)


def dense(rounds: int) -> Row:
    """The same of the dense dynamics, whose gradients also reach A, B and tau, at the published form's own length."""
    return beside_published(DENSE, PublishedLiquid(), PUBLISHED_LENGTH, rounds)


def beside_published(preset: str, form: nn.Module, length: int, rounds: int, goal: float | None = None) -> Row:
    """Training tokens/s of a preset at BATCH x length beside `form` at BATCH x PUBLISHED_LENGTH."""
    ours = LanguageModel.from_preset(preset)
    ids, few = random_bytes(BATCH, length + 1), random_bytes(BATCH, PUBLISHED_LENGTH + 1)
    name, label = f"{preset} training, T {length}", f"published form, T {PUBLISHED_LENGTH}"
    return beside(name, trainer(ours, ids), trainer(form, few), rounds, goal, label)


def training(case: str, rounds: int) -> Row:
    """Training tokens/s beside a Transformer with as many parameters."""
    return beside_attention(PAIRS[case], rounds)


def beside_attention(pair: Pair, rounds: int) -> Row:
    """The row of one pair, at 4096 tokens a step or one row."""
    ours = LanguageModel.from_preset(pair.preset)
    peer = of_the_size(ours, pair.peer)
    ids = random_bytes(max(1, 4096 // pair.length), pair.length + 1)
    label = f"attention ({peer.num_parameters():,} parameters; ours {ours.num_parameters():,})"
    name = f"{pair.preset} training, T {pair.length}"
    return beside(name, trainer(ours, ids), trainer(peer, ids), rounds, pair.goal, label)


def of_the_size(ours: LanguageModel, preset: str) -> LanguageModel:
    """The preset with the vocabulary and head of `ours`, its MLPs of the width, a multiple of 8, that equals the sizes.

    Raises GlissandoError where no width comes within 1 % of the parameters.
    """
    c, target = ours.config, ours.num_parameters()

    def build(hidden: int) -> LanguageModel:
        shared: dict[str, Any] = {"vocab_size": c.vocab_size, "tied_head": c.tied_head, "head_bias": c.head_bias}
        return LanguageModel.from_preset(preset, **shared, block={"mlp": {"hidden": hidden}})

    with torch.device("meta"):
        narrow, wider = (build(hidden).num_parameters() for hidden in (8, 16))
    model = build(8 * max(1, 1 + round((target - narrow) / (wider - narrow))))
    if abs(model.num_parameters() / target - 1) > 0.01:
        raise GlissandoError(
            f"`{preset}` cannot have the {target:,} parameters of its peer: by the width of its MLPs it comes to "
            f"{model.num_parameters():,}; compare it with a model of about that size"
        )
    return model


def memory(rounds: int) -> Row:
    """Peak memory of a training step for each token more: from T = 8192 to 16384 beside from 4096 to 8192."""
    return growth_of_memory(NANO, LENGTHS, peak_in_a_process)


def growth_of_memory(preset: str, lengths: Sequence[int], peak: Callable[[str, int], int]) -> Row:
    """The row of the last three lengths: what a process needs at any length is in no difference of two."""
    peaks = [peak(preset, length) for length in lengths]
    label = ", ".join(f"{size / 2**20:,.4g} at T {length:,}" for size, length in zip(peaks, lengths, strict=True))
    print(f"  liquid-memory: {preset}: MiB of a training step: {label}", flush=True)
    points = list(zip(lengths, peaks, strict=True))[-3:]
    near, far = ((high - low) / (long - short) for (short, low), (long, high) in pairwise(points))
    growth = far / near
    name = f"{preset} training, peak memory"
    goal = "1.0x (linear), within 10 %"
    return Row(name, far / 2**10, near / 2**10, "KiB a token", growth, goal, growth < 1.1, f"to T {lengths[-2]:,}")


def peak_in_a_process(preset: str, length: int) -> int:
    """`peak_of_training` of a process of its own, as a peak is never taken back."""
    code = f"from benchmarks.liquid import peak_of_training; print(peak_of_training({preset!r}, {length}))"
    # Each array is mapped and given back by itself: what an allocator keeps is not counted.
    exact = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=exact)
    return int(done.stdout)


def peak_of_training(preset: str, length: int) -> int:
    """Bytes by which a training step on one row raises the peak of this process, beyond one on a short row."""
    model = LanguageModel.from_preset(preset)
    trainer(model, random_bytes(1, 65))()  # compiles what is compiled
    before = peak_bytes()
    trainer(model, random_bytes(1, length + 1))()
    return peak_bytes() - before


def cfc(rounds: int) -> Row:
    """Training tokens/s of one gated liquid mixer, D 256 and 128 states, beside CfC's 256 -> 128, at 8 x 128 tokens."""
    return beside_cfc(Liquid(256, state_size=128), 256, 128, rounds)


def beside_cfc(mixer: nn.Module, size: int, units: int, rounds: int) -> Row:
    """The row of a mixer of width `size`. Raises GlissandoError where `ncps` is not installed."""
    peer = cfc_class()(size, units)
    x = torch.randn(8, 128, size, generator=torch.Generator().manual_seed(0))
    counts = [sum(p.numel() for p in module.parameters()) for module in (peer, mixer)]
    label = f"CfC ({counts[0]:,} parameters; ours {counts[1]:,})"
    name, ours = "liquid layer training, 8 x 128", layer_trainer(mixer, x)
    return beside(name, ours, layer_trainer(peer, x), rounds, 3, label)


def layer_trainer(module: nn.Module, x: Tensor) -> Callable[[], float]:
    """Tokens/s of one training step of a layer that returns y and its state: mean square of y, gradients, AdamW."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        began = time.perf_counter()
        y, _ = module(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return x.shape[0] * x.shape[1] / (time.perf_counter() - began)

    return step


def cfc_class() -> Any:
    """The peer. Raises GlissandoError where it is not installed."""
    try:
        from ncps.torch import CfC
    except ImportError as error:
        raise GlissandoError("the peer needs ncps: pip install ncps") from error
    return CfC
