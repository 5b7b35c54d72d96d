"""Tasks of recall, of following a state and of copying, as one table of generators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from glissando.data.corpora import (
    CopyOptions,
    InductionOptions,
    ParityOptions,
    RecallOptions,
    SelectiveCopyOptions,
    TrackingOptions,
)
from glissando.data.tasks import ASCII, Draw, Probe, TaskCorpus, codes, lengths_of

# Keys of independent random streams.
_LENGTHS, _MOVES, _KEYS, _VALUES, _QUERIES, _SYMBOLS, _PLACES = range(7)
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

# ---------------------------------------------------------------------- recall


def recall(o: RecallOptions) -> Probe:
    """Multi-query associative recall: P = `pairs` keys, each with its value, then the keys once more.

        eos k_1 v_1 ... k_P v_P  q_1 a_1 ... q_P a_P        a_j = v_i where q_j = k_i

    Only the a_j are scored. Keys are distinct characters from ! to O, values distinct ones from P to ~ (47 each), and
    every key is queried once. Besides chance, which may give any value not yet given,
    there are the figures of `unbound`: a model that knows which values there were and which have been given, but not
    their keys.

    Source: Arora et al., "Zoology: Measuring and improving recall in efficient language models", 2023
    (arXiv 2312.04927), without its filler between queries.
    """
    n, first = o.pairs, 2 * o.pairs

    def draw(draw: Draw) -> np.ndarray:
        keys = codes(_KEY_CHARACTERS)[draw.order(len(_KEY_CHARACTERS), _KEYS)[:, :n]]
        values = codes(_VALUE_CHARACTERS)[draw.order(len(_VALUE_CHARACTERS), _VALUES)[:, :n]]
        bound = np.stack([keys, values], axis=2)
        queried = np.take_along_axis(bound, draw.order(n, _QUERIES)[:, :, None], axis=1)
        # The last answer is no input.
        return np.concatenate([bound, queried], axis=1).reshape(len(keys), -1)[:, :-1]

    def answers(read: np.ndarray) -> np.ndarray:
        keys, values, queried = read[:, 0:first:2], read[:, 1:first:2], read[:, first::2]
        answers = np.zeros_like(read)
        answers[:, first::2] = np.take_along_axis(
            values, (queried[:, :, None] == keys[:, None, :]).argmax(axis=2), axis=1
        )
        return answers

    any_value = _guess([len(_VALUE_CHARACTERS) - number for number in range(n)], "chance")
    unbound = _guess([n - number for number in range(n)], "unbound")
    return Probe(
        _KEY_CHARACTERS + _VALUE_CHARACTERS,
        4 * n,
        draw,
        answers,
        lambda valid: any_value | unbound,
        "raise pairs",
        prompt=first + 1,
        text=lambda read, answers: f"{read}{answers[-1]}\n",
        facts={"pairs": n},
    )


def _guess(ways: Sequence[int], name: str) -> dict[str, float]:
    """Accuracy and bits of answers drawn evenly from so many ways each."""
    accuracy, bits = float(np.mean([1 / n for n in ways])), float(np.mean([math.log2(n) for n in ways]))
    return {f"{name}_accuracy": accuracy, f"{name}_bits": bits}


# ---------------------------------------------------------------------- following a state


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

    def chance(self, valid: np.ndarray) -> dict[str, float]:
        """By the state's distribution after so many letters, whichever they were."""
        lengths = lengths_of(valid)
        shares = self.unread(int(lengths.max()))
        scored = [int((lengths >= position).sum()) for position in range(1, len(shares) + 1)]
        bits = [-float(np.sum(share * np.log2(share, where=share > 0, out=np.zeros_like(share)))) for share in shares]
        return {
            "chance_accuracy": float(np.average([share.max() for share in shares], weights=scored)),
            "chance_bits": float(np.average(bits, weights=scored)),
        }


def following(o: ParityOptions, automaton: Automaton, facts: dict[str, object]) -> Probe:
    """Random letters, after each of which the state of an automaton is to be given.

        eos x_1 ... x_L        after x_i: s_i = step(x_i, s_{i-1})

    The states are targets and never read: with the state before a letter in sight, its next would be a matter of the
    last two tokens and not of memory. So a sampled text is an answer for one character.

    L is even over 1 to `length`. Whether what was learned holds for longer rows, `glissando evaluate RUN --data.length
    N` shows.
    """

    def draw(draw: Draw) -> np.ndarray:
        lengths = 1 + draw.below(o.length, _LENGTHS)
        letters = codes(automaton.letters)[draw.many_below(len(automaton.letters), o.length, _MOVES)]
        return np.where(np.arange(o.length) < lengths[:, None], letters, 0).astype(np.uint8)

    return Probe(
        automaton.letters + automaton.states,
        1 + o.length,
        draw,
        automaton.run,
        automaton.chance,
        "raise data.length",
        facts={"lengths": [1, o.length], **facts},
    )


def parity(o: ParityOptions) -> Probe:
    """Random bits, after each of which the parity so far is to be given: e for an even number of ones, o for an odd.

    The defaults are lengths of Delétang et al., "Neural networks and the Chomsky hierarchy", 2023 (arXiv 2207.02098),
    who train on 1 to 40 and validate on up to 500.
    """
    return following(o, Automaton("01", "eo", np.array([[0, 1], [1, 0]])), {})


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


def tracking(o: TrackingOptions) -> Probe:
    """Random moves of `items` things in a row, after each of which their arrangement is to be given, a character each.

    `items` 2 is a parity, 3 and 4 give solvable groups, and 5 the word problem of S_5, which is complete for NC^1.
    `describe` has the meaning of each character: A 123 is the start. Moves: see `arrangements`.

    Source: Liu et al., "Transformers learn shortcuts to automata", 2023 (arXiv 2210.10749); Merrill et al., "The
    illusion of state in state-space models", 2024 (arXiv 2404.08819).
    """
    automaton = arrangements(o.items)
    named = zip(automaton.states, permutations("12345"[: o.items]), strict=True)
    moves = {"k": "keep", "s": "swap the first two", "r": "first to the end"}
    return following(o, automaton, {"moves": moves, "states": {state: "".join(order) for state, order in named}})


# ---------------------------------------------------------------------- copying
# Rows of one length, scored at their end. What is read where a symbol is due carries no information, so that a model
# cannot use its earlier answers.


def copy(o: CopyOptions) -> Probe:
    """S = 10 symbols of eight, a blank, and a question after which they are to be given in their order.

        eos s_1 ... s_S  . . . . :  . . .        after the colon and the S - 1 dots behind it: s_1 ... s_S

    `length` - 1 dots lie between the last symbol and the colon: T in the source, which has S = 10 and T = 100, 200,
    300 and 500. Unlike there only the S answers are scored, and not the blanks before them.

    Source: Arjovsky, Shah and Bengio, "Unitary evolution recurrent neural networks", 2016 (arXiv 1511.06464), 4.1.
    """
    n, delay, symbols = o.symbols, o.length, codes("ABCDEFGH")

    def draw(draw: Draw) -> np.ndarray:
        read = np.full((len(draw.rows), 2 * n + delay - 1), ord(_BLANK), np.uint8)
        read[:, :n] = symbols[draw.many_below(len(symbols), n, _SYMBOLS)]
        read[:, -n] = ord(_ASK)
        return read

    def answers(read: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros_like(read[:, n:]), read[:, :n]], axis=1)

    facts: dict[str, object] = {"symbols": n, "length": delay}
    chance, longest = _any_of("ABCDEFGH"), 2 * n + delay
    return Probe("ABCDEFGH.:", longest, draw, answers, chance, "lower valid_rows", n + delay, facts=facts)


def selective_copy(o: SelectiveCopyOptions) -> Probe:
    """S = 16 symbols of fourteen at random places among `length` - S dots, then S questions: give them in order.

        eos . . s_1 . s_2 s_3 . . . : : :        after the colons: s_1 s_2 s_3

    With the noise and the question the vocabulary has 16 tokens. The source has `length` 4096.

    Source: Gu and Dao, "Mamba: linear-time sequence modeling with selective state spaces", 2023 (arXiv 2312.00752),
    4.1.1.
    """
    n, length, symbols = o.symbols, o.length, codes("ABCDEFGHIJKLMN")

    def draw(draw: Draw) -> np.ndarray:
        read = np.full((len(draw.rows), length + n), ord(_BLANK), np.uint8)
        read[:, length:] = ord(_ASK)
        places = np.sort(draw.order(length, _PLACES)[:, :n], axis=1)
        np.put_along_axis(read, places, symbols[draw.many_below(len(symbols), n, _SYMBOLS)], axis=1)
        return read

    def answers(read: np.ndarray) -> np.ndarray:
        answers, scattered = np.zeros_like(read), read[:, :length]
        # In every row as many places are no dots, so that they come out as a rectangle, row by row.
        answers[:, length:] = scattered[scattered != ord(_BLANK)].reshape(len(read), n)
        return answers

    facts: dict[str, object] = {"symbols": n, "length": length}
    chance, longest = _any_of("ABCDEFGHIJKLMN"), 1 + length + n
    return Probe("ABCDEFGHIJKLMN.:", longest, draw, answers, chance, "lower valid_rows", length + 1, facts=facts)


def induction(o: InductionOptions) -> Probe:
    """Random symbols of fifteen with a mark once among them; at the end the mark once more: give the symbol behind it.

        eos x_1 ... x_i : s x_{i+3} ... x_{L-1} :        after the last: s

    With the mark the vocabulary has 16 tokens. The mark's first place is even over all that have one for s behind
    them. `length` L of the source is 256 in training, and 64 to 2^20 where it is measured.

    Source: Gu and Dao, "Mamba: linear-time sequence modeling with selective state spaces", 2023 (arXiv 2312.00752),
    4.1.2, after Olsson et al., "In-context learning and induction heads", 2022 (arXiv 2209.11895).
    """
    length, symbols = o.length, codes("ABCDEFGHIJKLMNO")

    def draw(draw: Draw) -> np.ndarray:
        read = symbols[draw.many_below(len(symbols), length, _SYMBOLS)]
        read[np.arange(len(read)), draw.below(length - 2, _PLACES)] = ord(_ASK)
        read[:, -1] = ord(_ASK)
        return read

    def answers(read: np.ndarray) -> np.ndarray:
        answers = np.zeros_like(read)
        answers[:, -1] = read[np.arange(len(read)), (read == ord(_ASK)).argmax(axis=1) + 1]
        return answers

    chance = _any_of("ABCDEFGHIJKLMNO")
    return Probe("ABCDEFGHIJKLMNO:", 1 + length, draw, answers, chance, "raise data.length", facts={"length": length})


def _any_of(symbols: str) -> Callable[[np.ndarray], dict[str, float]]:
    """The chance of predicting any symbol."""
    return lambda valid: _guess([len(symbols)], "chance")


class RecallCorpus(TaskCorpus):
    options, probe = RecallOptions, staticmethod(recall)


class ParityCorpus(TaskCorpus):
    options, probe = ParityOptions, staticmethod(parity)


class TrackingCorpus(TaskCorpus):
    options, probe = TrackingOptions, staticmethod(tracking)


class CopyCorpus(TaskCorpus):
    options, probe = CopyOptions, staticmethod(copy)


class SelectiveCopyCorpus(TaskCorpus):
    options, probe = SelectiveCopyOptions, staticmethod(selective_copy)


class InductionCorpus(TaskCorpus):
    options, probe = InductionOptions, staticmethod(induction)
