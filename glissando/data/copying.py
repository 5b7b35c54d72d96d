"""Tasks of copying: symbols behind a long blank, symbols picked out of noise, and the symbol behind a mark."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from glissando.data.corpora import CopyOptions, InductionOptions, SelectiveCopyOptions, TaskOptions
from glissando.data.order import random_below
from glissando.data.tasks import TaskCorpus, codes, shuffled
from glissando.data.tokenizers import Tokenizer
from glissando.errors import ConfigError

# Keys of independent random streams; those of tasks.py are 0 to 4.
_SYMBOLS, _PLACES = 5, 6
_BLANK, _ASK = ".", ":"


class _Copying(TaskCorpus):
    """Rows of one length, scored at their end; the answers there are not inputs, as in the published tasks.

    What is read where a symbol is due carries no information, so that a model cannot use its earlier answers.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, options: TaskOptions, symbols: str, marks: str, longest: int
    ) -> None:
        self._symbols = symbols
        super().__init__(tokenizer, options, symbols + marks, longest)

    def _drawn(self, shape: tuple[int, int], rows: np.ndarray, seed: int, *draw: object) -> np.ndarray:
        """(n, k) symbols, evenly and independently."""
        numbers = random_below(len(self._symbols), seed, _SYMBOLS, *draw, rows[:, None], np.arange(shape[1]))  # type: ignore[arg-type]
        return codes(self._symbols)[numbers]

    def _text(self, read: str, answers: str) -> str:
        """The inputs, and the answers below them."""
        return f"{read}\n{answers}\n"

    def chance(self) -> dict[str, float]:
        """Of predicting any symbol."""
        return {"chance_accuracy": 1 / len(self._symbols), "chance_bits": math.log2(len(self._symbols))}


class CopyCorpus(_Copying):
    """`symbols` = S symbols of eight, a blank, and a question after which they are to be given in their order.

        eos s_1 ... s_S  . . . . :  . . .        after the colon and the S - 1 dots behind it: s_1 ... s_S

    `delay` - 1 dots lie between the last symbol and the colon: T in the source, which has S = 10 and T = 100, 200,
    300 and 500. Unlike there only the S answers are scored, and not the blanks before them.

    Source: Arjovsky, Shah and Bengio, "Unitary evolution recurrent neural networks", 2016 (arXiv 1511.06464), 4.1.
    """

    _more = "raise symbols"

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `CopyOptions`."""
        o = CopyOptions(**options)
        self._count, self._delay = o.symbols, o.delay
        super().__init__(tokenizer, o, "ABCDEFGH", _BLANK + _ASK, 2 * o.symbols + o.delay)

    def _draw(self, rows: np.ndarray, seed: int, held_out: bool, attempt: int) -> np.ndarray:
        read = np.full((len(rows), 2 * self._count + self._delay - 1), ord(_BLANK), np.uint8)
        read[:, : self._count] = self._drawn((len(rows), self._count), rows, seed, held_out, attempt)
        read[:, -self._count] = ord(_ASK)
        return read

    def _answers(self, read: np.ndarray) -> np.ndarray:
        answers = np.zeros_like(read)
        answers[:, -self._count :] = read[:, : self._count]
        return answers

    def _prompt(self, read: str) -> str:
        """Up to the question: the next character is the first symbol."""
        return read[: self._count + self._delay]

    def describe(self) -> dict[str, object]:
        return super().describe() | {"symbols": self._count, "delay": self._delay}


class SelectiveCopyCorpus(_Copying):
    """`symbols` = S symbols of fourteen at random places among `length` - S dots, then S questions: give them in order.

        eos . . s_1 . s_2 s_3 . . . : : :        after the colons: s_1 s_2 s_3

    With the noise and the question the vocabulary has 16 tokens. The source has S = 16 and `length` 4096.

    Source: Gu and Dao, "Mamba: linear-time sequence modeling with selective state spaces", 2023 (arXiv 2312.00752),
    4.1.1.
    """

    _more = "raise symbols"

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `SelectiveCopyOptions`. Raises ConfigError for more symbols than places."""
        o = SelectiveCopyOptions(**options)
        if o.symbols > o.length:
            raise ConfigError(
                f"symbols {o.symbols} and length {o.length} must obey 1 <= symbols <= length; lower symbols or raise "
                "length"
            )
        self._count, self._length = o.symbols, o.length
        super().__init__(tokenizer, o, "ABCDEFGHIJKLMN", _BLANK + _ASK, 1 + o.length + o.symbols)

    def _draw(self, rows: np.ndarray, seed: int, held_out: bool, attempt: int) -> np.ndarray:
        read = np.full((len(rows), self._length + self._count), ord(_BLANK), np.uint8)
        read[:, self._length :] = ord(_ASK)
        places = np.sort(shuffled(self._length, seed, _PLACES, held_out, attempt, rows)[:, : self._count], axis=1)
        symbols = self._drawn((len(rows), self._count), rows, seed, held_out, attempt)
        np.put_along_axis(read, places, symbols, axis=1)
        return read

    def _answers(self, read: np.ndarray) -> np.ndarray:
        answers = np.zeros_like(read)
        scattered = read[:, : self._length]
        # In every row as many places are no dots, so that they come out as a rectangle, row by row.
        answers[:, self._length :] = scattered[scattered != ord(_BLANK)].reshape(len(read), self._count)
        return answers

    def _prompt(self, read: str) -> str:
        """Up to the first question: the next character is the first symbol."""
        return read[: self._length + 1]

    def describe(self) -> dict[str, object]:
        return super().describe() | {"symbols": self._count, "length": self._length}


class InductionCorpus(_Copying):
    """Random symbols of fifteen with a mark once among them; at the end the mark once more: give the symbol behind it.

        eos x_1 ... x_i : s x_{i+3} ... x_{L-1} :        after the last: s

    With the mark the vocabulary has 16 tokens. The mark's first place is even over all that have one for s behind
    them. `length` L of the source is 256 in training; of held-out rows it is `valid_len`, where that is given, to see
    whether what was learned holds for longer rows (there: 64 to 2^20).

    Source: Gu and Dao, "Mamba: linear-time sequence modeling with selective state spaces", 2023 (arXiv 2312.00752),
    4.1.2, after Olsson et al., "In-context learning and induction heads", 2022 (arXiv 2209.11895).
    """

    _more = "raise length"

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `InductionOptions`."""
        o = InductionOptions(**options)
        self._train_length, self._valid_length = o.length, o.valid_len or o.length
        longest = 1 + max(self._train_length, self._valid_length)
        super().__init__(tokenizer, o, "ABCDEFGHIJKLMNO", _ASK, longest)

    def _draw(self, rows: np.ndarray, seed: int, held_out: bool, attempt: int) -> np.ndarray:
        length = self._valid_length if held_out else self._train_length
        read = self._drawn((len(rows), length), rows, seed, held_out, attempt)
        place = random_below(length - 2, seed, _PLACES, held_out, attempt, rows)
        read[np.arange(len(rows)), place] = ord(_ASK)
        read[:, -1] = ord(_ASK)
        return read

    def _answers(self, read: np.ndarray) -> np.ndarray:
        answers = np.zeros_like(read)
        first = (read == ord(_ASK)).argmax(axis=1)
        answers[:, -1] = read[np.arange(len(read)), first + 1]
        return answers

    def _prompt(self, read: str) -> str:
        """The whole row: what comes next is the answer."""
        return read

    def describe(self) -> dict[str, object]:
        return super().describe() | {"length": self._train_length, "held_out_length": self._valid_length}
