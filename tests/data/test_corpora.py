"""Corpora by name: options that match what the classes take, and data sets through a stand-in library."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from glissando.config import from_dict
from glissando.data.base import Corpus
from glissando.data.corpora import (
    CORPORA,
    TOKENIZERS,
    BpeOptions,
    DataOptions,
    FileOptions,
    JsonlOptions,
    PairsOptions,
    ShiftOptions,
    TextOptions,
    _limited,
    about,
    build_corpus,
)
from glissando.data.hub import HubCorpus, HubSplit, fetch
from glissando.data.tokenizers import ByteTokenizer, HFTokenizer
from glissando.errors import ConfigError, DataError

SHARED = {"tokenizer", "seq_len", "batch_size", "seed", "self"}
PROSE = "Once there was a cat. It sat.\n" * 100


@pytest.mark.parametrize("name", CORPORA)
def test_keywords_of_a_class_are_its_options(name: str) -> None:
    """One declaration of each option; a misspelt keyword is an error that names the nearest."""
    with pytest.raises(ConfigError, match=r"unknown option 'batch_sise'\. Did you mean 'batch_size'"):
        CORPORA[name](ByteTokenizer(), batch_sise=8)
    for size in {"seq_len", "batch_size", "valid_rows"} & {field.name for field in fields(CORPORA.options[name])}:
        with pytest.raises(ConfigError, match=f"{size}: expected a number greater than 0, got 0"):
            CORPORA[name](ByteTokenizer(), **{size: 0})


@pytest.mark.parametrize("name", CORPORA)
def test_each_is_described_in_a_line(name: str) -> None:
    assert 10 < len(about(name)) < 110


def test_the_configuration_imports_nothing_heavy() -> None:
    code = "import sys, glissando.data.corpora; print(*(name in sys.modules for name in ('numpy', 'torch')))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]


@pytest.fixture
def configs(tmp_path: Path) -> dict[str, DataOptions]:
    text = tmp_path / "t.txt"
    text.write_text(PROSE)
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"text": "Once there was a cat. It sat."}\n' * 200)
    pairs = tmp_path / "p.b64"
    pairs.write_text("YQli\nYglj\nYwlk\n")
    small = {"seq_len": 32, "batch_size": 4}
    return {
        "text": TextOptions(**small, path=str(text)),
        "jsonl": JsonlOptions(**small, path=str(lines), valid_fraction=0.25),
        "shift": ShiftOptions(**small, valid_rows=8),
        "pairs": PairsOptions(**small, path=str(pairs)),
    }


@pytest.mark.parametrize(("name", "eos"), [("text", 0), ("jsonl", 0), ("shift", 10), ("pairs", 10)])
def test_each_is_built_with_its_own_end(name: str, eos: int, configs: dict[str, DataOptions]) -> None:
    corpus = build_corpus(configs[name])
    assert corpus.tokenizer.eos_id == eos
    assert (corpus.seq_len, corpus.batch_size) == (32, 4)
    assert next(corpus.batches("train")).ids.shape[0] == 4
    assert corpus.prompts(2) == corpus.prompts(2)
    assert build_corpus(configs[name], ByteTokenizer(7)).tokenizer.eos_id == 7


@pytest.mark.parametrize("name", ["text", "jsonl", "pairs"])
def test_a_vocabulary_is_trained_on_the_corpus(
    name: str, configs: dict[str, DataOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glissando.data.corpora.TOKENIZER_TEXT_BYTES", 5000)
    config = configs[name]
    config.tokenizer = BpeOptions(vocab_size=280)
    corpus = build_corpus(config)
    assert isinstance(corpus.tokenizer, HFTokenizer)
    assert next(corpus.batches("train")).n_bytes > 0
    assert build_corpus(config).tokenizer.fingerprint == corpus.tokenizer.fingerprint


def test_the_text_for_a_vocabulary_is_limited_in_bytes() -> None:
    assert list(_limited(iter(["日", "本"] * 5), 6)) == ["日", "本"]


def test_a_tokenizer_from_a_file(configs: dict[str, DataOptions], tmp_path: Path) -> None:
    ByteTokenizer(3).save(tmp_path / "tok.json")
    config = configs["text"]
    config.tokenizer = FileOptions(path=str(tmp_path / "tok.json"))
    assert build_corpus(config).tokenizer.eos_id == 3
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.path is missing"):
        from_dict(CORPORA.section(), {"tokenizer": "file"}, "data")


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ({"path": "tok.json"}, "tokenizer file, and the kind is bytes"),
        ({"kind": "bpe", "path": "tok.json"}, "tokenizer file, and the kind is bpe"),
        ({"vocab_size": 300}, "tokenizer bpe, and the kind is bytes"),
    ],
)
def test_options_of_another_kind_of_tokenizer_are_refused(given: dict[str, Any], kinds: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown option 'data\.tokenizer\.\w+'\. It is one of {kinds}"):
        from_dict(CORPORA.section(), {"tokenizer": given}, "data")


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"data: unknown corpus 'storys'\. Did you mean 'stories'"):
        from_dict(CORPORA.section(), {"kind": "storys"}, "data")
    with pytest.raises(ConfigError, match=r"data\.tokenizer: unknown tokenizer 'byte'\. Did you mean 'bytes'"):
        from_dict(CORPORA.section(), {"tokenizer": {"kind": "byte"}}, "data")


def test_a_kind_may_stand_for_its_section() -> None:
    config = from_dict(CORPORA.section(), {"kind": "shift", "tokenizer": "bpe"}, "data")
    assert config == ShiftOptions(tokenizer=BpeOptions())
    assert TOKENIZERS.kind_of(config.tokenizer) == "bpe"


def test_stories_are_the_default() -> None:
    corpus = build_corpus(from_dict(CORPORA.section(), {}, "data"))
    assert corpus.tokenizer.eos_id == 10
    assert next(corpus.batches("train")).ids.shape[0] == 32


class FakeHub:
    """Stands in for the `datasets` package."""

    def __init__(self, rows: dict[str, list[dict[str, Any]]], error: Exception | None = None) -> None:
        self.rows, self.error, self.calls, self.served = rows, error, list[Any](), 0
        self.break_at: int | None = None

    def load_dataset(self, name: str, subset: str | None, **options: Any) -> Iterator[dict[str, Any]]:
        self.calls.append((name, subset, options))
        if self.error is not None:
            raise self.error
        (split,) = options.get("data_files", {options["split"]: options["split"]}).values()
        return self._serve(split)

    def _serve(self, split: str) -> Iterator[dict[str, Any]]:
        for number, row in enumerate(self.rows[split]):
            if number == self.break_at:
                raise ConnectionResetError("the line went dead")
            self.served += 1
            yield row


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    stories = [{"text": f"Story {i}. A café\0 there."} for i in range(60)] + [{"text": ""}]
    fake = FakeHub({"train": stories, "validation": stories[:7]})
    monkeypatch.setitem(sys.modules, "datasets", fake)  # type: ignore[arg-type]
    return fake


OPTIONS: dict[str, Any] = {"seq_len": 16, "batch_size": 4}


def test_a_data_set_by_name_is_fetched_once(hub: FakeHub, order_laws: Callable[[Corpus], None]) -> None:
    corpus = HubCorpus(**OPTIONS)
    assert {call[0] for call in hub.calls} == {"roneneldan/TinyStories"}
    assert all(call[2]["streaming"] for call in hub.calls)
    order_laws(corpus)
    expected = "".join(f"Story {i}. A café there.\n<|endoftext|>\n" for i in range(7))
    assert "".join(corpus.texts("valid")) == expected
    assert sum(batch.n_bytes for batch in corpus.batches("valid")) == len(expected.encode())
    HubCorpus(**OPTIONS)
    assert len(hub.calls) == 2


def test_a_fetch_that_breaks_off_is_never_taken_for_whole(hub: FakeHub, cache: Path) -> None:
    hub.break_at = 20
    with pytest.raises(DataError, match=r"the line went dead.*--data\.kind text --data\.path"):
        fetch(HubSplit("tinystories", "train"))
    assert list((cache / "hub").glob("*/*")) == []
    hub.break_at = None
    assert fetch(HubSplit("tinystories", "train")).read_text().count("<|endoftext|>") == 60


def test_a_text_without_its_record_or_changed_is_fetched_again(hub: FakeHub, cache: Path) -> None:
    path = fetch(HubSplit("tinystories", "train"))
    content = path.read_bytes()
    for damage in (content[:-5], content.replace(b"Story 9", b"Story X"), b""):
        path.write_bytes(damage)
        assert fetch(HubSplit("tinystories", "train")).read_bytes() == content
    path.with_name("manifest.json").unlink()
    path.write_bytes(content[:100])
    assert fetch(HubSplit("tinystories", "train")).read_bytes() == content
    path.with_name("manifest.json").write_text("{")
    assert fetch(HubSplit("tinystories", "train")).read_bytes() == content
    assert len(hub.calls) == 6


def test_only_as_much_as_is_requested_is_fetched(hub: FakeHub) -> None:
    path = fetch(HubSplit("owner/name", "train", max_bytes=200))
    assert 200 <= path.stat().st_size < 260
    assert hub.served < 10
    assert hub.calls[0][0] == "owner/name"
    assert fetch(HubSplit("owner/name", "train")) != path


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("unreachable"), r"ConnectionError: unreachable\); check both names and the network"),
        (FileNotFoundError("no such data set"), "could not read split 'train'.*check both names"),
        (ValueError("Bad split"), "could not read split 'train'.*Bad split"),
    ],
)
def test_failures_of_the_library_are_explained(hub: FakeHub, error: Exception, message: str) -> None:
    hub.error = error
    with pytest.raises(DataError, match=message):
        fetch(HubSplit("owner/name", "train"))


def test_a_missing_field_or_package_says_what_to_do(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"no text field 'story', only text; .*text_field"):
        fetch(HubSplit("owner/name", "train", text_field="story"))
    hub.rows["empty"] = [{"text": ""}]
    with pytest.raises(DataError, match="has no text"):
        fetch(HubSplit("owner/name", "empty"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install -e '\.\[hf\]'"):
        fetch(HubSplit("owner/name", "train"))


def test_without_a_held_out_split_the_end_is_held_out(hub: FakeHub) -> None:
    corpus = HubCorpus(valid_split=None, **OPTIONS)
    assert corpus.path == corpus.valid_path
    assert len(hub.calls) == 1


FILE = "\nOne caf\u00e9.\n\nMore of it.\n<|endoftext|>\n\nTwo.\n<|endoftext|>\n"


def test_a_file_of_a_data_set_is_its_own_text(hub: FakeHub, order_laws: Callable[[Corpus], None]) -> None:
    lines = [{"text": line} for line in (FILE * 9).split("\n")[:-1]]
    hub.rows = {"V2-train.txt": lines, "V2-valid.txt": lines[:8]}
    corpus = HubCorpus(train_split="V2-train.txt", valid_split="V2-valid.txt", **OPTIONS)
    files = [call[2]["data_files"] for call in hub.calls]
    assert files == [{"train": "V2-valid.txt"}, {"train": "V2-train.txt"}]
    assert ("".join(corpus.texts("train")), "".join(corpus.texts("valid"))) == (FILE * 9, FILE)
    order_laws(corpus)
    HubCorpus(train_split="V2-train.txt", valid_split="V2-valid.txt", **OPTIONS)
    assert len(hub.calls) == 2
    alone = HubCorpus(train_split="V2-train.txt", **OPTIONS)
    assert alone.path == alone.valid_path  # its end is held out, and no split of another text
    assert fetch(HubSplit("owner/name", "V2-train.txt", max_bytes=20)).read_text() == FILE[:24]
    with pytest.raises(ConfigError, match=r"valid_split test is a split and data\.train_split V2-train\.txt a file"):
        HubCorpus(train_split="V2-train.txt", valid_split="test", **OPTIONS)


def test_other_files_of_a_data_set_hold_rows(hub: FakeHub) -> None:
    hub.rows = {"part-0.jsonl": [{"text": "One."}, {"text": ""}, {"text": "Two."}]}
    text = fetch(HubSplit("owner/name", "part-0.jsonl")).read_text()
    assert text == "One.\n<|endoftext|>\nTwo.\n<|endoftext|>\n"
    hub.error = FileNotFoundError("no such file")
    with pytest.raises(DataError, match=r"could not read file 'part-1\.jsonl' of the data set"):
        fetch(HubSplit("owner/name", "part-1.jsonl"))


@pytest.mark.filterwarnings("ignore")
def test_the_library_itself_reads_a_file_of_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is a data set too, which needs no network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("datasets")
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "V2-train.txt").write_text(FILE, encoding="utf-8")
    (tmp_path / "owner" / "V1-train.txt").write_text("another text")
    name = str(tmp_path / "owner")
    assert fetch(HubSplit(name, "V2-train.txt")).read_text(encoding="utf-8") == FILE
    with pytest.raises(DataError, match=r"could not read file 'V3-train\.txt'"):
        fetch(HubSplit(name, "V3-train.txt"))
