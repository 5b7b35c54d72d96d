"""The stream of facts has the entropy it says, and the program runs from a training to a record and a picture."""

from __future__ import annotations

import csv
import itertools
import math

import numpy as np
import torch

from glissando.data.base import IGNORED, Shard
from glissando.model import LanguageModel
from research import forgetting
from research.forgetting import FIRST_FILLER, FIRST_KEY, FIRST_VALUE, GET, SET, FactsCorpus, stream


def test_whoever_remembers_the_latest_value_is_never_surprised_and_nothing_else_is_known():
    text = stream(400_000, 16, 20, 10_000, 7)
    latest, set_at, values, asked = {}, {}, [], []
    for place in np.flatnonzero(np.isin(text.ids, (SET, GET))):
        sign, key, value = text.ids[place : place + 3].tolist()
        assert FIRST_KEY <= key < FIRST_VALUE <= value < FIRST_FILLER
        if sign == SET:
            latest[key], set_at[key] = value, place
            values.append(value - FIRST_VALUE)
        else:
            assert value == latest[key]
            asked.append((place + 1, place - set_at.pop(key)))
    assert asked == list(zip(text.asked.tolist(), text.distance.tolist(), strict=True))
    assert len(latest) == 17
    assert (text.distance >= 20).all()
    low, high = ((text.distance < edge).mean() for edge in (math.sqrt(20 * 10_000), 11_000))
    assert abs(low - 0.5) < 0.05  # uniform in the logarithm
    assert high == 1
    for symbols in (values, text.ids[text.ids >= FIRST_FILLER] - FIRST_FILLER):
        counts = np.bincount(symbols, minlength=64)
        chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert 30 < chi_square < 110  # 63 degrees of freedom: uniform, 6 bits each


def test_values_of_questions_alone_are_scored_and_the_floor_is_zero():
    corpus = FactsCorpus(seq_len=64, batch_size=2, valid_rows=4)
    for batch in (*corpus.batches("valid"), next(corpus.lanes())):
        scored = (batch.targets != IGNORED).nonzero()
        assert batch.n_bytes == len(scored) > 0
        assert batch.floor_bits == 0
        for row, place in scored.tolist():
            assert batch.ids[row, place - 1] == GET
            assert place + 1 == 64 or batch.ids[row, place + 1] == batch.targets[row, place]


def test_lanes_are_functions_of_the_step_and_go_on_from_row_to_row():
    corpus = FactsCorpus(seq_len=32, batch_size=2, rows=4, valid_rows=1)
    batches = list(itertools.islice(corpus.lanes(), 11))
    for start in (3, 4, 10):
        assert torch.equal(next(corpus.lanes(start=start)).ids, batches[start].ids)
        assert torch.equal(next(corpus.lanes(start=start, shard=Shard(1, 2))).ids, batches[start].ids[1:])
    document = corpus._document(4 * 32, 2, 1, 1)
    assert np.array_equal(np.concatenate([batch.ids[1] for batch in batches[4:8]]), document[0])


def test_a_model_without_knowledge_remembers_nothing_and_pays_for_every_token(tmp_path):
    config = forgetting.configuration("delta", tmp_path, {}).model
    config.vocab_size = forgetting.VOCABULARY
    model = LanguageModel(config).eval()
    with torch.no_grad():
        model.embedding.weight.zero_()
    for row in forgetting.remembered(model, 5_000, 2000):
        assert abs(row["bits"] - (6 - math.log2(forgetting.VOCABULARY))) < 1e-3


def test_the_program(tmp_path):
    for models in (["spectral", "window"], ["spectral", "--edges", "100", "400", "6000"]):  # the second reads again
        forgetting.main(["--quick", "--out", str(tmp_path), "--models", *models])
    rows = list(csv.DictReader((tmp_path / "forgetting.csv").read_text().splitlines()))
    assert {row["model"] for row in rows} == {"spectral", "window"}
    assert len({(row["model"], row["others"], row["from"]) for row in rows}) == len(rows)
    counts = {"spectral": {}, "window": {}}
    for row in rows:
        counts[row["model"]].setdefault((row["from"], row["below"]), []).append(int(row["answers"]))
    assert set(counts["spectral"]) == {("100", "400"), ("400", "6000")}
    assert set(counts["window"]) == {("100", "1000"), ("1000", "10000")}
    assert sum(map(sum, counts["spectral"].values())) == sum(map(sum, counts["window"].values()))
