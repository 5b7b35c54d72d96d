"""What of the Tauformer shows without training: its cache, its speed, and whether its printed figures agree."""

from __future__ import annotations

import math
import statistics
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.speed import in_turn, random_bytes
from glissando.compare.speed import trainer
from glissando.model import LanguageModel
from glissando.state import State, state_bytes
from research.audit.claim import Finding, Plan
from research.audit.tau.binned import BinnedMemory
from research.audit.training import seeded
from research.intervals import Median, median_of
from research.published.tauformer import PublishedTauformer

PRESET = "tauformer"
WIDTH, HEADS = 384, 6


def cache_as_published(plan: Plan) -> Finding:
    """Bytes of (v, lambda_k) over those of (k, v), at the published head size."""
    ids, kept = random_bytes(1, 64), []
    for softmax in (False, True):
        model = seeded(0, partial(PublishedTauformer, 256, WIDTH, HEADS, 1, softmax=softmax))
        kept.append(sum(part.nbytes for layer in model.cache(ids) for part in layer))
    ratio = kept[0] / kept[1]
    said = f"{kept[0] // 64} against {kept[1] // 64} bytes a token and layer: {ratio:.4f} (heads of 64: 65 / 128)"
    return Finding(said, {"bytes": kept, "ratio": ratio}, {"half of it within 2 %": abs(ratio / 0.5 - 1) <= 0.02})


def cache_corrected(plan: Plan) -> Finding:
    """Bytes of our whole state over those of attention's, with and without what gates add, and a bounded cache."""
    lengths = (64, 128) if plan.quick else (1024, 4096)
    variants: dict[str, dict[str, Any]] = {
        "exact": {},
        "with importance and gate": {"importance": True, "forget_gate": True},
    }
    states = {name: [_state_of("tau", length, options) for length in lengths] for name, options in variants.items()}
    standard = [_state_of("attention", length, {}) for length in lengths]
    bounded = [_binned_bytes(length, 64 if plan.quick else 1024) for length in lengths]
    ratios = {name: found[-1] / standard[-1] for name, found in states.items()}
    summary = "; ".join(f"{name} {ratio:.4f}" for name, ratio in ratios.items())
    said = (
        f"behind {lengths[-1]:,} tokens, the whole state over attention's: {summary}. The binned cache takes "
        f"{bounded[0] / 1024:,.0f} KiB behind {lengths[0]:,} tokens and {bounded[1] / 1024:,.0f} behind "
        f"{lengths[1]:,}, where attention's takes {standard[0] / 1024:,.0f} and {standard[1] / 1024:,.0f}"
    )
    checks = {"half of it within 2 %": abs(ratios["exact"] / 0.5 - 1) <= 0.02}
    return Finding(said, {"ratios": ratios, "binned": bounded, "attention": standard, "lengths": lengths}, checks)


@torch.no_grad()
def _state_of(mixer: str, length: int, options: dict[str, Any]) -> int:
    """Bytes of the state of one layer behind so many tokens."""
    model = _layer_of(mixer, 1, options).eval()
    state: State = model.init_state(1)
    for part in random_bytes(1, length).split(256, 1):
        _, state = model(part, state)
    return state_bytes(state)


def _binned_bytes(length: int, bins: int) -> int:
    """Bytes of `BinnedMemory` behind so many tokens, at the preset's sizes."""
    memory, size = BinnedMemory(HEADS, WIDTH // HEADS, bins), WIDTH // HEADS
    for k, v in zip(torch.rand(length, HEADS), torch.randn(length, HEADS, size), strict=True):
        memory.write(k, v, torch.zeros(HEADS), 0.05)
    return memory.nbytes


def _layer_of(mixer: str, layers: int, options: dict[str, Any]) -> LanguageModel:
    """`tauformer` at its width, reading bytes, with so many layers; `attention` in its place."""
    given = {"kind": mixer, **(options if mixer == "tau" else {"heads": HEADS})}
    return seeded(0, lambda: LanguageModel.from_preset(PRESET, vocab_size=256, mixer=given, depth={"layers": layers}))


# ---------------------------------------------------------------------- speed

FASTER = 1.2


def speed_as_published(plan: Plan) -> Finding:
    """Training tokens/s of the published form beside the same with softmax attention, at the published length."""
    length, width = (64, 48) if plan.quick else (1024, WIDTH)
    forms = [seeded(0, partial(PublishedTauformer, 256, width, HEADS, 2, softmax=softmax)) for softmax in (False, True)]
    found = _trained(forms, length, plan)
    said = f"2 layers of {width}, {length} tokens, training: {found}"
    return Finding(said, found._asdict(), {"a fifth faster": found.ratio.between(FASTER)})


def speed_corrected(plan: Plan) -> Finding:
    """The same of attention in O(N log N), at several lengths."""
    found = {}
    for length in (64,) if plan.quick else (1024, 4096, 8192):
        forms = [_layer_of(mixer, 1 if plan.quick else 2, {}) for mixer in ("tau", "attention")]
        found[length] = _trained(forms, length, plan)
    summary = "; ".join(f"{length:,} tokens {each}" for length, each in found.items())
    checks = {f"a fifth faster at {length:,} tokens": each.ratio.between(FASTER) for length, each in found.items()}
    figures = {str(length): each._asdict() for length, each in found.items()}
    return Finding(f"2 layers of {WIDTH}, one row, training: {summary}", figures, checks)


class Rates(NamedTuple):
    """Median tokens/s of ours and of the peer, and the ratio of pairs measured in turn."""

    ours: float
    peer: float
    ratio: Median

    def __str__(self) -> str:
        return f"{self.ours:,.0f} against {self.peer:,.0f} tokens/s, ratio of pairs {self.ratio}"


def _trained(forms: list[Any], length: int, plan: Plan) -> Rates:
    ids = random_bytes(1, length + 1)
    first, second = (trainer(form, ids) for form in forms)
    pairs = in_turn(first, second, 1 if plan.quick else 15)
    ours, peer = (statistics.median(side) for side in zip(*pairs, strict=True))
    return Rates(ours, peer, median_of([x / y for x, y in pairs]))


# ---------------------------------------------------------------------- arithmetic

STEPS, TOKENS_A_STEP, TOKENS_A_SECOND, HOURS = 5000, 131_072, 60_000, 2
TOLD_HOURS = f"{HOURS} hours within a tenth"
#: printed perplexity -> the loss printed beside it; and every loss that was printed, by what it is
PRINTED = {107.47: ("validation at step 100", 4.9255), 6.59: ("validation at step 2000", 2.3585)}
LOSSES = {
    "training at 100": 4.6772, "validation at 100": 4.9255, "validation at 2000": 2.3585, "validation at 2100": 2.92,
    "validation at 4200": 2.95, "validation at 4500": 1.9146, "validation at 5000": 2.3746,
}  # fmt: skip
BEST_STEPS = (4500, 4600)
H100 = (
    "an H100 and the corpus: glissando train --preset tauformer --data.path FILE --data.tokenizer.kind file "
    "--data.tokenizer.path tokenizer.json --training.tokens 655360000 --out RUN"
)
#: of an H100 in bfloat16, dense
PEAK = 989e12


def throughput_as_published(plan: Plan) -> Finding:
    """Steps times tokens over tokens/s, beside the hours stated."""
    tokens, hours = STEPS * TOKENS_A_STEP, _hours()
    needed = tokens / (HOURS * 3600)
    said = (
        f"{STEPS:,} steps of {TOKENS_A_STEP:,} tokens are {tokens:,}; at {TOKENS_A_SECOND:,} tokens/s they take "
        f"{hours:.2f} hours; {HOURS} hours would take {needed:,.0f} tokens/s"
    )
    checks = {TOLD_HOURS: _as_told(hours)}
    return Finding(said, {"tokens": tokens, "hours": hours, "needed": needed}, checks)


def _hours() -> float:
    return STEPS * TOKENS_A_STEP / TOKENS_A_SECOND / 3600


def _as_told(hours: float) -> bool:
    return abs(hours / HOURS - 1) <= 0.1


def throughput_corrected(plan: Plan) -> Finding:
    """The share of an H100 that the rate is, by the operations of our preset at the published size."""
    from glissando.flops import training_flops

    with torch.device("meta"):
        model = LanguageModel.from_preset(PRESET)
    flops = training_flops(model, 1024)
    share = flops * TOKENS_A_SECOND / PEAK
    said = (
        f"a token of training is {flops:.3g} operations at the published size, so that {TOKENS_A_SECOND:,} tokens/s "
        f"are {share:.1%} of an H100's bfloat16 peak: possible, and not measured here. At that rate {STEPS:,} "
        f"steps take {_hours():.2f} hours"
    )
    checks = {TOLD_HOURS: _as_told(_hours()), "the rate is within what the device can do": share < 1}
    return Finding(said, {"flops_a_token": flops, "share_of_peak": share}, checks, H100)


def perplexity_as_published(plan: Plan) -> Finding:
    """exp of the loss printed beside each perplexity."""
    summary, checks = [], {}
    for perplexity, (where, loss) in PRINTED.items():
        summary.append(f"{perplexity} beside {loss} ({where}), whose exponential is {math.exp(loss):.2f}")
        checks[f"{perplexity} is that of {where}"] = _agrees(perplexity, loss)
    checks["the best step is the same everywhere"] = len(set(BEST_STEPS)) == 1
    said = f"printed: {'; '.join(summary)}; the best step is {' and '.join(map(str, BEST_STEPS))}"
    return Finding(said, {"printed": {str(p): loss for p, (_, loss) in PRINTED.items()}}, checks)


def perplexity_corrected(plan: Plan) -> Finding:
    """For each printed perplexity the printed loss that it is the exponential of, if there is one."""
    summary, checks = [], {}
    for perplexity in PRINTED:
        fits = [name for name, loss in LOSSES.items() if _agrees(perplexity, loss)]
        summary.append(f"{perplexity} is that of {fits[0] if fits else 'no loss that was printed'}")
        checks[f"{perplexity} is that of a validation loss"] = any("validation" in name for name in fits)
    best = min((loss, name) for name, loss in LOSSES.items() if "validation" in name)
    said = (
        f"{'; '.join(summary)}; the best validation loss, {best[0]} ({best[1]}), is a perplexity of "
        f"{math.exp(best[0]):.2f}"
    )
    return Finding(said, {"perplexities": {name: math.exp(loss) for name, loss in LOSSES.items()}}, checks)


def _agrees(perplexity: float, loss: float) -> bool:
    """To the digits printed, within a hundredth."""
    return abs(math.exp(loss) / perplexity - 1) < 0.01
