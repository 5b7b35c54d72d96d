"""Tasks that probe memory: what they have in common; the tasks themselves are in probes.py.

What is scored follows from what was read without a doubt: the entropy floor is 0, and accuracy is what a model can
hold. `describe` has the accuracy and bits of chance.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np
import torch

from glissando.data.base import IGNORED, Batch, RowCorpus
from glissando.data.corpora import GeneratedOptions
from glissando.data.drawn import Draw, Source, is_held_out
from glissando.data.pairs import NEWLINE, PAD_ID
from glissando.data.tokenizers import ByteTokenizer, Tokenizer
from glissando.errors import ConfigError

_HELD_OUT_SEED = 0  # the held-out rows are the same for every run, whatever its seed
ASCII = 128


class TaskCorpus(RowCorpus):
    """Rows `eos c_1 ... c_L` of codes, scored where the task has an answer after c_i.

    Targets are IGNORED elsewhere, so that loss, accuracy and n_bytes are of the answers alone. A code is an ASCII
    character, unless a task says otherwise, and a token, whatever the tokenizer; the end token is a newline for bytes.
    Rows are padded on the right with id 0 and masked, to the longest of the global batch. Held-out rows are distinct
    and sorted by length.

    Raises ConfigError if `seq_len` cannot hold the longest row, there are fewer than `valid_rows` different rows to
    hold out, or the tokenizer has no token of its own for a character.
    """

    entropy_floor = 0.0
    options: ClassVar[type[Any]]
    more: ClassVar[str]  # how a person gets more different rows
    asked: ClassVar[int] = 0  # the answer that a prompt asks for: the first
    alphabet: str  # the characters that are read or answered

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of its options."""
        self.o = o = self.options(**options)
        self.seq_len, self.batch_size, self._seed = o.seq_len, o.batch_size, o.seed
        if (longest := self.longest()) > self.seq_len:
            raise ConfigError(
                f"the longest row needs {longest} tokens, more than seq_len {self.seq_len}; raise data.seq_len to "
                f"{longest}"
            )
        self.tokenizer, self._ids = self._vocabulary(tokenizer)
        self._source = Source(lambda draw: np.stack(self.draw(draw), axis=1), self._is_held_out, self.more)
        chosen = self._source.distinct(o.valid_rows, _HELD_OUT_SEED, held_out=True)
        self._valid = chosen[np.argsort(lengths_of(chosen), kind="stable")]

    @abstractmethod
    def longest(self) -> int:
        """Tokens of the longest row, with the end in front of it."""

    @abstractmethod
    def draw(self, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """(n, L), what is read of each row, 0 behind its end; and the answer after each code, 0 where nothing is
        scored."""

    @abstractmethod
    def chance(self) -> dict[str, float]:
        """Accuracy and bits per byte of the held-out answers for who knows the task but reads only earlier answers."""

    def _vocabulary(self, tokenizer: Tokenizer | None) -> tuple[Tokenizer, np.ndarray]:
        """The tokenizer, and (128,) int64, the id of each ASCII character of the alphabet, PAD_ID for others."""
        tokenizer = tokenizer or ByteTokenizer(NEWLINE)
        encoded = {character: tokenizer.encode(character) for character in self.alphabet}
        for character, ids in encoded.items():
            if len(ids) != 1 or list(encoded.values()).count(ids) > 1 or ids[0] == tokenizer.eos_id:
                raise ConfigError(
                    f"the tokenizer encodes the character {character!r} as {ids}, but a task needs a token of its own "
                    "for each character and for the end; use data.tokenizer.kind bytes"
                )
        table = np.full(ASCII, PAD_ID, np.int64)
        table[codes(self.alphabet)] = [encoded[character][0] for character in self.alphabet]
        return tokenizer, table

    def _is_held_out(self, drawn: np.ndarray) -> np.ndarray:
        return is_held_out(drawn[:, 0])

    def describe(self) -> dict[str, object]:
        common = {each.name for each in fields(GeneratedOptions)}
        of_task = {each.name: getattr(self.o, each.name) for each in fields(self.o) if each.name not in common}
        return super().describe() | self.chance() | of_task

    def prompts(self, n: int, *, seed: int = 0) -> list[str]:
        """Held-out beginnings, the next character of which is an answer."""
        rows = self._source.rows(np.arange(n), seed, held_out=True)
        return [self._text(read[: 1 + np.flatnonzero(answers)[self.asked]]) for read, answers in rows]

    def _training(self, rows: np.ndarray) -> np.ndarray:
        return self._source.rows(rows, self._seed, held_out=False)

    def _batch(self, group: np.ndarray, chosen: Sequence[int]) -> Batch:
        read, answers = group[list(chosen), :, : lengths_of(group).max()].transpose(1, 0, 2)
        ids = torch.from_numpy(_behind(self.tokenizer.eos_id, self._ids[read]))
        targets = torch.from_numpy(_behind(IGNORED, np.where(answers > 0, self._ids[answers], IGNORED)))
        mask = torch.from_numpy(_behind(True, read > 0))
        return Batch(ids, targets, int((answers > 0).sum()), None if mask.all() else mask, floor_bits=0.0)

    def _written(self, group: np.ndarray) -> list[str]:
        """What is read, and below it the answers."""
        return [f"{self._text(read)}\n{self._text(answers)}\n" for read, answers in group]

    def _text(self, codes: np.ndarray) -> str:
        return self.tokenizer.decode(self._ids[codes[codes > 0]].tolist())


def _behind(first: int, rest: np.ndarray) -> np.ndarray:
    """(n, L) -> (n, 1 + L), `first` in front of every row."""
    return np.concatenate([np.full((len(rest), 1), first, rest.dtype), rest], axis=1)


def lengths_of(drawn: np.ndarray) -> np.ndarray:
    """(n,) codes that are read of each row (n, 2, L)."""
    return (drawn[:, 0] > 0).sum(axis=1)


def codes(characters: str) -> np.ndarray:
    return np.frombuffer(characters.encode("ascii"), np.uint8)
