"""Tasks of following a state: the parity of bits, and things moved in a row."""

from __future__ import annotations

from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from glissando.data.corpora import ParityOptions, TrackingOptions
from glissando.data.order import random_below
from glissando.data.tasks import ASCII, LENGTHS, MOVES, TaskCorpus, codes, lengths_of
from glissando.data.tokenizers import Tokenizer
from glissando.errors import ConfigError


class Automaton(NamedTuple):
    """What a machine reads and what states it has."""

    letters: str  # A characters
    states: str  # S characters; it starts in the first
    step: np.ndarray  # (A, S), the state that each letter leads to from each state

    def run(self, read: np.ndarray) -> np.ndarray:
        """(n, L) letters -> (n, L) the state after each, as characters; 0 where `read` is 0."""
        number = np.zeros(ASCII, np.int64)
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


class AutomatonCorpus(TaskCorpus):
    """Random letters, after each of which the state of an automaton is to be given.

        eos x_1 ... x_L        after x_i: s_i = step(x_i, s_{i-1})

    The states are targets and never read: with the state before a letter in sight, its next would be a matter of the
    last two tokens and not of memory. So a sampled text is an answer for one character.

    L is even over `min_len` to `max_len`; of held-out rows it is `valid_len`, where that is given, to see whether
    what was learned holds for longer rows.

    Raises ConfigError as `TaskCorpus` does, and for lengths that are not in order.
    """

    _more = "raise max_len, or valid_len if that is given"

    def __init__(self, tokenizer: Tokenizer | None, options: ParityOptions, automaton: Automaton) -> None:
        low, high, held = options.min_len, options.max_len, options.valid_len
        if not 1 <= low <= high:
            raise ConfigError(
                f"min_len {low} and max_len {high} must obey 1 <= min_len <= max_len; lower min_len or raise max_len"
            )
        self._automaton = automaton
        self._train_span = low, high
        self._valid_span = (low, high) if held is None else (held, held)
        longest = 1 + max(high, self._valid_span[1])
        super().__init__(tokenizer, options, automaton.letters + automaton.states, longest)

    def _draw(self, rows: np.ndarray, seed: int, held_out: bool, attempt: int) -> np.ndarray:
        low, high = self._valid_span if held_out else self._train_span
        column, draw = np.arange(high), (held_out, attempt)
        lengths = low + random_below(high - low + 1, seed, LENGTHS, *draw, rows)
        letters = random_below(len(self._automaton.letters), seed, MOVES, *draw, rows[:, None], column)
        return np.where(column < lengths[:, None], codes(self._automaton.letters)[letters], 0).astype(np.uint8)

    def _answers(self, read: np.ndarray) -> np.ndarray:
        return self._automaton.run(read)

    def _text(self, read: str, answers: str) -> str:
        """The letters, and under each of them the state."""
        return f"{read}\n{answers}\n"

    def _prompt(self, read: str) -> str:
        """The whole row: what comes next is its last state."""
        return read

    def chance(self) -> dict[str, float]:
        """By the state's distribution after so many letters, whichever they were."""
        lengths = lengths_of(self._valid)
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
    """Random bits, after each of which the parity so far is to be given: e for an even number of ones, o for an odd.

    The defaults are lengths of Delétang et al., "Neural networks and the Chomsky hierarchy", 2023 (arXiv 2207.02098),
    who train on 1 to 40 and validate on up to 500.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `ParityOptions`."""
        super().__init__(tokenizer, ParityOptions(**options), Automaton("01", "eo", np.array([[0, 1], [1, 0]])))


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
    """Random moves of `items` things in a row, after each of which their arrangement is to be given, a character each.

    `items` 2 is a parity, 3 and 4 give solvable groups, and 5 the word problem of S_5, which is complete for NC^1.

    Source: Liu et al., "Transformers learn shortcuts to automata", 2023 (arXiv 2210.10749); Merrill et al., "The
    illusion of state in state-space models", 2024 (arXiv 2404.08819). Moves: see `arrangements`.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `TrackingOptions`."""
        o = TrackingOptions(**options)
        self._items = o.items
        super().__init__(tokenizer, o, arrangements(o.items))

    def describe(self) -> dict[str, object]:
        """With the meaning of each character: A 123 is the start."""
        named = zip(self._automaton.states, permutations("12345"[: self._items]), strict=True)
        return super().describe() | {
            "moves": {"k": "keep", "s": "swap the first two", "r": "first to the end"},
            "states": {character: "".join(arrangement) for character, arrangement in named},
        }
