"""A fixed set of pairs, reshuffled each epoch: characters that are shifted, or random answers (functions of the seed
and the input), which can only be memorised. The corpus `fixed-pairs`."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import PositiveInt

from glissando.config import options
from glissando.data.corpora import ShiftOptions, register_corpus
from glissando.data.drawn import hashed
from glissando.data.order import random_below
from glissando.data.pairs import ANSWERS, FIRST, PRINTABLE, Pair, PairsCorpus, ShiftCorpus, texts_of
from glissando.data.tokenizers import Tokenizer


@options
class FixedPairsOptions(ShiftOptions):
    """Generated pairs, so many different ones.

    rule         shift, or random: answers that do not depend on the input
    train_pairs  number of different training pairs
    """

    rule: Literal["shift", "random"] = "shift"
    train_pairs: PositiveInt = 64


@register_corpus("fixed-pairs", FixedPairsOptions)
class FixedPairs(ShiftCorpus):
    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `FixedPairsOptions`."""
        o = FixedPairsOptions(**options)
        self._rule = o.rule
        super().__init__(tokenizer, **{k: v for k, v in options.items() if k not in ("rule", "train_pairs")})
        self.entropy_floor = 0.0 if self._rule == "shift" else None
        self.train_set = self.fixed = self.distinct(o.train_pairs, self._seed, held_out=False)

    def _training(self, rows: np.ndarray) -> list[Pair]:
        return PairsCorpus._training(self, rows)

    def _pairs(self, inputs: np.ndarray, seed: int) -> list[Pair]:
        if self._rule == "shift":
            return super()._pairs(inputs, seed)
        drawn = random_below(PRINTABLE, seed, ANSWERS, hashed(inputs, ANSWERS)[:, None], np.arange(inputs.shape[1]))
        answers = np.where(inputs > 0, FIRST + drawn, 0).astype(np.uint8)
        return [Pair(*pair) for pair in zip(texts_of(inputs), texts_of(answers), strict=True)]
