"""The stories as a corpus: endless training rows, and a fixed set of whole held-out stories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

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
from glissando.errors import ConfigError, unknown_name

_STORIES_A_ROW = 1 << 20  # story numbers set aside for each training row, more than any row can hold
_PAD_MULTIPLE = 64
_HELD_OUT_SEED = 0  # the held-out stories are the same for every run, whatever its seed


class StoriesCorpus(Corpus):
    """Generated stories of exactly known information.

    Training row n is a pure function of (seed, n): the end marker, then as many whole stories as fit into `seq_len`
    tokens, at least one. A story is never cut, because then its beginnings would be read more often than its ends, and
    it is its ends that need memory. With `labelled` a training row is one story, and batches carry control (B, 2): mood
    and speech in {-1, 0, 1}. Rows are padded on the right and carry exact `floor_bits`.

    Held-out rows are one story each: the floor is the cost of a story read from its first byte. They are sorted by
    length.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        seq_len: int = 1024,
        batch_size: int = 8,
        seed: int = 0,
        valid_stories: int = 256,
        labelled: bool = False,
    ) -> None:
        check_sizes(seq_len, batch_size)
        if valid_stories < 1:
            raise ConfigError(f"valid_stories must be at least 1, got {valid_stories}")
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.seed = seed
        self.valid_stories = valid_stories
        self.labelled = labelled
        self.control_names = LABELS if labelled else ()
        self.entropy_floor = entropy_floor()

    def batches(self, split: Split, *, start: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        """Training batches without end from number `start`, or the held-out ones once from number `start`.

        The last held-out batch holds what is left. All shards pad to the longest row of the global batch.
        Raises UnknownNameError for an unknown split, ConfigError for training rows that cannot be shared out.
        """
        if split not in ("train", "valid"):
            raise unknown_name("split", split, ("train", "valid"))
        if split == "valid":
            return self._valid(start, shard)
        return self._train(start, shard_rows(self.batch_size, shard))

    def texts(self, split: Split = "train") -> Iterator[str]:
        """Whole stories, endless for "train"."""
        if split == "valid":
            yield from (story.text for story in self._held_out())
            return
        for row in count():
            yield generate(self.seed, "train", row * _STORIES_A_ROW).text

    def prompts(self, n: int, *, seed: int = 0) -> list[str]:
        """First sentences of `n` stories of the test split: they name the hero and decide no label."""
        return [first_sentence(generate(seed, "test", index).text) for index in range(n)]

    def judge(self, text: str) -> dict[str, float | None]:
        """By the grammar where it reads the text, by words and quoted lines where it does not."""
        judged = judge(text)
        return {name: judged.label(name) for name in LABELS}

    def describe(self) -> dict[str, object]:
        """The exact figures of the source."""
        figures = {"expected_bits": expected_bits(), "expected_bytes": expected_bytes(), "plots": list(PLOTS)}
        return {**super().describe(), **figures}

    def _train(self, start: int, mine: range) -> Iterator[Batch]:
        for step in count(start):
            first = step * self.batch_size
            rows = [self._row(first + row) for row in range(self.batch_size)]
            yield self._batch(rows, mine)

    def _row(self, number: int) -> list[Story]:
        """As many whole stories as fit into seq_len tokens, and at least one; just one if it is labelled."""
        index = number * _STORIES_A_ROW
        row = [generate(self.seed, "train", index)]
        room = self.seq_len - len(self._tokens(row[0].text))
        while not self.labelled:
            index += 1
            story = generate(self.seed, "train", index)
            room -= len(self._tokens(story.text))
            if room < 0:
                break
            row.append(story)
        return row

    def _tokens(self, story: str) -> list[int]:
        """A story's tokens; its end marker is the tokenizer's own, and stands for one byte."""
        return [*self.tokenizer.encode(story.removesuffix(END)), self.tokenizer.eos_id]

    def _held_out(self) -> list[Story]:
        stories = (generate(_HELD_OUT_SEED, "valid", index) for index in range(self.valid_stories))
        return sorted(stories, key=lambda story: len(story.text))

    def _valid(self, start: int, shard: Shard) -> Iterator[Batch]:
        stories, size = self._held_out(), self.batch_size
        for rows, scored in held_out_rows(len(stories), size, start, shard):
            first = int(rows[0]) // size * size
            group = [[story] for story in stories[first : first + size]]
            batch = self._batch(group, [int(row) - first for row in rows])
            yield batch if scored else unscored(batch)

    def _batch(self, rows: Sequence[Sequence[Story]], mine: Sequence[int]) -> Batch:
        """Rows `mine` of a global batch, padded on the right to a multiple of 64 that fits its longest row."""
        eos = self.tokenizer.eos_id
        tokens = [[token for story in row for token in self._tokens(story.text)] for row in rows]
        width = -(-max(map(len, tokens)) // _PAD_MULTIPLE) * _PAD_MULTIPLE
        tokens, stories = [tokens[row] for row in mine], [story for row in mine for story in rows[row]]
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
