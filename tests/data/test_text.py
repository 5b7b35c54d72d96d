"""Text files as windows: order, exact coverage and byte counts, the token cache, and helpful errors."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import wordpiece

from glissando.data.base import IGNORED, Batch, Corpus
from glissando.data.order import random_below, shuffled
from glissando.data.text import TextCorpus, TextSource
from glissando.data.textfile import check_text, digested
from glissando.data.tokenizers import HFTokenizer, train_bpe
from glissando.errors import DataError

PROSE = "The cat — a café cat — sat on the mat.\nIt was naïve; 日本 too.\n\nThen it left, and all was quiet.\n"
OPTIONS = {"seq_len": 16, "batch_size": 4}
BPE = train_bpe(iter([PROSE]), 300)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    return write(tmp_path / "prose.txt", "".join(f"{i}: {PROSE}" for i in range(40)))


def train(corpus: Corpus, n: int) -> list[Batch]:
    return list(islice(corpus.batches("train"), n))


def scored_tokens(corpus: Corpus) -> list[int]:
    """Held-out targets in the order in which they are scored."""
    return [int(t) for b in corpus.batches("valid") for t in b.targets.flatten() if t != IGNORED]


@given(st.integers(1, 2000), st.integers(0, 2**63), st.integers(0, 50))
def test_shuffled_is_a_permutation_each_epoch(size: int, seed: int, epoch: int) -> None:
    visited = shuffled(np.arange(epoch * size, (epoch + 1) * size), size, seed)
    assert sorted(visited.tolist()) == list(range(size))


def test_shuffled_and_random_are_uniform_and_change_with_seed_and_epoch() -> None:
    size = 64
    epochs = shuffled(np.arange(4000 * size), size, 1).reshape(4000, size)
    counts = np.stack([np.bincount(epochs[:, column], minlength=size) for column in (0, 1, 31, 63)])
    chi = ((counts - 62.5) ** 2 / 62.5).sum(axis=1)
    assert (chi < 120).all()  # 63 degrees of freedom: 120 lies beyond one in 10**5
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[0], shuffled(np.arange(size), size, 2))
    drawn = np.bincount(random_below(100, 7, np.arange(100_000)), minlength=100)
    assert ((drawn - 1000) ** 2 / 1000).sum() < 180
    assert shuffled(np.array([10**15]), 10**12, 3)[0] < 10**12


def test_windows_are_the_file_and_targets_are_one_ahead(prose: Path) -> None:
    content = prose.read_bytes()
    for batch in train(TextCorpus(path=prose, **OPTIONS), 20):
        assert batch.n_bytes == 64
        assert torch.equal(batch.ids[:, 1:], batch.targets[:, :-1])
        for row in batch.targets:
            assert bytes(row.tolist()) in content


def test_training_offsets_are_uniform_and_reach_both_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", "".join(map(chr, range(33, 123))))  # every byte tells its place
    corpus = TextCorpus(path=path, seq_len=8, batch_size=100)
    seen = Counter(int(row[0]) - 33 for batch in train(corpus, 74) for row in batch.targets)
    assert set(seen) == set(range(81 - 8 + 1))  # 81 of the 90 bytes train
    assert max(seen.values()) < 160  # 100 expected, standard deviation 10
    first = next(b.ids[b.targets[:, 0] == 33] for b in corpus.batches("train") if (b.targets[:, 0] == 33).any())
    assert (first[:, 0] == corpus.tokenizer.eos_id).all()


def test_a_stride_visits_every_window_once_an_epoch_in_a_new_order(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", "".join(map(chr, range(33, 123))))
    corpus = TextCorpus(path=path, stride=4, seq_len=8, batch_size=19)
    epochs = [[(int(row[0]) - 33) for row in batch.targets] for batch in train(corpus, 3)]
    assert all(sorted(epoch) == list(range(0, 73, 4)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@given(size=st.integers(1, 200), rows=st.integers(1, 5))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_every_byte_of_a_held_out_file_is_scored_once(size: int, rows: int, tmp_path: Path) -> None:
    content = bytes(np.random.default_rng(size).integers(1, 128, size).tolist())
    valid, text = write(tmp_path / "valid.txt", content), write(tmp_path / "t.txt", "x" * 16)
    corpus = TextCorpus(path=text, valid_path=valid, seq_len=16, batch_size=rows)
    assert bytes(scored_tokens(corpus)) == content
    stream, n_bytes, position = bytes([corpus.tokenizer.eos_id]) + content, 0, 0
    for batch in corpus.batches("valid"):
        n_bytes += batch.n_bytes
        for row, targets in zip(batch.ids, batch.targets, strict=True):
            columns = torch.nonzero(targets != IGNORED).flatten().tolist()
            read = bytes(row[: columns[-1] + 1].tolist())
            position += len(columns)
            assert stream[:position].endswith(read)
    assert n_bytes == size


def test_the_last_window_is_padded_and_masked(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", "a" * 20)
    (batch,) = TextCorpus(path=path, valid_path=path, **OPTIONS).batches("valid")
    assert batch.mask is not None
    assert batch.mask.sum(dim=1).tolist() == [16, 4]
    assert ((batch.targets == IGNORED) == ~batch.mask).all()


@pytest.mark.parametrize("tokenizer", [BPE, wordpiece()], ids=["bpe", "wordpiece"])
def test_bytes_of_tokens_add_up_to_the_file(tokenizer: HFTokenizer, prose: Path) -> None:
    corpus = TextCorpus(tokenizer, path=prose, valid_path=prose, **OPTIONS)
    batches = list(corpus.batches("valid"))
    assert sum(batch.n_bytes for batch in batches) == prose.stat().st_size
    assert all(batch.n_bytes > 0 for batch in train(corpus, 3))
    if tokenizer is BPE:
        assert tokenizer.decode(scored_tokens(corpus)) == prose.read_text()
        for batch in train(corpus, 5):
            assert batch.n_bytes == sum(
                len(tokenizer.token_bytes[t])  # type: ignore[index]
                for t in batch.targets.flatten()
            )


def test_the_token_cache_is_used_and_keyed_by_content_and_tokenizer(prose: Path, cache: Path) -> None:
    def build(tokenizer: HFTokenizer = BPE) -> TextCorpus:
        return TextCorpus(tokenizer, path=prose, **OPTIONS)

    first = train(build(), 1)[0]
    files = sorted((cache / "tokens").glob("*/ids"))
    assert len(files) == 2  # of what is trained on and of what is held out
    times = [file.stat().st_mtime_ns for file in files]
    assert torch.equal(train(build(), 1)[0].ids, first.ids)
    assert [file.stat().st_mtime_ns for file in files] == times
    train(build(train_bpe(iter([PROSE]), 280)), 1)
    assert len(list((cache / "tokens").glob("*/ids"))) == 4
    write(prose, prose.read_bytes() + b"more\n")
    train(build(), 1)
    assert len(list((cache / "tokens").glob("*/ids"))) > 4


def test_a_training_goes_on_with_its_tokens_whatever_becomes_of_the_files(prose: Path, cache: Path) -> None:
    """Another process may tokenise the same text, and a person may edit it."""
    expected = train(TextCorpus(BPE, path=prose, **OPTIONS), 3)
    batches = TextCorpus(BPE, path=prose, **OPTIONS).batches("train")
    found = [next(batches)]
    prose.write_text("another text")
    for file in (cache / "tokens").glob("*/*"):
        (other := file.with_name("other")).write_bytes(file.read_bytes()[::-1])
        other.replace(file)  # as a writer does at its end
    found += islice(batches, 2)
    assert [b.ids.tolist() for b in found] == [b.ids.tolist() for b in expected]


def test_a_file_that_changes_before_it_is_converted_is_refused(prose: Path) -> None:
    corpus = TextCorpus(BPE, path=prose, **OPTIONS)
    size = prose.stat().st_size
    with prose.open("a") as file:
        file.write("more")
    with pytest.raises(DataError, match=f"has changed while it was read: it had {size:,} bytes and has {size + 4:,}"):
        train(corpus, 1)


def test_a_file_that_is_cut_off_before_it_is_converted_is_refused(prose: Path) -> None:
    corpus = TextCorpus(BPE, path=prose, **OPTIONS)
    prose.write_text("short")
    with pytest.raises(DataError, match=r"has changed while it was read: it had .* and has 5 now"):
        train(corpus, 1)


def test_a_broken_tokenisation_leaves_nothing_behind(prose: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: HFTokenizer, texts: list[str]) -> list[np.ndarray]:
        raise KeyboardInterrupt

    corpus = TextCorpus(BPE, path=prose, **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(HFTokenizer, "encode_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(corpus, 1)
    assert list((cache / "tokens").glob("*/*")) == []
    assert train(corpus, 1)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200), size=st.integers(4, 50))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_pieces_join_to_the_text(text: str, size: int, tmp_path: Path) -> None:
    file = digested(write(tmp_path / "t.txt", text))
    source = TextSource([(file, 0, file.size)])
    found = list(source.pieces(piece_bytes=size))
    assert "".join(piece.text for piece in found) == text
    assert all(len(piece.text.encode()) <= size for piece in found)
    assert [piece.begins for piece in found] == [number == 0 for number in range(len(found))]


def test_ascii_only_drops_every_other_byte(prose: Path) -> None:
    corpus = TextCorpus(path=prose, ascii_only=True, **OPTIONS)
    kept = prose.read_text().encode("ascii", "ignore")
    for batch in train(corpus, 30):
        assert all(bytes(targets.tolist()) in kept for targets in batch.targets)
        assert batch.n_bytes == batch.targets.numel()
    whole = TextCorpus(path=prose, valid_path=prose, ascii_only=True, **OPTIONS)
    assert bytes(scored_tokens(whole)) == kept
    tokens = TextCorpus(BPE, path=prose, valid_path=prose, ascii_only=True, **OPTIONS)
    assert BPE.decode(scored_tokens(tokens)).encode() == kept


def test_the_end_of_the_file_validates_and_the_cap_holds(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", "é" * 100)
    corpus = TextCorpus(path=path, valid_fraction=0.095, **OPTIONS)
    assert ["".join(corpus.texts(split)) for split in ("train", "valid")] == ["é" * 90, "é" * 10]  # whole characters
    capped = TextCorpus(path=path, max_valid_bytes=5, **OPTIONS)
    assert sum(batch.n_bytes for batch in capped.batches("valid")) == 4


def test_prompts_do_not_begin_at_the_line_between_two_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", b"Once.\n<|endoftext|>\n" * 60)
    assert set(TextCorpus(path=path, **OPTIONS).prompts(20)) == {"Once."}


def test_prompts_are_held_out_deterministic_and_texts_are_whole(prose: Path) -> None:
    corpus = TextCorpus(path=prose, **OPTIONS)
    prompts = corpus.prompts(10)
    assert prompts == corpus.prompts(10) != corpus.prompts(10, seed=1)
    held_out = "".join(corpus.texts("valid"))
    assert all(prompt and prompt in held_out for prompt in prompts)
    assert "".join(corpus.texts("train")) + held_out == prose.read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no file"),
        (b"", "is empty"),
        (b"short", "less than one window of 16"),
        (b"one\ntwo\xfftail" * 20, "byte 7, line 2.*not UTF-8.*iconv -f LATIN1"),
        (b"a" * 99 + b"\n\xe2\x82", "byte 100, line 2.*not UTF-8"),
        (b"a\nb\nc\0" + b"d" * 90, "byte 5, line 3.*NUL.*tr -d"),
        (("text of Windows" * 20).encode("utf-16"), "is UTF-16.*iconv"),
    ],
)
def test_unusable_files_are_named_with_position_and_fix(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        train(TextCorpus(path=path, **OPTIONS), 1)
    assert str(path) in str(caught.value)


def test_a_file_too_short_to_train_on_can_be_validated(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", "short")
    corpus = TextCorpus(path=path, valid_path=path, **OPTIONS)
    assert bytes(scored_tokens(corpus)) == b"short"
    with pytest.raises(DataError, match="has 5 tokens to train on, less than one window of 16"):
        train(corpus, 1)


def test_a_directory_or_no_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a directory"):
        TextCorpus(path=tmp_path, **OPTIONS)
    with pytest.raises(DataError, match=r"data\.path"):
        TextCorpus(path=None, **OPTIONS)


def test_defects_are_found_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glissando.data.textfile._BLOCK", 5)
    path = write(tmp_path / "t.txt", "añb日本c\n" * 9)
    check_text(path)
    for offset in range(0, path.stat().st_size - 1):
        damaged = bytearray(path.read_bytes())
        damaged[offset] = 0xFF
        other = write(tmp_path / "u.txt", bytes(damaged))
        with pytest.raises(DataError) as caught:
            check_text(other)
        with pytest.raises(UnicodeDecodeError) as expected:
            bytes(damaged).decode()
        line = 1 + damaged[: expected.value.start].count(b"\n")
        assert f"byte {expected.value.start}, line {line}:" in str(caught.value)


def test_bytes_that_are_no_text_are_dropped_with_all_that_is_not_ascii(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", b"latin \xe9 text\n" * 40)
    corpus = TextCorpus(path=path, ascii_only=True, **OPTIONS)
    assert all((batch.ids < 128).all() for batch in train(corpus, 5))
    for tokenizer in (BPE, wordpiece()):
        ascii_only = TextCorpus(tokenizer, path=path, valid_path=path, ascii_only=True, **OPTIONS)
        assert sum(batch.n_bytes for batch in ascii_only.batches("valid")) == len(b"latin  text\n" * 40)


@pytest.mark.data
def test_the_sample_shakespeare_splits_as_usual(sample_data: Path) -> None:
    corpus = TextCorpus(path=sample_data / "tinyshakespeare.txt", seq_len=256, batch_size=32)
    assert sum(len(text.encode()) for text in corpus.texts("train")) == 1_003_854
    assert sum(batch.n_bytes for batch in corpus.batches("valid")) == 111_540
