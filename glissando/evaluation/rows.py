"""Held-out text as separate rows of ids, so that they can be picked, put behind other text, and batched anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from glissando.data.base import IGNORED, Batch, Corpus

#: rows read at once
ROWS_A_BATCH = 16


class Row(NamedTuple):
    """One row without its padding."""

    ids: list[int]
    targets: list[int]
    n_bytes: float  # of text that the targets stand for


def valid_rows(corpus: Corpus) -> list[Row]:
    """Every held-out row. A row's bytes are its targets' share of its batch's."""
    rows = []
    for batch in corpus.batches("valid"):
        total = max(int((batch.targets != IGNORED).sum()), 1)
        for index in range(len(batch.ids)):
            real = slice(None) if batch.mask is None else batch.mask[index]
            targets = batch.targets[index][real]
            share = int((targets != IGNORED).sum()) / total
            if share:
                rows.append(Row(batch.ids[index][real].tolist(), targets.tolist(), batch.n_bytes * share))
    return rows


def spread(rows: Sequence[Row], n: int) -> list[Row]:
    """`n` rows at even distances, which for sorted rows is a fair sample; all of them if n is 0 or too many."""
    if n == 0 or n >= len(rows):
        return list(rows)
    return [rows[(2 * k + 1) * len(rows) // (2 * n)] for k in range(n)]


def batches_of(rows: Sequence[Row], size: int = ROWS_A_BATCH) -> Iterator[Batch]:
    """Rows of like length together, padded on the right."""
    ordered = sorted(rows, key=lambda row: len(row.ids))
    for first in range(0, len(ordered), size):
        group = ordered[first : first + size]
        width = len(group[-1].ids)
        ids = [row.ids + [0] * (width - len(row.ids)) for row in group]
        targets = [row.targets + [IGNORED] * (width - len(row.ids)) for row in group]
        mask = torch.arange(width)[None, :] < torch.tensor([len(row.ids) for row in group])[:, None]
        n_bytes = round(sum(row.n_bytes for row in group))
        yield Batch(torch.tensor(ids), torch.tensor(targets), n_bytes, mask)
