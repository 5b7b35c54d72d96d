"""How long a comparison takes on this machine, from a few steps of each model, and a shorter one instead.

The time of a training is its tokens by the tokens/s of a step; what is measured between and behind the trainings is
taken as a share of it. A machine that is busy meanwhile, or a kernel that is compiled first, makes it longer.
"""

from __future__ import annotations

import copy
import json
import sys

from glissando.compare.log import Log
from glissando.compare.models import read_models
from glissando.compare.plan import PLAN, SWEEP_SHARE, Amount, Comparison, Job
from glissando.compare.speed import step_rate
from glissando.compare.training import with_vocabulary
from glissando.runs import CONFIG

#: of the time of the trainings, for held-out texts, samples, and the measurement of speed
_BESIDE = 0.3
#: models and tokens of a first look, and how little of its budget a shortened training has
FEWER, FIRST_LOOK, _LEAST = 3, "tokens=5e4", 0.1


def planned(comparison: Comparison) -> str:
    """What will be done, in a line."""
    trained = "once" if comparison.seeds == 1 else f"{comparison.seeds} times"
    probes = f", then {len(comparison.probes)} probes" if comparison.probes else ""
    return f"{len(comparison.names)} models, each trained {trained} for {comparison.budget}{probes}"


def fitted(comparison: Comparison, within: float | None, log: Log) -> Comparison:
    """The comparison, with a line of how long it takes; where that is more than `within` seconds, a shorter one.

    The shorter one has the first models alone and a smaller budget. Nothing is timed where a training has begun before:
    what is there goes on with the budget that it has.
    """
    first = [Job("run", name, 0, comparison.rates(name)[0]) for name in comparison.names]
    if any(comparison.directory.glob(f"*/*/*/{CONFIG}")):
        return comparison
    if comparison.budget.kind not in ("tokens", "steps", "seconds"):
        return comparison
    seconds = [_seconds(comparison, job, log) for job in first]
    whole = f"{planned(comparison)}: about {spelled(sum(seconds))}"
    if within is None or sum(seconds) <= within:
        log.print(f"{whole}; for a first look name {FEWER} models and give --budget {FIRST_LOOK}")
        return comparison
    shorter = copy.copy(comparison)
    names = comparison.names[:FEWER]
    shorter.__dict__.pop("models")
    given = comparison.given
    shorter.given = {name: given[name] for name in names} if isinstance(given, dict) else list(given)[:FEWER]
    least = sum(seconds[:FEWER])
    share = max(_LEAST, min(1.0, within / least))
    shorter.budget = Amount(comparison.budget.kind, float(f"{share * comparison.budget.value:.2g}"))
    log.print(f"{whole}, more than the {spelled(within)} of --within")
    log.print(f"instead: {planned(shorter)}: about {spelled(least * shorter.budget.value / comparison.budget.value)}")
    return shorter


def resumed(comparison: Comparison) -> Comparison:
    """With the models and the budget that the same command had chosen before, from the plan in its directory; a plan
    that is no shorter form of what is asked for is of another command, and changes nothing."""
    file = comparison.directory / PLAN
    if not file.is_file():
        return comparison
    plan = json.loads(file.read_bytes())
    value, _, kind = plan["budget"].partition(" ")
    budget, names = Amount(kind, float(value.replace(",", ""))), list(read_models(plan["models"]))
    asked = comparison.names in (names, [*names, *comparison.names[FEWER:]])
    if asked and kind == comparison.budget.kind and budget.value <= comparison.budget.value:
        comparison.given, comparison.budget = plan["models"], budget
        del comparison.models
        print(f"as {file} has it: {planned(comparison)}", file=sys.stderr, flush=True)
    return comparison


def _seconds(comparison: Comparison, job: Job, log: Log) -> float:
    """Of all trainings of a model but its probes."""
    kind, value = comparison.budget
    trainings = comparison.seeds + (SWEEP_SHARE * len(comparison.learning_rates) if comparison.sweeps else 0)
    if kind != "seconds":
        log.status(f"timing a training step of {job.model}")
        rate, tokens = step_rate(with_vocabulary(comparison.config(job)))
        value *= (1 if kind == "tokens" else tokens) / rate
    return trainings * value * (1 + _BESIDE)


def spelled(seconds: float) -> str:
    """90 seconds, 12 minutes, 2.5 hours."""
    if seconds < 100:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"
