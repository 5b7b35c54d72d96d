"""What of the Tauformer shows in training: whether it learns, its tau, a domain's Laplacian, and what is absorbed.

One harness: bytes of one text, three layers of 96, four heads, windows of 256, AdamW 2e-3 with a cosine, for the
published form and for ours alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from glissando.evaluation.observe import observe, show
from glissando.mixers.tau import Tau
from glissando.mixers.tau import laplacian as graphs
from glissando.model import LanguageModel
from glissando.training.optimizer import freeze
from research.audit.claim import Finding, Plan
from research.audit.tau.graph import random_graph
from research.audit.training import (
    Curve,
    HeldOut,
    Learning,
    Tuned,
    cosine,
    held_out,
    learn,
    losses,
    read_bytes,
    running_median,
    seeded,
    tuned,
)
from research.intervals import gap_of, mean_of
from research.published.tauformer import PublishedTauformer

CORPUS = (
    "the published JSONL corpus in 30,522 word pieces, 655M tokens: glissando train --preset tauformer --data.path "
    "FILE --data.tokenizer.kind file --data.tokenizer.path tokenizer.json --training.tokens "
    "655360000 --out RUN"
)
RATE = 2e-3
RATES = (1e-3, 2e-3, 4e-3)
#: where T starts that is learned, as in `tauformer-nano`: from 0.01 gradients are noise
START = 0.2
GATES = {"importance": True, "forget_gate": True, "output_gate": True, "horizons": [2.0, 64.0]}
#: steps between two looks at tau, or at the energies
EVERY = 10
NEAR = 1.02


def tau_mixers(model: LanguageModel) -> list[Tau]:
    """In the order of the layers."""
    return [mixer for mixer in model.modules() if isinstance(mixer, Tau)]


def set_tau(model: LanguageModel, tau: float) -> None:
    for mixer in tau_mixers(model):
        mixer.tau.fill_(tau)


def key_energies(model: LanguageModel, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """E (N, H) of the first tau layer's keys at the N real tokens of ids (B, T), by one forward of the model."""
    seen: list[Tensor] = []
    show(model, tau_mixers(model)[:1], lambda mixer, x, ctx: seen.append(mixer.key_energies(x, ctx)), ids, mask)
    return seen[0]


class Size(NamedTuple):
    width: int
    heads: int
    layers: int
    batch: int
    length: int
    steps: int


def size_of(plan: Plan) -> Size:
    return Size(32, 2, 1, 2, 32, plan.steps or 12) if plan.quick else Size(96, 4, 3, 4, 256, plan.steps or 600)


def _published(plan: Plan, **options: Any) -> PublishedTauformer:
    s = size_of(plan)
    model = PublishedTauformer(256, s.width, s.heads, s.layers, **options)
    model.calibrate(_some(plan))
    return model


def _ours(plan: Plan, **tau: Any) -> LanguageModel:
    """`tauformer` at the harness's size; mixers other than tau by `mixer`."""
    s = size_of(plan)
    mixer, learns = tau.pop("mixer", "tau"), tau.pop("learns", True)
    own = {"head_size": s.width // s.heads, **tau} if mixer == "tau" else {}
    given = {"kind": mixer, "heads": s.heads, **own}
    model = LanguageModel.from_preset(
        "tauformer", vocab_size=256, hidden_size=s.width, mixer=given, depth={"layers": s.layers}
    )
    if mixer == "tau":
        set_tau(model, float(key_energies(model, _some(plan)).median()))
    freeze(model, [] if learns else ["*.log_temperature"])
    return model


def _some(plan: Plan) -> Tensor:
    s = size_of(plan)
    return read_bytes(plan).train[: s.batch * s.length].view(s.batch, s.length)


MODELS: dict[str, Callable[[Plan], nn.Module]] = {
    "published": lambda plan: _published(plan),
    "published GPT": lambda plan: _published(plan, softmax=True),
    "softmax": lambda plan: _ours(plan, mixer="attention"),
    "T = 1": lambda plan: _ours(plan, temperature=1.0, learns=False),
    "learned T": lambda plan: _ours(plan, temperature=START),
    "learned T, gates": lambda plan: _ours(plan, temperature=START, **GATES),
    "no scalar": lambda plan: _ours(plan, temperature=1e6, learns=False),
}


class Run(NamedTuple):
    model: Any
    curve: Curve
    held_out: HeldOut


def _how(plan: Plan, seed: int) -> Learning:
    s = size_of(plan)
    return Learning(s.batch, s.length, s.steps, RATE, seed, cosine, betas=(0.9, 0.99))


@lru_cache(maxsize=64)
def run(plan: Plan, kind: str, seed: int = 0) -> Run:
    """A model of MODELS, trained."""
    model = seeded(seed, lambda: MODELS[kind](plan))
    curve = learn(model, read_bytes(plan).train, _how(plan, seed))
    return Run(model, curve, _scored(model, plan))


def _scored(model: nn.Module, plan: Plan) -> HeldOut:
    return held_out(model, read_bytes(plan).held_out, size_of(plan).length, _count(plan))


def _count(plan: Plan) -> int:
    return 4 if plan.quick else 64


def _setup(plan: Plan) -> str:
    s = size_of(plan)
    return f"{read_bytes(plan).source}; {s.layers} layers of {s.width}, {s.steps} steps of {s.batch} x {s.length}"


# ---------------------------------------------------------------------- does it learn


def learns_as_published(plan: Plan) -> Finding:
    """The published form, T = 1: held-out loss beside that of a table of pairs; which weights get gradients."""
    model, curve, score = run(plan, "published")
    pairs, share = _bigram(plan), model.effective_share(_some(plan)[:1])
    silent = sorted({name.split(".")[2] for name, p in model.named_parameters() if p.grad is None})
    said = (
        f"{_setup(plan)}: training loss {curve.last():.3f}, held out {score.mean:.3f} nats a byte (a table of pairs of "
        f"bytes: {pairs:.3f}); the last query attends almost equally to {share:.1%} of its keys; "
        f"without gradient: {', '.join(silent) or 'nothing'}"
    )
    checks = {
        "the loss falls below that of a table of pairs": score.mean < pairs,
        "every part learns": not silent,
        "attention selects (attends almost equally to less than half of the keys)": share < 0.5,
    }
    figures = {"training": curve.last(), "held_out": score.mean, "bigram": pairs, "effective_share": share}
    return Finding(said, figures | {"without_gradient": silent}, checks, CORPUS)


def learns_corrected(plan: Plan) -> Finding:
    """Ours at T = 1 and with a learned T, by the same three tests; beside them softmax in the same model."""
    kinds = ("T = 1", "learned T", "learned T, gates", "softmax")
    found = {kind: _tuned(plan, kind) for kind in kinds}
    seen = {kind: observe(found[kind].models[0], _some(plan)[:1])["effective_share"] for kind in kinds[:3]}
    below = {kind: gap_of(found[kind].nats - _table_nats(plan)) for kind in kinds}
    beside = {kind: gap_of(found[kind].nats - found["softmax"].nats) for kind in kinds[:3]}
    summary = "; ".join(
        f"{kind} {found[kind].mean:.3f} ({beside[kind]} against softmax; attends almost equally to {seen[kind]:.0%} of "
        "its keys)"
        for kind in kinds[:3]
    )
    said = (
        f"{_setup(plan)}, {len(plan.each_seed)} seed(s), each at the best of the rates {_rates()}, held-out nats a "
        f"byte: softmax {found['softmax'].mean:.3f}; {summary}; a table of pairs of bytes "
        f"{float(_table_nats(plan).mean()):.3f}"
    )
    checks: dict[str, bool | None] = {}
    for kind in kinds[:2]:
        checks[f"{kind}: the loss falls below that of a table of pairs"] = below[kind].below()
        checks[f"{kind}: every part learns"] = not _silent(found[kind].models[0], plan)
        checks[f"{kind}: attention selects (attends almost equally to less than half of the keys)"] = seen[kind] < 0.5
    figures = {
        "held_out": {kind: each.nats.mean(1).tolist() for kind, each in found.items()},
        "against_softmax": beside,
    }
    figures |= {"rates": {kind: each.rate for kind, each in found.items()}, "effective_share": seen}
    return Finding(said, figures, checks, draw=lambda t: _draw(plan, t))


@lru_cache(maxsize=8)
def _tuned(plan: Plan, kind: str) -> Tuned:
    rates = RATES[:1] if plan.quick else RATES
    return tuned(partial(MODELS[kind], plan), read_bytes(plan), _how(plan, 0), rates, plan.each_seed, _count(plan))


def _rates() -> str:
    return ", ".join(f"{rate:g}" for rate in RATES)


def _silent(model: nn.Module, plan: Plan) -> list[str]:
    """Parameters that get no gradient."""
    model.zero_grad()
    losses(model, _some(plan)).mean().backward()
    learned = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, p in learned if p.grad is None or not p.grad.any()]


def _table_nats(plan: Plan) -> Tensor:
    """(W,) nats a byte of the table of pairs, on the windows that are reported where a rate is chosen."""
    text, length = read_bytes(plan).reported, size_of(plan).length
    count = min(_count(plan), (len(text) - 1) // length)
    return -_table(plan)[text[:-1], text[1:]][: count * length].view(count, length).mean(1)


def _bigram(plan: Plan) -> float:
    """Held-out nats a byte of a table of pairs."""
    text = read_bytes(plan).held_out
    return -float(_table(plan)[text[:-1], text[1:]].mean())


def _table(plan: Plan) -> Tensor:
    """log P(byte | the one before), by counts of pairs, a tenth added to each."""
    text = read_bytes(plan)
    counts = torch.full((256, 256), 0.1, dtype=torch.float64)
    counts.view(-1).index_add_(0, text.train[:-1] * 256 + text.train[1:], torch.ones(len(text.train) - 1).double())
    return (counts / counts.sum(1, keepdim=True)).log()


def _attends(plan: Plan, nats: float) -> str:
    """What a comparison of attentions needs to mean anything, or "": that they predict better than pairs do."""
    if plan.quick or nats < _bigram(plan):
        return ""
    return f"training until attention predicts better than a table of pairs ({_bigram(plan):.3f} nats): more --steps"


def _draw(plan: Plan, target: Path) -> Path:
    from glissando.evaluation.figures import figure_and_axes

    figure, (axes,) = figure_and_axes()
    colors = {"published": "#b3261e", "T = 1": "#c77700", "learned T": "#0b6e99", "softmax": "#5f6b76"}
    for kind, color in colors.items():
        curve = run(plan, kind).curve.losses
        smooth = running_median(curve, max(1, len(curve) // 20))
        axes.plot(range(1, len(curve) + 1), smooth, color=color, linewidth=1.8, label=kind)
    axes.axhline(_bigram(plan), color="#5f6b76", linewidth=1, linestyle="--", label="table of pairs of bytes")
    axes.set(xlabel="steps", ylabel="training loss, nats a byte (running median)")
    axes.set_title("One number a head, T = 1 and learned, beside softmax")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(target)
    return target


# ---------------------------------------------------------------------- loss and tau


class Drift(NamedTuple):
    """The loss and the median energy of the first layer's keys, every EVERY steps; held-out loss at the end."""

    losses: list[float]
    medians: list[float]
    held_out: float

    def change(self) -> float:
        """Relative change of the median energy from the first step to the last."""
        return self.medians[-1] / self.medians[0] - 1

    def spearman(self) -> float:
        order = np.array([np.argsort(np.argsort(values)) for values in (self.losses, self.medians)], float)
        return float(np.corrcoef(order)[0, 1])


def _drift(
    plan: Plan, seed: int, model: Any, median_of: Callable[[], float], recalibrates: Callable[[float], Any] | None
) -> Drift:
    medians: list[float] = []

    def watch(step: int) -> None:
        if step % EVERY == 0:
            medians.append(median_of())
            if recalibrates is not None:
                recalibrates(medians[-1])

    curve = learn(model, read_bytes(plan).train, _how(plan, seed), watch).losses
    means = [float(np.mean(curve[i * EVERY : (i + 1) * EVERY])) for i in range(len(medians))]
    return Drift(means, medians, _scored(model, plan).mean)


def drift_as_published(plan: Plan) -> Finding:
    """The published form, recalibrated every ten steps: do tau and the loss fall together?"""
    model = seeded(0, lambda: _published(plan))

    def median() -> float:
        return float(model.key_energies(_some(plan)).median())

    found = _drift(plan, 0, model, median, lambda tau: model.tau.fill_(tau))
    said = f"{_setup(plan)}, tau recalibrated every {EVERY} steps: {_drifted(found)}"
    checks = {"tau falls": found.medians[-1] < found.medians[0], "with the loss": found.spearman() > 0.5}
    needs = _attends(plan, found.held_out)
    return Finding(said, {**found._asdict(), "spearman": found.spearman()}, {} if needs else checks, needs)


def drift_corrected(plan: Plan) -> Finding:
    """Energies that learn, on a tau that stays and on one that follows: is it the loss that pulls them down?"""
    ways = ("frozen", "recalibrated")
    found = {way: [_our_drift(plan, seed, follows=way == ways[1]) for seed in plan.each_seed] for way in ways}
    summary = "; ".join(
        f"tau {way}: {_drifted(each[0])}, held out {each[0].held_out:.3f}" for way, each in found.items()
    )
    moved = {
        way: mean_of(torch.tensor([d.medians[-1] / d.medians[0] - 1 for d in each])) for way, each in found.items()
    }
    follows = {way: mean_of(torch.tensor([drift.spearman() for drift in each])) for way, each in found.items()}
    said = (
        f"{_setup(plan)}, energies with gradients, seed 0: {summary}. Over {len(plan.each_seed)} seed(s) the median "
        "energy changes by "
        + ", ".join(f"{100 * moved[way].value:+.0f} % ({way}; Spearman {follows[way]})" for way in ways)
    )
    checks = {
        "on a frozen tau the energies fall": moved["frozen"].below(),
        "on a frozen tau they fall with the loss": follows["frozen"].above(0.5),
    }
    figures = {way: [{**d._asdict(), "spearman": d.spearman()} for d in each] for way, each in found.items()}
    needs = _attends(plan, max(drift.held_out for each in found.values() for drift in each))
    return Finding(said, figures, {} if needs else checks, needs)


def _our_drift(plan: Plan, seed: int, follows: bool) -> Drift:
    model = seeded(seed, lambda: _ours(plan, temperature=START))

    def median() -> float:
        return float(key_energies(model, _some(plan)).median())

    return _drift(plan, seed, model, median, (lambda tau: set_tau(model, tau)) if follows else None)


def _drifted(found: Drift) -> str:
    first, last = found.medians[0], found.medians[-1]
    return (
        f"the median energy goes from {first:.3f} to {last:.3f} while the loss goes from {found.losses[0]:.2f} to "
        f"{found.losses[-1]:.2f} (Spearman {found.spearman():+.2f})"
    )


# ---------------------------------------------------------------------- a domain's graph

#: nats a byte: seeds alone differ by half as much
MATTERS = 0.005


def graphs_of(plan: Plan) -> dict[str, Tensor]:
    """L (K, K) at one scale: the text's own graph, a chain, and a random one."""
    size, text = size_of(plan).width // size_of(plan).heads, read_bytes(plan)
    rows = text.train[: len(text.train) // 256 * 256].view(-1, 256)
    found = graphs.token_embeddings_from_corpus(rows, 256, None if plan.quick else 48)
    domain = graphs.project(graphs.from_embeddings(found.vectors, 8, found.counts), size)
    made = {"domain": domain, "chain": graphs.chain(size), "random": random_graph(size, 4, seed=0)}
    return {name: graphs.normalise(graph) for name, graph in made.items()}


def laplacian_as_published(plan: Plan) -> Finding:
    """The published form with the text's graph and with a chain: training loss, one seed."""
    made, ends, scores = graphs_of(plan), {}, {}
    for name in ("domain", "chain"):
        model = seeded(0, partial(_published, plan, laplacian=made[name]))
        ends[name] = learn(model, read_bytes(plan).train, _how(plan, 0)).last()
        scores[name] = _scored(model, plan).mean
    said = f"{_setup(plan)}: training loss {ends['domain']:.3f} with the text's graph, {ends['chain']:.3f} with a chain"
    checks = {f"lower with the domain's graph, by more than {MATTERS}": ends["domain"] < ends["chain"] - MATTERS}
    needs = _attends(plan, min(scores.values()))
    return Finding(said, {"loss": ends, "held_out": scores}, {} if needs else checks, needs)


def laplacian_corrected(plan: Plan) -> Finding:
    """Ours, energies and T learned, with three graphs: held-out loss over seeds."""
    made = graphs_of(plan)
    nats = {name: torch.stack([_with_graph(plan, made[name], seed).nats for seed in plan.each_seed]) for name in made}
    summary = ", ".join(f"{name} {float(values.mean()):.4f}" for name, values in nats.items())
    gaps = {other: gap_of(nats["domain"] - nats[other]) for other in ("chain", "random")}
    said = (
        f"{_setup(plan)}, held-out nats a byte, {len(plan.each_seed)} seed(s): {summary}; the domain's against "
        + ", ".join(f"{other} {gap}" for other, gap in gaps.items())
    )
    checks = {
        f"lower than with a {other} graph, by more than {MATTERS}": gap.below(-MATTERS) for other, gap in gaps.items()
    }
    figures = {"held_out": {name: values.mean(1).tolist() for name, values in nats.items()}, "gaps": gaps}
    needs = _attends(plan, min(float(values.mean()) for values in nats.values()))
    return Finding(said, figures, {} if needs else checks, needs)


def _with_graph(plan: Plan, graph: Tensor, seed: int) -> HeldOut:
    def make() -> LanguageModel:
        model = _ours(plan, temperature=START)
        for mixer in tau_mixers(model):
            mixer.laplacian.copy_(graph)
        set_tau(model, float(key_energies(model, _some(plan)).median()))
        return model

    model = seeded(seed, make)
    learn(model, read_bytes(plan).train, _how(plan, seed))
    return _scored(model, plan)


# ---------------------------------------------------------------------- what is absorbed


def epiplexity_as_published(plan: Plan) -> Finding:
    """The area of the training loss above its end: the published form beside its GPT."""
    areas = {kind: _area(plan, kind) for kind in ("published", "published GPT")}
    ends = {kind: run(plan, kind).curve.last() for kind in areas}
    said = f"{_setup(plan)}: {_areas(areas, ends, 'training loss at the end')}"
    checks = {"the area is larger with the scalar, by 2 %": areas["published"] > NEAR * areas["published GPT"]}
    return Finding(said, {"kilobits": areas, "end": ends}, checks)


def epiplexity_corrected(plan: Plan) -> Finding:
    """The same of ours with its scalar and with every lambda weighing the same; and where they end, held out."""
    kinds = ("learned T", "no scalar", "softmax")
    areas = {kind: torch.tensor([_area(plan, kind, seed) for seed in plan.each_seed]) for kind in kinds}
    nats = {kind: torch.stack([run(plan, kind, seed).held_out.nats for seed in plan.each_seed]) for kind in kinds}
    larger = mean_of(areas["learned T"] / areas["no scalar"] - 1)
    lower = gap_of(nats["learned T"] - nats["no scalar"])
    means, ends = ({kind: float(each.mean()) for kind, each in found.items()} for found in (areas, nats))
    said = (
        f"{_setup(plan)}, {len(plan.each_seed)} seed(s) at {RATE:g}: {_areas(means, ends, 'held out')}. The area with "
        f"the scalar over that without, less 1: {larger}; held-out nats with it less those without: {lower}. A large "
        "area is also what a slow start makes: read it with the end"
    )
    checks = {
        "the area is larger with the scalar than without, by 2 %": larger.above(NEAR - 1),
        f"held-out loss is lower with it, by more than {MATTERS}": lower.below(-MATTERS),
    }
    figures = {"kilobits": {kind: each.tolist() for kind, each in areas.items()}, "held_out": ends}
    return Finding(said, figures | {"larger": larger, "lower": lower}, checks)


def _area(plan: Plan, kind: str, seed: int = 0) -> float:
    """Kilobits that the training text cost above what the last steps cost."""
    curve, s = run(plan, kind, seed).curve, size_of(plan)
    above = sum(curve.losses) - len(curve.losses) * curve.last()
    return above * s.batch * s.length / math.log(2) / 1000


def _areas(areas: dict[str, float], ends: dict[str, float], what: str) -> str:
    return "; ".join(f"{kind} {areas[kind]:,.0f} kbit above the end, {what} {ends[kind]:.3f}" for kind in areas)
