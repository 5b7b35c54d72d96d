"""Tasks of recall, of following a state and of copying, each a generator: random numbers -> (what is read, answers).

What is scored follows from what was read without a doubt: the entropy floor is 0, and accuracy is what a model can
hold. `describe` has the accuracy and bits of chance.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from itertools import permutations
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from glissando.data.base import IGNORED, Batch, RowCorpus
from glissando.data.corpora import (
    CopyOptions,
    GeneratedOptions,
    InductionOptions,
    MqarOptions,
    ParityOptions,
    RecallOptions,
    SelectiveCopyOptions,
    TrackingOptions,
)
from glissando.data.drawn import Draw, Source, is_held_out
from glissando.data.order import random_words
from glissando.data.pairs import NEWLINE, PAD_ID
from glissando.data.tokenizers import ByteTokenizer, NumberTokenizer, Tokenizer
from glissando.errors import ConfigError

_HELD_OUT_SEED = 0  # the held-out rows are the same for every run, whatever its seed
_ASCII = 128
# Keys of independent random streams.
_LENGTHS, _MOVES, _KEYS, _VALUES, _QUERIES, _SYMBOLS, _PLACES = range(7)
_MQAR_KEYS, _MQAR_VALUES, _GAPS, _NOISE, _MQAR_SPLIT = range(7, 12)
_KEY_CHARACTERS = "".join(map(chr, range(33, 80)))
_VALUE_CHARACTERS = "".join(map(chr, range(80, 127)))
_BLANK, _ASK = ".", ":"
_MOVE_CHARACTERS = "ksr"  # keep, swap, rotate
#: capitals for up to four items; S_5 has more elements than there are printable characters
_STATE_CHARACTERS = "".join(
    chr(code)
    for code in (*range(65, 91), *range(33, 65), *range(91, 127), 32, *range(1, 10), *range(11, 32), 127)
    if chr(code) not in _MOVE_CHARACTERS
)
#: gaps of mqar are mostly short near 0, uniform for 1
_POWER = 0.01

# ---------------------------------------------------------------------- what they have in common


class TaskCorpus(RowCorpus):
    """Rows `eos c_1 ... c_L` of codes, scored where the task has an answer after c_i.

    Targets are IGNORED elsewhere, so that loss, accuracy and n_bytes are of the answers alone. A code is an _ASCII
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
    symbols: str  # those of which an answer is one, evenly

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of its options."""
        self.o = o = self.options(**options)
        self.seq_len, self.batch_size, self._seed = o.seq_len, o.batch_size, o.seed
        if (longest := self._longest()) > self.seq_len:
            raise ConfigError(
                f"the longest row needs {longest} tokens, more than seq_len {self.seq_len}; raise data.seq_len to "
                f"{longest}"
            )
        self.tokenizer, self._ids = self._vocabulary(tokenizer)
        self._source = Source(lambda draw: np.stack(self.draw(draw), axis=1), self._is_held_out, self.more)
        chosen = self._source.distinct(o.valid_rows, _HELD_OUT_SEED, held_out=True)
        self._valid = chosen[np.argsort(lengths_of(chosen), kind="stable")]

    def _longest(self) -> int:
        """Tokens of the longest row, with the end in front of it."""
        return 1 + self.draw(Draw(np.arange(1), 0, held_out=True))[0].shape[1]

    @abstractmethod
    def draw(self, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """(n, L), what is read of each row, 0 behind its end; and the answer after each code, 0 where nothing is
        scored."""

    def chance(self) -> dict[str, float]:
        """Accuracy and bits per byte of the held-out answers for who knows the task but reads only earlier answers."""
        return _guess([len(self.symbols)])

    def _vocabulary(self, tokenizer: Tokenizer | None) -> tuple[Tokenizer, np.ndarray]:
        """The tokenizer, and (128,) int64, the id of each _ASCII character of the alphabet, PAD_ID for others."""
        tokenizer = tokenizer or ByteTokenizer(NEWLINE)
        encoded = {character: tokenizer.encode(character) for character in self.alphabet}
        for character, ids in encoded.items():
            if len(ids) != 1 or list(encoded.values()).count(ids) > 1 or ids[0] == tokenizer.eos_id:
                raise ConfigError(
                    f"the tokenizer encodes the character {character!r} as {ids}, but a task needs a token of its own "
                    "for each character and for the end; use data.tokenizer.kind bytes"
                )
        table = np.full(_ASCII, PAD_ID, np.int64)
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


def _guess(ways: Sequence[int], name: str = "chance") -> dict[str, float]:
    """Accuracy and bits of answers drawn evenly from so many ways each."""
    accuracy, bits = float(np.mean([1 / n for n in ways])), float(np.mean([math.log2(n) for n in ways]))
    return {f"{name}_accuracy": accuracy, f"{name}_bits": bits}


def codes(characters: str) -> np.ndarray:
    return np.frombuffer(characters.encode("ascii"), np.uint8)


# ---------------------------------------------------------------------- recall


class RecallCorpus(TaskCorpus):
    """Multi-query associative recall: P = `pairs` keys, each with its value, then the keys once more.

        eos k_1 v_1 ... k_P v_P  q_1 a_1 ... q_P a_P        a_j = v_i where q_j = k_i

    Only the a_j are scored. Keys are distinct characters from ! to O, values distinct ones from P to ~ (47 each), and
    every key is queried once. Besides chance, which may give any value not yet given,
    there are the figures of `unbound`: a model that knows which values there were and which have been given, but not
    their keys.

    Source: Arora et al., "Zoology: Measuring and improving recall in efficient language models", 2023
    (arXiv 2312.04927), without its filler between queries.
    """

    options, more = RecallOptions, "raise pairs"
    alphabet = _KEY_CHARACTERS + _VALUE_CHARACTERS

    def draw(self, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        n = self.o.pairs
        keys = codes(_KEY_CHARACTERS)[draw.order(len(_KEY_CHARACTERS), _KEYS)[:, :n]]
        values = codes(_VALUE_CHARACTERS)[draw.order(len(_VALUE_CHARACTERS), _VALUES)[:, :n]]
        bound = np.stack([keys, values], axis=2)
        queried = np.take_along_axis(bound, draw.order(n, _QUERIES)[:, :, None], axis=1)
        # The last answer is no input.
        read = np.concatenate([bound, queried], axis=1).reshape(len(keys), -1)[:, :-1]
        answers = np.zeros_like(read)
        answers[:, 2 * n :: 2] = queried[:, :, 1]
        return read, answers

    def chance(self) -> dict[str, float]:
        n = self.o.pairs
        return _guess(range(len(_VALUE_CHARACTERS), len(_VALUE_CHARACTERS) - n, -1)) | _guess(
            range(n, 0, -1), "unbound"
        )


class MqarCorpus(TaskCorpus):
    """Multi-query associative recall as published: P = `pairs` keys with their values, then each key once more among
    noise.

        eos k_1 v_1 ... k_P v_P  . . k_3 . k_1 . . . k_2 .        after the second k_i, not before: v_i

    Tokens are numbers below V = `vocabulary`; 0 is the end token. The keys of a row are different numbers from 1 to
    V / 2 - 1, its values different ones from V / 2 to V - 1, noise any from 1 to V - 1, keys of the row included.
    Answers are scored and not read. k_i is queried g_i pairs of tokens behind the last pair: gaps are drawn without
    replacement, key after key, with weights (g + 1)^(0.01 - 1), g < (seq_len - 2 P) // 2. A row has `seq_len` tokens.

    Bits per byte are bits per answer. Besides chance, any of the V / 2 values, `describe` has the figures of
    `unbound`: a model that knows the values of a row, but not their keys.

    Source: Arora et al., "Zoology: Measuring and improving recall in efficient language models", 2023
    (arXiv 2312.04927); the end token stands in front, in the place of a token of noise at the end.

    Raises ConfigError if the tokenizer is of another vocabulary.
    """

    options, more = MqarOptions, "raise pairs or vocabulary"

    def _longest(self) -> int:
        return 4 * self.o.pairs

    def _vocabulary(self, tokenizer: Tokenizer | None) -> tuple[Tokenizer, np.ndarray]:
        size = self.o.vocabulary
        tokenizer = tokenizer or NumberTokenizer(size)
        if not isinstance(tokenizer, NumberTokenizer) or tokenizer.vocab_size != size:
            raise ConfigError(
                f"mqar with vocabulary {size} is read by its own tokenizer of so many numbers, got "
                f"{type(tokenizer).__name__} of {tokenizer.vocab_size}; give data.vocabulary "
                "what the model was trained with, or train a new model"
            )
        return tokenizer, np.arange(size)

    def draw(self, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        pairs, half, size = self.o.pairs, self.o.vocabulary // 2, self.o.vocabulary
        first = 2 * pairs
        keys = 1 + _some_of(half - 1, pairs, draw, _MQAR_KEYS)
        values = half + _some_of(size - half, pairs, draw, _MQAR_VALUES)
        read = 1 + draw.many_below(size - 1, self.seq_len - 1, _NOISE)
        weights = np.arange(1, (self.seq_len - first) // 2 + 1) ** (_POWER - 1)
        fractions = (draw.words(len(weights), _GAPS) >> np.uint64(11)) * 2.0**-53
        # The least of exponential times with the weights as rates is drawn by weight, and so on without replacement.
        times = -np.log1p(-fractions) / weights
        queries = first + 2 * times.argsort(axis=1, kind="stable")[:, :pairs]
        read[:, 0:first:2], read[:, 1:first:2] = keys, values
        np.put_along_axis(read, queries, keys, axis=1)
        answers = np.zeros_like(read)
        np.put_along_axis(answers, queries, values, axis=1)
        return read, answers

    def _is_held_out(self, drawn: np.ndarray) -> np.ndarray:
        read = drawn[:, 0]
        return random_words(_MQAR_SPLIT, np.arange(read.shape[1]), read).sum(axis=1) % np.uint64(10) == 0

    def chance(self) -> dict[str, float]:
        return _guess([self.o.vocabulary - self.o.vocabulary // 2]) | _guess([self.o.pairs], "unbound")


def _some_of(size: int, count: int, draw: Draw, key: int) -> np.ndarray:
    """(n, count), so many different numbers below `size` in random order."""
    words = draw.words(size, key)
    least = words.argpartition(count - 1, axis=1)[:, :count]
    return np.take_along_axis(least, np.take_along_axis(words, least, 1).argsort(axis=1, kind="stable"), 1)


# ---------------------------------------------------------------------- following a state


class Automaton(NamedTuple):
    """What a machine reads and what states it has."""

    letters: str  # A characters
    states: str  # S characters; it starts in the first
    step: np.ndarray  # (A, S), the state that each letter leads to from each state

    def run(self, read: np.ndarray) -> np.ndarray:
        """(n, L) letters -> (n, L) the state after each, as characters; 0 where `read` is 0."""
        number = np.zeros(_ASCII, np.int64)
        number[codes(self.letters)] = np.arange(len(self.letters))
        states = np.empty(read.shape, np.int64)
        state = np.zeros(len(read), np.int64)
        for column, letters in enumerate(number[read].T):
            states[:, column] = state = self.step[letters, state]
        return np.where(read > 0, codes(self.states)[states], 0).astype(np.uint8)

    def unread(self, length: int) -> list[np.ndarray]:
        """The distribution (S,) of the state after 1 ... `length` evenly random letters."""
        share, shares = np.eye(len(self.states))[0], []
        for _ in range(length):
            weights = np.tile(share, len(self.letters)) / len(self.letters)
            share = np.bincount(self.step.ravel(), weights, minlength=len(self.states))
            shares.append(share)
        return shares


class _Following(TaskCorpus):
    """Random letters, after each of which the state of an automaton is to be given.

        eos x_1 ... x_L        after x_i: s_i = step(x_i, s_{i-1})

    The states are targets and never read: with the state before a letter in sight, its next would be a matter of the
    last two tokens and not of memory. So a sampled text is an answer for one character.

    L is even over 1 to `length`. Whether what was learned holds for longer rows, `glissando evaluate RUN --data.length
    N` shows.
    """

    more, asked = "raise data.length", -1

    automaton: Automaton

    @property
    def alphabet(self) -> str:  # type: ignore[override]
        return self.automaton.letters + self.automaton.states

    def draw(self, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        letters, length = codes(self.automaton.letters), self.o.length
        lengths = 1 + draw.below(length, _LENGTHS)
        drawn = letters[draw.many_below(len(letters), length, _MOVES)]
        read = np.where(np.arange(length) < lengths[:, None], drawn, 0).astype(np.uint8)
        return read, self.automaton.run(read)

    def chance(self) -> dict[str, float]:
        """By the state's distribution after so many letters, whichever they were."""
        lengths = lengths_of(self._valid)
        shares = self.automaton.unread(int(lengths.max()))
        scored = [int((lengths >= position).sum()) for position in range(1, len(shares) + 1)]
        bits = [-float(np.sum(share * np.log2(share, where=share > 0, out=np.zeros_like(share)))) for share in shares]
        return {
            "chance_accuracy": float(np.average([share.max() for share in shares], weights=scored)),
            "chance_bits": float(np.average(bits, weights=scored)),
        }


class ParityCorpus(_Following):
    """Random bits, after each of which the parity so far is to be given: e for an even number of ones, o for an odd.

    The defaults are lengths of Delétang et al., "Neural networks and the Chomsky hierarchy", 2023 (arXiv 2207.02098),
    who train on 1 to 40 and validate on up to 500.
    """

    options = ParityOptions
    automaton = Automaton("01", "eo", np.array([[0, 1], [1, 0]]))


def arrangements(items: int) -> Automaton:
    """The symmetric group S_n on `items` = n things in a row: its n! arrangements and three moves.

    k keeps them, s swaps the first two, r takes the first to the end. s and r generate the group; without k the sign
    of the arrangement would follow from the number of moves where n is even. States are in lexicographic order from A.
    """
    states = list(permutations(range(items)))
    number = {state: index for index, state in enumerate(states)}
    moves = [states, [(b, a, *rest) for a, b, *rest in states], [(*rest, a) for a, *rest in states]]
    step = np.array([[number[state] for state in move] for move in moves])
    return Automaton(_MOVE_CHARACTERS, _STATE_CHARACTERS[: len(states)], step)


class TrackingCorpus(_Following):
    """Random moves of `items` things in a row, after each of which their arrangement is to be given, a character each.

    `items` 2 is a parity, 3 and 4 give solvable groups, and 5 the word problem of S_5, which is complete for NC^1.
    `describe` has the meaning of each character: A 123 is the start. Moves: see `arrangements`.

    Source: Liu et al., "Transformers learn shortcuts to automata", 2023 (arXiv 2210.10749); Merrill et al., "The
    illusion of state in state-space models", 2024 (arXiv 2404.08819).
    """

    options = TrackingOptions

    @cached_property
    def automaton(self) -> Automaton:  # type: ignore[override]
        return arrangements(self.o.items)

    def describe(self) -> dict[str, object]:
        named = zip(self.automaton.states, permutations("12345"[: self.o.items]), strict=True)
        moves = {"k": "keep", "s": "swap the first two", "r": "first to the end"}
        return super().describe() | {"moves": moves, "states": {state: "".join(order) for state, order in named}}


# ---------------------------------------------------------------------- copying
# Rows of one length, scored at their end. What is read where a symbol is due carries no information, so that a model
# cannot use its earlier answers.


class CopyCorpus(TaskCorpus):
    """S = 10 symbols of eight, a blank, and a question after which they are to be given in their order.

        eos s_1 ... s_S  . . . . :  . . .        after the colon and the S - 1 dots behind it: s_1 ... s_S

    `length` - 1 dots lie between the last symbol and the colon: T in the source, which has S = 10 and T = 100, 200,
    300 and 500. Unlike there only the S answers are scored, and not the blanks before them.

    Source: Arjovsky, Shah and Bengio, "Unitary evolution recurrent neural networks", 2016 (arXiv 1511.06464), 4.1.
    """

    options, more = CopyOptions, "lower valid_rows"
    symbols = "ABCDEFGH"
    alphabet = symbols + _BLANK + _ASK

    def draw(self, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        n = self.o.symbols
        memory = codes(self.symbols)[draw.many_below(len(self.symbols), n, _SYMBOLS)]
        read = np.full((len(memory), 2 * n + self.o.length - 1), ord(_BLANK), np.uint8)
        read[:, :n], read[:, -n] = memory, ord(_ASK)
        answers = np.zeros_like(read)
        answers[:, -n:] = memory
        return read, answers


class SelectiveCopyCorpus(TaskCorpus):
    """S = 16 symbols of fourteen at random places among `length` - S dots, then S questions: give them in order.

        eos . . s_1 . s_2 s_3 . . . : : :        after the colons: s_1 s_2 s_3

    With the noise and the question the vocabulary has 16 tokens. The source has `length` 4096.

    Source: Gu and Dao, "Mamba: linear-time sequence modeling with selective state spaces", 2023 (arXiv 2312.00752),
    4.1.1.
    """

    options, more = SelectiveCopyOptions, "lower valid_rows"
    symbols = "ABCDEFGHIJKLMN"
    alphabet = symbols + _BLANK + _ASK

    def draw(self, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        n, length = self.o.symbols, self.o.length
        memory = codes(self.symbols)[draw.many_below(len(self.symbols), n, _SYMBOLS)]
        read = np.full((len(memory), length + n), ord(_BLANK), np.uint8)
        read[:, length:] = ord(_ASK)
        np.put_along_axis(read, np.sort(draw.order(length, _PLACES)[:, :n], axis=1), memory, axis=1)
        answers = np.zeros_like(read)
        answers[:, length:] = memory
        return read, answers


class InductionCorpus(TaskCorpus):
    """Random symbols of fifteen with a mark once among them; at the end the mark once more: give the symbol behind it.

        eos x_1 ... x_i : s x_{i+3} ... x_{L-1} :        after the last: s

    With the mark the vocabulary has 16 tokens. The mark's first place is even over all that have one for s behind
    them. `length` L of the source is 256 in training, and 64 to 2^20 where it is measured.

    Source: Gu and Dao, "Mamba: linear-time sequence modeling with selective state spaces", 2023 (arXiv 2312.00752),
    4.1.2, after Olsson et al., "In-context learning and induction heads", 2022 (arXiv 2209.11895).
    """

    options, more = InductionOptions, "raise data.length"
    symbols = "ABCDEFGHIJKLMNO"
    alphabet = symbols + _ASK

    def draw(self, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        length = self.o.length
        read = codes(self.symbols)[draw.many_below(len(self.symbols), length, _SYMBOLS)]
        rows, marked = np.arange(len(read)), draw.below(length - 2, _PLACES)
        read[rows, marked] = read[:, -1] = ord(_ASK)
        answers = np.zeros_like(read)
        answers[:, -1] = read[rows, marked + 1]
        return read, answers
