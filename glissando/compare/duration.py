"""How long a comparison takes on this machine, from what is timed of each model, and a shorter one instead.

A training takes its tokens by the time of one, and its validations; beside it, the model is scored, writes a sample,
and its speed is measured. What is left is corrected after each training by how long those before took. A shorter
comparison validates less often, so that at most a fifth of its trainings' time goes into that.
"""

from __future__ import annotations

import copy
import json
import math
import time
from typing import NamedTuple

from glissando.compare.log import Log
from glissando.compare.models import read_models
from glissando.compare.plan import PLAN, SWEEP_SHARE, Amount, Comparison, Job
from glissando.compare.speed import DECODED, cost_of
from glissando.compare.training import with_vocabulary
from glissando.runs import CONFIG

#: validations of a training, and the largest part of its time that those of a shortened one take where it has several
_VALIDATIONS, _SHARE = 10, 0.2
#: steps of the speed's measurement, and tokens of a sample
_STEPS, _SAMPLE = 8, 300
#: the option of training by which a shorter comparison validates less often
EVERY = "validate_every"
#: models and tokens of a first look, how many models a shortened comparison has at least, and how little of its budget
FEWER, FIRST_LOOK, FEWEST, _LEAST = 3, "tokens=5e4", 2, 0.02


def planned(comparison: Comparison) -> str:
    """What will be done, in a line."""
    trained = "once" if comparison.seeds == 1 else f"{comparison.seeds} times"
    probes = f", then {len(comparison.probes)} probes" if comparison.probes else ""
    return f"{len(comparison.names)} models, each trained {trained} for {comparison.budget}{probes}"


def fitted(comparison: Comparison, within: float | None, log: Log, began: float) -> tuple[Comparison, dict[str, float]]:
    """The comparison, and about how many seconds each model takes where that is known, with a line that says so; where
    it is more than is left of `within` seconds from `began` on, a shorter one.

    The shorter one has fewer models, the first ones, and a smaller budget; probes are not counted. Nothing is timed
    where a training has begun before: what is there goes on with the budget that it has.
    """
    if _has_trainings(comparison):
        if within is not None:
            log.print(
                f"{planned(comparison)}: {comparison.directory} has trainings, which go on with this budget. --within "
                "sizes a comparison before its first training: for another, give another --out"
            )
        return comparison, {}
    if comparison.budget.kind == "flops":
        return comparison, {}
    costs: dict[str, _Costs] = {}
    names, left = comparison.names, math.inf
    for name in names:
        costs[name] = _costs(comparison, name, log)
        left = math.inf if within is None else within - (time.perf_counter() - began)
        if len(costs) == FEWER and sum(_expected(costs).values()) > left:
            break  # the others are not trained in any case
    fits, seconds = len(costs) == len(names), sum(_expected(costs).values())
    few = "" if fits else f", {FEWER} of them alone"
    line = f"{planned(comparison)}{few}: about {spelled(seconds)}{' without the probes' if comparison.probes else ''}"
    if within is None or (fits and seconds <= left):
        log.print(f"{line}; for a first look name {FEWER} models and give --budget {FIRST_LOOK}")
        return comparison, _expected(costs)
    costs, share, validations = _affordable(costs, left, _VALIDATIONS if EVERY in comparison.training else 1)
    names = list(costs)
    shorter, models = copy.copy(comparison), comparison.given
    shorter.__dict__.pop("models")
    shorter.given = {name: models[name] for name in names} if isinstance(models, dict) else list(models)[: len(names)]
    shorter.budget = Amount(comparison.budget.kind, float(f"{max(_LEAST, share) * comparison.budget.value:.2g}"))
    scored = ""
    if validations < _VALIDATIONS:
        scored = f", with at most {validations} validation{'s' * (validations > 1)} each"
        number = costs[names[0]].number * shorter.budget.value / comparison.budget.value
        shorter.training = comparison.training | {EVERY: max(1, math.ceil(number / validations))}
    shortened = _expected(costs, shorter.budget.value / comparison.budget.value, validations)
    log.print(f"{line}, more than the {spelled(within)} of --within")
    note = f", longer than --within: {len(names)} models and {_LEAST:.0%} of --budget are the least"
    about = spelled(sum(shortened.values()))
    log.print(f"instead: {planned(shorter)}{scored}: about {about} from now{'' if share >= _LEAST else note}")
    return shorter, shortened


def resumed(comparison: Comparison) -> Comparison:
    """With the models and the budget that the same command had chosen before, from the plan in its directory, where a
    training has begun; a plan that is no shorter form of what is asked for is of another command, and changes nothing.
    """
    file = comparison.directory / PLAN
    if not file.is_file() or not _has_trainings(comparison):
        return comparison
    plan = json.loads(file.read_bytes())
    value, _, kind = plan["budget"].partition(" ")
    budget, names = Amount(kind, float(value.replace(",", ""))), list(read_models(plan["models"]))
    if (
        names == comparison.names[: len(names)]
        and kind == comparison.budget.kind
        and budget.value <= comparison.budget.value
    ):
        comparison.given, comparison.budget = plan["models"], budget
        if EVERY in plan["training"]:
            comparison.training = {EVERY: plan["training"][EVERY]} | comparison.training
        del comparison.models
    return comparison


def _has_trainings(comparison: Comparison) -> bool:
    return any(comparison.directory.glob(f"*/*/*/{CONFIG}"))


class _Costs(NamedTuple):
    """Seconds of a model, all trainings together but those of probes: its steps, one validation of each, and all else;
    and the number of steps of one training."""

    steps: float
    validation: float
    rest: float
    number: float


def _expected(costs: dict[str, _Costs], share: float = 1.0, validations: int = _VALIDATIONS) -> dict[str, float]:
    """Seconds of each model with a share of the budget."""
    return {name: share * cost.steps + validations * cost.validation + cost.rest for name, cost in costs.items()}


def _affordable(costs: dict[str, _Costs], left: float, fewest: int) -> tuple[dict[str, _Costs], float, int]:
    """The costs of the first models that fit into the seconds that are left, the share of the budget that they get,
    and their validations."""
    share, validations = 1.0, _VALIDATIONS
    for count in range(min(FEWER, len(costs)), min(FEWEST, len(costs)) - 1, -1):
        costs = {name: costs[name] for name in [*costs][:count]}
        steps, scoring = sum(cost.steps for cost in costs.values()), sum(cost.validation for cost in costs.values())
        for validations in range(_VALIDATIONS, fewest - 1, -1):
            share = min(1.0, (left - sum(_expected(costs, 0.0, validations).values())) / steps)
            if validations * scoring <= _SHARE * (share * steps + validations * scoring):
                break
        if share >= _LEAST:
            break
    return costs, share, validations


def _costs(comparison: Comparison, name: str, log: Log) -> _Costs:
    log.status(f"timing {name}")
    job = Job("run", name, 0, comparison.rates(name)[0])
    cost = cost_of(with_vocabulary(comparison.config(job)))
    kind, value = comparison.budget
    trainings = comparison.seeds + (len(comparison.learning_rates) if comparison.sweeps else 0)
    whole = comparison.seeds + (SWEEP_SHARE * len(comparison.learning_rates) if comparison.sweeps else 0)
    training = value * {"tokens": cost.token, "steps": cost.step, "seconds": 1.0}[kind]
    validation = 0.0 if kind == "seconds" else cost.held_out  # under a budget in seconds they are a part of it
    rest = trainings * (2 * cost.start + cost.held_out + _SAMPLE * cost.decoded)
    rest += _STEPS * cost.step + sum(comparison.contexts) * cost.token
    rest += len(comparison.contexts) * DECODED * cost.decoded
    return _Costs(whole * training, trainings * validation, rest, training / cost.step)


def spelled(seconds: float) -> str:
    """90 seconds, 12 minutes, 2.5 hours."""
    if seconds < 100:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"
