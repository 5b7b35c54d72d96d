"""Where a model's bits go: its parts add up, and are what they are called."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from glissando.data.stories.corpus import StoriesCorpus
from glissando.data.stories.stories import generate, story_bits
from glissando.data.tokenizers import NumberTokenizer, train_bpe
from glissando.evaluation.scoring import score
from glissando.model import LanguageModel
from research import where_bits_go


def spans(text: str) -> dict[str, list[str]]:
    """Spans by kind: a first byte and the rest behind it."""
    found: dict[str, list[str]] = defaultdict(list)
    for letter, kind in zip(text, where_bits_go.kinds_of(text), strict=True):
        name, _, part = kind.partition(", ")
        if part == "first byte":
            found[name].append(letter)
        elif part == "rest":
            found[name][-1] += letter
    return found


def test_names_and_facts_again_stood_before():
    for index in range(20):
        text = generate(0, "valid", index).text
        kinds = spans(text)
        assert {"a name", "a name again", "a fact"} <= set(kinds)
        assert len(kinds["a name"]) == len(set(kinds["a name"]))
        assert set(kinds["a name again"]) <= set(kinds["a name"])
        assert all(text.count(name) > 1 for name in kinds["a name again"])
        assert set(kinds["a pronoun"]) <= {
            f(w) for w in ["he", "she", "him", "her", "his", "himself", "herself"] for f in (str, str.title)
        }


def test_the_parts_add_up():
    """The floor's parts to the stories' exact bits, those of a model without knowledge to 8 a byte."""
    model = LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1}).eval()
    with torch.no_grad():
        model.embedding.weight.zero_()
    kinds, floor, (spent,) = where_bits_go.measure([model], where_bits_go.stories(3))
    texts = [generate(0, "valid", index).text for index in range(3)]
    assert kinds.total() == sum(map(len, texts))
    assert floor.total() == pytest.approx(sum(map(story_bits, texts)))
    for kind, count in kinds.items():
        assert spent[kind] == pytest.approx(8 * count, rel=1e-5)


def test_the_bits_of_a_token_count_at_the_first_of_its_bytes_that_has_a_kind():
    name, rest, other = "a name, first byte", "a name, rest", where_bits_go.OTHER
    kinds = [other, name, rest, rest, other, other, name]
    assert where_bits_go.kinds_of_tokens(kinds, [3, 1, 2, 1]) == [name, rest, other, name]
    assert where_bits_go.kinds_of_tokens(kinds, [1] * 7) == kinds


def test_mistakes(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["where_bits_go", "--stories", "0"])
    with pytest.raises(SystemExit):
        where_bits_go.main()
    assert "--stories: must be a whole number of at least 1, got 0" in capsys.readouterr().err
    model = LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1}, vocab_size=9)
    model.tokenizer = NumberTokenizer(9)
    with pytest.raises(SystemExit, match="do not stand for bytes of a text"):
        where_bits_go.measure([model], where_bits_go.stories(1))


def test_a_model_of_longer_tokens_pays_in_all_what_evaluation_says():
    text = "".join(generate(0, "train", index).text for index in range(4))
    model = LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1}, vocab_size=300).eval()
    model.tokenizer = train_bpe(iter([text]), 300)
    kinds, _, (spent,) = where_bits_go.measure([model], where_bits_go.stories(3))
    corpus = StoriesCorpus(model.tokenizer, seq_len=64, batch_size=1, valid_rows=3)
    assert spent.total() / kinds.total() == pytest.approx(score(model, corpus.batches("valid")).bits_per_byte, rel=1e-5)
