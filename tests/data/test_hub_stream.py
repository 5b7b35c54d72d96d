"""Data sets by name that are read as training goes: the library itself streams a local one."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from glissando.data.base import Corpus, Shard
from glissando.data.hub import HubStreamCorpus
from glissando.data.tokenizers import ByteTokenizer, Tokenizer, train_bpe
from glissando.errors import DataError

#: imported late: it takes seconds, which collecting would take in every process
NEEDED = pytest.mark.skipif(find_spec("datasets") is None, reason="needs datasets: pip install -e '.[hf]'")
pytestmark = [pytest.mark.filterwarnings("ignore"), NEEDED]
OPTIONS: dict[str, Any] = {"seq_len": 16, "batch_size": 4}
TEXTS = [f"{i}: the café was {'very ' * (i % 5)}quiet. " for i in range(200)]
BPE = train_bpe(iter(TEXTS), 300)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A data set of three files, with a row that has no text and one with a NUL character."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("glissando.data.hub._CHUNK", 1000)  # documents are cut and go on in the next one
    (folder := tmp_path / "set").mkdir()
    for number, rows in enumerate((TEXTS[:90], TEXTS[90:91], ["", *TEXTS[91:]])):
        lines = (json.dumps({"text": text.replace("very", "very\0"), "id": 1}) + "\n" for text in rows)
        (folder / f"train-{number}.jsonl").write_text("".join(lines))
    (folder / "validation.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:40]))
    return {"name": str(folder), "max_valid_bytes": 600}


def read(corpus: Corpus, n: int, start: int = 0) -> list[list[list[int]]]:
    return [batch.targets.tolist() for batch in islice(corpus.batches("train", start=start), n)]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
@pytest.mark.parametrize("split", [None, "validation"])
def test_shards_make_up_the_batch(tokenizer: Tokenizer, split: str | None, hub: dict[str, Any]) -> None:
    corpus = HubStreamCorpus(tokenizer, valid_split=split, **hub, **OPTIONS)
    steps = list(islice(corpus.steps(0, [Shard(part, 4) for part in range(4)]), 5))
    for parts, whole in zip(steps, corpus.batches("train"), strict=False):
        assert torch.equal(torch.cat([part.ids for part in parts]), whole.ids)
        assert sum(part.n_bytes for part in parts) == whole.n_bytes
    held_out = list(corpus.batches("valid"))
    halves = [list(corpus.batches("valid", shard=Shard(part, 2))) for part in range(2)]
    assert sum(batch.n_bytes for half in halves for batch in half) == sum(batch.n_bytes for batch in held_out)
    assert {len(half) for half in halves} == {len(held_out)}


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_the_stream_is_the_data_set_in_its_order_behind_what_is_held_out(
    tokenizer: Tokenizer, hub: dict[str, Any]
) -> None:
    corpus = HubStreamCorpus(tokenizer, valid_split=None, **hub, **OPTIONS)
    held_out = sum(batch.n_bytes for batch in corpus.batches("valid"))
    stream = [token for text in TEXTS for token in [*tokenizer.encode(text), tokenizer.eos_id]]
    behind = stream[sum(int((batch.targets >= 0).sum()) for batch in corpus.batches("valid")) :]
    assert 600 <= held_out < 650 + 20  # whole documents, and an end after each
    n_batches = 2 * len(behind) // 64
    result = [token for batch in read(corpus, n_batches) for row in batch for token in row]
    assert result == (behind * 2)[: 64 * n_batches]  # at its end from the top again


def test_so_many_bytes_are_an_epoch(hub: dict[str, Any]) -> None:
    corpus = HubStreamCorpus(valid_split="validation", max_bytes=1000, **hub, **OPTIONS)
    result = bytes(token for batch in read(corpus, 40) for row in batch for token in row)
    epoch = result.index(b"\0" + TEXTS[0].encode()) + 1
    assert 1000 <= epoch < 1000 + 50 + 64
    assert result[:epoch] == result[epoch : 2 * epoch]


def test_resuming_starts_at_a_document_near_the_step(hub: dict[str, Any]) -> None:
    corpus = HubStreamCorpus(valid_split="validation", **hub, **OPTIONS)
    exact, resumed = read(corpus, 1, 0), read(corpus, 1, 90)
    assert exact == read(corpus, 1)
    number = int(bytes(resumed[0][0]).partition(b":")[0])
    place = len("\0".join(TEXTS[:number]).encode())
    assert place == pytest.approx(90 * 64, rel=0.2)
    assert read(corpus, 1, 10**6) == exact  # beyond the end


def test_what_cannot_be_read_says_so(hub: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="could not read split 'test' of the data set"):
        HubStreamCorpus(valid_split="test", **hub, **OPTIONS)
    with pytest.raises(DataError, match=r"has no text field 'story', only id, text; .*text_field"):
        HubStreamCorpus(valid_split=None, text_field="story", **hub, **OPTIONS)
    with pytest.raises(DataError, match=r"the data set '.*' contains no text to train on.*max_valid_bytes"):
        next(HubStreamCorpus(valid_split=None, **hub | {"max_valid_bytes": 10**6}, **OPTIONS).batches("train"))
