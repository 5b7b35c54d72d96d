"""What of the Liquid State-Space Model shows on series: whether tau adapts over time, and uneven times.

The series are two decaying oscillators, kicked now and then, whose frequencies switch between two regimes, sampled
after exponential gaps; each step is given the value and the time to the next one, which it must predict.
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

from glissando.evaluation.diagnostics import compare_patterns, signals
from research.audit.claim import Finding, Plan
from research.audit.liquid.form import published_model, some_ids
from research.audit.training import parameters, seeded
from research.intervals import gap_of, mean_of
from research.irregular_series import Gru, Liquid, Windows
from research.published.liquid_ssm import Core
from research.signal_picture import plot_signal

FEATURES, WINDOW = 2, 64
DECAY, TURN = np.array([0.02, 0.1]), np.array([[0.3, 1.1], [0.9, 0.4]])


@lru_cache(maxsize=4)
def windows(count: int, seed: int) -> Windows:
    """Windows of WINDOW steps, each of a series of its own."""
    rng, x, dt = np.random.default_rng(seed), [], []
    for _ in range(count):
        regime, z = int(rng.integers(2)), rng.normal(size=2) + 1j * rng.normal(size=2)
        gaps, values = rng.exponential(1.0, WINDOW + 1), []
        for gap in gaps:
            values.append(z.real)
            z = z * np.exp((-DECAY + 1j * TURN[regime]) * gap)
            if rng.random() < 0.05:
                regime, z = 1 - regime, z + rng.normal(size=2)
        x.append(values)
        dt.append(gaps[:-1])
    given = torch.tensor(np.array(x), dtype=torch.float32)
    return Windows(given[:, :-1], torch.tensor(np.array(dt), dtype=torch.float32), given[:, 1:])


def gru_like(model: nn.Module) -> Gru:
    """The GRU whose width brings it nearest to the model's parameters."""
    grus = (Gru(FEATURES, width) for width in range(4, 128))
    return min(grus, key=lambda gru: abs(parameters(gru) - parameters(model)))


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "liquid": partial(Liquid, FEATURES),
    "liquid, dt a feature too": partial(Liquid, FEATURES, reads_time=True),
    "liquid, dt a feature alone": partial(Liquid, FEATURES, knows_time=False, reads_time=True),
    "liquid without dt": partial(Liquid, FEATURES, knows_time=False),
    "GRU, dt a feature": lambda width: gru_like(Liquid(FEATURES, width)),
}


class Fitted(NamedTuple):
    model: Any
    errors: Tensor  # (W,) of held-out windows


@lru_cache(maxsize=32)
def fitted(plan: Plan, kind: str, seed: int = 0) -> Fitted:
    """Adam with a cosine, the better of two rates by validation windows; errors of others, over the variance."""
    width, rates = (8, (1e-2,)) if plan.quick else (24, (3e-3, 1e-2))
    tried = [_fit(plan, kind, width, rate, seed) for rate in rates]
    best = min(tried, key=lambda model: float(errors(model, _part(plan, 1)).mean()))
    return Fitted(best, errors(best, _part(plan, 2)))


def _part(plan: Plan, number: int) -> Windows:
    """To train on (0), to choose by (1), to report (2)."""
    return windows((16, 4, 4)[number] if plan.quick else (256, 64, 128)[number], number)


def _fit(plan: Plan, kind: str, width: int, rate: float, seed: int) -> nn.Module:
    model, train = seeded(seed, lambda: KINDS[kind](width)), _part(plan, 0)
    steps, rng = plan.steps or (6 if plan.quick else 500), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        rows = torch.randint(len(train.x), (8,), generator=rng)
        optimizer.zero_grad()
        (model(train.x[rows], train.dt[rows]) - train.target[rows]).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@torch.no_grad()
def errors(model: nn.Module, data: Windows) -> Tensor:
    """(W,) mean squares over a feature's variance."""
    return ((model(data.x, data.dt) - data.target).square() / data.target.square().mean((0, 1))).mean((1, 2))


# ---------------------------------------------------------------------- uneven times


def irregular_as_published(plan: Plan) -> Finding:
    """Whether the published form accepts the times of the tokens."""
    model, ids = published_model(plan), some_ids(1, 4)
    try:
        model(ids, dt=torch.ones(1, 4))
        takes = True
    except TypeError:
        takes = False
    said = "times cannot be given: its dt is a substep that it chooses itself, and every token takes ten"
    return Finding(
        said if not takes else "times can be given", {"takes_time": takes}, {"it accepts the time of each token": takes}
    )


def irregular_corrected(plan: Plan) -> Finding:
    """Forecasts of uneven series with the time, without it, and by a GRU that reads it; and the laws of time."""
    found = {kind: torch.stack([fitted(plan, kind, seed).errors for seed in plan.each_seed]) for kind in KINDS}
    means = {kind: float(each.mean()) for kind, each in found.items()}
    gap = gap_of(found["liquid"] - found["liquid without dt"])
    gru = found["GRU, dt a feature"]
    beside = {kind: gap_of(found[kind] - gru) for kind in ("liquid", "liquid, dt a feature too")}
    still, halves = _laws(plan)
    summary = ", ".join(f"{kind} {mean:.3f}" for kind, mean in means.items())
    against = ", ".join(f"{kind} {each}" for kind, each in beside.items())
    said = (
        f"mean square of the forecast over the variance, held-out series, {len(plan.each_seed)} seed(s): {summary}; "
        f"with the time {gap} against without; against the GRU: {against}. A step of "
        f"dt = 0 moves the state by {still:g}; two half steps and one differ by {halves:.0e} where tau sees the "
        "input alone"
    )
    checks = {
        "knowing the time helps": gap.below(),
        "no time, no change": still == 0,
        "two half steps are one": halves < 1e-9,
    }
    figures = {"errors": means, "against_no_time": gap, "against_gru": beside, "laws": [still, halves]}
    return Finding(said, figures, checks)


@torch.no_grad()
def _laws(plan: Plan) -> tuple[float, float]:
    """How far dt = 0 moves the state; how far two half steps with one input are from one."""
    model = seeded(0, lambda: Liquid(FEATURES, 8, state_dependence=False)).model.double().eval()
    mixer = model.depth.blocks[0].mixer
    x, state = (
        torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        mixer.init_state(1),
    )
    from glissando.mixers import Context

    def after(state: Any, dt: float) -> Any:
        return mixer(x, state, Context(dt=torch.full((1, 1), dt, dtype=torch.float64)))[1]

    begun = after(state, 1.0)
    still = float((after(begun, 0.0).x - begun.x).abs().max())
    return still, float((after(after(begun, 0.5), 0.5).x - after(begun, 1.0).x).abs().max())


# ---------------------------------------------------------------------- does tau adapt

_SEEDS = 8
LARGER = 1.01


def adaptation_as_published(plan: Plan) -> Finding:
    """tau of new cores of the published demonstration, whose four patterns lie along the eight features of one step."""
    logs: dict[str, list[float]] = {name: [] for name in _along(0)}
    for seed in range(_SEEDS):
        core = seeded(seed, lambda: Core(8, 16, hippo=True, inputs=8))
        for name, u in _along(seed).items():
            with torch.no_grad():
                logs[name].append(float(core.tau(torch.zeros(1, 16), u).log().mean()))
    means = {name: math.exp(sum(each) / len(each)) for name, each in logs.items()}
    gap = mean_of(torch.tensor(logs["smooth"]) - torch.tensor(logs["spiky"]))
    low, high = (math.exp(end) for end in gap.interval)
    summary = ", ".join(f"{name} {mean:.4f}" for name, mean in means.items())
    said = (
        f"one step, the published patterns along its 8 features, {_SEEDS} new models: tau {summary}; smooth over spiky "
        f"{math.exp(gap.value):.4f} ({low:.4f} to {high:.4f}). The network that makes tau "
        "gets no gradient, so that training changes nothing of it"
    )
    return Finding(
        said,
        {"tau": means},
        {f"tau is {LARGER:g}x as large for smooth as for spiky, or more": gap.above(math.log(LARGER))},
    )


def _along(seed: int) -> dict[str, Tensor]:
    return {
        "smooth": torch.sin(torch.linspace(0, 2 * math.pi, 8)).unsqueeze(0),
        "spiky": torch.tensor([[0.0, 1.0, 0.0, -1.0, 0.0, 1.0, 0.0, -1.0]]),
        "constant": torch.full((1, 8), 0.5),
        "random": torch.randn(1, 8, generator=torch.Generator().manual_seed(seed)),
    }


def adaptation_corrected(plan: Plan) -> Finding:
    """tau of a model that learned to forecast, where the patterns run over time."""
    summary, ratios = [], []
    for seed in plan.each_seed:
        model = fitted(plan, "liquid", seed).model.model
        rows = {row.pattern: row for row in compare_patterns(model, signals(model), against="spiky", seeds=_SEEDS)}
        smooth = rows["smooth"]
        ratios.append((smooth.ratio, smooth.low, smooth.high))
        others = ", ".join(f"{name} {rows[name].ratio:.2f}" for name in ("constant", "random"))
        summary.append(f"seed {seed}: smooth {smooth.ratio:.2f} ({smooth.low:.2f} to {smooth.high:.2f}), {others}")
    said = f"trained to forecast uneven series; tau over that of spiky input, patterns over time: {'; '.join(summary)}"
    over_seeds = mean_of(torch.tensor([math.log(ratio) for ratio, _, _ in ratios]))
    checks = {f"it is {LARGER:g}x as large for smooth as for spiky, or more": over_seeds.above(math.log(LARGER))}
    return Finding(said, {"smooth_over_spiky": ratios}, checks, draw=lambda target: _draw(plan, target))


def _draw(plan: Plan, target: Path) -> Path:
    data = _part(plan, 2)
    return plot_signal(fitted(plan, "liquid").model.model, data.x[0], target, data.dt[0])
