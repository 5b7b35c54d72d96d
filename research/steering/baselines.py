"""The dial beside what can be done without one: prompt-prefixing and activation addition on the uncontrolled base.

All continue the same prompts with the same random numbers, and all pay in the same coin: the perplexity of held-out
text read while steered to u, as a ratio to that of the base left alone. The cost of turning to +-1 is

    cost = exp((nats at -1 + nats at 1) / 2 - nats of the base)        nats per token

and success is the share of texts, of both signs of u, whose label has the sign of u.

The baselines get their best chance, and not from what is reported: the kind of prefix, and the place and strength of
the addition, are chosen on other prompts and other held-out rows. Each is reported twice: at whatever cost, and at no
more than the dial's cost or 1 %, whichever is more, so that others can be compared with a dial that costs nothing. The
addition's strength is then the one that costs as much on the rows of the report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from glissando.errors import ConfigError
from glissando.evaluation.rows import spread, valid_rows
from glissando.evaluation.scoring import wilson
from glissando.evaluation.steering import Cost, Dials, Trial
from glissando.model import LanguageModel
from research.steering.activation_addition import Addition, mean_differences
from research.steering.prompt_prefix import KINDS, Prefix, prefix_fits
from research.steering.rows import labelled_texts

#: strengths of the addition, in differences of means
STRENGTHS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
#: labelled training texts of each sign, for prefixes and differences
TEXTS = 64
#: what every baseline may cost, even beside a dial that costs less: at no cost at all, none has an effect
GRANTED = 1.01
#: a cost at which a baseline is surely felt; places are compared at the dial's cost and at this
_FELT = 1.5
#: a cost beyond which strengths are not tried: what is written is no text any more
_RUINOUS = 10.0


class Steering(Protocol):
    """A way to turn what a model writes by u."""

    @property
    def way(self) -> str: ...

    def write(self, trial: Trial, u: float) -> list[str]: ...

    def read(self, trial: Trial, u: float) -> Cost: ...


class Dial:
    """The steering that a model was trained for."""

    way = "dial"

    def __init__(self, dials: Dials, name: str) -> None:
        self.dials, self.name = dials, name

    def write(self, trial: Trial, u: float) -> list[str]:
        own = trial is self.dials.trial
        return self.dials.texts({self.name: u}) if own else trial.write(self.dials.model, {self.name: u})

    def read(self, trial: Trial, u: float) -> Cost:
        own = trial is self.dials.trial
        return self.dials.cost({self.name: u}) if own else trial.read(self.dials.model, {self.name: u})


@dataclass(frozen=True)
class Outcome:
    """What turning to -1 and to 1 did."""

    way: str
    prompts: int
    successes: tuple[int, int]  # texts with a label below 0 at u = -1, and above 0 at u = 1
    cost: float  # ratio of perplexities to the base, see the module

    @property
    def success(self) -> float:
        """Share of successes on both sides."""
        return sum(self.successes) / (2 * self.prompts)

    def as_dict(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "prompts": self.prompts,
            "success_at_-1": self.successes[0] / self.prompts,
            "success_at_+1": self.successes[1] / self.prompts,
            "success": self.success,
            "success_95": list(wilson(sum(self.successes), 2 * self.prompts)),
            "perplexity_against_base": self.cost,
        }


@dataclass(frozen=True)
class Baseline:
    """One way without a dial: what was tried on the prompts to choose by, and the chosen on those of the report."""

    name: str
    tried: list[Outcome] = field(default_factory=list)
    as_cheap: Outcome | None = None  # None: nothing of it costs so little
    best: Outcome | None = None  # None: it could not be tried
    note: str | None = None

    def as_dict(self) -> dict[str, Any]:
        chosen = {"as_cheap_as_the_dial": self.as_cheap, "best_at_any_cost": self.best}
        outcomes = {key: None if outcome is None else outcome.as_dict() for key, outcome in chosen.items()}
        return {
            "name": self.name,
            **outcomes,
            "note": self.note,
            "tried": [outcome.as_dict() for outcome in self.tried],
        }


@dataclass(frozen=True)
class Comparison:
    """One dial, the base left alone, and every baseline."""

    name: str
    dial: Outcome
    unsteered: Outcome
    baselines: list[Baseline]
    chosen_on: int  # prompts, none of them among those of the report

    def dial_is_above(self) -> bool | None:
        """Whether the dial's success is higher than that of every baseline as cheap; None if none is as cheap."""
        rivals = [baseline.as_cheap for baseline in self.baselines if baseline.as_cheap is not None]
        return all(self.dial.success > rival.success for rival in rivals) if rivals else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "dial": self.name,
            "outcome": self.dial.as_dict(),
            "unsteered": self.unsteered.as_dict(),
            "dial_above_baselines_as_cheap": self.dial_is_above(),
            "chosen_on_other_prompts": self.chosen_on,
            "baselines": [baseline.as_dict() for baseline in self.baselines],
        }


def compare(
    dials: Dials, base: LanguageModel, name: str, selection: Trial, strengths: Sequence[float] = STRENGTHS
) -> Comparison:
    """The dial `name` beside the baselines on `base`, on the dials' trial, all choices being made on `selection`.

    Raises ConfigError for strengths that are not positive, and for training text without labels of both signs.
    """
    strengths = check_strengths(strengths)
    report = dials.trial
    texts = labelled_texts(report.corpus, name, TEXTS)
    task = _Task(name, base, report, selection, Dial(dials, name))
    alone = report.judge(report.write(base), name)
    unsteered = Outcome("no steering", len(alone), (int((alone < 0).sum()), int((alone > 0).sum())), 1.0)
    prefixes = {kind: Prefix(base, kind, texts) for kind in KINDS}
    baselines = [compare_prefixes(task, prefixes), compare_additions(task, mean_differences(base, texts), strengths)]
    return Comparison(name, task.turn(task.dial, report), unsteered, baselines, len(selection.prompts))


def check_strengths(strengths: Sequence[float]) -> tuple[float, ...]:
    """The strengths in order, each once. Raises ConfigError unless there are some, all positive and finite."""
    strengths = tuple(sorted(set(strengths)))
    if not strengths or not all(0 < s < math.inf for s in strengths):
        raise ConfigError(f"strengths needs positive numbers, such as {list(STRENGTHS)}; got {list(strengths)}")
    return strengths


def selection_trial(report: Trial, prompts: int) -> Trial:
    """A trial to choose by: prompts that are not in `report`, and a quarter as many held-out rows, others if there are.

    Raises ConfigError if the corpus has fewer than 2 such prompts.
    """
    if prompts < 2:
        raise ConfigError(f"selection_prompts must be at least 2, got {prompts}")
    corpus, taken = report.corpus, set(report.prompts)
    fresh: list[str] = []
    for count in (len(report.prompts) + prompts, 4 * (len(report.prompts) + prompts)):
        fresh = [text for text in dict.fromkeys(corpus.prompts(count, seed=report.seed)) if text not in taken]
        if len(fresh) >= prompts:
            break
    if len(fresh) < 2:
        raise ConfigError(
            f"the corpus has {len(fresh)} held-out beginnings beside the {len(taken)} of the report, and baselines are "
            "chosen on others than they are reported on, at least 2: lower --prompts, or give --baselines false"
        )
    others = [row for row in valid_rows(corpus) if row not in report.held_out] or list(report.held_out)
    rows = spread(others, max(1, len(report.held_out) // 4))
    return replace(report, prompts=fresh[:prompts], held_out=rows)


@dataclass
class _Task:
    """What the baselines of one dial share."""

    name: str
    base: LanguageModel
    report: Trial
    selection: Trial
    dial: Dial

    def __post_init__(self) -> None:
        self.alone = {id(trial): trial.read(self.base) for trial in (self.report, self.selection)}

    def cost(self, steering: Steering, trial: Trial) -> float:
        """The cost of turning to +-1, as a ratio of perplexities."""
        nats = (steering.read(trial, -1.0).nats + steering.read(trial, 1.0).nats) / 2
        return Cost(0.0, nats).against(self.alone[id(trial)])

    def limit(self, trial: Trial) -> float:
        """What a baseline may cost to count as cheap as the dial."""
        return max(self.cost(self.dial, trial), GRANTED)

    def turn(self, steering: Steering, trial: Trial) -> Outcome:
        successes = []
        for u in (-1.0, 1.0):
            labels = np.nan_to_num(trial.judge(steering.write(trial, u), self.name))
            successes.append(int((labels * u > 0).sum()))
        return Outcome(steering.way, len(trial.prompts), (successes[0], successes[1]), self.cost(steering, trial))


def compare_prefixes(task: _Task, prefixes: dict[str, Prefix]) -> Baseline:
    """Every kind on the selection; reported: the best, and the best of those that are as cheap there as the dial."""
    name = "prompt-prefixing"
    if not prefix_fits(task.base, task.report):
        return Baseline(name, note="the base's learned positions leave none for a prefix before held-out text")
    tried = {kind: task.turn(prefix, task.selection) for kind, prefix in prefixes.items()}
    cheap = {kind: outcome for kind, outcome in tried.items() if outcome.cost <= task.limit(task.selection)}
    best = task.turn(prefixes[_best(tried)], task.report)
    if not cheap:
        return Baseline(name, list(tried.values()), None, best)
    as_cheap = best if _best(cheap) == _best(tried) else task.turn(prefixes[_best(cheap)], task.report)
    return Baseline(name, list(tried.values()), as_cheap, best)


def compare_additions(task: _Task, vectors: dict[str, Any], strengths: Sequence[float]) -> Baseline:
    """On the selection, every place at two costs, then every strength at the best place; reported: see the module."""
    additions = _Additions(task, vectors, max(strengths))
    limit = task.limit(task.selection)
    cheap = additions.try_places(limit)
    additions.try_places(max(_FELT, limit))
    tried = additions.tried
    place = _best(tried)[0] if tried else next(iter(vectors))
    for s in strengths:
        if tried and task.cost(additions.at(place, s), task.selection) > _RUINOUS:
            break
        additions.try_at(place, s)
    best = task.turn(additions.at(*_best(tried)), task.report)
    place = _best(cheap)[0] if cheap else place
    equal = additions.matched(place, task.report, task.limit(task.report))
    as_cheap = None if equal is None else task.turn(additions.at(place, equal), task.report)
    return Baseline("activation addition", list(tried.values()), as_cheap, best)


class _Additions:
    """The additions of one task, and what those tried on the selection did."""

    def __init__(self, task: _Task, vectors: dict[str, Any], highest: float) -> None:
        self.task, self.vectors, self.highest = task, vectors, highest
        self.tried: dict[tuple[str, float], Outcome] = {}

    def at(self, place: str, s: float) -> Addition:
        return Addition(self.task.base, place, self.vectors[place], s)

    def matched(self, place: str, trial: Trial, limit: float) -> float | None:
        return matched_strength(lambda s: self.task.cost(self.at(place, s), trial), limit, self.highest)

    def try_at(self, place: str, s: float) -> None:
        if (place, s) not in self.tried:
            self.tried[place, s] = self.task.turn(self.at(place, s), self.task.selection)

    def try_places(self, limit: float) -> dict[tuple[str, float], Outcome]:
        """Every place at the strength that costs `limit`; what those did."""
        matched = {place: self.matched(place, self.task.selection, limit) for place in self.vectors}
        strengths = [(place, s) for place, s in matched.items() if s is not None]
        for place, s in strengths:
            self.try_at(place, s)
        return {key: self.tried[key] for key in strengths}


def _best(tried: dict[Any, Outcome]) -> Any:
    """The key of the highest success, the cheaper of equals."""
    return max(tried, key=lambda key: (tried[key].success, -tried[key].cost))


def matched_strength(cost: Callable[[float], float], limit: float, highest: float, tries: int = 7) -> float | None:
    """The largest strength tried, `highest` at most, with cost(s) <= limit > 1; None if none is.

    Near s = 0 the cost is exp(c s^2), as what a model was trained to costs least; so every try aims by that
    law from the one before, within what is known, and the search ends within a tenth of the limit.
    """
    low, high, s = 0.0, highest, highest
    for _ in range(tries):
        share = math.log(cost(s)) / math.log(limit)
        if share <= 1:
            low = s
        else:
            high = s
        if 0.9 <= share <= 1 or low == highest:
            break
        aim = s * math.sqrt(0.95 / share) if share > 0 else high
        s = aim if low < aim < high else (low + high) / 2
    return low or None
