"""JSONL streams: packing, routed validation, exact resuming, labels, and lines that cannot be used."""

from __future__ import annotations

import json
import logging
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import wordpiece

from glissando.data.base import IGNORED, Batch, Corpus
from glissando.data.jsonl import Fields, JsonlCorpus
from glissando.data.tokenizers import ByteTokenizer, Tokenizer, train_bpe
from glissando.errors import ConfigError, DataError

OPTIONS: dict[str, Any] = {"seq_len": 8, "batch_size": 4}
TEXTS = [f"{i}: a café, naïve {'x' * (i % 23)}" for i in range(300)]
BPE = train_bpe(iter(TEXTS), 300)


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return write(tmp_path / "s.jsonl", [{"text": text, "more": text} for text in TEXTS])


def train(corpus: Corpus, n: int, start: int = 0) -> list[Batch]:
    return list(islice(corpus.batches("train", start=start), n))


def packed(texts: list[str]) -> bytes:
    return b"\0" + b"\0".join(text.encode() for text in texts) + b"\0"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE, wordpiece()], ids=["bytes", "bpe", "wordpiece"])
@pytest.mark.parametrize("separate", [False, True])
def test_order_laws(tokenizer: Tokenizer, separate: bool, stream: Path, order_laws: Callable[[Corpus], None]) -> None:
    order_laws(JsonlCorpus(tokenizer, path=stream, valid_path=stream if separate else None, **OPTIONS))


@pytest.mark.parametrize("every", [2, 5, 20])
def test_the_stream_is_the_file_in_order_and_each_target_comes_once(
    stream: Path, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glissando.data.jsonl.VALID_BATCHES", 10**6)
    corpus = JsonlCorpus(path=stream, valid_fraction=1 / every, **OPTIONS)
    content = packed(TEXTS)
    n_blocks = (len(content) - 1) // 32
    held_out = list(corpus.batches("valid"))
    assert len(held_out) == n_blocks // every
    trained = train(corpus, n_blocks - len(held_out))
    streams = {"train": iter(trained), "valid": iter(held_out)}
    for block in range(n_blocks):
        batch = next(streams["valid" if block % every == every - 1 else "train"])
        assert bytes(batch.ids.flatten().tolist()) == content[block * 32 : block * 32 + 32]
        assert bytes(batch.targets.flatten().tolist()) == content[block * 32 + 1 : block * 32 + 33]
        assert batch.n_bytes == 32
        assert batch.mask is None


def test_held_out_batches_stay_held_out_over_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glissando.data.jsonl.VALID_BATCHES", 10**6)
    texts = [" ".join(str(n) for n in range(5 * i, 5 * i + 5)) for i in range(300)]  # nothing comes twice
    path = write(tmp_path / "s.jsonl", [{"text": text} for text in texts])
    corpus = JsonlCorpus(path=path, valid_fraction=0.25, **OPTIONS)
    n_blocks = (len(packed(texts)) - 1) // 32
    epoch = n_blocks - n_blocks // 4
    three = train(corpus, 3 * epoch)
    for first, second, third in zip(*(three[i * epoch : (i + 1) * epoch] for i in range(3)), strict=True):
        assert torch.equal(first.ids, second.ids)
        assert torch.equal(first.ids, third.ids)
    held_out = {bytes(b.ids.flatten().tolist()) for b in corpus.batches("valid")}
    assert not held_out & {bytes(b.ids.flatten().tolist()) for b in three}


@given(
    sizes=st.lists(st.integers(1, 20), min_size=40, max_size=60),
    start=st.integers(0, 300),
    every=st.integers(2, 6),
)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_resuming_in_a_new_process_is_skipping(sizes: list[int], start: int, every: int, tmp_path: Path) -> None:
    """With and without an end of file in between."""
    path = write(tmp_path / "s.jsonl", [{"text": f"{i}-" * size} for i, size in enumerate(sizes)])
    options = OPTIONS | {"batch_size": 2, "valid_fraction": 1 / every}
    expected = train(JsonlCorpus(path=path, **options), start + 2)[start:]
    for _ in range(2):
        resumed = train(JsonlCorpus(path=path, **options), 2, start)
        assert [b.ids.tolist() for b in resumed] == [b.ids.tolist() for b in expected]


def test_lines_are_read_once_and_again_when_the_file_or_an_option_changes(
    stream: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    parse = Fields.parse
    monkeypatch.setattr(Fields, "parse", lambda self, line: read.append(line) or parse(self, line))
    expected = train(JsonlCorpus(path=stream, **OPTIONS), 1, 110)
    assert len(read) == len(TEXTS)
    assert train(JsonlCorpus(path=stream, valid_fraction=0.3, **OPTIONS), 1)
    assert train(JsonlCorpus(path=stream, **OPTIONS), 1, 110)[0].ids.tolist() == expected[0].ids.tolist()
    assert len(read) == len(TEXTS)
    train(JsonlCorpus(path=stream, text_field="more", **OPTIONS), 1)
    assert len(read) == 2 * len(TEXTS)
    write(stream, [{"text": "new " + text} for text in TEXTS])
    fresh = JsonlCorpus(path=stream, **OPTIONS)
    assert bytes(train(fresh, 1)[0].ids.flatten().tolist()) == packed(["new " + t for t in TEXTS])[:32]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE, wordpiece()], ids=["bytes", "bpe", "wordpiece"])
@pytest.mark.parametrize("labelled", [False, True])
def test_held_out_bytes_are_those_of_the_file(tokenizer: Tokenizer, labelled: bool, tmp_path: Path) -> None:
    """Each document's bytes and one for its end."""
    path = write(tmp_path / "s.jsonl", [{"text": text, "control": [0.5]} for text in TEXTS])
    names = ["mood"] if labelled else []
    corpus = JsonlCorpus(tokenizer, path=path, valid_path=path, control_names=names, seq_len=64, batch_size=7)
    total = sum(batch.n_bytes for batch in corpus.batches("valid"))
    assert total == sum(len(text.encode()) + 1 for text in TEXTS)


def test_labelled_rows_are_documents_with_their_control(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"text": "good", "control": [1, 0.5]},
        {"text": "a longer one that is cut", "control": {"form": -2, "mood": 3}},
    ]
    path = write(tmp_path / "s.jsonl", records)
    corpus = JsonlCorpus(path=path, valid_path=path, control_names=["mood", "form"], seq_len=8, batch_size=2)
    batch = train(corpus, 1)[0]
    assert batch.control is not None
    assert batch.control.tolist() == [[1.0, 0.5], [3.0, -2.0]]
    assert bytes(batch.ids[0].tolist()) == b"\0good\0\0\0"
    assert batch.targets[0].tolist() == [*b"good\0", IGNORED, IGNORED, IGNORED]
    assert bytes(batch.targets[1].tolist()) == b"a longer"
    assert batch.mask is not None
    assert batch.mask.sum(dim=1).tolist() == [5, 8]
    assert batch.n_bytes == 13
    assert corpus.control_names == ("mood", "form")


def test_labelled_order_laws(tmp_path: Path, order_laws: Callable[[Corpus], None]) -> None:
    path = write(tmp_path / "s.jsonl", [{"text": text, "control": [i]} for i, text in enumerate(TEXTS)])
    order_laws(JsonlCorpus(path=path, control_names=["n"], **OPTIONS))


GOOD = json.dumps({"text": "fine text", "control": [1]}).encode()
BAD_LINES = [
    (b"{broken", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'["text"]', "a JSON list, not an object"),
    (b'{"txt": "x"}', "no field 'text'; did you mean 'txt'"),
    (b'{"text": 3}', "is a int, not text"),
    (b'{"text": ""}', "is empty"),
    (b'{"text": "a\\u0000b"}', "NUL"),
    (b'{"text": "a\\ud800b"}', "surrogate"),
    (b'{"text": "\xff"}', "not UTF-8 at byte 10"),
    (b'{"text": "' + b"x" * 300_000 + b'"}', "longer than 200000 bytes"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=[message for _, message in BAD_LINES])
def test_a_bad_line_is_counted(
    line: bytes, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glissando.data.jsonl.MAX_LINE_BYTES", 200_000)
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"\n".join([GOOD] * 9 + [line] + [b"  "] + [GOOD] * 9 + [line]))
    clean = tmp_path / "clean.jsonl"
    clean.write_bytes(b"\n".join([GOOD] * 18))
    options = OPTIONS | {"valid_fraction": 0.5}
    with caplog.at_level(logging.WARNING):
        corpus = JsonlCorpus(path=path, **options)
        found, expected = train(corpus, 9), train(JsonlCorpus(path=clean, **options), 9)
    assert [b.ids.tolist() for b in found] == [b.ids.tolist() for b in expected]
    assert corpus.problems is not None
    assert "\n" not in corpus.problems
    assert corpus.problems.startswith(f"2 bad lines skipped in {path}")
    assert JsonlCorpus(path=clean, **options).problems is None
    assert "line 10: " in corpus.problems
    assert "line 21: " in corpus.problems
    assert message in corpus.problems
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "control", [None, [1], [1, 2, 3], {"a": 1}, ["x", 1], [True, 1], [float("nan"), 0], [10**400, 0], [1e300, 0]]
)
def test_bad_labels_are_bad_lines(control: object, tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", [{"text": "t", "control": control}])
    with pytest.raises(DataError, match="line 1: `control`"):
        train(JsonlCorpus(path=path, control_names=["a", "b"], **OPTIONS), 1)


def test_a_huge_line_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glissando.data.jsonl.MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "s.jsonl"
    with path.open("wb") as file:
        for _ in range(20):
            file.write(GOOD + b"\n")
        file.write(b'{"text": "')
        for _ in range(100):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n' + (GOOD + b"\n") * 20)
    corpus = JsonlCorpus(path=path, valid_fraction=0.5, **OPTIONS)
    tracemalloc.start()
    train(corpus, 8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert "line 21: longer than 1048576 bytes" in (corpus.problems or "")


def test_too_little_is_refused_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too little to train on"):
        train(JsonlCorpus(path=write(tmp_path / "a.jsonl", [{"text": "x"}]), **OPTIONS), 1)
    with pytest.raises(DataError, match=r"too little to validate on.*valid_fraction"):
        train(JsonlCorpus(path=write(tmp_path / "b.jsonl", [{"text": "x" * 100}]), **OPTIONS), 1)
    with pytest.raises(DataError, match=r"too little.*1 bad line skipped.*line 1"):
        train(JsonlCorpus(path=write(tmp_path / "c.jsonl", ["x"]), **OPTIONS), 1)
    with pytest.raises(DataError, match="no file"):
        JsonlCorpus(path=tmp_path / "none.jsonl", **OPTIONS)
    with pytest.raises(ConfigError, match=r"valid_fraction of jsonl must be at most 0\.5, got 0\.9"):
        JsonlCorpus(path=tmp_path / "a.jsonl", valid_fraction=0.9, **OPTIONS)


def test_prompts_come_from_held_out_text_and_texts_are_the_documents(stream: Path) -> None:
    corpus = JsonlCorpus(path=stream, valid_path=stream, seq_len=64, batch_size=4)
    prompts = corpus.prompts(6)
    assert prompts == corpus.prompts(6)
    assert all(prompt and any(prompt in text for text in TEXTS) for prompt in prompts)
    assert list(corpus.texts("valid")) == list(corpus.texts("train")) == TEXTS


def test_a_byte_order_mark_is_no_part_of_the_first_line(stream: Path, tmp_path: Path) -> None:
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + stream.read_bytes())
    found, expected = JsonlCorpus(path=marked, **OPTIONS), JsonlCorpus(path=stream, **OPTIONS)
    assert [b.ids.tolist() for b in train(found, 3)] == [b.ids.tolist() for b in train(expected, 3)]
