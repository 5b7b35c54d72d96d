"""How good a model of events is, beside predictors without a network and, where it is known, the truth.

Log-likelihoods are in nats an event: the sum over all waits, those without an event too, over the number of events.
Intervals are bootstrap intervals over series, because the events of one series are not independent; of a single series,
over stretches of 100 events.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from glissando.events.baselines import Floats, Predicted, baselines
from glissando.events.batches import After
from glissando.series.scores import SHARE, Bootstrap, figures_table, in_words

#: the row of what is known to be true
TRUTH = "truth"
#: steps of a stretch
_STRETCH = 100
#: bins of probability in which kinds are counted
_BINS = 20


class Residuals(NamedTuple):
    """Integrated hazards between events, which are exponential with mean 1 where the model is right.

    values    (N,) of each wait that ends with an event, or with observation
    drawn     the number of those that observation ended, and a draw completed
    distance  of Kolmogorov and Smirnov to the exponential distribution
    p         the probability of a larger one, if the model is right
    """

    values: Floats
    drawn: int
    distance: float
    p: float


class Score(NamedTuple):
    """Figures by predictor: {"model": {"log_likelihood": -1.2, ...}, "poisson": ...}.

    log_likelihood  nats an event, in the unit of the times; of it `time` and `kind`
    next_time       mean absolute error of the median as a forecast of the wait
    accuracy        share of events whose kind was the most likely one at their time
    calibration     of the kinds: mean distance between predicted probability and frequency, over bins of probability
    ks              distance of the residuals to the exponential distribution, and its probability ks_p
    model_minus     the model's log_likelihood minus the predictor's; of `truth`, minus the model's excess

    Figures that end in `_low` and `_high` are the ends of an interval over series.
    """

    events: int
    ends: int
    series: int
    unit: str
    figures: dict[str, dict[str, float]]

    @property
    def worse(self) -> list[str]:
        """The baselines than which the model is not better."""
        return [who for who, row in self.figures.items() if who not in ("model", TRUTH) and not row["model_minus"] > 0]

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "worse": self.worse}

    def headline(self) -> str:
        """Whether the model is worth keeping, and how far it is from the truth."""
        others = [who for who in self.figures if who not in ("model", TRUTH)]
        line = f"The model is better than {in_words(others)}." if others else "No predictor was fitted beside it."
        if self.worse:
            line = f"THE MODEL IS NO BETTER than {in_words(self.worse)}: train longer or on more data."
        if TRUTH in self.figures:
            row = self.figures[TRUTH]
            ends = [f"{-row[f'model_minus_{end}']:.4f}" for end in ("high", "low") if f"model_minus_{end}" in row]
            between = f" [{', '.join(ends)}]" if ends else ""
            line += f" It is {0 - row['model_minus']:.4f}{between} nats an event short of the truth."
        return line

    def table(self) -> str:
        """The headline, then a line for each predictor."""
        forms = {"accuracy": ".1%", "next_time": ".4g", "ks_p": ".4g", "model_minus": "+.4f"}
        rows = [((who,), row) for who, row in self.figures.items()]
        over = "series" if self.series > 1 else f"stretches of {_STRETCH} events"
        about = (
            f"{self.events:,} events and {self.ends:,} ends of observation of {self.series:,} series; nats an event; "
            f"in brackets {SHARE:.0%} intervals, bootstrap over {over}"
        )
        table = figures_table(rows, ".4f", forms, {"next_time": f"next time ({self.unit})"})
        return "\n".join([self.headline(), about, *table])


def score(observed: After, model: Predicted, train: After | None, unit: str, truth: Predicted | None = None) -> Score:
    """The figures of a model on what is held out.

    Args:
        observed: What came; at least one event.
        model: What the model predicted of it.
        train: What the model was trained on, to which the baselines are fitted; None: there are none.
        unit: Of the times.
        truth: Where it is known.
    """
    predicted = {"model": model}
    if train is not None:
        predicted |= {each.name: each.predict(observed) for each in baselines(train)}
    if truth is not None:
        predicted[TRUTH] = truth
    bootstrap = Bootstrap(observed.series, observed.is_event, _STRETCH)
    figures: dict[str, dict[str, float]] = {}
    mean = bootstrap.means(model.time + model.kind)
    for who, each in predicted.items():
        parts = {"log_likelihood": each.time + each.kind, "time": each.time, "kind": each.kind}
        row = {name: float(part.sum() / observed.events) for name, part in parts.items()}
        row |= _of_forecasts(observed, each)
        resampled = bootstrap.means(parts["log_likelihood"])
        if who == "model":
            row |= bootstrap.interval("log_likelihood", resampled)
        else:
            row["model_minus"] = figures["model"]["log_likelihood"] - row["log_likelihood"]
            row |= bootstrap.interval("model_minus", mean - resampled)
        figures[who] = row
    return Score(observed.events, int(observed.end.sum()), len(np.unique(observed.series)), unit, figures)


def _of_forecasts(observed: After, each: Predicted) -> dict[str, float]:
    """What is known of a predictor beside its likelihood."""
    row, arrives, event = {}, observed.arrives, observed.is_event
    if each.median is not None and arrives.any():
        row["next_time"] = float(np.abs(each.median - observed.wait)[arrives].mean())
    if each.kinds is not None and observed.kinds > 1:
        kinds = each.kinds[event]
        row["accuracy"] = float((kinds.argmax(1) == observed.kind[event]).mean())
        row["calibration"] = calibration(np.exp(kinds), observed.kind[event])
    if each.low is not None and each.high is not None:
        rescaled = residuals(observed, each.low, each.high)
        row |= {"ks": rescaled.distance, "ks_p": rescaled.p}
    return row


def residuals(observed: After, low: Floats, high: Floats) -> Residuals:
    """The hazard integrated from each event to the next.

    One of an interval is drawn within it, and one that observation ends goes on by an exponential draw: both leave them
    exponential where the model is right. Events at one time have no wait.

    Args:
        observed: What came.
        low: (n,) the integral over each wait, of an interval to its begin.
        high: (n,) to its end; `low` where times are exact, or the wait is censored.
    """
    rng = np.random.default_rng(0)
    arrives, waits = observed.arrives, observed.wait > 0
    inside = low - np.log1p(-rng.random(len(low)) * -np.expm1(low - high))
    piece = np.where(arrives & (observed.resolution > 0), inside, high)
    last = np.append(observed.series[1:] != observed.series[:-1], True)
    number = np.append(0, (arrives | last)[:-1].cumsum())
    total = np.bincount(number, np.where(waits, piece, 0.0))
    ended = np.bincount(number, arrives) > 0
    waited = np.bincount(number, waits) > 0
    values = np.sort((total + np.where(ended, 0.0, rng.exponential(size=len(total))))[waited])
    count = len(values)
    if not count:
        return Residuals(values, 0, 0.0, 1.0)
    share = -np.expm1(-values)
    steps = np.arange(count + 1) / count
    distance = float(max((steps[1:] - share).max(), (share - steps[:-1]).max()))
    return Residuals(values, int((waited & ~ended).sum()), distance, _kolmogorov(distance * np.sqrt(count)))


def _kolmogorov(x: float) -> float:
    """P(K > x) of Kolmogorov's distribution."""
    j = np.arange(1, 1001)
    return float(min(1.0, max(0.0, 2 * ((-1.0) ** (j - 1) * np.exp(-2 * j**2 * x**2)).sum())))


def calibration(chances: Floats, kind: np.ndarray) -> float:
    """The mean distance of predicted probabilities (N, K) from how often such kinds came, over bins of probability."""
    came = np.eye(chances.shape[1])[kind].ravel()
    chance = chances.ravel()
    place = (chance * _BINS).astype(np.int64).clip(0, _BINS - 1)
    count = np.bincount(place, minlength=_BINS)
    gap = np.abs(np.bincount(place, chance - came, minlength=_BINS))
    return float(gap.sum() / count.sum())
