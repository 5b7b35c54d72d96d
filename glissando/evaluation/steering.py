"""How well a dial turns a text: sweeps of the control over held-out prompts, judged by the corpus's own oracle, or by
the probabilities of a user's own words, for which no oracle is needed.

Every prompt is continued at every value u with the same random numbers, so that what differs is the dial's doing.

A word is read behind one space, whatever space the prompt ends with: its tokens t_1 .. t_n are those by which
encode(prompt + " " + word) is longer than encode(prompt), and

    P(word | prompt, u) = prod_i p(t_i | end mark, prompt, t_1 .. t_{i-1}, u)         at temperature 1
    P(set | prompt, u) = sum over its words

is the probability that the continuation begins with one of these token sequences (in bytes " goodness" begins with
" good"). No word's tokens may begin with another's, so that nothing is counted twice. Other tokens that spell a word
are not counted.

What that costs is given as bits per byte of held-out text read at u, and as a ratio of perplexities per token,

    cost(u) = exp(nats per token at u - nats per token of the base, or without a control)

where the base is the uncontrolled model from which steering started.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from glissando.data.base import IGNORED, Corpus
from glissando.data.tokenizers import Tokenizer
from glissando.errors import ConfigError
from glissando.evaluation.rows import Row, batches_of, spread, valid_rows
from glissando.evaluation.scoring import Score, score, wilson
from glissando.generation import Continuation, Sampling, control_values, tokenizer_of
from glissando.model import LanguageModel

#: what is swept by default: from -1.5 to 1.5 in steps of 0.25
VALUES = tuple(v / 4 for v in range(-6, 7))
_RESAMPLES = 2000  # of the prompts


class Cost(NamedTuple):
    """What held-out text costs a reader."""

    bits_per_byte: float
    nats: float  # per token

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(min(self.nats, 700.0))

    def against(self, other: Cost) -> float:
        """The ratio of the two perplexities: 1.02 is 2 % above `other`."""
        return math.exp(min(self.nats - other.nats, 700.0))


@dataclass(frozen=True)
class Trial:
    """What is the same for every way of steering: prompts to continue, random numbers, text to read, a judge."""

    corpus: Corpus
    prompts: Sequence[str]
    held_out: Sequence[Row]
    max_tokens: int = 700
    temperature: float = 0.8
    seed: int = 0

    def write(
        self,
        model: LanguageModel,
        control: Mapping[str, float] | None = None,
        before: Sequence[Sequence[int]] | None = None,
    ) -> list[str]:
        """Each prompt and its continuation, to the end of the text or `max_tokens`.

        before  ids that the model reads ahead of each prompt, its end mark by default; they are no part of the text.
        """
        tokenizer = tokenizer_of(model)
        before = before or [[tokenizer.eos_id]] * len(self.prompts)
        ids = [[*ahead, *tokenizer.encode(prompt)] for ahead, prompt in zip(before, self.prompts, strict=True)]
        dial = None if control is None else _as_tensor(model, control).expand(len(ids), -1)
        written: list[list[int]] = [[] for _ in ids]
        sampling = Sampling(self.temperature, seed=self.seed)
        for step in Continuation(
            model, ids, self.max_tokens, sampling, ends=lambda row, token: token == tokenizer.eos_id, control=dial
        ):
            for row, token in enumerate(step):
                if token is not None and token != tokenizer.eos_id:
                    written[row].append(token)
        return [prompt + tokenizer.decode(tokens) for prompt, tokens in zip(self.prompts, written, strict=True)]

    def judge(self, texts: Sequence[str], name: str) -> NDArray[np.float64]:
        """The label `name` of each text, NaN without evidence. Raises ConfigError if the oracle knows no such label."""
        return np.array([_label(self.corpus, text, name) for text in texts])

    def read(
        self, model: LanguageModel, control: Mapping[str, float] | None = None, rows: Sequence[Row] | None = None
    ) -> Cost:
        """The cost of the held-out rows, or of `rows`, read with the dials so; without a control if None."""
        result = self.score(model, control, self.held_out if rows is None else rows)
        return Cost(result.bits_per_byte, result.loss)

    def score(self, model: LanguageModel, control: Mapping[str, float] | None, rows: Sequence[Row]) -> Score:
        """The score of `rows`, in the order of `batches_of`, read with the dials so."""
        dial = None if control is None else _as_tensor(model, control)
        batches = (
            batch._replace(control=None if dial is None else dial.expand(len(batch.ids), -1))
            for batch in batches_of(rows)
        )
        return score(model, batches)


def trial(
    corpus: Corpus,
    *,
    prompts: int | Sequence[str] = 32,
    cost_rows: int = 32,
    max_tokens: int = 700,
    temperature: float = 0.8,
    seed: int = 0,
) -> Trial:
    """A trial on `prompts`, or so many held-out beginnings, and `cost_rows` held-out rows (0: all of them).

    Raises ConfigError for fewer than 2 prompts, fewer than 1 token, or a negative number of rows.
    """
    n = prompts if isinstance(prompts, int) else len(prompts)
    if n < 2:
        raise ConfigError(f"a sweep needs at least 2 prompts for an interval, got {n}")
    if max_tokens < 1:
        raise ConfigError(f"max_tokens must be at least 1, got {max_tokens}")
    if cost_rows < 0:
        raise ConfigError(f"cost_rows, the held-out rows to read, must be at least 0 (0: all), got {cost_rows}")
    Sampling(temperature)  # refuses what it cannot draw by, before anything is written
    rows = spread(valid_rows(corpus), cost_rows)
    texts = corpus.prompts(prompts, seed=seed) if isinstance(prompts, int) else prompts
    return Trial(corpus, texts, rows, max_tokens, temperature, seed)


class Dials:
    """A model's dials in one trial. What was written and read at a setting is kept: sweeps and pairs share settings."""

    def __init__(self, model: LanguageModel, trial: Trial) -> None:
        self.model, self.trial, self.names = model, trial, model.config.controls
        self._texts: dict[tuple[float, ...], list[str]] = {}
        self._costs: dict[tuple[float, ...] | None, Cost] = {}

    def texts(self, control: Mapping[str, float]) -> list[str]:
        """The trial's texts with the dials so, those not named at 0."""
        key = tuple(control_values(self.model, control))
        if key not in self._texts:
            self._texts[key] = self.trial.write(self.model, control)
        return self._texts[key]

    def cost(self, control: Mapping[str, float] | None) -> Cost:
        """The cost of the trial's held-out rows with the dials so; without a control if None."""
        key = None if control is None else tuple(control_values(self.model, control))
        if key not in self._costs:
            self._costs[key] = self.trial.read(self.model, control)
        return self._costs[key]


class WordSet(NamedTuple):
    """Words or phrases, and what the set is called."""

    name: str
    words: Sequence[str]


@dataclass(frozen=True)
class Sweep:
    """One dial: the label of each prompt's text (NaN: no evidence) at each value u, and the cost of held-out text.

    With word sets no texts are written, and the labels are (P(first) - P(second)) / (P(first) + P(second)).
    """

    name: str
    values: tuple[float, ...]
    labels: NDArray[np.float64]  # (values, prompts)
    texts: list[list[str]]  # [value][prompt]
    costs: list[Cost]  # of held-out text read with the dial at u
    uncontrolled: Cost  # the same without a control
    base: Cost | None = None  # the same by the model that steering started from, if there is one
    sets: tuple[WordSet, ...] = ()  # two, or none
    probabilities: tuple[NDArray[np.float64], ...] = ()  # (values, prompts) of each set

    @property
    def measure(self) -> str:
        """What a label is."""
        if not self.sets:
            return f"{self.name} of the text, judged"
        first, second = (f"P({each.name})" for each in self.sets)
        return f"({first} - {second}) / ({first} + {second})"

    def at(self, u: float) -> NDArray[np.float64]:
        return self.labels[self.values.index(u)]

    def means(self) -> NDArray[np.float64]:
        """The mean label at each value; prompts without evidence count as 0, which is the neutral label."""
        return np.nan_to_num(self.labels).mean(1)

    def success(self, u: float) -> tuple[int, int]:
        """How many texts have a label of u's sign, of how many; no evidence is no success."""
        return int((np.nan_to_num(self.at(u)) * math.copysign(1, u) > 0).sum()), self.labels.shape[1]

    def anti_steerable(self) -> float:
        """The share of prompts whose text has a higher label at u = -1 than at u = 1."""
        return float((np.nan_to_num(self.at(1.0)) < np.nan_to_num(self.at(-1.0))).mean())

    def rank_correlation(self) -> float:
        """Spearman's, of u and the mean label at u; NaN if the label does not vary."""
        import pandas

        return float(pandas.DataFrame({"u": self.values, "mean": self.means()}).corr("spearman").iloc[0, 1])

    def crossing(self) -> tuple[float, float, float]:
        """Where the mean label rises through 0, with a 95 % interval bootstrapped over prompts; NaN if nowhere.

        The interval is NaN too where more than one draw in twenty rises through 0 nowhere: it would look too sure.
        """
        rng, n = np.random.default_rng(0), self.labels.shape[1]
        labels, u = np.nan_to_num(self.labels), np.asarray(self.values)
        draws = [crossing_point(u, labels[:, rng.integers(0, n, n)].mean(1)) for _ in range(_RESAMPLES)]
        crossings = [draw for draw in draws if not math.isnan(draw)]
        sure = len(crossings) >= 0.95 * _RESAMPLES
        low, high = np.quantile(crossings, [0.025, 0.975]).tolist() if sure else (math.nan, math.nan)
        return crossing_point(u, self.means()), low, high

    def as_dict(self) -> dict[str, Any]:
        """The figures that `glissando steer` writes."""
        plus, minus = self.success(1.0), self.success(-1.0)
        at, low, high = self.crossing()
        zero = self.costs[self.values.index(0.0)]
        sets = [
            {"name": each.name, "words": list(each.words), "probability": raw.mean(-1).tolist()}
            for each, raw in zip(self.sets, self.probabilities, strict=True)
        ]
        return {
            "dial": self.name,
            "prompts": self.labels.shape[1],
            "success_at_+1": plus[0] / plus[1],
            "success_at_+1_95": list(wilson(*plus)),
            "success_at_-1": minus[0] / minus[1],
            "success_at_-1_95": list(wilson(*minus)),
            "spearman": self.rank_correlation(),
            "crossing": at,
            "crossing_95": [low, high],
            "anti_steerable": self.anti_steerable(),
            "bits_per_byte_uncontrolled": self.uncontrolled.bits_per_byte,
            "bits_per_byte_at_0": zero.bits_per_byte,
            "perplexity_at_0_against_base": None if self.base is None else zero.against(self.base),
            "u": list(self.values),
            "mean_label": self.means().tolist(),
            "evidence": (~np.isnan(self.labels)).mean(1).tolist(),
            "bits_per_byte": [cost.bits_per_byte for cost in self.costs],
            "perplexity": [cost.perplexity for cost in self.costs],
            "perplexity_against_uncontrolled": [cost.against(self.uncontrolled) for cost in self.costs],
            "perplexity_against_base": None if self.base is None else [cost.against(self.base) for cost in self.costs],
        } | ({"measure": self.measure, "sets": sets} if sets else {})


def sweep(dials: Dials, name: str, values: Sequence[float] = VALUES, base: Cost | None = None) -> Sweep:
    """Turn the dial `name` over the trial's prompts, the other dials at 0.

    Raises ConfigError for values without -1, 0 and 1, for a model without this dial and for a corpus without an oracle.
    """
    values = check_values(values)
    texts, costs = [dials.texts({name: u}) for u in values], [dials.cost({name: u}) for u in values]
    labels = np.array([dials.trial.judge(at, name) for at in texts])
    return Sweep(name, values, labels, texts, costs, dials.cost(None), base)


def check_values(values: Sequence[float]) -> tuple[float, ...]:
    """The values in order, each once. Raises ConfigError where -1, 0 or 1 is missing, or one is not finite."""
    values = tuple(sorted(set(values)))
    if not all(map(math.isfinite, values)):
        raise ConfigError(f"values of a dial must be finite; got {list(values)}")
    if not {-1.0, 0.0, 1.0} <= set(values):
        raise ConfigError(f"a sweep needs the values -1, 0 and 1 among others; got {list(values)}")
    return values


def _as_tensor(model: LanguageModel, control: Mapping[str, float]) -> torch.Tensor:
    """(1, C)."""
    return model.embedding.weight.new_tensor([control_values(model, control)])


def _label(corpus: Corpus, text: str, name: str) -> float:
    judged = corpus.judge(text)
    if name not in judged:
        raise ConfigError(f"the corpus's oracle judges {', '.join(judged)}, and the dial is named {name!r}")
    value = judged[name]
    return math.nan if value is None else value


def crossing_point(u: NDArray[np.float64], means: NDArray[np.float64]) -> float:
    """Where the rising curve nearest to the means passes 0; NaN if it does not.

    That curve is their isotonic regression (least squares among curves that never fall) with straight lines between, so
    that there is one crossing and none to choose; the middle, where it lies on 0 for a while.
    """
    rising = isotonic(means)
    if not rising[0] < 0 < rising[-1]:
        return math.nan
    last_below, first_above = int(np.flatnonzero(rising < 0)[-1]), int(np.flatnonzero(rising > 0)[0])
    if first_above - last_below > 1:
        return float(u[last_below + 1] + u[first_above - 1]) / 2
    low, high = rising[last_below], rising[first_above]
    return float(u[last_below] - low * (u[first_above] - u[last_below]) / (high - low))


def isotonic(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Pool adjacent violators: the non-decreasing sequence nearest to `values`."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((float(value), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (b, m), (a, n) = pools.pop(), pools.pop()
            pools.append(((a * n + b * m) / (n + m), n + m))
    return np.repeat([mean for mean, _ in pools], [count for _, count in pools])


def read_lines(path: str, option: str) -> list[str]:
    """The lines of a text file that are not blank. Raises ConfigError if there are none, or no such file."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: cannot read {path}: {error}") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{option}: {path} is empty; write one word, phrase or prompt a line")
    return lines


def read_word_sets(paths: Sequence[str]) -> tuple[WordSet, WordSet]:
    """The sets in two files, called by the names of these. Raises ConfigError for another number of files."""
    if len(paths) != 2:
        raise ConfigError(
            f"--words takes two files, that of the words for u > 0 and that for u < 0: --words good.txt bad.txt; got "
            f"{len(paths)}"
        )
    first, second = (WordSet(Path(path).stem, read_lines(path, "--words")) for path in paths)
    return first, second


def word_sweep(
    dials: Dials, name: str, sets: tuple[WordSet, WordSet], values: Sequence[float], base: Cost | None = None
) -> Sweep:
    """Turn the dial `name`, the other dials at 0, and read every word behind every prompt of the trial.

    Raises ConfigError for values without -1, 0 and 1, for a model without this dial, and for words that cannot be
    encoded or overlap.
    """
    values, trial = check_values(values), dials.trial
    rows = word_rows(tokenizer_of(dials.model), trial.prompts, [word for each in sets for word in each.words])
    order = sorted(range(len(rows)), key=lambda row: len(rows[row].ids))  # that of batches_of
    each_row = np.empty((len(values), len(rows)))
    for index, u in enumerate(values):
        each_row[index, order] = np.exp(-np.array(trial.score(dials.model, {name: u}, rows).nats))
    each_word = each_row.reshape(len(values), len(trial.prompts), -1)
    first, second = (part.sum(-1) for part in np.split(each_word, [len(sets[0].words)], axis=-1))
    either = first + second
    labels = np.divide(first - second, either, out=np.full_like(either, np.nan), where=either > 0)
    costs = [dials.cost({name: u}) for u in values]
    texts: list[list[str]] = [[] for _ in values]
    return Sweep(name, values, labels, texts, costs, dials.cost(None), base, sets, (first, second))


def word_rows(tokenizer: Tokenizer, prompts: Sequence[str], words: Sequence[str]) -> list[Row]:
    """For each prompt a row for each word, in which the word's tokens alone are scored."""
    rows = []
    for prompt in map(str.rstrip, prompts):
        before = tokenizer.encode(prompt)
        sorted_rows = sorted((_tokens(tokenizer, prompt, before, word), number) for number, word in enumerate(words))
        for (a, one), (b, other) in pairwise(sorted_rows):
            if b[: len(a)] == a:
                raise ConfigError(
                    f"the word sets overlap: what begins with {words[other]!r} begins with {words[one]!r} and would be "
                    "counted twice; leave one of the two out"
                )
        for ids, _ in sorted(sorted_rows, key=lambda each: each[1]):
            rows.append(Row([tokenizer.eos_id, *before, *ids[:-1]], [IGNORED] * len(before) + ids, 0.0))
    return rows


def _tokens(tokenizer: Tokenizer, prompt: str, before: list[int], word: str) -> list[int]:
    """The tokens of `word` behind one space behind `prompt`."""
    whole = tokenizer.encode(f"{prompt} {word}")
    ids = whole[len(before) :]
    if whole[: len(before)] != before or not ids:
        raise ConfigError(
            f"the word {word!r} cannot be encoded after {prompt!r}: the tokenizer joins the two; give another prompt"
        )
    if tokenizer.decode(ids).strip() != word:
        raise ConfigError(f"the word {word!r} cannot be encoded: the tokenizer makes {tokenizer.decode(ids)!r} of it")
    return ids
