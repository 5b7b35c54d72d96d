"""Prompt-prefixing: a model without dials is steered by what it reads first.

To turn a label up, a training text whose label is above 0 is put before the prompt, and one below 0 to turn it down;
every prompt has another. What a prefix is made of matters, so there are several kinds:

    story    the whole text and its end mark
    opening  its first sentences, up to about 150 bytes, and a blank: the prompt goes on in the same text
    ending   its last sentences, likewise

The first keeps to what the model was trained on, where one text ends before the next begins, but carries no more than
what came earlier; in the other two the prompt follows as if the same author went on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from glissando.evaluation.steering import Cost, Trial
from glissando.generation import tokenizer_of
from glissando.model import LanguageModel
from research.steering.rows import behind

KINDS = ("opening", "ending", "story")
#: how much of a text its opening and its ending are, to the end of the sentence
PASSAGE_BYTES = 150
#: a prefix of fewer tokens carries nothing, so that where learned positions leave no positions for it there is none
_LEAST = 8


class Prefix:
    """The steering that puts labelled text of one kind before whatever `base` reads; u counts by its sign alone.

    texts  ids of training texts, those with the label above 0 under 1 and those below 0 under -1
    """

    def __init__(self, base: LanguageModel, kind: str, texts: Mapping[int, Sequence[Sequence[int]]]) -> None:
        tokenizer = tokenizer_of(base)
        self.base, self.kind, self.eos = base, kind, tokenizer.eos_id
        self._ahead: dict[int, list[list[int]]] = {}
        for sign, rows in texts.items():
            if kind == "story":
                self._ahead[sign] = [[*row, tokenizer.eos_id] for row in rows]
            else:
                cut = [passage(tokenizer.decode(row), kind) for row in rows]
                self._ahead[sign] = [tokenizer.encode(text + " ") for text in cut]

    @property
    def way(self) -> str:
        return f"prefix: {self.kind}"

    def write(self, trial: Trial, u: float) -> list[str]:
        """The trial's prompts continued, each behind a prefix of its own that is no part of the text."""
        return trial.write(self.base, before=self.chosen(trial, u, len(trial.prompts)))

    def read(self, trial: Trial, u: float) -> Cost:
        """The cost of the trial's held-out rows, each behind a prefix of its own that is not scored."""
        ahead = self.chosen(trial, u, len(trial.held_out))
        rows = [behind(row, before, self.eos) for row, before in zip(trial.held_out, ahead, strict=True)]
        return trial.read(self.base, rows=rows)

    def chosen(self, trial: Trial, u: float, n: int) -> list[list[int]]:
        """The end mark and a prefix for each of `n` texts; none twice unless there are fewer prefixes than that."""
        every = self._ahead[1 if u > 0 else -1]
        order, limit = np.random.default_rng(trial.seed).permutation(len(every)), prefix_limit(self.base, trial)
        picked = [every[order[index % len(every)]] for index in range(n)]
        return [[self.eos, *(ids if limit is None else ids[-limit:])] for ids in picked]


def prefix_limit(base: LanguageModel, trial: Trial) -> int | None:
    """Tokens that learned positions leave before the trial's longest held-out row; None where there is no limit."""
    if base.position_embedding is None or base.config.max_length is None:
        return None
    return max(0, base.config.max_length - max(len(row.ids) for row in trial.held_out) - 1)


def prefix_fits(base: LanguageModel, trial: Trial) -> bool:
    """Whether a prefix that carries anything fits before the held-out rows."""
    limit = prefix_limit(base, trial)
    return limit is None or limit >= _LEAST


def passage(text: str, kind: str) -> str:
    """The first ("opening") or last ("ending") sentences of `text` that reach PASSAGE_BYTES, or all of it."""
    ends = [match.end() for match in re.finditer(r"[.!?][\"']?(?=\s|$)", text)]
    if kind == "opening":
        return text[: next((end for end in ends if len(text[:end].encode()) >= PASSAGE_BYTES), len(text))].strip()
    starts = [end for end in reversed(ends) if len(text[end:].strip().encode()) >= PASSAGE_BYTES]
    return text[starts[0] if starts else 0 :].strip()
