"""What of the Continuous Transformer shows in training: held-out loss and accuracy, its learning rate, its samples."""

from __future__ import annotations

import itertools
import re
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from glissando.lab.claim import Finding, Plan
from glissando.lab.claim_training import (
    Curve,
    Factor,
    HeldOut,
    Learning,
    cosine,
    held_out,
    homeostatic,
    interval,
    learn,
    logits_of,
    parameters,
    read_bytes,
    seeded,
)
from glissando.lab.continuous_form import PRESET
from glissando.lab.published.continuous_transformer import PublishedContinuousTransformer
from glissando.model import LanguageModel

FULL_STEPS = 134_000
FULL = "134,000 steps of 8,192 characters (1.1e9 in all) at D = 1024, weeks on two cores: --steps 134000 on a GPU"
LOSS, ACCURACY = (0.90, 0.95), (0.70, 0.72)
RATE = 3e-4


class Size(NamedTuple):
    width: int
    length: int
    steps: int


def size_of(plan: Plan) -> Size:
    """The published width and length where the published number of steps is asked for; else what takes minutes."""
    if plan.quick:
        return Size(16, 64, plan.steps or 6)
    if (plan.steps or 0) >= FULL_STEPS:
        return Size(1024, 8192, plan.steps or FULL_STEPS)
    return Size(256, 1024, plan.steps or 150)


def _how(plan: Plan, rate: float, factor: Factor = homeostatic, seed: int = 0) -> Learning:
    size = size_of(plan)
    return Learning(1, size.length, size.steps, rate, seed, factor)


@lru_cache(maxsize=1)
def _published_run(plan: Plan) -> tuple[PublishedContinuousTransformer, Curve]:
    """The published form in its own training, at the size that the plan allows."""
    model = seeded(0, lambda: PublishedContinuousTransformer(size_of(plan).width))
    return model, learn(model, read_bytes(plan).train, _how(plan, RATE))


def accuracy_as_published(plan: Plan) -> Finding:
    """Loss of the training batches, and their accuracy, the mean of the last steps."""
    (model, curve), text, size = _published_run(plan), read_bytes(plan), size_of(plan)
    shown = held_out(model, text.train, size.length, 8)
    said = (
        f"{text.source}; D {size.width}, {size.steps} steps of {size.length:,} characters: training-batch loss "
        f"{curve.last():.3f} nats a character, accuracy on training text {shown.accuracy:.1%}"
    )
    reached = size.steps >= FULL_STEPS
    checks = {
        "loss 0.90 to 0.95 or less": curve.last() <= LOSS[1], "accuracy 70 % or more": shown.accuracy >= ACCURACY[0]
    } if reached else {}  # fmt: skip
    figures = {"loss": curve.last(), "accuracy": shown.accuracy, "text": text.source, **size._asdict()}
    return Finding(said, figures, checks, "" if reached else FULL)


def accuracy_corrected(plan: Plan) -> Finding:
    """Held-out text; read as the authors decode; and a Transformer with as many parameters after as many tokens."""
    (published, curve), text, size = _published_run(plan), read_bytes(plan), size_of(plan)
    ours, peer = _causal(plan), _transformer(plan)
    scores = {"published form": held_out(published, text.held_out, size.length)}
    scores |= {name: held_out(model, text.held_out, size.length) for name, model in (("causal", ours), ("peer", peer))}
    decoded = _as_decoded(published, plan)
    same_positions = _same_positions(published, plan)
    gap, half = interval(scores["published form"].nats - scores["peer"].nats)
    counts = parameters(published), parameters(peer)
    said = (
        f"{text.source}, held out, {size.steps} steps of {size.length:,} characters: published form "
        f"{_scored(scores['published form'])}; our causal form {_scored(scores['causal'])}; Transformer with "
        f"{counts[1]:,} parameters beside {counts[0]:,} {_scored(scores['peer'])}. The difference to it is {gap:+.3f} "
        f"+- {half:.3f}\nread prefix by prefix, as it decodes, the published form costs {decoded:.3f} at positions "
        f"where whole windows cost {same_positions:.3f}: what the leak is worth"
    )
    checks = {
        "held-out loss is the training batches' within 3 %": abs(scores["published form"].mean / curve.last() - 1)
        <= 0.03,
        "whole windows cost what prefixes do within 1 %": abs(same_positions / decoded - 1) <= 0.01,
        "as good as a Transformer of its size and tokens": gap - half <= 0,
    }
    figures = {name: {"nats": score.mean, "accuracy": score.accuracy} for name, score in scores.items()}
    return Finding(said, figures | {"difference_95": [gap - half, gap + half], "decoded": decoded}, checks)


def _scored(score: HeldOut) -> str:
    return f"{score.mean:.3f} nats and {score.accuracy:.1%}"


def _causal(plan: Plan) -> LanguageModel:
    model = seeded(0, lambda: LanguageModel.from_preset(PRESET, hidden_size=size_of(plan).width))
    learn(model, read_bytes(plan).train, _how(plan, RATE))
    return model


def _transformer(plan: Plan) -> LanguageModel:
    """`transformer` with the parameters of the causal form; of three rates the one with the best training loss."""
    ours = LanguageModel.from_preset(PRESET, hidden_size=size_of(plan).width)
    narrow = 16 if plan.quick else 96
    tried = []
    for rate in (RATE, 1e-3, 3e-3)[: 1 if plan.quick else 3]:
        model = seeded(0, lambda: _peer(ours, narrow))
        tried.append((learn(model, read_bytes(plan).train, _how(plan, rate, cosine)).last(), model))
    return min(tried, key=lambda each: each[0])[1]


def _peer(ours: LanguageModel, width: int) -> LanguageModel:
    """Two layers whose MLPs take up what parameters are left."""
    count, layers = parameters(ours), 2
    spent = 2 * 256 * width + layers * 4 * width * width
    hidden = max(8, (count - spent) // (layers * 3 * width))
    block = {"mlp": {"hidden": hidden}}
    heads = {"attention": {"heads": max(1, width // 32)}}
    return LanguageModel.from_preset(
        "transformer-nano", hidden_size=width, block=block, mixers=heads, depth={"layers": layers}, tied_head=False
    )


def _positions(length: int, count: int) -> list[int]:
    return [length * (i + 1) // (count + 1) for i in range(count)]


@torch.no_grad()
def _as_decoded(model: PublishedContinuousTransformer, plan: Plan) -> float:
    """Nats of some characters of one window, each from its prefix alone."""
    row, positions = _one_window(plan)
    found = [model.next_logits(row[:, : p + 1]).log_softmax(-1)[0, row[0, p + 1]] for p in positions]
    return -float(torch.stack(found).mean())


@torch.no_grad()
def _same_positions(model: PublishedContinuousTransformer, plan: Plan) -> float:
    """Nats of the same characters, computed with the window that they stand in."""
    row, positions = _one_window(plan)
    logits = model(row[:, :-1]).log_softmax(-1)
    return -float(torch.stack([logits[0, p, row[0, p + 1]] for p in positions]).mean())


def _one_window(plan: Plan) -> tuple[torch.Tensor, list[int]]:
    """A window and, as the leak is a matter of its start, positions that are dense there."""
    length = size_of(plan).length
    early = list(range(1, 9)) if plan.quick else list(range(1, 49))
    return read_bytes(plan).held_out[: length + 1].unsqueeze(0), early + _positions(length, 4 if plan.quick else 16)


# ---------------------------------------------------------------------- the learning rate


def _constant(step: int, steps: int, norm: float) -> float:
    return 1.0


FACTORS: dict[str, Factor] = {"homeostatic": homeostatic, "constant": _constant, "cosine": cosine}


def homeostasis_as_published(plan: Plan) -> Finding:
    """Training loss of the published form at the published base rate, with the factor and without."""
    curves = {name: _small(plan, name, RATE, 0)[1] for name in ("homeostatic", "constant")}
    factors = torch.tensor(curves["homeostatic"].factors)
    low, middle, high = factors.quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    said = (
        f"{_small_told(plan)}: training loss {curves['homeostatic'].last():.3f} with it and "
        f"{curves['constant'].last():.3f} at the constant base rate {RATE:g}; its factor is {low:.2f} to {high:.2f} "
        f"(5 to 95 %), {middle:.2f} in the median, and can never rise above 1"
    )
    checks = {"training loss is lower with it": curves["homeostatic"].last() < curves["constant"].last()}
    figures = {"loss": {name: curve.last() for name, curve in curves.items()}, "factor_05_50_95": [low, middle, high]}
    return Finding(said, figures, checks)


def homeostasis_corrected(plan: Plan) -> Finding:
    """Held-out loss at each schedule's own best base rate, over seeds."""
    rates = (RATE, 3e-3) if plan.quick else (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    best, chosen = {}, {}
    for name in FACTORS:
        tried = {rate: _small(plan, name, rate, 0)[0].mean for rate in rates}
        chosen[name] = min(tried, key=lambda rate, tried=tried: tried[rate])  # type: ignore[misc]
        runs = [_small(plan, name, chosen[name], seed)[0].nats for seed in range(plan.seeds)]
        best[name] = torch.stack(runs).mean(0)
    gaps = {name: interval(best["homeostatic"] - best[name]) for name in FACTORS if name != "homeostatic"}
    told = ", ".join(f"{name} {float(nats.mean()):.3f} (rate {chosen[name]:g})" for name, nats in best.items())
    said = (
        f"{_small_told(plan)}; held-out nats a character, each at the best of the base rates "
        f"{', '.join(f'{rate:g}' for rate in rates)}, {plan.seeds} seed(s): {told}; homeostatic against "
        + ", ".join(f"{name} {gap:+.3f} +- {half:.3f}" for name, (gap, half) in gaps.items())
    )
    checks = {f"lower than with a tuned {name} rate": gap + half < 0 for name, (gap, half) in gaps.items()}
    figures = {"held_out": {name: float(nats.mean()) for name, nats in best.items()}, "rates": chosen, "gaps": gaps}
    return Finding(said, figures, checks)


@lru_cache(maxsize=64)
def _small(plan: Plan, schedule: str, rate: float, seed: int) -> tuple[HeldOut, Curve]:
    """A small published form trained with a schedule: 4 windows of 256 a step."""
    width, length, steps = (16, 32, plan.steps or 6) if plan.quick else (64, 256, plan.steps or 150)
    model = seeded(seed, lambda: PublishedContinuousTransformer(width, checkpoint=False))
    text = read_bytes(plan)
    curve = learn(model, text.train, Learning(4, length, steps, rate, seed, FACTORS[schedule]))
    return held_out(model, text.held_out, length, 4 if plan.quick else 48), curve


def _small_told(plan: Plan) -> str:
    return f"{read_bytes(plan).source}; " + (
        "D 16, 32 characters" if plan.quick else f"published form at D 64, {plan.steps or 150} steps of 4 x 256"
    )


# ---------------------------------------------------------------------- samples

SAMPLE, TEMPERATURE, TOP_P = 200, 0.8, 0.9
NANO = "continuous-transformer-nano"
_LONGER = f"longer training: glissando train --preset {NANO} --training.tokens 8000000 --out RUN, then --run RUN"


def samples_as_published(plan: Plan) -> Finding:
    """Samples of 200 characters as published, after the training that the plan allows: are their words words?"""
    model, _ = _published_run(plan)
    size = size_of(plan)
    found = _judged(plan, [_sample(model, plan, seed) for seed in range(1 if plan.quick else 3)])
    said = f"after {size.steps} steps of {size.length:,} characters: {found.said}"
    reached = size.steps >= FULL_STEPS
    return Finding(said, found.figures, found.checks if reached else {}, "" if reached else FULL)


def samples_corrected(plan: Plan) -> Finding:
    """The same of the run that is given, or of `continuous-transformer-nano` after some minutes of training."""
    from glissando.loading import load

    if plan.run is not None:
        model, told, needs = load(plan.run), f"run {plan.run}", ""
    else:
        steps, length = (6, 32) if plan.quick else (8 * size_of(plan).steps, 512)
        shape = {"hidden_size": 16, "depth": {"layers": 1}} if plan.quick else {}
        model = seeded(0, lambda: LanguageModel.from_preset(NANO, **shape))
        learn(model, read_bytes(plan).train, Learning(1, length, steps, 2e-3, 0, cosine, betas=(0.9, 0.99)))
        told, needs = f"{NANO} after {steps:,} steps of {length} characters", _LONGER
    found = _judged(plan, [_sample(model, plan, seed) for seed in range(1 if plan.quick else 3)])
    return Finding(f"{told}: {found.said}", found.figures, found.checks, needs)


@torch.no_grad()
def _sample(model: nn.Module, plan: Plan, seed: int) -> str:
    """200 characters behind 64 of held-out text, all read again for each: what the published form does."""
    count = 24 if plan.quick else SAMPLE
    ids = read_bytes(plan).held_out[1000 * seed : 1000 * seed + 64].unsqueeze(0)
    rng = torch.Generator().manual_seed(seed)
    for _ in range(count):
        p = (logits_of(model, ids)[0, -1] / TEMPERATURE).softmax(-1)
        ordered, order = p.sort(descending=True)
        kept = ordered.where(ordered.cumsum(0) - ordered < TOP_P, 0.0)
        ids = torch.cat([ids, order[torch.multinomial(kept, 1, generator=rng)].unsqueeze(0)], 1)
    return bytes(ids[0, 64:].tolist()).decode("utf-8", "replace")


def _judged(plan: Plan, samples: list[str]) -> Finding:
    """Shares of words, and of pairs of words, that the training text has, beside those of held-out text."""
    text = read_bytes(plan)
    words = _words(text.text("train", len(text.train)))
    known, pairs = set(words), set(itertools.pairwise(words))
    real = _shares([text.text("held_out", 20_000)], known, pairs)
    ours = _shares(samples, known, pairs)
    said = (
        f"{ours[0]:.0%} of the sampled words occur in the training text (held-out text: {real[0]:.0%}), and "
        f"{ours[1]:.0%} of the pairs of words ({real[1]:.0%}). The first sample: {samples[0][:120]!r}"
    )
    checks = {
        "its words are words, as often as held-out text's within 5 points": ours[0] >= real[0] - 0.05,
        "its pairs of words are known, as often within 10 points": ours[1] >= real[1] - 0.10,
    }
    return Finding(said, {"samples": samples, "shares": ours, "held_out_shares": real}, checks)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def _shares(texts: list[str], known: set[str], pairs: set[tuple[str, str]]) -> tuple[float, float]:
    """Of words and of pairs; the first and the last word of a text may be cut, and are left out."""
    words, couples = [], []
    for text in texts:
        inside = _words(text)[1:-1]
        words += inside
        couples += list(itertools.pairwise(inside))
    return (
        sum(word in known for word in words) / max(1, len(words)),
        sum(couple in pairs for couple in couples) / max(1, len(couples)),
    )
