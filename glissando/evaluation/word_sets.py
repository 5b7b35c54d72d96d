"""P(word set | prompt): how a dial moves the probabilities of a user's own words, for which no oracle is needed.

A word is read behind one space, whatever space the prompt ends with: its tokens t_1 .. t_n are those by which
encode(prompt + " " + word) is longer than encode(prompt), and

    P(word | prompt, u) = prod_i p(t_i | end mark, prompt, t_1 .. t_{i-1}, u)         at temperature 1
    P(set | prompt, u) = sum over its words

is the probability that the continuation begins with one of these token sequences (in bytes " goodness" begins with
" good"). No word's tokens may begin with another's, so that nothing is counted twice. Other tokens that spell a word
are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from glissando.data.base import IGNORED
from glissando.data.tokenizers import Tokenizer
from glissando.errors import ConfigError
from glissando.evaluation.rows import Row
from glissando.evaluation.steering import Cost, Dials, Sweep, check_values
from glissando.generation import tokenizer_of


class WordSet(NamedTuple):
    """Words or phrases, and what the set is called."""

    name: str
    words: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class WordSweep(Sweep):
    """A sweep whose labels are (P(first) - P(second)) / (P(first) + P(second)), one for each prompt."""

    sets: tuple[WordSet, WordSet]
    probabilities: NDArray[np.float64]  # (2, values, prompts)

    @property
    def measure(self) -> str:
        first, second = (f"P({each.name})" for each in self.sets)
        return f"({first} - {second}) / ({first} + {second})"

    def as_dict(self) -> dict[str, Any]:
        """As of a sweep, and each set's mean probability over the prompts."""
        sets = [
            {
                "name": each.name,
                "words": list(each.words),
                "probability": raw.mean(-1).tolist(),
            }
            for each, raw in zip(self.sets, self.probabilities, strict=True)
        ]
        return super().as_dict() | {"measure": self.measure, "sets": sets}


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
) -> WordSweep:
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
    both = np.stack([first, second])
    return WordSweep(name, values, labels, texts, costs, dials.cost(None), base, sets=sets, probabilities=both)


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
