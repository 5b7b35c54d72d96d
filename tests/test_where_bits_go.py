"""Where a model's bits go: its parts add up, and are what they are called."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from glissando.data.stories.corpus import StoriesCorpus
from glissando.data.stories.stories import generate, story_bits
from glissando.data.tokenizers import train_bpe
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
    pieces = where_bits_go.rows("Once upon a time there was Lily. " * 4, 2, 40)
    kinds, floor, (spent,) = where_bits_go.measure([model], pieces)
    assert kinds.total() == 80
    assert floor is None
    assert spent.total() == pytest.approx(640, rel=1e-5)


def test_the_bits_of_a_token_count_at_the_first_of_its_bytes_that_has_a_kind():
    name, rest, other = "a name, first byte", "a name, rest", where_bits_go.OTHER
    kinds = [other, name, rest, rest, other, other, name]
    assert where_bits_go.kinds_of_tokens(kinds, [3, 1, 2, 1]) == [name, rest, other, name]
    assert where_bits_go.kinds_of_tokens(kinds, [1] * 7) == kinds


def test_a_model_of_longer_tokens_pays_in_all_what_evaluation_says():
    text = "".join(generate(0, "train", index).text for index in range(4))
    model = LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1}, vocab_size=300).eval()
    model.tokenizer = train_bpe(iter([text]), 300)
    kinds, _, (spent,) = where_bits_go.measure([model], where_bits_go.stories(3))
    corpus = StoriesCorpus(model.tokenizer, seq_len=64, batch_size=1, valid_rows=3)
    assert spent.total() / kinds.total() == pytest.approx(score(model, corpus.batches("valid")).bits_per_byte, rel=1e-5)


def test_a_text_has_names_and_words_by_their_capitals():
    text = "Once Lily met Émile. The dog, Émile said, saw Lily. She met the café's owner and Lily again; once."
    found = where_bits_go.words(text)
    data = text.encode()
    assert all(data[at:].startswith(word.encode()) for at, word, _ in found)
    assert {word for _, word, name in found if name} == {"Lily", "Émile"}
    assert {word for _, word, name in found if not name} == {"Once", "said", "café", "owner", "again", "once"}


def test_the_rows_of_a_text_follow_it_byte_by_byte():
    text = "Ah, Lily saw the moon. Lily saw the Möön moon, Lily.\n" * 3
    pieces = list(where_bits_go.rows(text, 4, 36))
    assert b"".join(piece.data for piece in pieces) == text.encode()[1 : 1 + 4 * 36]
    assert [piece.before for piece in pieces] == [text.encode()[36 * row] for row in range(4)]
    first = pieces[0].kinds
    assert first[3:7] == ["a name, first byte", *["a name, rest"] * 3]
    assert first[16:20] == ["a word, first byte", *["a word, rest"] * 3]
    assert first[22:26] == ["a name again, first byte", *["a name again, rest"] * 3]
    assert set(first[:3] + first[7:16] + first[20:22] + first[26:35]) == {"all else"}
    assert first[35] == "a name, first byte"
    # The next row begins within "Möön": a word cut off there belongs to neither row.
    assert pieces[1].data.decode().startswith("öön moon, Lily.")
    assert pieces[1].kinds[:6] == ["all else"] * 6
    assert pieces[1].kinds[6:10] == ["a word, first byte", *["a word, rest"] * 3]
    assert pieces[1].kinds[12:16] == ["a name, first byte", *["a name, rest"] * 3]
    assert pieces[1].kinds[35] == "a word again, first byte"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "4"], "--rows is of a text"),
        (["--text", "{text}", "--stories", "4"], "--stories is of the stories"),
        (["--text", "{text}", "--rows", "0"], "--rows must be at least 1, got 0"),
        (["--text", "{text}"], "256 rows of 512 bytes need 131,073 bytes, the text has 22: try a smaller --length"),
        (["--text", "{text}", "--length", "4"], "the text has 22: try --rows 5"),
        (["--text", "{text}x"], "cannot be read as UTF-8"),
    ],
)
def test_mistakes(arguments, message, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Lily saw the moon, so.")
    monkeypatch.setattr("sys.argv", ["where_bits_go", *(a.format(text=text) for a in arguments)])
    with pytest.raises(SystemExit) as error:
        where_bits_go.main()
    assert message in f"{error.value.code} {capsys.readouterr().err}"
