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
    held_out_rows,
    next_token_rows,
    shard_rows,
    unscored,
)
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

    Training row n is a pure function of (seed, n): the end marker, then whole stories each ended by the marker,
    cut at T + 1 tokens. Rows start at a story's beginning, so beginnings are somewhat more frequent than in an
    endless stream. With `labelled` a training row is one whole story, as held-out rows are, and batches carry
    control (B, 2): mood and speech in {-1, 0, 1}.

    Held-out rows are one whole story each, even where that is longer than `seq_len`: the floor is the cost of a
    story read from its first byte. They are sorted by length, padded on the right, and carry exact `floor_bits`.
    """

    control_names = LABELS

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
        for name, value in (("seq_len", seq_len), ("batch_size", batch_size), ("valid_stories", valid_stories)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.seed = seed
        self.valid_stories = valid_stories
        self.labelled = labelled
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

    def describe(self) -> dict[str, object]:
        """The exact figures of the source."""
        figures = {"expected_bits": expected_bits(), "expected_bytes": expected_bytes(), "plots": list(PLOTS)}
        return {**super().describe(), **figures}

    def _train(self, start: int, rows: range) -> Iterator[Batch]:
        for step in count(start):
            first = step * self.batch_size
            if self.labelled:
                numbers = range(first, first + self.batch_size)
                yield self._whole([generate(self.seed, "train", n * _STORIES_A_ROW) for n in numbers], rows)
            else:
                yield self._packed([first + row for row in rows])

    def _packed(self, numbers: list[int]) -> Batch:
        packed = [self._row(n) for n in numbers]
        ids, targets = next_token_rows([tokens for tokens, _ in packed])
        return Batch(ids, targets, n_bytes=sum(n_bytes for _, n_bytes in packed))

    def _row(self, number: int) -> tuple[list[int], int]:
        """T + 1 tokens, and the bytes that all but the first stand for."""
        tokens = [self.tokenizer.eos_id]
        n_bytes = 0
        index = number * _STORIES_A_ROW
        while True:
            story = generate(self.seed, "train", index).text
            ids = self._tokens(story)
            room = self.seq_len + 1 - len(tokens)
            if len(ids) >= room:
                cut = ids[:room]
                whole = len(ids) == room
                n_bytes += len(story) if whole else len(self.tokenizer.decode(cut).encode())
                return tokens + cut, n_bytes
            tokens += ids
            n_bytes += len(story)
            index += 1

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
            batch = self._whole(stories[first : first + size], [int(row) - first for row in rows])
            yield batch if scored else unscored(batch)

    def _whole(self, stories: Sequence[Story], mine: Sequence[int]) -> Batch:
        """Rows `mine` of a global batch of one story a row, padded on the right to a multiple of 64."""
        eos = self.tokenizer.eos_id
        tokens = [self._tokens(story.text) for story in stories]
        width = -(-max(map(len, tokens)) // _PAD_MULTIPLE) * _PAD_MULTIPLE
        tokens, stories = [tokens[row] for row in mine], [stories[row] for row in mine]
        inputs = [[eos, *ids[:-1]] + [eos] * (width - len(ids)) for ids in tokens]
        targets = [ids + [IGNORED] * (width - len(ids)) for ids in tokens]
        labels = [[story.labels[name] for name in LABELS] for story in stories]
        return Batch(
            torch.tensor(inputs, dtype=torch.int64),
            torch.tensor(targets, dtype=torch.int64),
            n_bytes=sum(len(story.text) for story in stories),
            mask=torch.arange(width)[None, :] < torch.tensor([len(ids) for ids in tokens])[:, None],
            control=torch.tensor(labels, dtype=torch.float32),
            floor_bits=sum(story.bits for story in stories),
        )


def first_sentence(story: str) -> str:
    """A story's text up to and with its first full stop."""
    return story[: story.index(".") + 1]
