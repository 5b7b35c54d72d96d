"""The stories as a corpus: endless training rows, and a fixed set of whole held-out stories."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch

from glissando.data.base import (
    IGNORED,
    Batch,
    RowCorpus,
    Shard,
    Split,
    held_out_batches,
    next_token_rows,
)
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

_STORIES_A_ROW = 1 << 20  # story numbers set aside for each training row, more than any row can hold
_BLOCK_TOKENS = 1 << 14  # of a stream of cut stories, before another one is begun
_PAD_MULTIPLE = 64
_HELD_OUT_SEED = 0  # the held-out stories are the same for every run, whatever its seed


class Window(NamedTuple):
    """At most seq_len + 1 tokens of a stream of stories, and the bytes that all but the first stand for."""

    ids: list[int]
    n_bytes: int
    story: Story  # the one that it ends in


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
        self._streams: dict[int, tuple[int, list[Window]]] = {}  # of each row of a batch: its newest block of windows
        self.control_names = LABELS if self.labelled else ()
        self.entropy_floor = entropy_floor()

    def texts(self, split: Split = "train") -> Iterator[str]:
        """Whole stories, endless for "train"."""
        if split == "valid":
            yield from super().texts(split)
            return
        for row in count():
            yield generate(self.seed, "train", row * _STORIES_A_ROW).text

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

    def _written(self, group: Iterable[Sequence[Story]]) -> Iterator[str]:
        return ("".join(story.text for story in row) for row in group)

    def _training(self, rows: np.ndarray) -> list[list[Story]]:
        return [self._row(int(row)) for row in rows]

    def _train_batches(self, start: int, chosen: range) -> Iterator[Batch]:
        if not self.cut:
            yield from super()._train_batches(start, chosen)
            return
        for step in count(start):
            yield self._cut_batch([self._window(step, row) for row in chosen])

    def _row(self, number: int) -> list[Story]:
        """As many whole stories as fit into seq_len tokens, and at least one; just one if it is labelled."""
        index = number * _STORIES_A_ROW
        row = [generate(self.seed, "train", index)]
        left = self.seq_len - len(self._tokens(row[0].text))
        while not self.labelled:
            index += 1
            story = generate(self.seed, "train", index)
            left -= len(self._tokens(story.text))
            if left < 0:
                break
            row.append(story)
        return row

    def _window(self, step: int, row: int) -> Window:
        """Row `row` of training batch `step`: of a block of about _BLOCK_TOKENS, a function of its number alone."""
        windows = max(1, _BLOCK_TOKENS // self.seq_len)
        block, place = divmod(step, windows)
        number = block * self.batch_size + row
        if self._streams.get(row, (-1,))[0] != number:
            first = number * _STORIES_A_ROW
            stories = (generate(self.seed, "train", index) for index in count(first))
            self._streams[row] = number, list(islice(self._windows(stories, packed=not self.labelled), windows))
        return self._streams[row][1][place]

    def _windows(self, stories: Iterable[Story], packed: bool) -> Iterator[Window]:
        """The stories' windows of seq_len targets one after another; unless they are packed, each story's last is
        shorter."""
        ids, sizes, eos, length = [self.tokenizer.eos_id], [0], self.tokenizer.eos_id, self.seq_len
        for story in stories:
            ids, sizes = ids + self._tokens(story.text), sizes + self._sizes(story.text)
            while len(ids) > (length if packed else 1):
                yield Window(ids[: length + 1], sum(sizes[1 : length + 1]), story)
                ids, sizes = ids[length:] or [eos], sizes[length:] or [0]
            if not packed:
                ids, sizes = [eos], [0]

    def _sizes(self, story: str) -> list[int]:
        """The bytes that each of a story's tokens stands for."""
        ids, lengths = self._tokens(story)[:-1], self.tokenizer.byte_lengths
        if lengths is not None:
            return [*lengths[ids].tolist(), 1]
        total = len(story.removesuffix(END).encode())
        return [*((i + 1) * total // len(ids) - i * total // len(ids) for i in range(len(ids))), 1]

    def _cut_batch(self, windows: Sequence[Window]) -> Batch:
        eos, width = self.tokenizer.eos_id, self.seq_len
        rows = [window.ids + [eos] * (width + 1 - len(window.ids)) for window in windows]
        ids, targets = next_token_rows(rows)
        real = torch.arange(width)[None, :] < torch.tensor([len(window.ids) - 1 for window in windows])[:, None]
        labels = [[window.story.labels[name] for name in LABELS] for window in windows]
        return Batch(
            ids,
            targets.masked_fill(~real, IGNORED),
            n_bytes=sum(window.n_bytes for window in windows),
            mask=None if real.all() else real,
            control=torch.tensor(labels, dtype=torch.float32) if self.labelled else None,
        )

    def _tokens(self, story: str) -> list[int]:
        """A story's tokens; its end marker is the tokenizer's own, and stands for one byte."""
        return [*self.tokenizer.encode(story.removesuffix(END)), self.tokenizer.eos_id]

    @cached_property
    def _valid(self) -> list[list[Story]]:
        stories = (generate(_HELD_OUT_SEED, "valid", index) for index in range(self.valid_rows))
        return [[story] for story in sorted(stories, key=lambda story: len(story.text))]

    def _valid_batches(self, start: int, shard: Shard) -> Iterator[Batch]:
        if not self.cut:
            return super()._valid_batches(start, shard)
        windows = list(self._windows((story for (story,) in self._valid), packed=False))
        return held_out_batches(
            len(windows), self.batch_size, start, shard, lambda rows: self._cut_batch([windows[row] for row in rows])
        )

    def _batch(self, group: Sequence[Sequence[Story]], chosen: Sequence[int]) -> Batch:
        """Padded on the right to a multiple of 64 that fits the longest row of the global batch."""
        eos = self.tokenizer.eos_id
        tokens = [[token for story in row for token in self._tokens(story.text)] for row in group]
        width = -(-max(map(len, tokens)) // _PAD_MULTIPLE) * _PAD_MULTIPLE
        tokens, stories = [tokens[row] for row in chosen], [story for row in chosen for story in group[row]]
        inputs = [[eos, *ids[:-1]] + [eos] * (width - len(ids)) for ids in tokens]
        targets = [ids + [IGNORED] * (width - len(ids)) for ids in tokens]
        labels = [[story.labels[name] for name in LABELS] for story in stories]
        return Batch(
            torch.tensor(inputs, dtype=torch.int64),
            torch.tensor(targets, dtype=torch.int64),
            n_bytes=sum(len(story.text) for story in stories),
            mask=torch.arange(width)[None, :] < torch.tensor([len(ids) for ids in tokens])[:, None],
            control=torch.tensor(labels, dtype=torch.float32) if self.labelled else None,
            floor_bits=sum(story.bits for story in stories),
        )


def first_sentence(story: str) -> str:
    """A story's text up to and with its first full stop."""
    return story[: story.index(".") + 1]
