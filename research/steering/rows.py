"""Rows behind other text, and labelled training texts: what the baselines steer by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from glissando.data.base import IGNORED, Corpus
from glissando.errors import ConfigError
from glissando.evaluation.rows import Row

#: batches of training text in which both signs of a label must have appeared
_SEARCHED = 2000


def behind(row: Row, before: Sequence[int], eos: int) -> Row:
    """`row` read after `before`, of which nothing is scored; it takes the place of the row's own leading end mark."""
    if row.ids and row.ids[0] == eos:
        return Row([*before, *row.ids[1:]], [IGNORED] * (len(before) - 1) + row.targets, row.n_bytes)
    return Row([*before, *row.ids], [IGNORED] * len(before) + row.targets, row.n_bytes)


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
