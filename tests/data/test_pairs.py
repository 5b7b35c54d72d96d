"""Pairs: the rule, disjoint splits, what is scored, finite sets, and the published files."""

from __future__ import annotations

import base64
import random
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glissando.data.base import IGNORED, Batch, Corpus
from glissando.data.pairs import Pair, PairFileCorpus, ShiftCorpus, read_pairs, shift
from glissando.data.tokenizers import train_bpe
from glissando.errors import ConfigError, DataError
from research.fixed_pairs import FixedPairs

PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)


def train(corpus: Corpus, n: int) -> list[Batch]:
    return list(islice(corpus.batches("train"), n))


def rows(batch: Batch) -> list[Pair]:
    """The pairs that a batch of bytes holds, read from what is scored and what is not."""
    found = []
    for ids, targets in zip(batch.ids, batch.targets, strict=True):
        scored = targets != IGNORED
        question = bytes(ids[: int(scored.nonzero()[0]) + 1].tolist()).decode()
        answer = bytes(targets[scored].tolist()).decode()
        assert question[0] == "\n"
        assert question[-1] == "\t"
        assert answer[-1] == "\n"
        found.append(Pair(question[1:-1], answer[:-1]))
    return found


@given(PRINTABLE, st.integers(-200, 200))
def test_shift_is_a_rotation_of_the_printable_characters(text: str, by: int) -> None:
    assert shift(shift(text, by), -by) == text
    assert shift(text, 95) == text
    assert all(32 <= ord(c) <= 126 for c in shift(text, by))


def test_shift_wraps_from_tilde_to_space() -> None:
    assert shift("#~C a}") == "$ D!b~"
    assert shift(" ", -1) == "~"


@pytest.mark.parametrize("fixed", [{}, {"train_pairs": 50}, {"train_pairs": 50, "rule": "random"}])
def test_order_laws(fixed: dict[str, Any], order_laws: Callable[[Corpus], None]) -> None:
    cls = FixedPairs if fixed else ShiftCorpus
    order_laws(cls(batch_size=8, valid_rows=21, seed=5, **fixed))


def test_pairs_obey_the_rule_and_only_the_answer_is_scored() -> None:
    for batch in train(ShiftCorpus(seed=1), 4):
        pairs = rows(batch)
        assert all(pair.output == shift(pair.input) for pair in pairs)
        assert batch.n_bytes == sum(len(pair.output) + 1 for pair in pairs)
        assert batch.n_bytes == int((batch.targets != IGNORED).sum())
        assert batch.mask is not None
        assert (batch.ids[~batch.mask] == 0).all()
        assert (batch.targets[~batch.mask] == IGNORED).all()
        assert [len(p.input) + len(p.output) + 2 for p in pairs] == batch.mask.sum(dim=1).tolist()


def test_lengths_and_characters_are_uniform() -> None:
    inputs = [pair.input for batch in train(ShiftCorpus(batch_size=500), 20) for pair in rows(batch)]
    lengths = Counter(map(len, inputs))
    assert set(lengths) == set(range(4, 13))
    assert sum((n - 10_000 / 9) ** 2 / (10_000 / 9) for n in lengths.values()) < 40  # 8 degrees of freedom
    characters = Counter("".join(inputs))
    expected = sum(characters.values()) / 95
    assert sum((n - expected) ** 2 / expected for n in characters.values()) < 170  # 94 degrees of freedom
    assert len(set(inputs)) > 9990


@pytest.mark.parametrize(("length", "batch_size"), [(2, 1500), (12, 100)])
def test_training_and_held_out_inputs_are_disjoint_for_every_seed(length: int, batch_size: int) -> None:
    """With two characters both sides meet nearly all that they can."""
    trained: set[str] = set()
    for seed in range(3):
        corpus = ShiftCorpus(length=length, batch_size=batch_size, seed=seed, valid_rows=100)
        trained |= {pair.input for batch in train(corpus, 4) for pair in rows(batch)}
    held_out = {pair.input for seed in range(3) for pair in corpus.held_out(400, seed)}
    assert not trained & held_out
    if length == 2:
        assert 0.7 < len(trained) / 95**2 / 0.9 < 1.05


def test_held_out_pairs_are_distinct_repeatable_and_vary_with_their_seed() -> None:
    corpus, other = ShiftCorpus(seed=1), FixedPairs(seed=2, train_pairs=10)
    assert corpus.held_out(300) == other.held_out(300)
    assert len({pair.input for pair in corpus.held_out(300)}) == 300
    assert corpus.held_out(300)[:10] == corpus.held_out(10)
    assert corpus.held_out(5) != corpus.held_out(5, seed=1)
    assert corpus.prompts(5) == [f"{pair.input}\t" for pair in corpus.held_out(5)]


def test_a_finite_set_is_visited_once_an_epoch_in_a_new_order() -> None:
    corpus = FixedPairs(train_pairs=24, batch_size=8, rule="random", seed=3)
    epochs = [[p for batch in train(corpus, 9)[3 * e : 3 * e + 3] for p in rows(batch)] for e in range(3)]
    assert all(sorted(epoch) == sorted(corpus.train_set) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert len({pair.input for pair in corpus.train_set}) == 24


def test_random_answers_say_nothing_of_the_input() -> None:
    corpus = FixedPairs(train_pairs=3000, rule="random")
    assert corpus.train_set == FixedPairs(train_pairs=3000, rule="random").train_set
    assert corpus.train_set != FixedPairs(train_pairs=3000, rule="random", seed=1).train_set
    assert corpus.entropy_floor is None
    assert ShiftCorpus().entropy_floor == 0.0
    pairs = corpus.train_set
    assert all(len(pair.input) == len(pair.output) for pair in pairs)
    moves = Counter((ord(o) - ord(i)) % 95 for p in pairs for i, o in zip(p.input, p.output, strict=True))
    expected = sum(moves.values()) / 95
    assert sum((moves[m] - expected) ** 2 / expected for m in range(95)) < 170


def test_a_tokenizer_of_words_works_too() -> None:
    corpus = ShiftCorpus(train_bpe(iter(["abc def"]), 300), batch_size=4)
    batch = train(corpus, 1)[0]
    assert batch.n_bytes == sum(
        len(corpus.tokenizer.decode(row[row != IGNORED].tolist()).removesuffix("<|endoftext|>")) + 1
        for row in batch.targets
    )


def test_a_short_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"seq_len 20; raise data\.seq_len"):
        train(ShiftCorpus(seq_len=20), 1)


def test_more_pairs_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="fewer than 90 different rows"):
        FixedPairs(length=1, train_pairs=90, valid_rows=3)


def encoded(*lines: str | bytes) -> bytes:
    return b"\n".join(base64.b64encode(x.encode()) if isinstance(x, str) else x for x in lines) + b"\n"


MIXED = encoded("ab\tbc", b"***", b"gA==", "no tab", "é\tü\ta", "a\tb\nc", "a\tb\0", b"", b"QQ", b"A" * 70_000, "x\ty")


def test_each_bad_line_is_counted_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "p.b64").write_bytes(MIXED)
    pairs, problems = read_pairs(tmp_path / "p.b64")
    assert pairs == {1: Pair("ab", "bc"), 5: Pair("é", "ü\ta"), 11: Pair("x", "y")}
    assert [line for line, _ in problems.first] == [2, 3, 4, 6, 7, 9, 10]
    kinds = ["not base64", "UTF-8 at byte 0", "no tab", "newline", "NUL", "not base64", "longer than"]
    assert all(kind in what for kind, (_, what) in zip(kinds, problems.first, strict=True))


def test_only_the_first_problems_are_kept_and_one_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "p.b64").write_bytes(encoded(*["bad"] * 100))
    _, problems = read_pairs(tmp_path / "p.b64")
    assert problems.count == 100
    assert len(problems.first) == 20
    assert len(caplog.records) == 1
    assert str(problems).startswith("100 bad lines")


def test_a_pair_file_is_a_corpus_with_disjoint_splits(tmp_path: Path, order_laws: Callable[[Corpus], None]) -> None:
    rng = random.Random(1)
    inputs = ["".join(rng.choices("abcdef", k=rng.randint(3, 6))) for _ in range(60)]
    (tmp_path / "p.b64").write_bytes(encoded(*[f"{text}\t{shift(text)}" for text in inputs]))
    corpus = PairFileCorpus(path=tmp_path / "p.b64", batch_size=4, seed=2)
    order_laws(corpus)
    valid = [pair for batch in corpus.batches("valid") for pair in rows(batch)]
    assert len(valid) == 6
    assert not {p.input for p in corpus.train_set} & {p.input for p in valid}
    assert corpus.held_out(100) == corpus.held_out(6)
    assert sorted(corpus.held_out(6)) == sorted(valid)


def test_a_pair_file_says_what_it_left_out(tmp_path: Path) -> None:
    good = [f"{text}\t{text}" for text in "abcdefghijklmnop"]
    (tmp_path / "p.b64").write_bytes(encoded(*good, "bad"))
    (tmp_path / "v.b64").write_bytes(encoded("x\ty", "worse"))
    corpus = PairFileCorpus(path=tmp_path / "p.b64", valid_path=tmp_path / "v.b64")
    assert corpus.problems is not None
    for part in ("p.b64 (line 17: no tab", "v.b64 (line 2: no tab"):
        assert part in corpus.problems
    (tmp_path / "p.b64").write_bytes(encoded(*good))
    assert PairFileCorpus(path=tmp_path / "p.b64").problems is None


def test_a_file_without_pairs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.b64").write_bytes(encoded("bad", "worse"))
    with pytest.raises(DataError, match=r"no usable pair to train on: 0 pairs.*line 1: no tab"):
        PairFileCorpus(path=tmp_path / "p.b64")
    (tmp_path / "q.b64").write_bytes(encoded("a\tb"))
    with pytest.raises(
        DataError, match=r"no usable pair to train on: 1 pairs to train on, of which 1 are also held out"
    ):
        PairFileCorpus(path=tmp_path / "q.b64", valid_path=tmp_path / "q.b64")
    with pytest.raises(DataError, match="no file"):
        PairFileCorpus(path=None)


@pytest.mark.data
@pytest.mark.parametrize(("name", "counts"), [("train", (159, 8, 5)), ("valid", (43, 7, 5))])
def test_the_published_files(sample_data: Path, name: str, counts: tuple[int, int, int]) -> None:
    pairs, problems = read_pairs(sample_data / f"pairs_{name}.b64")
    follow = sum(pair.output == shift(pair.input) for pair in pairs.values())
    assert (len(pairs) + problems.count, len(pairs), follow) == counts


@pytest.mark.data
def test_the_published_files_make_a_corpus(sample_data: Path) -> None:
    corpus = PairFileCorpus(
        path=sample_data / "pairs_train.b64", valid_path=sample_data / "pairs_valid.b64", batch_size=4
    )
    assert sorted(p for batch in train(corpus, 2) for p in rows(batch)) == sorted(corpus.train_set)
    assert torch.cat([b.ids for b in corpus.batches("valid")][:1]).shape[0] == 4


def test_a_byte_order_mark_is_no_part_of_the_first_pair(tmp_path: Path) -> None:
    path = tmp_path / "p.b64"
    path.write_bytes(b"\xef\xbb\xbf" + encoded("a\tb", "c\td"))
    assert read_pairs(path)[0] == {1: Pair("a", "b"), 2: Pair("c", "d")}


def test_whole_answers_have_room_for_characters_of_several_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from glissando.evaluation import pairs as scored
    from glissando.model import LanguageModel

    model = LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1})
    asked = []

    def perfect(model: object, prompts: list[str], *, max_tokens: int, temperature: float) -> list[str]:
        asked.append(max_tokens)
        return ["日本" if prompt == "a\t" else "" for prompt in prompts]

    monkeypatch.setattr(scored, "generate", perfect)
    found = scored.exact_match_rate(model, [Pair("a", "日本"), Pair("b", "")])
    assert (found["exact_match"], found["characters_right"]) == (1.0, 1.0)
    assert asked == [len("日本".encode()) + 1]
    assert scored.exact_match_rate(model, [Pair("b", "")])["characters_right"] is None
