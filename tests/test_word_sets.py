"""P(word set | prompt): against the closed forms of a model whose probabilities are known, and the verb with it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import configuration

from glissando.cli import main
from glissando.data.stories import StoriesCorpus
from glissando.data.tokenizers import ByteTokenizer, HFTokenizer, train_bpe
from glissando.errors import ConfigError
from glissando.evaluation.steering import Dials, Sweep, WordSet, read_word_sets, trial, word_rows, word_sweep
from glissando.model import LanguageModel
from glissando.training.fit import train

U = (-1.0, 0.0, 1.0)
FLOW = {"kind": "flow", "layers": 0, "n_steps": 1, "control": ["mood", "speech"]}
PROMPTS = ["The day was", "It was so ", "Oh"]  # of different length; a space at the end is none of the word's
GOOD, BAD = WordSet("good", ["good", "great day", "glad"]), WordSet("bad", ["bad", "sad"])


class Markov(LanguageModel):
    """p(next | last, u) = softmax(table[last] + u * tilt): a model whose probabilities are known."""

    def forward(self, ids: torch.Tensor, *_: Any, control: torch.Tensor | None = None, **__: Any) -> Any:  # type: ignore[override]
        u = 0.0 if control is None else control[:, :1, None]
        return self.table[ids] + u * self.tilt, None


def markov() -> Markov:
    model = Markov.from_config({"hidden_size": 16, "depth": FLOW}).eval()
    draw = torch.Generator().manual_seed(0)
    model.table, model.tilt = torch.randn(256, 256, generator=draw).double(), torch.randn(256, generator=draw).double()
    model.tokenizer = ByteTokenizer(10)
    return model


def expected(model: Markov, prompt: str, words: tuple[str, ...], u: float) -> float:
    """The sum over the words of the product over their bytes, the first of which is a space."""
    total = 0.0
    for word in words:
        last, p = prompt.rstrip().encode()[-1], 1.0
        for byte in f" {word}".encode():
            logits = model.table[last].numpy() + u * model.tilt.numpy()
            last, p = byte, p * math.exp(logits[byte]) / np.exp(logits).sum()
        total += p
    return total


def dials_of(model: LanguageModel, prompts: list[str] = PROMPTS) -> Dials:
    corpus = StoriesCorpus(ByteTokenizer(10), seq_len=64, batch_size=2, valid_rows=2, labelled=True)
    return Dials(model, trial(corpus, prompts=prompts, max_tokens=4))


def swept() -> tuple[Markov, Sweep]:
    model = markov()
    return model, word_sweep(dials_of(model), "mood", (GOOD, BAD), U)


def test_the_probabilities_are_those_of_the_closed_form():
    model, found = swept()
    for index, each in enumerate((GOOD, BAD)):
        exact = [[expected(model, prompt, tuple(each.words), u) for prompt in PROMPTS] for u in U]
        assert found.probabilities[index] == pytest.approx(np.array(exact), rel=1e-5)
    first, second = found.probabilities
    assert found.labels == pytest.approx((first - second) / (first + second))
    figures = found.as_dict()
    good, _ = figures["sets"]
    assert good["probability"] == pytest.approx(first.mean(1))
    assert figures["success_at_+1"] == (first[2] > second[2]).mean()


def test_the_other_dial_stands_at_0():
    """The model's logits follow the first control alone: turning the second changes nothing."""
    found = word_sweep(dials_of(markov()), "speech", (GOOD, BAD), U)
    assert all((each == each[1:2]).all() for each in found.probabilities)


def test_a_word_that_certainly_follows_has_probability_1():
    model = markov()
    for last, byte in zip(b"e glad", b" glad.", strict=True):
        model.table[last, byte] = 60.0
    model.tilt.zero_()
    found = word_sweep(dials_of(model, ["the", "one"]), "mood", (WordSet("good", ["glad"]), BAD), U)
    assert found.probabilities[0] == pytest.approx(np.ones((3, 2)))
    assert found.success(1.0) == (2, 2)
    assert found.success(-1.0) == (0, 2)


def test_words_are_tokens_behind_the_prompts():
    bpe = train_bpe(iter(["It was so good, and it was so bad. A good day."] * 9), 300)
    words = ["good", "bad day"]
    for row, word in zip(word_rows(bpe, ["It was so", "A "], words), words * 2, strict=True):
        scored = [token for token in row.targets if token != -100]
        assert bpe.decode(scored) == f" {word}"
        assert [*row.ids, scored[-1]][-len(scored) :] == scored
        assert row.ids[0] == bpe.eos_id
    assert len(scored) < len(" bad day")


def pieces() -> HFTokenizer:
    """Whole words of a fixed list, [UNK] for all others."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["[UNK]", "</s>", "the", "good", "bad"]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return HFTokenizer(backend)


def test_words_that_overlap_or_cannot_be_encoded_are_refused():
    for words in (["good", "bad", "good"], ["good", "bad", "goodness"], ["go", "bad", "good"]):
        with pytest.raises(ConfigError, match=r"overlap: what begins with 'good\w*' begins with 'go"):
            word_rows(ByteTokenizer(10), ["the"], words)
    assert [row.targets[-1] for row in word_rows(pieces(), ["the"], ["good", "bad"])] == [3, 4]
    with pytest.raises(ConfigError, match=r"'great' cannot be encoded: the tokenizer makes '\[UNK\]' of it"):
        word_rows(pieces(), ["the"], ["great"])

    class Joining(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [1] if text == "the good" else super().encode(text)

    with pytest.raises(ConfigError, match="'good' cannot be encoded after 'the'"):
        word_rows(Joining(10), ["the"], ["good"])


def files(folder: Path, **sets: str) -> list[str]:
    for name, text in sets.items():
        (folder / f"{name}.txt").write_text(text)
    return [str(folder / f"{name}.txt") for name in sets]


def test_word_sets_are_read_from_two_files(tmp_path: Path):
    paths = files(tmp_path, good="good\n\n very good \n", bad="bad", empty=" \n")
    assert read_word_sets(paths[:2]) == (WordSet("good", ["good", "very good"]), WordSet("bad", ["bad"]))
    for wrong, message in (
        (paths[:1], "two files"),
        (paths, "two files"),
        ([paths[0], paths[2]], r"empty\.txt is empty"),
        ([paths[0], "none.txt"], r"cannot read none\.txt"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_word_sets(wrong)


def labelled_run(folder: Path) -> Path:
    lines = [{"text": f"It was {('bad', 'good')[i % 2]}, number {i}.", "control": [i % 2, 0]} for i in range(80)]
    (folder / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    jsonl = {"path": str(folder / "own.jsonl"), "control_names": ["mood", "speech"]}
    data = {"data": {"kind": "jsonl", "seq_len": 48, "batch_size": 2, **jsonl}}
    train(configuration(folder, data, {"model.depth": FLOW, "training": {"steps": 2}}), folder / "run")
    return folder / "run"


def test_a_dial_of_any_labelled_text_is_judged_by_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, paths = labelled_run(tmp_path), files(tmp_path, good="good\nfine", bad="bad")
    prompts = files(tmp_path, prompts="It was a\nA day is\nThis is")
    command = ["steer", str(run), "--values", "[-1, 0, 1]", "--dials", "mood", "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "JsonlCorpus has no oracle" in capsys.readouterr().err
    assert main([*command, "--prompts", *prompts, "--words", paths[0], paths[0]]) == 2
    assert "overlap" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*command, "--prompts", *prompts, "--words", *paths]) == 0
    figures = json.loads((tmp_path / "out" / "steering.json").read_text())
    assert figures["dials"] == []
    (words,) = figures["words"]
    assert (words["dial"], words["prompts"], len(words["bits_per_byte"])) == ("mood", 3, 3)
    assert [each["name"] for each in words["sets"]] == ["good", "bad"]
    assert 0 < words["sets"][0]["probability"][0] < 1
    assert (tmp_path / "out" / "mood-words.png").read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    assert "P(bad)" in printed
    assert "no texts are written" in printed
