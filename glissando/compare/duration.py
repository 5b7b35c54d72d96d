"""How long a comparison takes on this machine, from a few timed steps of each model, and a shorter one instead.

A training takes its steps and its validations; beside it, a model is built and scored. A shorter comparison validates
less often, so that at most a fifth of its trainings' time goes into that.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from glissando.compare.log import Log
from glissando.compare.models import read_models
from glissando.compare.plan import PLAN, SWEEP_SHARE, Amount, Comparison, Job
from glissando.compare.speed import cost_of
from glissando.compare.training import with_vocabulary
from glissando.runs import CONFIG

#: validations of a training, and the largest part of its time that those of a shortened one take where it has several
_VALIDATIONS, _SHARE = 10, 0.2
#: the option of training by which a shorter comparison validates less often
EVERY = "validate_every"
#: models and tokens of a first look, and the least share of its budget that a shortened comparison has
FEWER, FIRST_LOOK, _LEAST = 3, "tokens=5e4", 0.02


def planned(comparison: Comparison) -> str:
    """What will be done, in a line."""
    trained = "once" if comparison.seeds == 1 else f"{comparison.seeds} times"
    probes = f", then {len(comparison.probes)} probes" if comparison.probes else ""
    return f"{len(comparison.names)} models, each trained {trained} for {comparison.budget}{probes}"


def fitted(comparison: Comparison, within: float | None, log: Log, began: float) -> Comparison:
    """The comparison, with a line that says how long it takes; where that is more than is left of `within` seconds from
    `began` on, a shorter one.

    The shorter one has fewer models, the first ones, and a smaller budget; probes are not counted. Nothing is timed
    where a training has begun before: what is there goes on with the budget that it has.
    """
    if _has_trainings(comparison):
        if within is not None:
            log.print(
                f"{planned(comparison)}: {comparison.out} has trainings, which go on with this budget. --within "
                "sizes a comparison before its first training: for another, give another --out"
            )
        return comparison
    if comparison.budget.kind == "flops":
        return comparison
    costs = [_costs(comparison, name, log) for name in comparison.names]
    seconds = sum(cost.steps + _VALIDATIONS * cost.validation + cost.rest for cost in costs)
    line = f"{planned(comparison)}: about {spelled(seconds)}{' without the probes' if comparison.probes else ''}"
    left = math.inf if within is None else within - (time.perf_counter() - began)
    if within is None or seconds <= left:
        log.print(f"{line}; for a first look name {FEWER} models and give --budget {FIRST_LOOK}")
        return comparison
    steps, validation, rest, number = map(sum, zip(*costs[:FEWER], strict=True))
    validations, training, scored = _VALIDATIONS, comparison.training, ""
    if validation and EVERY not in training:
        validations = min(max(int(_SHARE * (left - rest) / validation), 1), _VALIDATIONS)
    share = min(max((left - rest - validations * validation) / steps, _LEAST), 1.0)
    note = f", longer than --within: {_LEAST:.0%} of --budget is the least" if share == _LEAST else ""
    models, budget = comparison.given, comparison.budget
    share = min(float(f"{share * budget.value:.2g}") / budget.value, 1.0)
    if validations < _VALIDATIONS:
        training = training | {EVERY: math.ceil(share * number / len(costs[:FEWER]) / validations)}
        scored = f", with at most {validations} validation{'s' * (validations > 1)} each"
    shorter = replace(
        comparison,
        given=dict([*models.items()][:FEWER]) if isinstance(models, Mapping) else [*models][:FEWER],
        budget=budget.times(share),
        training=training,
    )
    seconds = share * steps + validations * validation + rest
    log.print(f"{line}, more than the {spelled(within)} of --within")
    log.print(f"instead: {planned(shorter)}{scored}: about {spelled(seconds)} from now{note}")
    return shorter


def resumed(comparison: Comparison) -> Comparison:
    """With the models and the budget that the same command had chosen before, from the plan in its directory, where a
    training has begun; a plan that is no shorter form of what is asked for is of another command, and changes nothing.
    """
    file = comparison.out / PLAN
    if not file.is_file() or not _has_trainings(comparison):
        return comparison
    plan = json.loads(file.read_bytes())
    value, _, kind = plan["budget"].partition(" ")
    budget, names = Amount(kind, float(value.replace(",", ""))), list(read_models(plan["models"]))
    asked = comparison.budget
    if names != comparison.names[: len(names)] or kind != asked.kind or budget.value > asked.value:
        return comparison
    every = {EVERY: plan["training"][EVERY]} if EVERY in plan["training"] else {}
    return replace(comparison, given=plan["models"], budget=budget, training=every | comparison.training)


def _has_trainings(comparison: Comparison) -> bool:
    return any(comparison.out.glob(f"*/*/*/{CONFIG}"))


class _Costs(NamedTuple):
    """Seconds of a model, all trainings together but those of probes: its steps, one validation of each, and all else;
    and the number of steps of one training."""

    steps: float
    validation: float
    rest: float
    number: float


def _costs(comparison: Comparison, name: str, log: Log) -> _Costs:
    log.status(f"timing {name}")
    cost = cost_of(with_vocabulary(comparison.config(Job("run", name, 0, comparison.rates(name)[0]))))
    kind, value = comparison.budget
    rates = len(comparison.learning_rates) if comparison.sweeps else 0
    training = value * {"tokens": cost.token, "steps": cost.step, "seconds": 1.0}[kind]
    trainings, whole = comparison.seeds + rates, comparison.seeds + SWEEP_SHARE * rates
    validation = 0.0 if kind == "seconds" else cost.held_out  # under a budget in seconds they are a part of it
    rest = trainings * (cost.start + cost.held_out)
    return _Costs(whole * training, trainings * validation, rest, training / cost.step)


def spelled(seconds: float) -> str:
    """90 seconds, 12 minutes, 2.5 hours."""
    if seconds < 100:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"
