"""GPT-2's vocabulary by name: fetched once, checked by its digests, the same ids as OpenAI's own program."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from glissando.cli import main
from glissando.data import tokenizers
from glissando.data.corpora import CORPORA, TOKENIZERS, BpeOptions, FileOptions, Gpt2Options, build_tokenizer
from glissando.data.tokenizers import END_OF_TEXT, HFTokenizer, train_bpe
from glissando.errors import DataError, UnknownNameError

TEXT = "Once upon a time there was a café; it's naïve 日本語.\n\n  They'll end. " * 3


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a small vocabulary in the two files' format, in the place of the published ones."""
    folder = tmp_path / "served"
    folder.mkdir()
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    symbols = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    merges = [" ".join(pair) for pair in json.loads(train_bpe(iter([TEXT]), 320).to_json())["model"]["merges"]]
    tokens = [*symbols, *(merge.replace(" ", "") for merge in merges), END_OF_TEXT]
    (folder / "encoder.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    monkeypatch.setattr(tokenizers, "GPT2_URL", folder.as_uri())
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in tokenizers.GPT2_SHA256}
    monkeypatch.setattr(tokenizers, "GPT2_SHA256", digests)
    return folder


def by_name() -> HFTokenizer:
    tokenizer = build_tokenizer(CORPORA.read({"tokenizer": "gpt2"}))
    assert isinstance(tokenizer, HFTokenizer)
    return tokenizer


def test_it_is_fetched_once_and_says_what_openais_program_says(served: Path) -> None:
    load = pytest.importorskip("tiktoken.load")
    core = pytest.importorskip("tiktoken.core")
    ranks = load.data_gym_to_mergeable_bpe_ranks(str(served / "vocab.bpe"), str(served / "encoder.json"))
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    expected = core.Encoding("tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)})
    tokenizer = by_name()
    assert tokenizer.encode(TEXT) == expected.encode(TEXT)
    assert tokenizer.encode(f"a{END_OF_TEXT}b") == expected.encode(f"a{END_OF_TEXT}b", allowed_special="all")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (expected.n_vocab, len(ranks))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.byte_lengths is not None
    for file in served.iterdir():
        file.unlink()
    assert by_name().fingerprint == tokenizer.fingerprint


def test_the_digests_are_those_that_openai_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    public = pytest.importorskip("tiktoken_ext.openai_public")
    monkeypatch.setattr(public, "data_gym_to_mergeable_bpe_ranks", dict)
    pinned = public.gpt2()["mergeable_ranks"]
    assert {
        "encoder.json": pinned["encoder_json_hash"],
        "vocab.bpe": pinned["vocab_bpe_hash"],
    } == tokenizers.GPT2_SHA256
    files = [f"{tokenizers.GPT2_URL}/{name}" for name in tokenizers.GPT2_SHA256]
    assert files == [pinned["encoder_json_file"], pinned["vocab_bpe_file"]]


def test_another_file_is_refused_and_a_changed_one_fetched_again(served: Path, cache: Path) -> None:
    whole = (served / "vocab.bpe").read_bytes()
    (served / "vocab.bpe").write_bytes(whole[:-5])
    with pytest.raises(DataError, match=r"vocab\.bpe is not the file expected: its SHA-256 is [0-9a-f]{64}"):
        by_name()
    assert not (cache / "gpt2" / "vocab.bpe").exists()
    (served / "vocab.bpe").write_bytes(whole)
    by_name()
    (cache / "gpt2" / "vocab.bpe").write_bytes(whole[:-5])
    by_name()
    assert (cache / "gpt2" / "vocab.bpe").read_bytes() == whole


def test_without_a_network_it_says_where_to_put_what(served: Path, cache: Path) -> None:
    kept = {file.name: file.read_bytes() for file in served.iterdir()}
    for file in served.iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"cannot fetch .*--data\.tokenizer path/to/tokenizer\.json") as caught:
        by_name()
    assert str(cache / "gpt2" / "encoder.json") in str(caught.value)
    for name, content in kept.items():  # by hand, as it says
        (cache / "gpt2" / name).write_bytes(content)
    assert by_name().eos == END_OF_TEXT


def test_a_text_stands_for_a_kind_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.json"
    for text, meant in (
        ("gpt2", Gpt2Options()),
        ("bpe", BpeOptions()),
        (str(path), FileOptions(path=str(path))),
    ):
        assert CORPORA.read({"tokenizer": text}).tokenizer == meant
        for arguments in (["--data.tokenizer", text], [f"--data.tokenizer={text}"]):
            assert main(["train", "--training.steps", "1", "--print_config", *arguments]) == 0
            assert f"kind: {TOKENIZERS.kind_of(meant)}" in capsys.readouterr().out
    with pytest.raises(UnknownNameError, match=r"'gpt3'. Did you mean 'gpt2'"):
        TOKENIZERS.read("gpt3")
    assert main(["train", "--training.steps", "1", "--print_config", "--data.tokenizer", "gpt3"]) == 2
    assert "unknown tokenizer 'gpt3'" in capsys.readouterr().err


def test_a_text_takes_the_place_of_a_files_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "options.yaml").write_text("data: {tokenizer: {kind: bpe, vocab_size: 300}}")
    command = ["train", "--config", str(tmp_path / "options.yaml"), "--training.steps", "1", "--print_config"]
    assert main([*command, "--data.tokenizer", "gpt2"]) == 0
    assert "kind: gpt2" in capsys.readouterr().out
