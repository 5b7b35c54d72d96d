"""Recall as it is published: pairs of a large vocabulary, and then the keys at uneven distances among random tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from glissando.data.base import IGNORED, Batch
from glissando.data.corpora import MqarOptions
from glissando.data.order import random_words
from glissando.data.tasks import Draw, DrawnCorpus, behind
from glissando.data.tokenizers import NumberTokenizer, Tokenizer
from glissando.errors import ConfigError

# Keys of independent random streams; those of probes.py are 0 to 6.
_KEYS, _VALUES, _GAPS, _NOISE, _SPLIT = range(7, 12)
#: gaps are mostly short near 0, uniform for 1
_POWER = 0.01


class MqarCorpus(DrawnCorpus):
    """Multi-query associative recall: P = `pairs` keys with their values, then each key once more among noise.

        eos k_1 v_1 ... k_P v_P  . . k_3 . k_1 . . . k_2 .        after the second k_i, not before: v_i

    Tokens are numbers below V = `vocabulary`; 0 is the end token. The keys of a row are different numbers from 1 to
    V / 2 - 1, its values different ones from V / 2 to V - 1, noise any from 1 to V - 1, keys of the row included.
    Answers are scored and not read. k_i is queried g_i pairs of tokens behind the last pair: gaps are drawn without
    replacement, key after key, with weights (g + 1)^(0.01 - 1), g < (seq_len - 2 P) // 2. A row has `seq_len` tokens.

    Bits per byte are bits per answer. Besides chance, any of the V / 2 values, `describe` has the figures of
    `unbound`: a model that knows the values of a row, but not their keys.

    Source: Arora et al., "Zoology: Measuring and improving recall in efficient language models", 2023
    (arXiv 2312.04927); the end token stands in front, in the place of a token of noise at the end.

    Raises ConfigError if a row cannot hold its pairs and their queries, `vocabulary` cannot give so many keys, there
    are fewer than `valid_rows` different rows to hold out, or the tokenizer is of another vocabulary.
    """

    _more = "raise pairs or vocabulary"

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `MqarOptions`."""
        o = MqarOptions(**options)
        self.seq_len, self.batch_size, self._seed = o.seq_len, o.batch_size, o.seed
        self._pairs, self._vocabulary, self._first_value = o.pairs, o.vocabulary, o.vocabulary // 2
        if 4 * o.pairs > o.seq_len:
            raise ConfigError(
                f"{o.pairs} pairs and their queries need rows of {4 * o.pairs} tokens, more than seq_len {o.seq_len}; "
                f"raise data.seq_len to {4 * o.pairs}"
            )
        if o.pairs > self._first_value - 1:
            raise ConfigError(
                f"vocabulary {o.vocabulary} has {self._first_value - 1} keys, fewer than {o.pairs} pairs; raise "
                f"data.vocabulary to {2 * o.pairs + 2}"
            )
        self.tokenizer = tokenizer or NumberTokenizer(o.vocabulary)
        if not isinstance(self.tokenizer, NumberTokenizer) or self.tokenizer.vocab_size != o.vocabulary:
            raise ConfigError(
                f"mqar with vocabulary {o.vocabulary} is read by its own tokenizer of so many numbers, got "
                f"{type(self.tokenizer).__name__} of {self.tokenizer.vocab_size}; give data.vocabulary "
                "what the model was trained with, or train a new model"
            )
        self._weights = np.arange(1, (o.seq_len - 2 * o.pairs) // 2 + 1) ** (_POWER - 1)
        self._valid = self._distinct(o.valid_rows)

    def _draw(self, draw: Draw) -> np.ndarray:
        """(n, 2, L) int64, what is read behind eos, and the answers; 0 where nothing is scored."""
        pairs, first = self._pairs, 2 * self._pairs
        keys = 1 + _some_of(self._first_value - 1, pairs, draw, _KEYS)
        values = self._first_value + _some_of(self._vocabulary - self._first_value, pairs, draw, _VALUES)
        noise = 1 + draw.many_below(self._vocabulary - 1, self.seq_len - 1, _NOISE)
        fractions = (draw.words(len(self._weights), _GAPS) >> np.uint64(11)) * 2.0**-53
        # The least of exponential times with the weights as rates is drawn by weight, and so on without replacement.
        times = -np.log1p(-fractions) / self._weights
        queries = first + 2 * times.argsort(axis=1, kind="stable")[:, :pairs]
        drawn = np.stack([noise, np.zeros_like(noise)], axis=1)
        drawn[:, 0, 0:first:2], drawn[:, 0, 1:first:2] = keys, values
        np.put_along_axis(drawn[:, 0], queries, keys, axis=1)
        np.put_along_axis(drawn[:, 1], queries, values, axis=1)
        return drawn

    def _is_held_out(self, drawn: np.ndarray) -> np.ndarray:
        read = drawn[:, 0]
        return random_words(_SPLIT, np.arange(read.shape[1]), read).sum(axis=1) % np.uint64(10) == 0

    def _batch(self, group: np.ndarray, mine: Sequence[int]) -> Batch:
        read, answers = group[list(mine)].transpose(1, 0, 2)
        ids = torch.from_numpy(behind(self.tokenizer.eos_id, read))
        targets = torch.from_numpy(behind(IGNORED, np.where(answers > 0, answers, IGNORED)))
        return Batch(ids, targets, int((answers > 0).sum()), floor_bits=0.0)

    def _written(self, group: np.ndarray) -> list[str]:
        """What is read, and below it the queries with their answers."""
        decode = self.tokenizer.decode
        return [
            f"{decode(read)}\n"
            + " ".join(f"{key}:{value}" for key, value in zip(read, answers, strict=True) if value)
            + "\n"
            for read, answers in group
        ]

    def prompts(self, n: int, *, seed: int = 0) -> list[str]:
        """Held-out beginnings up to the first query, whose answer is what comes next."""
        rows = self._rows(np.arange(n), seed, held_out=True)
        return [self.tokenizer.decode(read[: 1 + int((answers > 0).argmax())]) for read, answers in rows]

    def chance(self) -> dict[str, float]:
        values = self._vocabulary - self._first_value
        return {
            "chance_accuracy": 1 / values,
            "chance_bits": math.log2(values),
            "unbound_accuracy": 1 / self._pairs,
            "unbound_bits": math.log2(self._pairs),
        }

    def describe(self) -> dict[str, object]:
        return super().describe() | {"pairs": self._pairs, "vocabulary": self._vocabulary}


def _some_of(size: int, count: int, draw: Draw, key: int) -> np.ndarray:
    """(n, count), so many different numbers below `size` in random order."""
    words = draw.words(size, key)
    least = words.argpartition(count - 1, axis=1)[:, :count]
    return np.take_along_axis(least, np.take_along_axis(words, least, 1).argsort(axis=1, kind="stable"), 1)
