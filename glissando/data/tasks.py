"""Tasks that probe memory: recall of what was bound, the parity of bits, and the state of a permutation.

What is scored follows from what was read without a doubt: the entropy floor is 0, and accuracy is what a model can
hold. `describe` says what accuracy and bits chance has.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import count, permutations
from typing import NamedTuple

import numpy as np
import torch

from glissando.data.base import (
    IGNORED,
    WHOLE,
    Batch,
    Corpus,
    Shard,
    Split,
    check_sizes,
    held_out_rows,
    shard_rows,
    unscored,
)
from glissando.data.order import random_below, random_words
from glissando.data.pairs import NEWLINE, PAD_ID, _is_held_out
from glissando.data.tokenizers import ByteTokenizer, Tokenizer
from glissando.errors import ConfigError, unknown_name

# Keys of independent random streams.
_LENGTHS, _MOVES, _KEYS, _VALUES, _QUERIES = range(5)
_HELD_OUT_SEED = 0  # the held-out rows are the same for every run, whatever its seed
_TRIES = 1000
_BLOCK = 256
_ASCII = 128


class Sizes(NamedTuple):
    """What every task is told."""

    seq_len: int
    batch_size: int
    seed: int
    valid_rows: int


class TaskCorpus(Corpus):
    """Rows `eos c_1 ... c_L` of single characters, scored where the task has something to say after c_i.

    Targets are IGNORED elsewhere, so that loss, accuracy and n_bytes are of the answers alone. Each character is a
    token, whatever the tokenizer; the end token is a newline for bytes. Training row n is a pure function of
    (seed, n). Rows are padded on the right with id 0 and masked, to the longest of the global batch.

    A fixed hash of a row decides once and for all, for every seed, whether it is held out (a tenth are): training
    and held-out rows cannot overlap, however few there are. Held-out rows are distinct and sorted by length.

    Raises ConfigError if `seq_len` cannot hold the longest row, a size is below 1, there are fewer than `valid_rows`
    different rows to hold out, or the tokenizer has no token of its own for a character.
    """

    entropy_floor = 0.0
    _more: str  # how a person gets more different rows

    def __init__(self, tokenizer: Tokenizer | None, sizes: Sizes, alphabet: str, longest: int) -> None:
        seq_len, batch_size, self._seed, valid_rows = sizes
        check_sizes(seq_len, batch_size)
        if valid_rows < 1:
            raise ConfigError(f"valid_rows must be at least 1, got {valid_rows}")
        if longest > seq_len:
            raise ConfigError(
                f"the longest row needs {longest} tokens, more than seq_len {seq_len}; raise data.seq_len to {longest}"
            )
        self.tokenizer = tokenizer or ByteTokenizer(NEWLINE)
        self.seq_len, self.batch_size = seq_len, batch_size
        self._ids = _ids_of(self.tokenizer, alphabet)
        self._valid = self._distinct(valid_rows)

    @abstractmethod
    def _draw(self, rows: np.ndarray, seed: int, held_out: bool, attempt: int) -> np.ndarray:
        """(n, L) uint8, the characters of the rows numbered `rows` (n,) as first drawn or redrawn; 0 behind the end."""

    @abstractmethod
    def _answers(self, read: np.ndarray) -> np.ndarray:
        """(n, L) uint8, the character to be said after each of `read` (n, L); 0 where nothing is scored."""

    @abstractmethod
    def _text(self, read: str, said: str) -> str:
        """A row for a person and for a tokenizer; `said` has the answers without what lies between them."""

    @abstractmethod
    def _prompt(self, read: str) -> str:
        """The beginning of a row that leads to an answer."""

    @abstractmethod
    def chance(self) -> dict[str, float]:
        """Accuracy and bits per byte of the held-out answers for who knows the task but reads only earlier answers."""

    def batches(self, split: Split, *, start: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        if split not in ("train", "valid"):
            raise unknown_name("split", split, ("train", "valid"))
        if split == "valid":
            return self._valid_batches(start, shard)
        return self._train_batches(start, shard_rows(self.batch_size, shard))

    def texts(self, split: Split = "train") -> Iterator[str]:
        """Each row with its answers, endless for "train"."""
        if split == "valid":
            yield from self._texts(self._valid)
            return
        for first in count(0, _BLOCK):
            yield from self._texts(self._rows(np.arange(first, first + _BLOCK), self._seed, held_out=False))

    def prompts(self, n: int, *, seed: int = 0) -> list[str]:
        """Held-out beginnings, the next character of which is an answer."""
        return [self._prompt(_string(row)) for row in self._rows(np.arange(n), seed, held_out=True)]

    def describe(self) -> dict[str, object]:
        return super().describe() | self.chance()

    def _train_batches(self, start: int, mine: Sequence[int]) -> Iterator[Batch]:
        for step in count(start):
            rows = step * self.batch_size + np.arange(self.batch_size)
            yield self._batch(self._rows(rows, self._seed, held_out=False), mine)

    def _valid_batches(self, start: int, shard: Shard) -> Iterator[Batch]:
        size = self.batch_size
        for rows, scored in held_out_rows(len(self._valid), size, start, shard):
            first = int(rows[0]) // size * size
            batch = self._batch(self._valid[first : first + size], [int(row) - first for row in rows])
            yield batch if scored else unscored(batch)

    def _batch(self, read: np.ndarray, mine: Sequence[int]) -> Batch:
        """Rows `mine` of the global batch `read`, whose longest row sets the length on every shard."""
        read = read[list(mine), : _lengths(read).max()]
        said = self._answers(read)
        ids = _behind(self.tokenizer.eos_id, self._ids[read])
        targets = _behind(IGNORED, np.where(said > 0, self._ids[said], IGNORED))
        mask = torch.from_numpy(_behind(True, read > 0))
        tensors = torch.from_numpy(ids), torch.from_numpy(targets)
        return Batch(*tensors, int((said > 0).sum()), None if mask.all() else mask, floor_bits=0.0)

    def _texts(self, read: np.ndarray) -> list[str]:
        return [self._text(_string(row), _string(said)) for row, said in zip(read, self._answers(read), strict=True)]

    def _rows(self, rows: np.ndarray, seed: int, *, held_out: bool) -> np.ndarray:
        """What is read in the rows numbered `rows`, each redrawn until it lies on its side of the split."""
        read, todo = self._draw(rows, seed, held_out, 0), np.arange(len(rows))
        for attempt in range(1, _TRIES):
            todo = todo[_is_held_out(read[todo]) != held_out]
            if not todo.size:
                return read
            read[todo] = self._draw(rows[todo], seed, held_out, attempt)
        side = "held-out" if held_out else "training"
        raise ConfigError(f"no {side} row was found: there are too few different ones; {self._more}")

    def _distinct(self, n: int) -> np.ndarray:
        """The first `n` different held-out rows, sorted by length."""
        found: dict[bytes, None] = {}
        for first in range(0, 20 * (n + _BLOCK), _BLOCK):
            read = self._rows(np.arange(first, first + _BLOCK), _HELD_OUT_SEED, held_out=True)
            found |= dict.fromkeys(row.tobytes() for row in read)
            if len(found) >= n:
                chosen = np.frombuffer(b"".join([*found][:n]), np.uint8).reshape(n, -1)
                return chosen[np.argsort(_lengths(chosen), kind="stable")]
        raise ConfigError(f"there are fewer than {n} different rows to hold out; lower valid_rows, or {self._more}")


def _behind(first: int, rest: np.ndarray) -> np.ndarray:
    """(n, L) -> (n, 1 + L), `first` in front of every row."""
    return np.concatenate([np.full((len(rest), 1), first, rest.dtype), rest], axis=1)


def _lengths(read: np.ndarray) -> np.ndarray:
    return (read > 0).sum(axis=1)


def _string(row: np.ndarray) -> str:
    """The characters of one row (L,), without the zeros."""
    return row[row > 0].tobytes().decode("ascii")


def _codes(characters: str) -> np.ndarray:
    return np.frombuffer(characters.encode("ascii"), np.uint8)


def _ids_of(tokenizer: Tokenizer, alphabet: str) -> np.ndarray:
    """(128,) int64, the id of each ASCII character of `alphabet`, PAD_ID for others."""
    encoded = {character: tokenizer.encode(character) for character in alphabet}
    for character, ids in encoded.items():
        if len(ids) != 1 or list(encoded.values()).count(ids) > 1 or ids[0] == tokenizer.eos_id:
            raise ConfigError(
                f"the tokenizer encodes the character {character!r} as {ids}, but a task needs a token of its own for "
                "each character and for the end; use data.tokenizer.kind bytes"
            )
    table = np.full(_ASCII, PAD_ID, np.int64)
    table[_codes(alphabet)] = [encoded[character][0] for character in alphabet]
    return table


def _shuffled(size: int, seed: int, *indices: object) -> np.ndarray:
    """(n, size), a random order of range(size) for each of the indices, which are (n,) or single."""
    columns = [np.atleast_1d(np.asarray(index))[:, None] for index in indices]
    return random_words(seed, *columns, np.arange(size)).argsort(axis=1, kind="stable")


def _mean_guess(ways: Sequence[int]) -> tuple[float, float]:
    """Accuracy and bits of answers drawn evenly from so many ways each."""
    return float(np.mean([1 / n for n in ways])), float(np.mean([math.log2(n) for n in ways]))


_KEY_CHARACTERS = "".join(map(chr, range(33, 80)))
_VALUE_CHARACTERS = "".join(map(chr, range(80, 127)))


class RecallCorpus(TaskCorpus):
    """Multi-query associative recall: `pairs` keys, each with its value, then `queries` of the keys once more.

        eos k_1 v_1 ... k_P v_P  q_1 a_1 ... q_Q a_Q        a_j = v_i where q_j = k_i

    Only the a_j are scored. Keys are distinct characters from ! to O, values distinct ones from P to ~ (47 each), and
    no key is asked twice. `queries` None asks for every key.

    Besides chance, which may say any value not yet said, `describe` has the figures of `unbound`: who remembers which
    values there were and which have been said, but not whose they are.

    Source: Arora et al., "Zoology: Measuring and improving recall in efficient language models", 2023
    (arXiv 2312.04927), without its filler between queries.
    """

    _more = "raise pairs"

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        seq_len: int = 64,
        batch_size: int = 64,
        seed: int = 0,
        pairs: int = 16,
        queries: int | None = None,
        valid_rows: int = 256,
    ) -> None:
        most = len(_KEY_CHARACTERS)
        if not 1 <= pairs <= most:
            raise ConfigError(f"pairs must be from 1 to {most}, since keys are distinct characters; got {pairs}")
        if queries is not None and not 1 <= queries <= pairs:
            raise ConfigError(
                f"queries must be from 1 to pairs ({pairs}), since no key is asked twice; got {queries}; raise pairs"
            )
        self._pairs, self._queries = pairs, pairs if queries is None else queries
        sizes = Sizes(seq_len, batch_size, seed, valid_rows)
        longest = 2 * (pairs + self._queries)  # the last answer is said and not read
        super().__init__(tokenizer, sizes, _KEY_CHARACTERS + _VALUE_CHARACTERS, longest)

    def _draw(self, rows: np.ndarray, seed: int, held_out: bool, attempt: int) -> np.ndarray:
        draw = (held_out, attempt, rows)
        keys = _codes(_KEY_CHARACTERS)[_shuffled(len(_KEY_CHARACTERS), seed, _KEYS, *draw)[:, : self._pairs]]
        values = _codes(_VALUE_CHARACTERS)[_shuffled(len(_VALUE_CHARACTERS), seed, _VALUES, *draw)[:, : self._pairs]]
        bound = np.stack([keys, values], axis=2)
        asked = _shuffled(self._pairs, seed, _QUERIES, *draw)[:, : self._queries]
        asked_bound = np.take_along_axis(bound, asked[:, :, None], axis=1)
        return np.concatenate([bound, asked_bound], axis=1).reshape(len(rows), -1)[:, :-1]

    def _answers(self, read: np.ndarray) -> np.ndarray:
        first = 2 * self._pairs
        keys, values, asked = read[:, 0:first:2], read[:, 1:first:2], read[:, first::2]
        said = np.zeros_like(read)
        said[:, first::2] = np.take_along_axis(values, (asked[:, :, None] == keys[:, None, :]).argmax(axis=2), axis=1)
        return said

    def _text(self, read: str, said: str) -> str:
        return f"{read}{said[-1]}\n"

    def _prompt(self, read: str) -> str:
        """The pairs and the first query."""
        return read[: 2 * self._pairs + 1]

    def chance(self) -> dict[str, float]:
        accuracy, bits = _mean_guess([len(_VALUE_CHARACTERS) - said for said in range(self._queries)])
        unbound_accuracy, unbound_bits = _mean_guess([self._pairs - said for said in range(self._queries)])
        return {
            "chance_accuracy": accuracy,
            "chance_bits": bits,
            "unbound_accuracy": unbound_accuracy,
            "unbound_bits": unbound_bits,
        }

    def describe(self) -> dict[str, object]:
        return super().describe() | {"pairs": self._pairs, "queries": self._queries}


class Automaton(NamedTuple):
    """What a machine reads and what states it has."""

    letters: str  # A characters
    states: str  # S characters; it starts in the first
    step: np.ndarray  # (A, S), the state that each letter leads to from each state

    def run(self, read: np.ndarray) -> np.ndarray:
        """(n, L) letters -> (n, L) the state after each, as characters; 0 where `read` is 0."""
        number = np.zeros(_ASCII, np.int64)
        number[_codes(self.letters)] = np.arange(len(self.letters))
        states = np.empty(read.shape, np.int64)
        state = np.zeros(len(read), np.int64)
        for column, letters in enumerate(number[read].T):
            states[:, column] = state = self.step[letters, state]
        return np.where(read > 0, _codes(self.states)[states], 0).astype(np.uint8)

    def unread(self, length: int) -> list[np.ndarray]:
        """The distribution (S,) of the state after 1 ... `length` evenly random letters."""
        share, shares = np.eye(len(self.states))[0], []
        for _ in range(length):
            weights = np.tile(share, len(self.letters)) / len(self.letters)
            share = np.bincount(self.step.ravel(), weights, minlength=len(self.states))
            shares.append(share)
        return shares


class AutomatonCorpus(TaskCorpus):
    """Random letters, after each of which the state that an automaton is in must be said.

        eos x_1 ... x_L        after x_i: s_i = step(x_i, s_{i-1})

    The states are targets and never read: with the state before a letter in sight, its next would be a matter of the
    last two tokens and not of memory. So a sampled text is an answer for one character.

    L is even over `min_len` to `max_len`; of held-out rows it is `valid_len`, where that is given, to see whether
    what was learned holds for longer rows.

    Raises ConfigError as `TaskCorpus` does, and for lengths that are not in order.
    """

    _more = "raise max_len, or valid_len if that is given"

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        sizes: Sizes,
        automaton: Automaton,
        min_len: int,
        max_len: int,
        valid_len: int | None,
    ) -> None:
        if not 1 <= min_len <= max_len:
            raise ConfigError(
                f"min_len {min_len} and max_len {max_len} must obey 1 <= min_len <= max_len; lower min_len or raise "
                "max_len"
            )
        if valid_len is not None and valid_len < 1:
            raise ConfigError(f"valid_len must be at least 1, got {valid_len}; leave it out for rows as in training")
        self._automaton = automaton
        self._train_span = min_len, max_len
        self._valid_span = (min_len, max_len) if valid_len is None else (valid_len, valid_len)
        longest = 1 + max(max_len, self._valid_span[1])
        super().__init__(tokenizer, sizes, automaton.letters + automaton.states, longest)

    def _draw(self, rows: np.ndarray, seed: int, held_out: bool, attempt: int) -> np.ndarray:
        low, high = self._valid_span if held_out else self._train_span
        column, draw = np.arange(high), (held_out, attempt)
        lengths = low + random_below(high - low + 1, seed, _LENGTHS, *draw, rows)
        letters = random_below(len(self._automaton.letters), seed, _MOVES, *draw, rows[:, None], column)
        return np.where(column < lengths[:, None], _codes(self._automaton.letters)[letters], 0).astype(np.uint8)

    def _answers(self, read: np.ndarray) -> np.ndarray:
        return self._automaton.run(read)

    def _text(self, read: str, said: str) -> str:
        """The letters, and under each of them the state."""
        return f"{read}\n{said}\n"

    def _prompt(self, read: str) -> str:
        """The whole row: what comes next is its last state."""
        return read

    def chance(self) -> dict[str, float]:
        """By the state's distribution after so many letters, whichever they were."""
        lengths = _lengths(self._valid)
        shares = self._automaton.unread(int(lengths.max()))
        scored = [int((lengths >= position).sum()) for position in range(1, len(shares) + 1)]
        bits = [-float(np.sum(share * np.log2(share, where=share > 0, out=np.zeros_like(share)))) for share in shares]
        return {
            "chance_accuracy": float(np.average([share.max() for share in shares], weights=scored)),
            "chance_bits": float(np.average(bits, weights=scored)),
        }

    def describe(self) -> dict[str, object]:
        return super().describe() | {"lengths": list(self._train_span), "held_out_lengths": list(self._valid_span)}


class ParityCorpus(AutomatonCorpus):
    """Random bits, after each of which the parity so far must be said: e for an even number of ones, o for an odd.

    The defaults are lengths of Delétang et al., "Neural networks and the Chomsky hierarchy", 2023 (arXiv 2207.02098),
    who train on 1 to 40 and validate on up to 500.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        seq_len: int = 64,
        batch_size: int = 64,
        seed: int = 0,
        min_len: int = 1,
        max_len: int = 40,
        valid_len: int | None = None,
        valid_rows: int = 256,
    ) -> None:
        sizes, parity = Sizes(seq_len, batch_size, seed, valid_rows), Automaton("01", "eo", np.array([[0, 1], [1, 0]]))
        super().__init__(tokenizer, sizes, parity, min_len, max_len, valid_len)


_MOVE_CHARACTERS = "ksr"  # keep, swap, rotate
#: capitals for up to four items; S_5 has more elements than there are printable characters
_STATE_CHARACTERS = "".join(
    chr(code)
    for code in (*range(65, 91), *range(33, 65), *range(91, 127), 32, *range(1, 10), *range(11, 32), 127)
    if chr(code) not in _MOVE_CHARACTERS
)


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


class TrackingCorpus(AutomatonCorpus):
    """Random moves of `items` things in a row, after each of which their arrangement must be said, a character each.

    `items` 2 is a parity, 3 and 4 give solvable groups, and 5 the word problem of S_5, which is complete for NC^1.

    Source: Liu et al., "Transformers learn shortcuts to automata", 2023 (arXiv 2210.10749); Merrill et al., "The
    illusion of state in state-space models", 2024 (arXiv 2404.08819). Moves: see `arrangements`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        seq_len: int = 64,
        batch_size: int = 64,
        seed: int = 0,
        items: int = 3,
        min_len: int = 1,
        max_len: int = 40,
        valid_len: int | None = None,
        valid_rows: int = 256,
    ) -> None:
        if not 2 <= items <= 5:
            raise ConfigError(
                f"items must be from 2 to 5, since each of their arrangements is a character; got {items}"
            )
        self._items = items
        sizes = Sizes(seq_len, batch_size, seed, valid_rows)
        super().__init__(tokenizer, sizes, arrangements(items), min_len, max_len, valid_len)

    def describe(self) -> dict[str, object]:
        """With what each character says: A 123 is the start."""
        named = zip(self._automaton.states, permutations("12345"[: self._items]), strict=True)
        return super().describe() | {
            "moves": {"k": "keep", "s": "swap the first two", "r": "first to the end"},
            "states": {character: "".join(arrangement) for character, arrangement in named},
        }
