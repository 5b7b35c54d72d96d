"""Held-out text as separate rows of ids, so that they can be picked, put behind other text, and batched anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from glissando.data.base import IGNORED, Batch, Corpus
from glissando.errors import ConfigError

#: rows read at once
ROWS_A_BATCH = 16
#: batches of training text in which both signs of a label must have appeared
_SEARCHED = 2000


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


def behind(row: Row, before: Sequence[int], eos: int) -> Row:
    """`row` read after `before`, of which nothing is scored; it takes the place of the row's own leading end mark."""
    if row.ids and row.ids[0] == eos:
        return Row([*before, *row.ids[1:]], [IGNORED] * (len(before) - 1) + row.targets, row.n_bytes)
    return Row([*before, *row.ids], [IGNORED] * len(before) + row.targets, row.n_bytes)


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


def labelled_texts(corpus: Corpus, name: str, n: int) -> dict[int, list[list[int]]]:
    """The first `n` training texts with label `name` above 0, under 1, and below 0, under -1; ids without end marks.

    Raises ConfigError where training rows carry no such label, or only labels of one sign.
    """
    if name not in corpus.control_names:
        raise ConfigError(
            f"the training text has no label {name!r} (labels: {', '.join(corpus.control_names) or 'none'}), which the "
            "baselines steer by: train on a labelled corpus (--data.labelled true), or give --baselines false"
        )
    found: dict[int, list[list[int]]] = {1: [], -1: []}
    column, eos = corpus.control_names.index(name), corpus.tokenizer.eos_id
    for batch, _ in zip(corpus.batches("train"), range(_SEARCHED), strict=False):
        assert batch.control is not None
        for index, label in enumerate(batch.control[:, column].tolist()):
            real = slice(None) if batch.mask is None else batch.mask[index]
            texts = found.get(int(np.sign(label)), [])
            if len(texts) < n:
                texts.append(_without_ends(batch.ids[index][real].tolist(), eos))
        if min(map(len, found.values())) == n:
            break
    if not all(found.values()):
        raise ConfigError(
            f"{len(found[1])} training texts have a {name} above 0 and {len(found[-1])} below, and the baselines need "
            "both: label some of either kind, or give --baselines false"
        )
    return found


def _without_ends(ids: list[int], eos: int) -> list[int]:
    start, stop = 0, len(ids)
    while start < stop and ids[start] == eos:
        start += 1
    while stop > start and ids[stop - 1] == eos:
        stop -= 1
    return ids[start:stop]
