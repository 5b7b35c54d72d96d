"""Several files as one corpus: what joins them, order, shards, and errors that name the file or the pattern."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import wordpiece

from glissando.data.base import IGNORED, Corpus, Shard
from glissando.data.corpora import TextOptions, build_tokenizer
from glissando.data.jsonl import JsonlCorpus
from glissando.data.text import TextCorpus, TextSource
from glissando.data.textfile import digested
from glissando.data.tokenizers import ByteTokenizer, Tokenizer, train_bpe
from glissando.errors import DataError

OPTIONS: dict[str, Any] = {"seq_len": 16, "batch_size": 4}
TEXTS = ["".join(f"{name}{line}: the café was {'very ' * (line % 4)}quiet.\n" for line in range(20)) for name in "abcd"]
BPE = train_bpe(iter(TEXTS), 300)
TOKENIZERS = pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), BPE, wordpiece()], ids=["bytes", "bpe", "wordpiece"]
)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    for name, text in zip("abcd", TEXTS, strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "no.md").write_text("no part of the text")
    return str(tmp_path / "*.txt")


@pytest.fixture
def documents(tmp_path: Path) -> str:
    for name, text in zip("abcd", TEXTS, strict=True):
        lines = [json.dumps({"text": line}) + "\n" for line in text.splitlines()]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return str(tmp_path / "*.jsonl")


def scored(corpus: Corpus) -> list[int]:
    return [int(t) for batch in corpus.batches("valid") for t in batch.targets.flatten() if t != IGNORED]


@given(
    parts=st.lists(st.binary(min_size=1, max_size=9).map(lambda data: data.hex().encode()), min_size=1, max_size=5),
    cut=st.tuples(st.integers(0, 99), st.integers(0, 99)),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
def test_a_part_of_joined_files_has_no_end_at_its_own_ends(
    parts: list[bytes], cut: tuple[int, int], tmp_path: Path
) -> None:
    files = []
    for number, part in enumerate(parts):
        (path := tmp_path / str(number)).write_bytes(part)
        files.append(digested(path))
    whole, expected = TextSource([(file, 0, file.size) for file in files]), "\7".join(part.decode() for part in parts)
    assert (joined(whole), len(whole)) == (expected, len(expected))
    first, last = sorted(cut)
    part = whole.split(last)[0].split(first)[1]
    assert joined(part) == expected[first:last].strip("\7")
    assert len(part) == len(joined(part))


def test_a_split_between_or_within_files_keeps_characters_whole(tmp_path: Path) -> None:
    for number, text in enumerate(("aé", "日b")):
        (tmp_path / str(number)).write_text(text)
    whole = TextSource([(file := digested(tmp_path / name), 0, file.size) for name in "01"])
    parts = [tuple(map(joined, whole.split(position))) for position in range(8)]
    cut = [("a", "é\7日b")] * 2 + [("aé", "日b")] * 4 + [("aé\7日", "b")]
    assert parts == [("", "aé\7日b"), *cut]


def joined(source: TextSource) -> str:
    return "".join(("\7" if piece.begins else "") + piece.text for piece in source.pieces())[1:]


@TOKENIZERS
@pytest.mark.parametrize("stride", [None, 7])
def test_order_laws_of_a_pattern(
    tokenizer: Tokenizer, stride: int | None, texts: str, order_laws: Callable[[Corpus], None]
) -> None:
    order_laws(TextCorpus(tokenizer, path=texts, stride=stride, seed=3, **OPTIONS))


@TOKENIZERS
def test_an_end_stands_between_files_and_counts_as_a_byte(tokenizer: Tokenizer, texts: str) -> None:
    corpus = TextCorpus(tokenizer, path=texts, valid_path=texts, **OPTIONS)
    assert sum(batch.n_bytes for batch in corpus.batches("valid")) == len("\0".join(TEXTS).encode())
    found, files = scored(corpus), list[list[int]]([[]])
    for token in found:
        files.append([]) if token == tokenizer.eos_id else files[-1].append(token)
    if tokenizer.byte_lengths is not None:
        assert [tokenizer.decode(file) for file in files] == TEXTS
        lengths = tokenizer.byte_lengths.copy()
        lengths[tokenizer.eos_id] = 1
        for batch in islice(corpus.batches("train"), 20):
            assert batch.n_bytes == int(lengths[batch.targets].sum())
    assert len(files) == len(TEXTS)
    assert "".join(corpus.texts("train")) == "".join(TEXTS)
    prompts = corpus.prompts(20)
    assert len(set(prompts)) > 3
    assert all(
        "\0" not in prompt and (tokenizer.byte_lengths is None or prompt in "".join(TEXTS)) for prompt in prompts
    )


def test_the_end_of_the_last_files_is_held_out(texts: str) -> None:
    corpus = TextCorpus(path=texts, valid_fraction=0.4, **OPTIONS)
    whole = "\0".join(TEXTS).encode()
    assert "".join(corpus.texts("train")).encode() + "".join(corpus.texts("valid")).encode() == whole.replace(
        b"\0", b""
    )
    assert whole.endswith(bytes(scored(corpus)))
    assert len(scored(corpus)) == pytest.approx(0.4 * len(whole), abs=2)


def test_a_tokenizer_trained_on_a_pattern_reads_its_files(texts: str) -> None:
    options = TextOptions(path=texts, tokenizer={"kind": "bpe", "vocab_size": 300})  # type: ignore[arg-type]
    assert len(build_tokenizer(options).encode("a1: the café was very quiet.\n")) < 15


@pytest.mark.parametrize("world", [1, 2, 4])
def test_no_window_comes_twice_in_an_epoch_whatever_the_number_of_processes(world: int, tmp_path: Path) -> None:
    files = ["".join(f"{1000 * number + line} " for line in range(100)) for number in range(1, 5)]
    for number, text in enumerate(files):
        (tmp_path / f"{number}.txt").write_text(text)
    corpus = TextCorpus(path=str(tmp_path / "*.txt"), stride=16, seed=5, **OPTIONS)
    steps, rest = divmod(corpus.epoch_rows, 4)
    shards = [list(islice(corpus.batches("train", shard=Shard(r, world)), steps)) for r in range(world)]
    rows = [tuple(row) for shard in shards for batch in shard for row in batch.targets.tolist()]
    whole = "\0".join(files).encode()
    windows = [tuple(whole[at : at + 16]) for at in range(0, len(whole), 16)][: corpus.epoch_rows]
    assert len(set(rows)) == len(rows) == corpus.epoch_rows - rest
    assert set(rows) <= set(windows)


@TOKENIZERS
@pytest.mark.parametrize("separate", [False, True])
def test_order_laws_of_several_jsonl_files(
    tokenizer: Tokenizer, separate: bool, documents: str, order_laws: Callable[[Corpus], None]
) -> None:
    held_out: dict[str, Any] = {"valid_path": documents} if separate else {"valid_fraction": 0.2}
    order_laws(JsonlCorpus(tokenizer, path=documents, **held_out, **OPTIONS))


def test_several_jsonl_files_are_one_stream(documents: str, tmp_path: Path) -> None:
    whole = tmp_path / "joined"
    whole.write_bytes(b"".join((tmp_path / f"{name}.jsonl").read_bytes() for name in "abcd"))
    many, one = JsonlCorpus(path=documents, **OPTIONS), JsonlCorpus(path=whole, **OPTIONS)
    epoch = 60  # of about 45 batches: into the second one
    expected = [batch.ids.tolist() for batch in islice(one.batches("train"), epoch)]
    assert [batch.ids.tolist() for batch in islice(many.batches("train"), epoch)] == expected
    (tmp_path / "e.jsonl").write_text("{broken\n")
    for _ in range(2):  # as the lines are read, and from the tokens
        found = JsonlCorpus(path=documents, **OPTIONS)
        assert [batch.ids.tolist() for batch in islice(found.batches("train"), epoch)] == expected
        assert f"1 bad line skipped in {tmp_path / 'e.jsonl'} (line 1: not JSON" in (found.problems or "")


@pytest.mark.parametrize("kind", [TextCorpus, JsonlCorpus])
def test_a_pattern_or_folder_without_files_says_so(kind: type[Corpus], tmp_path: Path) -> None:
    suffix = "txt" if kind is TextCorpus else "jsonl"
    with pytest.raises(DataError, match=r"there is no file .*none\*\.txt; check data\.path \(the current directory"):
        kind(path=str(tmp_path / "none*.txt"), **OPTIONS)  # type: ignore[call-arg]
    with pytest.raises(DataError, match=rf"is a directory; data\.path takes a file, or a pattern: '.*/\*\.{suffix}'"):
        kind(path=str(tmp_path), **OPTIONS)  # type: ignore[call-arg]
    (tmp_path / "none.txt").write_text("")
    with pytest.raises(DataError, match=r"none\.txt is empty"):
        kind(path=str(tmp_path / "none*.txt"), **OPTIONS)  # type: ignore[call-arg]


def test_names_with_brackets_folders_below_and_empty_files(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text(TEXTS[0])
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "b.txt").write_text(TEXTS[1])
    (tmp_path / "deep" / "empty.txt").write_text("")
    found = TextCorpus(path=str(tmp_path / "**" / "*.txt"), **OPTIONS)
    assert "".join(found.texts("train")) + "".join(found.texts("valid")) == TEXTS[0] + TEXTS[1]
    assert "".join(TextCorpus(path=tmp_path / "a[1].txt", **OPTIONS).texts("train")) in TEXTS[0]


def test_a_file_that_vanishes_or_is_no_text_is_named(texts: str, tmp_path: Path) -> None:
    corpus = TextCorpus(path=texts, **OPTIONS)
    (tmp_path / "c.txt").unlink()
    with pytest.raises(DataError, match=r"c\.txt cannot be read any more \(No such file"):
        next(corpus.batches("train"))
    (tmp_path / "b.txt").write_bytes(b"one\n\xff")
    with pytest.raises(DataError, match=r"b\.txt: at byte 4, line 2: a byte that is not UTF-8"):
        TextCorpus(path=texts, **OPTIONS)


def test_ascii_only_joins_files_as_well(texts: str) -> None:
    corpus = TextCorpus(path=texts, valid_path=texts, ascii_only=True, **OPTIONS)
    assert bytes(scored(corpus)) == "\0".join(TEXTS).encode("ascii", "ignore")
    assert np.concatenate([batch.ids.numpy() for batch in islice(corpus.batches("train"), 20)]).max() < 128
