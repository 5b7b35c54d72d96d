"""Tokenizers: reversible, exact in bytes, one file each, and streams that never split a character."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import bert, byte_fallback, gpt2, wordpiece
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers

from glissando.data.corpora import FileOptions, TextOptions, build_tokenizer
from glissando.data.tokenizers import (
    ByteTokenizer,
    HFTokenizer,
    StreamDecoder,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)
from glissando.errors import ConfigError, DataError, RunError

TEXT = "Once upon a time there was a café; naïve 日本語 👩‍👩‍👧 \x01\t\r\n ends.\n" * 20
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
BPE = train_bpe(iter([TEXT]), 400)
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcé日.,'", *(f"##{c}" for c in "abcé日"), "don", "##t", "n"]


WORDPIECE = wordpiece(PIECES)
FALLBACK = byte_fallback()
PREFIXED = HFTokenizer(Backend.from_str(BPE.to_json().replace('"add_prefix_space":false', '"add_prefix_space":true')))


@given(ANY_TEXT)
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_reversible_on_any_text_and_lengths_are_its_bytes(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths is not None
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
    np.testing.assert_array_equal(tokenizer.encode_batch([text, text])[1], ids)


def test_the_end_token_in_text_is_one_id_and_reversible() -> None:
    text = "a<|endoftext|>\nb"
    ids = BPE.encode(text)
    assert BPE.eos_id in ids
    assert BPE.decode(ids) == text
    assert BPE.byte_lengths is not None
    assert BPE.byte_lengths[ids].sum() == len(text)


def test_bpe_training_is_deterministic_and_compresses() -> None:
    assert train_bpe(iter([TEXT]), 400).to_json() == BPE.to_json()
    assert len(BPE.encode(TEXT)) < 0.6 * len(TEXT.encode())
    assert BPE.vocab_size <= 400
    with pytest.raises(ConfigError, match="257"):
        train_bpe(iter([TEXT]), 256)


@given(st.data())
@settings(max_examples=25)
@pytest.mark.parametrize(
    "tokenizer",
    [ByteTokenizer(), BPE, WORDPIECE, FALLBACK, PREFIXED],
    ids=["bytes", "bpe", "wordpiece", "byte-fallback", "prefixed"],
)
def test_streamed_pieces_join_to_the_decoded_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """For any ids at all, valid text or not."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=150))
    stream = StreamDecoder(tokenizer)
    assert "".join(stream.push(i) for i in ids) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [WORDPIECE, FALLBACK, PREFIXED], ids=["wordpiece", "byte-fallback", "prefixed"])
def test_the_work_for_a_streamed_id_does_not_grow(tokenizer: HFTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokenizer.token_bytes is None
    text = "abc, don't cab. aé 日 bca... " * 60
    ids = tokenizer.encode(text)
    whole, decode, decoded = tokenizer.decode(ids), tokenizer.decode, 0

    def counted(some: list[int]) -> str:
        nonlocal decoded
        decoded += len(some)
        return decode(some)

    monkeypatch.setattr(tokenizer, "decode", counted)
    stream, pieces, most = StreamDecoder(tokenizer), [], 0
    for i in ids:
        decoded = 0
        pieces.append(stream.push(i))
        most = max(most, decoded)
    assert "".join(pieces) + stream.flush() == whole
    assert len(ids) > 1000
    assert most <= 120


@given(ANY_TEXT)
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_a_stream_never_splits_a_character(tokenizer: Tokenizer, text: str) -> None:
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(i) for i in tokenizer.encode(text)]
    assert stream.flush() == ""
    assert all(piece == "" or piece in text for piece in pieces)
    assert "".join(pieces) == text


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(10), BPE, WORDPIECE])
def test_saved_and_loaded_it_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.eos_id == tokenizer.eos_id
        assert loaded.vocab_size == tokenizer.vocab_size
        assert loaded.encode("abc, don't") == tokenizer.encode("abc, don't")
        assert loaded.fingerprint == tokenizer.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    BPE.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(RunError, match=r"tokenizer\.json"):
            WORDPIECE.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == BPE.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def from_configuration(path: Path) -> Tokenizer:
    return build_tokenizer(TextOptions(tokenizer=FileOptions(path=str(path))))


@pytest.mark.parametrize("load", [load_tokenizer, from_configuration])
@pytest.mark.slow
def test_a_vocabulary_of_the_size_of_gpt2_loads(load: Callable[[Path], Tokenizer], tmp_path: Path) -> None:
    gpt2().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (50257, 50256)
    ids = tokenizer.encode(TEXT)
    assert max(ids) >= 256
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.byte_lengths is not None
    assert tokenizer.byte_lengths.shape == (50257,)
    assert tokenizer.byte_lengths[ids].sum() == len(TEXT.encode())
    assert np.bincount(tokenizer.byte_lengths).tolist() == [0, 256, 50_000, *[0] * 10, 1]
    assert tokenizer.encode("a<|endoftext|>b")[1] == 50256


@pytest.mark.parametrize("load", [load_tokenizer, from_configuration])
def test_a_vocabulary_of_the_size_of_bert_loads(load: Callable[[Path], Tokenizer], tmp_path: Path) -> None:
    bert().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (30522, 102)
    assert tokenizer.byte_lengths is None
    # Nothing is put around a text, and case is lost.
    assert tokenizer.decode(tokenizer.encode("Tests, and more.")) == "tests, and more."


def test_the_file_of_a_hugging_face_tokenizer_stays_its_own(tmp_path: Path) -> None:
    BPE.save(tmp_path)
    assert Backend.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() == BPE.vocab_size


def test_wordpiece_has_no_byte_lengths_and_ends_with_sep() -> None:
    assert WORDPIECE.byte_lengths is None
    assert WORDPIECE.eos_id == PIECES.index("[SEP]")
    assert WORDPIECE.encode("ab cab") == [PIECES.index(p) for p in ("a", "##b", "c", "##a", "##b")]


def test_truncation_in_the_file_is_switched_off(tmp_path: Path) -> None:
    backend = Backend.from_str(BPE.to_json())
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "t.json"))
    assert load_tokenizer(tmp_path / "t.json").encode(TEXT) == BPE.encode(TEXT)


def test_byte_lengths_are_refused_where_encoding_changes_text() -> None:
    backend = Backend.from_str(BPE.to_json())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert HFTokenizer(backend).byte_lengths is None
    backend = Backend.from_str(BPE.to_json())
    backend.normalizer = normalizers.NFC()
    assert HFTokenizer(backend).byte_lengths is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no tokenizer at"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1, 2]", "not a tokenizer"),
        (b'{"hello": 1}', "not a tokenizer"),
        (b'{"type": "glissando-bytes", "eos_id": 300}', "not a byte"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


def test_a_tokenizer_without_an_end_token_names_those_that_are_known(tmp_path: Path) -> None:
    spec = json.loads(WORDPIECE.to_json())
    vocabulary = {key.replace("[SEP]", "[STOP]"): i for key, i in spec["model"]["vocab"].items()}
    spec["model"]["vocab"] = vocabulary
    (tmp_path / "t.json").write_text(json.dumps(spec))
    with pytest.raises(DataError, match=r"no token that ends a document, which is one of .*\[SEP\].*: rename its own"):
        load_tokenizer(tmp_path / "t.json")


def test_half_a_surrogate_pair_and_a_wrong_end_are_user_errors() -> None:
    for tokenizer in (ByteTokenizer(), BPE):
        with pytest.raises(DataError, match="character 1"):
            tokenizer.encode("a\ud800")
    with pytest.raises(ConfigError, match="not a byte"):
        ByteTokenizer(256)


def test_a_token_added_as_text_of_stand_ins_takes_away_byte_lengths() -> None:
    """It would be decoded as other bytes than it stands for: "é" is the stand-in of one byte, and two bytes of text."""
    backend = Backend.from_str(BPE.to_json())
    backend.add_tokens(["plain", "日本"])
    assert HFTokenizer(backend).byte_lengths is not None
    backend.add_tokens(["é"])
    assert HFTokenizer(backend).byte_lengths is None
