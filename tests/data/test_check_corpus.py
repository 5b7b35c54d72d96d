"""`check_corpus` names the law that a corpus breaks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from glissando.data.base import WHOLE, Batch, Corpus, Shard, held_out_batches, next_token_rows, shard_rows
from glissando.data.tokenizers import ByteTokenizer
from glissando.testing import LawError, check_corpus


class Counting(Corpus):
    """Row n begins with the byte n."""

    seq_len, batch_size, tokenizer = 8, 4, ByteTokenizer()

    def batches(self, split: str, *, start: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        if split == "valid":
            return held_out_batches(10, self.batch_size, start, shard, self.batch)
        return self.training(start, shard)

    def training(self, start: int, shard: Shard) -> Iterator[Batch]:
        step = start
        while True:
            yield self.batch([step * self.batch_size + row for row in shard_rows(self.batch_size, shard)])
            step += 1

    def batch(self, rows: Any) -> Batch:
        ids, targets = next_token_rows([[(int(row) + i) % 256 for i in range(self.seq_len + 1)] for row in rows])
        return Batch(ids, targets, n_bytes=targets.numel())


class Ends(Counting):
    def training(self, start, shard):
        return islice(super().training(start, shard), max(3 - start, 0))


class CannotResume(Counting):
    def training(self, start, shard):
        return super().training(start, shard) if start == 0 else iter(())


class StartsAnew(Counting):
    def training(self, start, shard):
        return super().training(0, shard)


class SameForAll(Counting):
    def training(self, start, shard):
        return super().training(start, WHOLE)


class ValidForAll(Counting):
    def batches(self, split, *, start=0, shard=WHOLE):
        return super().batches(split, start=start, shard=WHOLE if split == "valid" else shard)


class NoToken(Counting):
    def batch(self, rows):
        made = super().batch(rows)
        return Batch(made.ids, torch.full_like(made.targets, -7), n_bytes=made.n_bytes)


class Six(Counting):
    batch_size = 6


class NothingHeldOut(Counting):
    def batches(self, split, *, start=0, shard=WHOLE):
        return iter(()) if split == "valid" else super().batches(split, start=start, shard=shard)


def test_a_corpus_that_obeys_passes() -> None:
    check_corpus(Counting())


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        (Ends, r"order: batches\('train', start=0\) .* ends after 3"),
        (CannotResume, r"order: batches\('train', start=1\) .* ends after 0"),
        (StartsAnew, "order: .*start=1.*differ"),
        (SameForAll, "shards: 2 processes"),
        (ValidForAll, "held out: 2 processes score other targets"),
        (NoToken, "shapes: a target is neither a token nor -100: -7"),
        (Six, "shards: .*multiple of 4, got 6"),
        (NothingHeldOut, "held out: `valid` has no batch"),
    ],
)
def test_a_broken_law_is_named(corpus: type[Counting], message: str) -> None:
    with pytest.raises(LawError, match=message):
        check_corpus(corpus())
