"""The stories as a corpus: endless training rows, and a fixed set of whole held-out stories."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from glissando.data.base import Batch, RowCorpus, Split
from glissando.data.corpora import StoriesOptions
from glissando.data.stories.oracle import judge
from glissando.data.stories.stories import (
    END,
    LABELS,
    PLOTS,
    Story,
    entropy_floor,
    expected_bits,
    expected_bytes,
    generate,
)
from glissando.data.tokenizers import Tokenizer
from glissando.data.tokens import Piece, Tokens, in_memory

_STORIES_A_ROW = 1 << 20  # story numbers set aside for each training row, more than any row can hold
_BLOCK_TOKENS = 1 << 14  # of a stream of cut stories, before another one is begun
_PAD_MULTIPLE = 64
_HELD_OUT_SEED = 0  # the held-out stories are the same for every run, whatever its seed


class Windows(NamedTuple):
    """Windows that follow each other in streams of stories.

    tokens  of all streams
    begins  where each stream begins
    first   (W,) where each window begins
    stop    (W,) behind the last token that it may predict
    labels  (W, 2) of the story of each
    """

    tokens: Tokens
    begins: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    labels: np.ndarray


class StoriesCorpus(RowCorpus):
    """Generated stories of exactly known information.

    Training row n is a pure function of (seed, n): the end marker, then as many whole stories as fit into `seq_len`
    tokens, at least one. A story is never cut, because then its beginnings would be read more often than its ends, and
    it is its ends that need memory. With `labelled` a training row is one story, and batches carry control (B, 2): mood
    and speech in {-1, 0, 1}. Rows are padded on the right and carry exact `floor_bits`.

    Held-out rows are one story each: the floor is the cost of a story read from its first byte. They are sorted by
    length.

    With `cut` rows have at most `seq_len` tokens and stories are cut where rows end: row r of the batches in turn holds
    consecutive windows of one stream of stories (with `labelled`, of one story after another), and held-out rows are
    the windows of each story. What stood before a window is not known to its reader, so rows carry no `floor_bits`.
    """

    def __init__(self, tokenizer: Tokenizer, **options: Any) -> None:
        """By the keywords of `StoriesOptions`."""
        o = StoriesOptions(**options)
        self.tokenizer = tokenizer
        self.seq_len, self.batch_size, self.seed = o.seq_len, o.batch_size, o.seed
        self.valid_rows, self.labelled, self.cut = o.valid_rows, o.labelled, o.cut
        self._blocks: dict[tuple[int, ...], tuple[int, Windows]] = {}  # of each shard's rows: the newest one
        self.control_names = LABELS if self.labelled else ()
        self.entropy_floor = entropy_floor()

    def texts(self, split: Split = "train") -> Iterator[str]:
        """Whole stories, endless for "train"."""
        if split == "valid":
            return super().texts(split)
        return (self._text(generate(self.seed, "train", row * _STORIES_A_ROW)) for row in count())

    def prompts(self, n: int, *, seed: int = 0) -> list[str]:
        """First sentences of `n` stories of the test split: they name the hero and decide no label."""
        return [first_sentence(generate(seed, "test", index).text) for index in range(n)]

    def judge(self, text: str) -> dict[str, float | None]:
        """By the grammar where it reads the text, by words and quoted lines where it does not."""
        return judge(text)

    def describe(self) -> dict[str, object]:
        """The exact figures of the source."""
        figures = {"expected_bits": expected_bits(), "expected_bytes": expected_bytes(), "plots": list(PLOTS)}
        return {**super().describe(), **figures}

    def _text(self, story: Story) -> str:
        return story.text

    def _written(self, group: Iterable[Sequence[Story]]) -> Iterator[str]:
        return ("".join(map(self._text, row)) for row in group)

    def _tokens(self, stories: Iterable[Story]) -> Tokens:
        """A story's end marker is the tokenizer's own, and stands for one byte."""
        return in_memory((Piece(self._text(story).removesuffix(END)) for story in stories), self.tokenizer)

    @cached_property
    def _valid(self) -> list[list[Story]]:
        stories = (generate(_HELD_OUT_SEED, "valid", index) for index in range(self.valid_rows))
        return [[story] for story in sorted(stories, key=lambda story: len(story.text))]

    def _stories(self, number: int) -> Iterator[tuple[Story, int]]:
        """The endless stories of training row `number`, and each one's number of tokens."""
        for index in count(number * _STORIES_A_ROW):
            story = generate(self.seed, "train", index)
            yield story, len(self.tokenizer.encode(self._text(story).removesuffix(END))) + 1

    def _training(self, rows: np.ndarray) -> list[list[Story]]:
        return [self._row(number) for number in rows.tolist()]

    def _row(self, number: int) -> list[Story]:
        """As many whole stories as fit into seq_len tokens, and at least one; just one if it is labelled."""
        row, left = list[Story](), self.seq_len
        for story, size in self._stories(number):
            if row and size > left:
                break
            row.append(story)
            left -= size
            if self.labelled:  # a second story would be drawn in vain
                break
        return row

    def _batch(self, group: Sequence[Sequence[Story]], chosen: Sequence[int]) -> Batch:
        """Padded on the right to a multiple of 64 that fits the longest row of the global batch."""
        tokens, places = self._tokens(story for row in group for story in row), np.array(chosen)
        ends = tokens.ends[np.cumsum([0, *map(len, group)])]
        width = -(-int(np.diff(ends).max()) // _PAD_MULTIPLE) * _PAD_MULTIPLE
        labels = _labels([group[row][0] for row in chosen]) if self.labelled else None
        batch = tokens.batch(ends[places], width, stop=ends[places + 1] + 1, labels=labels)
        return batch._replace(floor_bits=sum(story.bits for row in chosen for story in group[row]))

    # ---------------------------------------------------------------------- cut

    def _train_batch(self, step: int, rows: np.ndarray) -> Batch:
        """Cut stories come in blocks of about _BLOCK_TOKENS a row, each a function of its number alone."""
        if not self.cut:
            return super()._train_batch(step, rows)
        n_windows = max(1, _BLOCK_TOKENS // self.seq_len)
        block, place = divmod(step, n_windows)
        if self._blocks.get(shard := tuple(rows), (-1,))[0] != block:
            streams = [self._stream(block * self.batch_size + row, n_windows) for row in rows.tolist()]
            self._blocks[shard] = block, self._windows(streams, packed=not self.labelled)
        windows = self._blocks[shard][1]
        return self._window_batch(windows, np.searchsorted(windows.first, windows.begins) + place)

    def _stream(self, number: int, n_windows: int) -> list[Story]:
        """Stories of so many windows, or more."""
        stream, length, left = list[Story](), self.seq_len, n_windows * self.seq_len
        for story, size in self._stories(number):
            stream.append(story)
            left -= -(-size // length) * length if self.labelled else size
            if left <= 0:
                break
        return stream

    def _windows(self, streams: Sequence[Sequence[Story]], packed: bool) -> Windows:
        """The windows of seq_len targets of each stream; unless they are packed, each story's last is shorter."""
        stories = [story for stream in streams for story in stream]
        tokens, documents = self._tokens(stories), np.cumsum([0, *map(len, streams)])
        ends = tokens.ends[documents] if packed else tokens.ends
        counts = -(-np.diff(ends) // self.seq_len)
        part = np.repeat(np.arange(len(counts)), counts)
        first = ends[part] + self.seq_len * (np.arange(len(part)) - (np.cumsum(counts) - counts)[part])
        return Windows(tokens, tokens.ends[documents[:-1]], first, ends[part + 1] + 1, _labels(stories)[part])

    def _window_batch(self, windows: Windows, chosen: np.ndarray) -> Batch:
        labels = windows.labels[chosen] if self.labelled else None
        return windows.tokens.batch(windows.first[chosen], self.seq_len, stop=windows.stop[chosen], labels=labels)

    @cached_property
    def _valid_windows(self) -> Windows:
        return self._windows(self._valid, packed=False)

    def _n_valid(self) -> int:
        return len(self._valid_windows.first) if self.cut else super()._n_valid()

    def _valid_batch(self, rows: np.ndarray) -> Batch:
        return self._window_batch(self._valid_windows, rows) if self.cut else super()._valid_batch(rows)


def _labels(stories: Sequence[Story]) -> np.ndarray:
    return np.array([[story.labels[name] for name in LABELS] for story in stories], np.float32)


def first_sentence(story: str) -> str:
    """A story's text up to and with its first full stop."""
    return story[: story.index(".") + 1]
