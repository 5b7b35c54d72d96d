"""How far forecasts are from the values, by channel, beside forecasts that need no model; and how good classes are.

A model is worth keeping where it is better than the last value, the mean, the linear anchor and, where a period shows,
the value one period before: the first line of a table says where it is not. Intervals are bootstrap intervals over
series, because the values of one series are not independent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glissando.series.heads import Head, Point

#: names of the forecasts that need no training, and of the anchor
LAST, MEAN, ANCHOR, SEASON = "last value", "mean", "anchor", "one period before"
#: shares of the central intervals whose coverage is measured
INTERVALS = (0.5, 0.9)
#: the mean square change over a period, of that over lags half a period away, at most
_DIP = 0.75
#: relative difference of two errors that are equal but for rounding
_EQUAL = 1e-6
#: number of resamples, and the share of an interval
_RESAMPLES, SHARE = 500, 0.95


class Answers(NamedTuple):
    """N values that were forecast, each of one channel of one series at one time; params are in the channel's unit.

    horizon   time from the step at which the question was asked to the value
    gap       time from the channel's last observed value to the value; NaN where none was observed
    scale     the deviation in which each is trained: of the channel, or of its series so far
    row       the panel's step
    baselines forecasts (N,) by name; where one is NaN, as the last value of a channel never seen, the mean is used
    """

    series: np.ndarray  # (N,) int64
    channel: np.ndarray  # (N,) int64
    target: np.ndarray  # (N,), none NaN
    params: Tensor  # (N, P)
    horizon: np.ndarray  # (N,)
    gap: np.ndarray  # (N,)
    scale: np.ndarray  # (N,)
    row: np.ndarray  # (N,) int64
    baselines: Mapping[str, np.ndarray]

    def in_own_units(self, head: Head) -> Answers:
        """The same in deviations from the target, so that all targets are 0."""
        shift, scale = (torch.from_numpy(part).unsqueeze(1) for part in (-self.target / self.scale, 1 / self.scale))
        return self._replace(
            target=np.zeros_like(self.target),
            params=head.affine(self.params.double().unsqueeze(1), shift, scale).squeeze(1),
            baselines={name: (values - self.target) / self.scale for name, values in self.baselines.items()},
        )

    def chosen(self, index: np.ndarray) -> Answers:
        """Those at `index`, in that order."""
        parts: dict[str, Any] = {name: part[index] for name, part in self._asdict().items() if name != "baselines"}
        return Answers(**parts, baselines={name: values[index] for name, values in self.baselines.items()})

    def baseline(self, name: str, chosen: np.ndarray) -> tuple[np.ndarray, float] | None:
        """A baseline's forecasts of the `chosen` (N,) values, and the share of them for which the mean stands in; None
        where it has no forecast at all, as in a channel without a period."""
        values = self.baselines[name][chosen]
        absent = np.isnan(values)
        if absent.all():
            return None
        return np.where(absent, self.baselines[MEAN][chosen], values) if absent.any() else values, absent.mean()


@dataclass(frozen=True)
class Score:
    """Figures by channel, or target of a classification, and predictor: {"hdl": {"model": {"rmse": 0.1}, "mean": ...}}.

    `loss` is the mean of what training minimises, where the next step alone is asked about; there are no figures where
    it is not finite. Figures that end in `_low` and `_high` are the ends of an interval over series, `model_minus` is
    the model's first figure minus the predictor's. `worse` has, by predictor, the channels in which the model is not
    better than it. `own`: errors are in units of each series' own deviation so far.
    """

    loss: float = np.nan
    scored: int = 0
    series: int = 0
    figures: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    worse: dict[str, list[str]] = field(default_factory=dict)
    own: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "loss": self.loss, "scored": self.scored, "series": self.series, "targets": self.figures,
            "worse": self.worse,
        }  # fmt: skip

    def headline(self) -> str:
        """Whether the model is worth keeping."""
        total, others = len(self.figures), [name for by_model in self.figures.values() for name in by_model]
        if not self.worse:
            compared = [_the(name) for name in dict.fromkeys(others) if name != "model"]
            return f"The model is better than {in_words(compared)}{f' in all {total} channels' if total > 1 else ''}."
        parts = [
            f"than {_the(name)}" + (f" in {len(names)} of {total} channels ({in_words(names)})" if total > 1 else "")
            for name, names in self.worse.items()
        ]
        best = ANCHOR if ANCHOR in self.worse else next(iter(self.worse))
        return f"THE MODEL IS NO BETTER {in_words(parts)}: use {_the(best)} there, or train longer or on more data."

    def table(self) -> str:
        """The headline, then a line for each channel and predictor."""
        rows = [
            ((channel if not place else "", who), row)
            for channel, by_model in self.figures.items()
            for place, (who, row) in enumerate(by_model.items())
        ]
        forms = {"by_mean": ".1%", "model_minus": "+.4g"} | {f"covered_{share:.0%}": ".1%" for share in INTERVALS}
        intervals = f"in brackets {SHARE:.0%} intervals, bootstrap over series"
        about = (
            f"{self.scored:,} scored in {self.series:,} series"
            f"{', in units of the deviation of each so far' if self.own else ''}; "
            f"{intervals if self.series > 1 else 'no intervals, which need several series'}"
        )
        return "\n".join([self.headline(), about, *figures_table(rows, ".4g", forms)])


def score_forecasts(answers: Answers, head: Head, channels: Sequence[str], naive: np.ndarray | None = None) -> Score:
    """RMSE, MAE, MASE and CRPS of each channel, of the model and of each baseline, and the coverage of intervals.

    The CRPS of a baseline, which predicts a point, is its mean absolute error. `by_mean` is the share of its forecasts
    for which it has none, so that the mean stands in.

    Args:
        answers: What was forecast.
        head: The model's head, which reads the parameters.
        channels: Names of the channels.
        naive: Mean absolute error (O,) of the last value on the training data, by which MASE divides; None: no MASE.
    """
    means = head.mean(answers.params).double().numpy()
    crps = head.crps(answers.params, torch.from_numpy(answers.target).to(answers.params)).double().numpy()
    inside = {} if isinstance(head, Point) else {share: _inside(answers, head, share) for share in INTERVALS}
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for number, channel in enumerate(channels):
        chosen = answers.channel == number
        if not chosen.any():
            continue
        target, bootstrap = answers.target[chosen], Bootstrap(answers.series[chosen])
        by_model = figures[channel] = {}
        for who in ("model", *answers.baselines):
            forecast = (means[chosen], 0.0) if who == "model" else answers.baseline(who, chosen)
            if forecast is None:
                continue
            error, absent = forecast[0] - target, forecast[1]
            roots = np.sqrt(bootstrap.means(error**2))
            row = {"rmse": float(np.sqrt((error**2).mean())), "mae": float(np.abs(error).mean())}
            if naive is not None and naive[number] > 0:
                row["mase"] = row["mae"] / float(naive[number])
            if who == "model":
                row["crps"] = float(crps[chosen].mean())
                row |= {f"covered_{share:.0%}": float(each[chosen].mean()) for share, each in inside.items()}
                row |= bootstrap.interval("rmse", roots)
                model = roots
            else:
                row |= {"crps": row["mae"], "model_minus": by_model["model"]["rmse"] - row["rmse"]}
                row |= bootstrap.interval("model_minus", model - roots)
                row |= {"by_mean": absent} if absent else {}
            by_model[who] = row
    return Score(np.nan, len(answers.target), len(np.unique(answers.series)), figures, _worse(figures))


def score_classes(
    logits: np.ndarray,
    labels: np.ndarray,
    series: np.ndarray,
    name: str,
    classes: Sequence[str],
    shares: np.ndarray,
) -> Score:
    """Log-loss (nats), accuracy, AUROC and average precision of classes.

    Of two classes, AUROC and average precision are those of the rarer one in the training data, which is the last;
    of more, the mean over classes that occur, each against the rest.

    Args:
        logits: (N, C) of the model.
        labels: (N,) the class of each.
        series: (N,) the series of each, over which the intervals are.
        name: Name of the target.
        classes: Names of the classes, the most frequent of the training data first.
        shares: (C,) shares of the classes in the training data, which are the predictor without a model.
    """
    bootstrap = Bootstrap(series)
    prior = np.broadcast_to(np.log(np.maximum(shares, 1e-12)), (len(labels), len(classes)))
    predicted = {"model": logits, f"shares (always {classes[0]})": prior}
    by_model: dict[str, dict[str, float]] = {}
    for who, values in predicted.items():
        log_p = torch.from_numpy(np.array(values, np.float64)).log_softmax(-1).numpy()
        losses = -log_p[np.arange(len(labels)), labels]
        means = bootstrap.means(losses)
        row = {"log_loss": float(losses.mean()), "accuracy": float((log_p.argmax(-1) == labels).mean())}
        row |= _ranking(log_p, labels)
        if who == "model":
            row |= bootstrap.interval("log_loss", means)
            model = means
        else:
            row["model_minus"] = by_model["model"]["log_loss"] - row["log_loss"]
            row |= bootstrap.interval("model_minus", model - means)
        by_model[who] = row
    return Score(np.nan, len(labels), len(np.unique(series)), {name: by_model}, _worse({name: by_model}))


def _worse(figures: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, list[str]]:
    worse: dict[str, list[str]] = {}
    for channel, by_model in figures.items():
        for who, row in by_model.items():
            if who != "model" and not row["model_minus"] < -_EQUAL * row.get("rmse", row.get("log_loss", 1.0)):
                worse.setdefault(who, []).append(channel)
    return worse


def _inside(answers: Answers, head: Head, share: float) -> np.ndarray:
    ends = head.quantile(answers.params, [(1 - share) / 2, (1 + share) / 2]).double().numpy()
    return (ends[:, 0] <= answers.target) & (answers.target <= ends[:, 1])


class Bootstrap:
    """Means over values of resampled series, the same resamples for every mean.

    Args:
        series: The series (N,) of each value.
        counted: (N,) the number of values, or events, that each stands for; None: one.
        stretch: Of a single series, so many values after another are resampled in place of series; 0: there are none.
    """

    def __init__(self, series: np.ndarray, counted: np.ndarray | None = None, stretch: int = 0) -> None:
        _, self._index = np.unique(series, return_inverse=True)
        if stretch and not self._index.any():
            self._index = np.arange(len(series)) // stretch
        self._count = int(self._index.max()) + 1
        self._weights = np.random.default_rng(0).multinomial(
            self._count, np.full(self._count, 1 / self._count), _RESAMPLES
        )
        self._total = np.maximum(self._weights @ np.bincount(self._index, counted), 1)

    def means(self, values: np.ndarray) -> np.ndarray:
        """The sum of the values (N,) of each resample over what they count, (R,)."""
        means: np.ndarray = self._weights @ np.bincount(self._index, values) / self._total
        return means

    def interval(self, name: str, figures: np.ndarray) -> dict[str, float]:
        """The ends of the interval of a figure (R,) of each resample; none of a single series."""
        if self._count < 2:
            return {}
        low, high = np.quantile(figures, [(1 - SHARE) / 2, (1 + SHARE) / 2])
        return {f"{name}_low": float(low), f"{name}_high": float(high)}


# ---------------------------------------------------------------------- classes


def _ranking(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """AUROC and average precision; none where only one class occurs."""
    numbers = [1] if scores.shape[1] == 2 else np.unique(labels)
    occur = [each for each in numbers if 0 < (labels == each).sum() < len(labels)]
    measures = {"auroc": auroc, "average_precision": average_precision} if occur else {}
    return {
        name: float(np.mean([of(scores[:, each], labels == each) for each in occur])) for name, of in measures.items()
    }


def auroc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The probability that a positive has a higher score than a negative, ties counting half."""
    _, index, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[index]
    n = int(positive.sum())
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * (len(scores) - n)))


def average_precision(scores: np.ndarray, positive: np.ndarray) -> float:
    """The sum over thresholds of (recall - recall before) times precision; tied scores share a threshold."""
    _, index = np.unique(-scores, return_inverse=True)
    hits, total = np.bincount(index, positive), np.bincount(index)
    return float((hits * hits.cumsum() / total.cumsum()).sum() / positive.sum())


# ---------------------------------------------------------------------- seasons


def period_of(times: Sequence[np.ndarray], values: Sequence[np.ndarray], step: float) -> float | None:
    """The period of a channel, in the unit of its times, or None where none shows.

    The series are put on a grid of `step`; cells without a value are left out of every sum. The mean square change over
    a lag shows the period p if, over p and over 2p, it is at most three quarters of its mean over half a period less
    and half a period more, where a period is farthest from itself: slow changes neither pass for one nor hide one. And
    the autocorrelation r at p exceeds 1.645 sqrt((1 + 2 sum of earlier r^2) / n), the one-sided test of 5 % that the M
    competitions use. The lags end where a third of the longest series ends.

    Args:
        times: Times of each series, ascending.
        values: Values of each series, NaN where none was observed.
        step: Width of a cell, such as the median gap.
    """
    grids = [grid for t, v in zip(times, values, strict=True) if (grid := _on_grid(t, v, step)) is not None]
    longest = max((len(grid) for grid in grids), default=0) // 3
    if longest < 3:
        return None
    products, changes, pairs = (np.zeros(longest + 1) for _ in range(3))
    for grid in grids:
        known = ~np.isnan(grid)
        centred = np.where(known, grid - grid[known].mean(), 0.0)
        size = 1 << (2 * len(grid) - 1).bit_length()
        x, squares, there = (np.fft.rfft(part, size) for part in (centred, centred**2, known.astype(np.float64)))
        within = np.arange(longest + 1) < len(grid)
        for total, power in (
            (products, np.abs(x) ** 2), (pairs, np.abs(there) ** 2),
            (changes, (np.conj(squares) * there).real - np.abs(x) ** 2),
        ):  # fmt: skip
            lags = np.fft.irfft(power, size)[: longest + 1]
            total[: len(lags)] += np.where(within[: len(lags)], lags, 0.0)
    pairs = pairs.round()
    if products[0] <= 0:
        return None
    enough = pairs >= max(10, 0.01 * pairs[0])
    variance = products[0] / pairs[0]
    r, change = (np.where(enough, each / np.maximum(pairs, 1), 0.0) / variance for each in (products, changes))
    bound = 1.645 * np.sqrt((1 + 2 * np.concatenate([[0.0, 0.0], (r[1:-1] ** 2).cumsum()])) / pairs[0])
    at = np.arange(2, 2 * longest // 5 + 1)
    once = change[at] / np.maximum((change[at // 2] + change[3 * at // 2]) / 2, 1e-300)
    twice = change[2 * at] / np.maximum((change[3 * at // 2] + change[5 * at // 2]) / 2, 1e-300)
    lower = np.maximum(once, twice)
    shows = (lower <= _DIP) & (r[at] > bound[at]) & enough[at] & enough[5 * at // 2]
    if not shows.any():
        return None
    # Odd multiples of a period show too: the first of those that show as clearly is the period, about which noise may
    # shift a flat minimum, and the multiples tell neighbours apart.
    first = at[shows & (lower <= lower[shows].min() + 0.1)][0]
    near = range(max(2, int(0.85 * first)), min(longest, int(1.15 * first) + 1) + 1)
    return float(step * min(near, key=lambda lag: change[lag::lag].mean()))


def _on_grid(times: np.ndarray, values: np.ndarray, step: float) -> np.ndarray | None:
    """The last value of each cell; None for fewer than four values, or gaps of which a grid is mostly empty."""
    known = ~np.isnan(values)
    if known.sum() < 4:
        return None
    cells = np.rint((times[known] - times[known][0]) / step).astype(np.int64)
    if cells[-1] >= 50 * known.sum():
        return None
    grid = np.full(cells[-1] + 1, np.nan)
    grid[cells] = values[known]
    return grid


def seasonal_values(
    times: np.ndarray, values: np.ndarray, asked: np.ndarray, at: np.ndarray, period: float, step: float
) -> np.ndarray:
    """The last value (N,) a whole number of periods before each time `at`, of those observed at or before `asked`.

    A value counts if it lies within half a step of that time. NaN where there is none.

    Args:
        times: Times of one series, ascending.
        values: Its values of one channel, NaN where none was observed.
        asked: Times (N,) at which the forecasts are made.
        at: Times (N,) that are forecast.
        period: As period_of returns it.
        step: Width of a cell.
    """
    known = ~np.isnan(values)
    times, values = times[known], values[known]
    seasonal = np.full(len(at), np.nan)
    if not len(times):
        return seasonal
    back = np.maximum(np.ceil((at - asked) / period - 1e-9), 1.0)
    for _ in range(int(np.ceil((at.max() - times[0]) / period)) + 1 if len(at) else 0):
        open_ = np.isnan(seasonal)
        wanted = at - back * period
        if not (open_ & (wanted >= times[0] - step / 2)).any():
            break
        right = np.searchsorted(times, wanted)
        left, right = np.clip(right - 1, 0, len(times) - 1), np.clip(right, 0, len(times) - 1)
        near = np.where(np.abs(times[left] - wanted) <= np.abs(times[right] - wanted), left, right)
        hit = open_ & (np.abs(times[near] - wanted) <= step / 2) & (times[near] <= asked + 1e-9 * period)
        seasonal[hit] = values[near[hit]]
        back = back + 1
    return seasonal


# ---------------------------------------------------------------------- texts


def _the(name: str) -> str:
    return "a forecast of the value one period before" if name == SEASON else f"the {name}"


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines of columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(n) for cell, n in zip(line, widths, strict=True)).rstrip() for line in lines]


def in_words(names: Sequence[str]) -> str:
    """a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def figures_table(
    rows: Sequence[tuple[Sequence[str], Mapping[str, float]]], usual: str, forms: Mapping[str, str],
    titles: Mapping[str, str] = {},
) -> list[str]:  # fmt: skip
    """Lines of a table, one for each row's labels and figures, with intervals where it has them.

    Args:
        rows: Labels, and figures by name; those that end in `_low` and `_high` are the ends of an interval.
        usual: How a figure is written.
        forms: How those of some names are.
        titles: Of columns that are not called as the name of their figures is.
    """
    columns = list(dict.fromkeys(name for _, row in rows for name in row if not name.endswith(("_low", "_high"))))

    def cell(row: Mapping[str, float], name: str) -> str:
        if name not in row:
            return ""
        ends = [format(row[end], usual) for end in (f"{name}_low", f"{name}_high") if end in row]
        return format(row[name], forms.get(name, usual)) + (f" [{', '.join(ends)}]" if ends else "")

    head = [*[""] * len(rows[0][0]), *(titles.get(name, name.replace("_", " ")) for name in columns)]
    return aligned([head, *([*labels, *(cell(row, name) for name in columns)] for labels, row in rows)])
