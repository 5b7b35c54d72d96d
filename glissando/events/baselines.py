"""Predictors of events that need no network, fitted to the training log in closed form: what a model has to beat.

poisson       a constant hazard, and the shares of the kinds
hour of week  a hazard and shares for each of the 168 hours of the week, where times are dates
renewal       a hazard that is constant between quantiles of the waits, and the shares of the kinds after each kind

A hazard of b is d_b / E_b: events over time at risk, or -log(1 - d_b r / E_b) / r where times have a resolution r.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from glissando.events.batches import After

Floats = np.ndarray
#: names of the baselines
POISSON, WEEK, RENEWAL = "poisson", "hour of week", "renewal"
#: a time that is longer than any
_NEVER = 1e30
#: hours of a week; bins of the renewal process at most, and events that one has at least
_HOURS, _BINS, _LEAST = 168, 40, 50
#: events of the overall rate, and of the overall shares, that each bin is given beforehand
_PRIOR, _PRIOR_KINDS = 0.5, 5.0


class Predicted(NamedTuple):
    """What a predictor gives of n scored steps, in nats and in the unit of the times.

    time    (n,) log-likelihood of when the next event came, or of the time without one
    kind    (n,) of its kind; 0 without an event
    kinds   (n, K) the log-probability of each kind at the time of the next event; None where it is not known
    low, high  (n,) the hazard integrated over the wait, of an interval to its begin and to its end; None as `kinds`
    median  (n,) of the wait; None as `kinds`
    """

    time: Floats
    kind: Floats
    kinds: Floats | None = None
    low: Floats | None = None
    high: Floats | None = None
    median: Floats | None = None


class Hazard:
    """A hazard that is constant between edges (B + 1,), which ascend from 0, and has the last one as its period: 1, or
    a time that nothing reaches."""

    def __init__(self, edges: Floats) -> None:
        self.edges, self.period = edges, edges[-1]
        self.rate = np.ones(len(edges) - 1)

    def fit(self, low: Floats, high: Floats, events: Floats, resolution: float) -> None:
        """Set the rates by the intervals at risk, and the times of events."""
        risk = np.array([(self._passed(b, high) - self._passed(b, low)).sum() for b in range(len(self.rate))])
        count = np.bincount(self.bin(events, resolution), minlength=len(self.rate))
        overall = (count.sum() + _PRIOR) / max(risk.sum(), 1e-300)
        self.rate = (count + _PRIOR) / (risk + _PRIOR / overall)
        if resolution:
            self.rate = -np.log1p(-np.minimum(self.rate * resolution, 1 - 1e-9)) / resolution

    def bin(self, t: Floats, resolution: float = 0.0) -> np.ndarray:
        """The bin of times, or of the intervals of a length `resolution` that end at them."""
        middle = np.maximum(t - resolution / 2, 0)  # a time below half the resolution is in the first bin
        inner = np.searchsorted(self.edges, middle % self.period, side="right") - 1
        return inner.clip(0, len(self.rate) - 1)

    def integral(self, t: Floats) -> Floats:
        """From 0 to t."""
        at_edges = self._at_edges()
        return t // self.period * at_edges[-1] + np.interp(t % self.period, self.edges, at_edges)

    def inverse(self, value: Floats) -> Floats:
        """The t of an integral."""
        at_edges = self._at_edges()
        return value // at_edges[-1] * self.period + np.interp(value % at_edges[-1], at_edges, self.edges)

    def _at_edges(self) -> Floats:
        """(B + 1,) the integral to each edge."""
        return np.append(0.0, np.cumsum(self.rate * np.diff(self.edges)))

    def _passed(self, b: int, t: Floats) -> Floats:
        """The time that a clock at t has spent in bin b."""
        low, high = self.edges[b : b + 2]
        return t // self.period * (high - low) + (t % self.period).clip(low, high) - low


class Baseline:
    """A hazard of the wait, or of the time of the week, and shares of the kinds by a context."""

    def __init__(self, name: str, train: After) -> None:
        self.name = name
        edges, waits = np.array([0.0, _NEVER]), train.wait[train.arrives]
        if name == WEEK:
            edges = np.linspace(0, 1, _HOURS + 1)
        elif name == RENEWAL and len(waits):
            bins = min(_BINS, max(1, len(waits) // _LEAST))
            edges = np.array([0.0, *np.unique(np.quantile(waits, np.linspace(0, 1, bins + 1)[1:-1])), _NEVER])
        self.hazard = Hazard(edges)
        waits_ = train.wait > 0
        low, high, of = self._span(train)
        self.hazard.fit(low[waits_], high[waits_], high[train.arrives], train.resolution / of)
        may_tie = train.tie >= 0
        self.tied = (float((train.tie == 1).sum()) + 0.5) / (float(may_tie.sum()) + 1)
        event = train.is_event
        shares = np.bincount(train.kind[event], minlength=train.kinds) + 0.5
        shares = shares / shares.sum()
        context = self._context(train)
        self.shares = np.tile(_PRIOR_KINDS * shares, (1 + max(_HOURS, train.kinds), 1))
        np.add.at(self.shares, (context[event], train.kind[event]), 1.0)
        self.shares /= self.shares.sum(1, keepdims=True)

    def predict(self, observed: After) -> Predicted:
        """The likelihood of what is held out."""
        low, high, of = self._span(observed)
        begun = np.maximum(high - observed.resolution / of, low)
        start, first, last = (self.hazard.integral(each) for each in (low, begun, high))
        waited, whole = first - start, last - start
        with np.errstate(divide="ignore"):
            if observed.resolution:
                arrival = -waited + np.log(-np.expm1(-(last - first)))
            else:
                arrival = -whole + np.log(self.hazard.rate[self.hazard.bin(high)] / of)
        time = np.where(observed.arrives, arrival, np.where(observed.wait > 0, -whole, 0.0))
        time = time + np.where(observed.tie == 1, np.log(self.tied), 0.0)
        time = time + np.where(observed.tie == 0, np.log1p(-self.tied), 0.0)
        shares = np.log(self.shares[self._context(observed)])
        kind = np.where(observed.is_event, shares[np.arange(len(observed.kind)), observed.kind.clip(0)], 0.0)
        median = self.hazard.inverse(start + np.log(2)) - (low - observed.within / of)
        return Predicted(time, kind, shares, waited, whole, np.where(observed.tie == 1, 0.0, median * of))

    def _span(self, seen: After) -> tuple[Floats, Floats, float]:
        """Where the hazard is read: begin and end of each wait, and the unit of both."""
        if self.name != WEEK:
            return seen.within, seen.wait, 1.0
        assert seen.phase is not None
        return seen.phase + seen.within / seen.week, seen.phase + seen.wait / seen.week, seen.week

    def _context(self, seen: After) -> np.ndarray:
        """(n,) a number from 0 on."""
        if self.name == POISSON:
            return np.zeros(len(seen.kind), np.int64)
        if self.name == RENEWAL:
            return seen.last + 1
        return self.hazard.bin(self._span(seen)[1])


def baselines(train: After) -> list[Baseline]:
    """Those that can be fitted."""
    return [Baseline(name, train) for name in (POISSON, WEEK, RENEWAL) if name != WEEK or train.phase is not None]
