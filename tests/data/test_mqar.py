"""Recall of many pairs among noise: the order laws, answers worked out again, the published distribution, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tolerances import assert_close

from glissando.config import from_dict
from glissando.data.base import IGNORED, Batch, Corpus
from glissando.data.corpora import CORPORA, build_corpus, build_tokenizer
from glissando.data.probes import MqarCorpus
from glissando.data.tokenizers import ByteTokenizer, NumberTokenizer, StreamDecoder, load_tokenizer
from glissando.errors import ConfigError, DataError
from glissando.generation import generate
from glissando.loading import load
from glissando.model import LanguageModel
from glissando.training.config import RunConfig
from glissando.training.fit import train
from glissando.training.language_task import LanguageTask


def make(**options: Any) -> MqarCorpus:
    return MqarCorpus(**{"pairs": 3, "seq_len": 24, "vocabulary": 64, "batch_size": 8, "valid_rows": 20, **options})


def trained(corpus: MqarCorpus, n: int) -> list[Batch]:
    return list(islice(corpus.batches("train"), n))


def test_order_laws(order_laws: Callable[[Corpus], None]) -> None:
    order_laws(make(valid_rows=21, seed=5))


@pytest.mark.parametrize(("pairs", "seq_len", "vocabulary"), [(1, 5, 16), (3, 24, 64), (16, 256, 8192), (64, 256, 131)])
def test_each_key_is_queried_once_and_its_value_is_the_answer(pairs: int, seq_len: int, vocabulary: int) -> None:
    corpus = make(pairs=pairs, seq_len=seq_len, vocabulary=vocabulary, valid_rows=2)
    for batch in [*trained(corpus, 3), *corpus.batches("valid")]:
        assert batch.mask is None
        assert batch.ids.shape[1] == seq_len
        assert batch.n_bytes == len(batch.ids) * pairs
        assert batch.floor_bits == 0.0
        for ids, targets in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True):
            first = 1 + 2 * pairs
            keys, values = ids[1:first:2], ids[2:first:2]
            assert ids[0] == 0
            assert len(set(keys)) == len(set(values)) == pairs
            assert set(keys) <= set(range(1, vocabulary // 2))
            assert set(values) <= set(range(vocabulary // 2, vocabulary))
            assert set(ids[first:]) <= set(range(1, vocabulary))
            places = [place for place, target in enumerate(targets) if target != IGNORED]
            assert all(place >= first and (place - first) % 2 == 0 for place in places)
            answers = {ids[place]: targets[place] for place in places}
            assert answers == dict(zip(keys, values, strict=True))
            assert len(places) == pairs


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_gaps_are_drawn_without_replacement_by_a_power_law(power: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glissando.data.probes._POWER", power)
    """Against the exact chance of every order of two gaps, which NumPy's `choice` has as well."""
    corpus = make(pairs=2, seq_len=12, vocabulary=512, batch_size=8000)
    (batch,) = trained(corpus, 1)
    first, second = ((batch.ids[:, 5:] == batch.ids[:, [k]]) & (batch.targets[:, 5:] != IGNORED) for k in (1, 3))
    gaps = torch.stack([first.int().argmax(1), second.int().argmax(1)], 1) // 2
    weights = np.arange(1, 5) ** (power - 1)
    for one in range(4):
        for other in set(range(4)) - {one}:
            expected = weights[one] / weights.sum() * weights[other] / (weights.sum() - weights[one])
            found = float((gaps == torch.tensor([one, other])).all(1).double().mean())
            assert found == pytest.approx(expected, abs=4 * math.sqrt(expected / 8000))


def test_keys_values_and_noise_are_even() -> None:
    (batch,) = trained(make(vocabulary=32, batch_size=3000), 1)
    for column, kinds in ((1, range(1, 16)), (2, range(16, 32))):
        counts = torch.bincount(batch.ids[:, column], minlength=32)[list(kinds)].double()
        assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 45
    noise = batch.ids[:, 8::2]  # no place of a query
    counts = torch.bincount(noise.flatten(), minlength=32)[1:].double()
    assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 65


def test_training_and_held_out_rows_are_disjoint_for_every_seed_and_repeat() -> None:
    few = {"pairs": 1, "seq_len": 5, "vocabulary": 8}  # 3 keys, 4 values, 7 of noise
    held = {tuple(row.tolist()) for b in make(**few, valid_rows=2).batches("valid") for row in b.ids}
    assert len(held) == 2
    for seed in range(3):
        batches = trained(make(**few, valid_rows=2, seed=seed, batch_size=200), 2)
        assert not held & {tuple(row.tolist()) for batch in batches for row in batch.ids}
    one, same, other = (trained(make(seed=seed), 1)[0].ids for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(*(next(make(seed=seed).batches("valid")).ids for seed in (1, 2)))


def test_chance() -> None:
    found = make().describe()
    assert found["chance_accuracy"] == 1 / 32
    assert found["chance_bits"] == 5
    assert found["unbound_accuracy"] == pytest.approx(1 / 3)
    assert found["unbound_bits"] == pytest.approx(math.log2(3))
    assert (found["pairs"], found["vocabulary"]) == (3, 64)


def test_prompts_end_in_a_query_and_texts_give_its_answer() -> None:
    corpus = make()
    held = {
        tuple(ids.tolist()): targets
        for b in make(valid_rows=400).batches("valid")
        for ids, targets in zip(b.ids, b.targets, strict=True)
    }
    for prompt in corpus.prompts(5):
        ids = [0, *corpus.tokenizer.encode(prompt)]
        (targets,) = [targets for row, targets in held.items() if list(row[: len(ids)]) == ids]
        assert targets[len(ids) - 1] != IGNORED
        assert (targets[: len(ids) - 1] == IGNORED).all()
    read, answers = next(corpus.texts()).splitlines()
    (batch,) = trained(corpus, 1)
    assert corpus.tokenizer.encode(read) == batch.ids[0, 1:].tolist()
    scored = batch.targets[0] != IGNORED
    assert answers == " ".join(map(str, batch.targets[0][scored].tolist()))


def test_numbers_are_read_and_kept(tmp_path: Path) -> None:
    config = CORPORA.read({"kind": "mqar", "vocabulary": 300})
    tokenizer = build_tokenizer(config)
    assert isinstance(tokenizer, NumberTokenizer)
    assert build_corpus(config).tokenizer.vocab_size == tokenizer.vocab_size == 300
    assert tokenizer.decode(tokenizer.encode(" 17 299\n0")) == "17 299 0"
    stream = StreamDecoder(tokenizer)
    ids = [7, 70, 0, 299] * 20
    assert "".join([*map(stream.push, ids), stream.flush()]) == tokenizer.decode(ids)
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert isinstance(again, NumberTokenizer)
    assert again.vocab_size == 300
    for text in ("300", "a", "-1", "\u0663"):
        with pytest.raises(DataError, match="numbers from 0 to 299"):
            tokenizer.encode(text)
    (tmp_path / "tokenizer.json").write_text('{"type": "glissando-numbers", "vocab_size": 1}')
    with pytest.raises(DataError, match=r"tokenizer\.json: vocab_size 1 must be from 2"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="from 2 to"):
        NumberTokenizer(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": 7}, "raise data.seq_len to 28"),
        ({"vocabulary": 6}, "raise data.vocabulary to 8"),
        ({"pairs": 1, "seq_len": 4, "vocabulary": 4, "valid_rows": 50}, "raise pairs or vocabulary"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_a_tokenizer_of_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer bpe would do nothing"):
        from_dict(RunConfig, {"data": {"kind": "mqar", "tokenizer": {"kind": "bpe"}}})


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), NumberTokenizer(63)])
def test_another_vocabulary_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"give data\.vocabulary what the model was trained with"):
        MqarCorpus(tokenizer, pairs=3, seq_len=24, vocabulary=64)


def test_a_run_is_trained_and_opened(tmp_path: Path) -> None:
    config = {
        "model": {
            "hidden_size": 16,
            "mixer": {"kind": "delta", "heads": 2, "keys": "previous"},
            "depth": {"layers": 1},
        },
        "data": {"kind": "mqar", "pairs": 3, "seq_len": 24, "vocabulary": 300, "valid_rows": 8, "batch_size": 4},
        "training": {"steps": 2, "precision": "32-true"},
    }
    run = train(from_dict(RunConfig, config), tmp_path / "run")
    model = load(run.path)
    assert model.config.vocab_size == 300
    assert model.tokenizer is not None
    (text,) = generate(model, "17 200 17", max_tokens=3)
    assert all(int(word) < 300 for word in text.split())


def test_the_head_is_computed_where_something_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, hits and gradients as of all logits."""
    (batch,) = trained(make(), 1)
    config = {"hidden_size": 8, "vocab_size": 64, "mixer": {"kind": "delta", "heads": 2}, "depth": {"layers": 1}}
    model = LanguageModel.from_config({**config, "head_bias": True, "logit_scale": 2.0}).double()
    wanted = (batch.targets != IGNORED).sum()
    task, seen = LanguageTask(RunConfig(), make()), []
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda features: (seen.append(features.shape), logits(features))[1])
    found = task.loss(model, batch, logged=True)
    found.total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr("glissando.training.language_task.is_sharded", lambda model: True)  # then all are computed
    expected = task.loss(model, batch, logged=True)
    expected.total.backward()
    assert seen == [(1, int(wanted), 8), (*batch.ids.shape, 8)]
    assert_close(found.total, expected.total, "loss", 1e-12)
    for name, p in model.named_parameters():
        assert_close(gradients[name], p.grad, name, 1e-12)
    assert found.also["hits"] == expected.also["hits"]
    assert found.weight == int(wanted)
