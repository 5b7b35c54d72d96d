"""Data sets by name that are read as training goes: the library itself streams a local one."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import configuration

from glissando.config import from_dict
from glissando.data.base import Corpus, Shard
from glissando.data.hub_stream import HubStreamCorpus
from glissando.data.tokenizers import ByteTokenizer, Tokenizer, train_bpe
from glissando.errors import DataError
from glissando.runs import Run
from glissando.training.config import RunConfig
from glissando.training.fit import resume, train

pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")
OPTIONS: dict[str, Any] = {"seq_len": 16, "batch_size": 4}
TEXTS = [f"{i}: the café was {'very ' * (i % 5)}quiet. " for i in range(200)]
BPE = train_bpe(iter(TEXTS), 300)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A data set of three files, with a row that has no text and one with a NUL character."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
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
def test_order_laws(
    tokenizer: Tokenizer, split: str | None, hub: dict[str, Any], order_laws: Callable[[Corpus], None]
) -> None:
    order_laws(HubStreamCorpus(tokenizer, valid_split=split, **hub, **OPTIONS))


def test_the_stream_is_the_data_set_in_its_order_behind_what_is_held_out(hub: dict[str, Any]) -> None:
    corpus = HubStreamCorpus(valid_split=None, **hub, **OPTIONS)
    held_out = sum(batch.n_bytes for batch in corpus.batches("valid"))
    stream = ("\0".join(TEXTS) + "\0").encode()
    assert 600 <= held_out < 650 + 20  # whole documents, and an end after each
    epoch = (len(stream) - held_out) // 64
    found = b"".join(bytes(row) for batch in read(corpus, epoch) for row in batch)
    assert found == stream[held_out:][: 64 * epoch]
    assert read(corpus, 3, epoch) == read(corpus, 3)  # from the top again


def test_so_many_bytes_are_an_epoch(hub: dict[str, Any]) -> None:
    corpus = HubStreamCorpus(valid_split="validation", max_bytes=1000, **hub, **OPTIONS)
    first, *others = read(corpus, 40)
    epoch = others.index(first) + 1
    assert 1000 <= 64 * epoch < 1000 + 50 + 64


def test_resuming_opens_the_file_of_the_step_alone(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import IterableDataset

    monkeypatch.setattr("glissando.data.marks.EVERY", 4)
    opened: list[tuple[int, int]] = []
    shard, skip = IterableDataset.shard, IterableDataset.skip

    def counted(self: Any, num_shards: int, index: int, *args: Any) -> Any:
        opened.append((index, 0))
        return shard(self, num_shards, index, *args)

    def skipped(self: Any, n: int) -> Any:
        opened[-1] = (opened[-1][0], n)
        return skip(self, n)

    corpus = HubStreamCorpus(valid_split="validation", **hub, **OPTIONS)
    expected = read(corpus, 100)[90]
    again = HubStreamCorpus(valid_split="validation", **hub, **OPTIONS)
    monkeypatch.setattr(IterableDataset, "shard", counted)
    monkeypatch.setattr(IterableDataset, "skip", skipped)
    assert read(again, 1, 90) == [expected]
    ((file, rows),) = opened
    assert file == 2
    assert rows > 30


def test_every_part_of_a_step_is_read_at_once(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = HubStreamCorpus(valid_split="validation", **hub, **OPTIONS)
    reads: list[object] = []
    documents = type(corpus._train).read
    monkeypatch.setattr(type(corpus._train), "read", lambda *args: reads.append(args) or documents(*args))
    steps = list(islice(corpus.steps(5, [Shard(part, 4) for part in range(4)]), 3))
    assert len(reads) == 1
    for parts, whole in zip(steps, corpus.batches("train", start=5), strict=False):
        assert torch.equal(torch.cat([part.ids for part in parts]), whole.ids)


@pytest.mark.slow
def test_a_training_resumes_as_if_it_had_not_stopped(hub: dict[str, Any], tmp_path: Path) -> None:
    values = configuration(tmp_path).as_dict() | {"data": {"kind": "hub_stream", "valid_split": None, **hub, **OPTIONS}}
    whole, part = (from_dict(RunConfig, values, "test") for _ in range(2))
    whole.training.steps = part.training.steps = 8
    part.training.save_every = 4
    expected = Run.open(train(whole, tmp_path / "whole").path).read_state_dict()
    run = train(part, tmp_path / "part").path
    for name in ("step-00000008",):  # as if it had been killed after the fourth step
        (run / "checkpoints" / name).rename(tmp_path / name)
    found = Run.open(resume(run).path).read_state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_cannot_be_read_says_so(hub: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="could not read split 'test' of the data set"):
        HubStreamCorpus(valid_split="test", **hub, **OPTIONS)
    with pytest.raises(DataError, match=r"has no text field 'story', only id, text; .*text_field"):
        HubStreamCorpus(valid_split=None, text_field="story", **hub, **OPTIONS)
    with pytest.raises(DataError, match=r"the data set '.*' contains too little to train on.*max_valid_bytes"):
        HubStreamCorpus(valid_split=None, **hub | {"max_valid_bytes": 10**6}, **OPTIONS)
