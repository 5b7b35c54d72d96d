"""Memory tasks: the order laws, answers worked out again from what is read, disjoint splits, and chance as it is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow import slow_where

from glissando.config import from_dict
from glissando.data.base import IGNORED, Batch, Corpus, Shard
from glissando.data.corpora import CORPORA, BpeOptions, GeneratedOptions, build_corpus
from glissando.data.probes import (
    CopyCorpus,
    InductionCorpus,
    ParityCorpus,
    RecallCorpus,
    SelectiveCopyCorpus,
    TaskCorpus,
    TrackingCorpus,
    arrangements,
)
from glissando.data.tokenizers import HFTokenizer, Tokenizer, train_bpe
from glissando.errors import ConfigError, UnknownNameError
from glissando.evaluation.scoring import Score, score
from glissando.loading import load
from glissando.training.config import RunConfig
from glissando.training.fit import train

TASKS: dict[str, type[TaskCorpus]] = {
    "recall": RecallCorpus,
    "parity": ParityCorpus,
    "tracking": TrackingCorpus,
    "copy": CopyCorpus,
    "selective_copy": SelectiveCopyCorpus,
    "induction": InductionCorpus,
}
AUTOMATA = ("parity", "tracking")


def make(task: str, **options: Any) -> TaskCorpus:
    return TASKS[task](**{"valid_rows": 32} | options)


def rows(*batches: Batch) -> list[tuple[str, str]]:
    """What is read, and what is to be given after each character of it: a space where nothing is scored."""
    found = []
    for batch in batches:
        mask = torch.ones_like(batch.ids, dtype=torch.bool) if batch.mask is None else batch.mask
        for ids, targets, real in zip(batch.ids, batch.targets, mask, strict=True):
            assert ids[0] == 10
            assert targets[0] == IGNORED
            assert not (ids[~real] != 0).any()
            assert (targets[~real] == IGNORED).all()
            said = ["" if t == IGNORED else chr(t) for t in targets[real].tolist()]
            found.append((bytes(ids[real].tolist()[1:]).decode(), "".join(c or " " for c in said[1:])))
    return found


def trained(corpus: Corpus, n: int) -> list[tuple[str, str]]:
    return rows(*islice(corpus.batches("train"), n))


def held_out(corpus: Corpus) -> list[tuple[str, str]]:
    return rows(*corpus.batches("valid"))


def chi2(counts: Counter[Any], kinds: int) -> float:
    expected = counts.total() / kinds
    assert len(counts) <= kinds
    return sum((n - expected) ** 2 / expected for n in counts.values()) + expected * (kinds - len(counts))


# ---------------------------------------------------------------------- what every corpus obeys


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("recall", {"pairs": 5}),
        ("parity", {"length": 9}),
        ("tracking", {"items": 5, "length": 12}),
        ("copy", {"length": 7}),
        ("selective_copy", {"length": 20}),
        ("induction", {"length": 9}),
    ],
)
def test_order_laws(task: str, options: dict[str, Any], order_laws: Callable[[Corpus], None]) -> None:
    order_laws(make(task, batch_size=8, valid_rows=21, seed=5, **options))


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_functions_of_the_seed_and_held_out_ones_are_not(task: str) -> None:
    one, same, other = (make(task, seed=seed, batch_size=16, valid_rows=20) for seed in (1, 1, 2))
    assert trained(one, 3) == trained(same, 3) != trained(other, 3)
    assert held_out(one) == held_out(other)
    assert one.prompts(5) == other.prompts(5) != one.prompts(5, seed=1)
    assert list(one.texts("valid")) == list(other.texts("valid"))


@pytest.mark.parametrize("task", TASKS)
def test_held_out_rows_are_distinct_sorted_and_keep_their_place_as_more_are_asked_for(task: str) -> None:
    few, many = held_out(make(task, valid_rows=30)), held_out(make(task, valid_rows=120))
    assert len(set(few)) == 30
    assert len(set(many)) == 120
    assert set(few) < set(many)
    assert [len(read) for read, _ in many] == sorted(len(read) for read, _ in many)


@pytest.mark.parametrize(
    ("task", "options", "space"),
    [
        ("recall", {"pairs": 1}, 47 * 47),
        ("parity", {"length": 8}, 2**9 - 2),
        ("tracking", {"length": 5}, (3**6 - 3) // 2),
        ("induction", {"length": 4}, 2 * 15**2),
    ],
)
@pytest.mark.slow
def test_training_and_held_out_rows_are_disjoint_for_every_seed(task: str, options: Any, space: int) -> None:
    """So few rows that both sides meet nearly all that they can; prompts are whole rows here."""
    seen: set[str] = set()
    for seed in range(2):
        corpus = make(task, batch_size=3000, seed=seed, valid_rows=space // 20, **options)
        seen |= {read for read, _ in trained(corpus, 3)}
        kept = {read for read, _ in held_out(corpus)} | set(corpus.prompts(200, seed=seed))
        assert len(kept) >= space // 20
        assert not seen & kept
    assert 0.85 < len(seen) / space < 0.95


@pytest.mark.parametrize("task", TASKS)
def test_bytes_floor_and_padding(task: str) -> None:
    corpus = make(task, batch_size=8, valid_rows=20)
    assert corpus.entropy_floor == corpus.describe()["entropy_floor"] == 0.0
    for batch in [*islice(corpus.batches("train"), 3), *corpus.batches("valid")]:
        assert batch.n_bytes == int((batch.targets != IGNORED).sum()) > 0
        assert batch.floor_bits == 0.0
        assert batch.mask is None or batch.mask.any(dim=0).all()  # as wide as its longest row
        assert batch.ids.shape[1] <= corpus.seq_len
    for part in make(task, batch_size=8, valid_rows=1).batches("valid", shard=Shard(1, 2)):
        assert part.n_bytes == part.floor_bits == 0


@pytest.mark.parametrize("task", TASKS)
def test_they_are_generated_corpora_with_samples(task: str) -> None:
    assert issubclass(CORPORA.options[task], GeneratedOptions)
    corpus = build_corpus(CORPORA.read(task))
    assert isinstance(corpus, CORPORA[task])
    assert corpus.tokenizer.eos_id == 10
    assert (corpus.seq_len, corpus.batch_size) == (256, 32)
    shown, counted = list(islice(corpus.texts(), 60)), trained(corpus, 2)
    for text, (read, said) in zip(shown, counted, strict=False):
        assert text == f"{read}\n{said.replace(' ', '') if task == 'recall' else said.strip()}\n"
    assert len(list(corpus.texts("valid"))) == 256
    with pytest.raises(UnknownNameError, match="Did you mean 'valid'"):
        corpus.batches("valido")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- answers, worked out again


@pytest.mark.parametrize("pairs", [1, 6, 47])
def test_recall_scores_the_values_of_the_keys_asked_for(pairs: int) -> None:
    corpus = RecallCorpus(pairs=pairs, seq_len=200, batch_size=16, valid_rows=10)
    for read, said in trained(corpus, 3) + held_out(corpus):
        first = 2 * pairs
        keys, values, asked = read[0:first:2], read[1:first:2], read[first::2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert len(set(asked)) == len(asked) == pairs
        assert set(asked) <= set(keys)
        assert all("!" <= key <= "O" for key in keys)
        assert all("P" <= value <= "~" for value in values)
        bound = dict(zip(keys, values, strict=True))
        answers = "".join(bound[key] for key in asked)
        assert said[first::2] == answers
        assert not (said[:first] + said[first + 1 :: 2]).strip()
        assert read[first + 1 :: 2] == answers[:-1]


def test_recall_is_even_over_keys_values_places_and_order() -> None:
    found = trained(RecallCorpus(pairs=4, batch_size=1000, valid_rows=1), 2)
    assert chi2(Counter(read[0] for read, _ in found), 47) < 90
    assert chi2(Counter(read[7] for read, _ in found), 47) < 90
    orders = Counter(tuple(read[0:8:2].index(key) for key in read[8::2]) for read, _ in found)
    assert chi2(orders, 24) < 60


@pytest.mark.parametrize("length", [1, 2, 100])
def test_copy_says_the_symbols_behind_the_blank(length: int) -> None:
    corpus = CopyCorpus(length=length, seq_len=200, batch_size=16, valid_rows=10)
    for read, said in trained(corpus, 3) + held_out(corpus):
        memory, blank, asked = read[:10], read[10:-10], read[-10:]
        assert set(memory) <= set("ABCDEFGH")
        assert blank == "." * (length - 1)
        assert asked == ":" + "." * 9
        assert said == " " * (len(read) - 10) + memory
        assert len(read) + 1 == 20 + length


@pytest.mark.parametrize("length", [16, 17, 128])
def test_selective_copy_says_what_is_no_noise(length: int) -> None:
    corpus = SelectiveCopyCorpus(length=length, batch_size=16, valid_rows=5)
    for read, said in trained(corpus, 3) + held_out(corpus):
        memory = "".join(c for c in read[:length] if c != ".")
        assert len(memory) == 16
        assert set(memory) <= set("ABCDEFGHIJKLMN")
        assert read[length:] == ":" * 16
        assert said == " " * length + memory


def test_symbols_of_selective_copy_lie_anywhere() -> None:
    found = trained(SelectiveCopyCorpus(length=18, batch_size=1000, valid_rows=1), 2)
    noise = Counter(tuple(i for i, c in enumerate(read[:18]) if c == ".") for read, _ in found)
    assert chi2(noise, 18 * 17 // 2) < 220
    assert chi2(Counter("".join(said.strip() for _, said in found)), 14) < 45


@pytest.mark.parametrize("length", [3, 40])
def test_induction_says_what_stood_behind_the_mark(length: int) -> None:
    corpus = InductionCorpus(length=length, batch_size=64, valid_rows=1)
    for read, said in trained(corpus, 3) + held_out(corpus):
        before, answer_and_rest, end = read.split(":")
        assert end == ""
        assert set(before + answer_and_rest) <= set("ABCDEFGHIJKLMNO")
        assert said == " " * (length - 1) + answer_and_rest[0]


def test_the_mark_and_the_answer_of_induction_are_even() -> None:
    found = trained(InductionCorpus(length=12, batch_size=1000, valid_rows=1), 2)
    assert chi2(Counter(read.index(":") for read, _ in found), 10) < 35
    assert chi2(Counter(said[-1] for _, said in found), 15) < 45


@pytest.mark.parametrize(("task", "kinds"), [("copy", 8), ("selective_copy", 14), ("induction", 15)])
def test_chance_of_copying_is_any_symbol(task: str, kinds: int) -> None:
    found = make(task).chance()
    assert found == {"chance_accuracy": 1 / kinds, "chance_bits": pytest.approx(math.log2(kinds))}
    asked = Counter("".join(said.replace(" ", "") for _, said in trained(make(task), 10)))
    assert chi2(asked, kinds) < 50


def test_parity_counts_the_ones() -> None:
    corpus = ParityCorpus(batch_size=200, valid_rows=50)
    for read, said in trained(corpus, 3) + held_out(corpus):
        assert said == "".join("eo"[read[: i + 1].count("1") % 2] for i in range(len(read)))


@pytest.mark.parametrize("items", [2, 3, 5])
def test_tracking_moves_the_things_as_described(items: int) -> None:
    corpus = TrackingCorpus(items=items, batch_size=100, valid_rows=50)
    legend = corpus.describe()["states"]
    assert isinstance(legend, dict)
    assert len(set(legend.values())) == len(legend) == math.factorial(items)
    assert not set(legend) & set("ksr\n\0")
    for read, said in trained(corpus, 2) + held_out(corpus):
        things = list("12345"[:items])
        for letter, state in zip(read, said, strict=True):
            if letter == "s":
                things[0], things[1] = things[1], things[0]
            elif letter == "r":
                things.append(things.pop(0))
            assert "".join(things) == legend[state]


@pytest.mark.parametrize("items", [2, 3, 4, 5])
def test_moves_generate_the_symmetric_group(items: int) -> None:
    machine = arrangements(items)
    size = math.factorial(items)
    for letter, order in (("k", 1), ("s", 2), ("r", items)):
        step = machine.step[machine.letters.index(letter)]
        assert sorted(step) == list(range(size))
        state, orders = np.arange(size), []
        for _ in range(items):
            state = step[state]
            orders.append((state == np.arange(size)).all())
        assert orders.index(True) + 1 == order
    reached = {0}
    while len(grown := reached | {int(s) for r in reached for s in machine.step[:, r]}) > len(reached):
        reached = grown
    assert len(reached) == size


@pytest.mark.parametrize("task", AUTOMATA)
def test_no_window_of_a_few_characters_has_the_answer(task: str) -> None:
    """A state that could be read would make this a task of the last two characters."""
    follows: dict[str, Counter[str]] = {}
    for read, said in trained(make(task, batch_size=2000, valid_rows=1), 1):
        assert not set(read) & set(said)
        for end in range(12, len(read)):
            follows.setdefault(read[end - 3 : end + 1], Counter())[said[end]] += 1
    kinds = {"parity": 2, "tracking": 6}[task]
    assert all(max(counts.values()) / counts.total() < 1.5 / kinds for counts in follows.values())


@pytest.mark.parametrize("task", AUTOMATA)
def test_lengths_and_letters_are_even(task: str) -> None:
    found = [read for read, _ in trained(make(task, batch_size=1000, length=9, valid_rows=9), 2)]
    assert chi2(Counter(map(len, found)), 9) < 40
    letters = 2 if task == "parity" else 3
    assert chi2(Counter("".join(found)), letters) < 20
    assert chi2(Counter(read[:2] for read in found if len(read) > 1), letters**2) < 40


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_beginnings_that_lead_to_an_answer(task: str) -> None:
    corpus = make(task)
    known = held_out(make(task, valid_rows=60))
    for prompt in corpus.prompts(20):
        assert any(read.startswith(prompt) and said[len(prompt) - 1] != " " for read, said in known)


# ---------------------------------------------------------------------- chance


def test_chance_of_recall_is_a_guess_among_what_was_not_said() -> None:
    assert RecallCorpus(pairs=1, valid_rows=9).chance()["chance_accuracy"] == pytest.approx(1 / 47)
    found = RecallCorpus(pairs=3).chance()
    assert found["chance_accuracy"] == pytest.approx((1 / 47 + 1 / 46 + 1 / 45) / 3)
    assert found["chance_bits"] == pytest.approx(math.log2(47 * 46 * 45) / 3)
    assert found["unbound_accuracy"] == pytest.approx((1 / 3 + 1 / 2 + 1) / 3)
    assert found["unbound_bits"] == pytest.approx(math.log2(3 * 2) / 3)


def test_chance_of_parity_is_a_coin() -> None:
    assert ParityCorpus().chance() == {"chance_accuracy": 0.5, "chance_bits": 1.0}


@pytest.mark.parametrize("items", [2, 3, 5])
def test_chance_of_tracking_is_the_best_guess_without_the_moves(items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against every sequence of moves there is."""
    machine = arrangements(items)
    words = np.array([[ord(c) for c in word] for word in product("ksr", repeat=7)], np.uint8)
    said = machine.run(words)
    for position, share in enumerate(machine.unread(7)):
        counts = Counter(said[:, position].tolist())
        expected = [counts[ord(state)] / len(words) for state in machine.states]
        np.testing.assert_allclose(share, expected, atol=1e-12)
    monkeypatch.setattr("glissando.data.probes.lengths_of", lambda rows: np.full(len(rows), 7))
    found = TrackingCorpus(items=items, length=7, valid_rows=9).chance()
    shares = [np.array(list(Counter(column.tolist()).values())) / len(words) for column in said.T]
    assert found["chance_accuracy"] == pytest.approx(np.mean([share.max() for share in shares]))
    assert found["chance_bits"] == pytest.approx(np.mean([-(share * np.log2(share)).sum() for share in shares]))


def test_long_walks_forget_where_they_began() -> None:
    found = TrackingCorpus(items=4, length=999, seq_len=1000, valid_rows=9).chance()
    assert found["chance_accuracy"] == pytest.approx(1 / 24, abs=0.01)
    assert found["chance_bits"] == pytest.approx(math.log2(24), abs=0.05)


@pytest.mark.parametrize("task", TASKS)
def test_only_answers_count_for_accuracy_and_bits(task: str) -> None:
    """Who knows everything has accuracy 1 and 0 bits; who knows only the alphabet, of parity, half and 1 bit."""
    known, guessed = Score(), Score()
    for batch in make(task, batch_size=16, valid_rows=100).batches("valid"):
        right = torch.nn.functional.one_hot(batch.targets.clamp(min=0), 256).float()
        known.add(batch, 100 * right)
        either = torch.zeros(256)
        either[[ord("e"), ord("o")]] = 50.0
        guessed.add(batch, either.expand(*batch.ids.shape, 256))
    assert known.accuracy == 1.0
    assert known.bits_per_byte == pytest.approx(0.0, abs=1e-6)
    assert known.as_dict()["entropy_floor"] == 0.0
    assert known.as_dict()["excess"] == known.bits_per_byte
    if task == "parity":
        assert guessed.accuracy == pytest.approx(0.5, abs=0.05)
        assert guessed.bits_per_byte == pytest.approx(1.0, abs=1e-5)


# ---------------------------------------------------------------------- tokenizers, refusals, training


@pytest.mark.parametrize("task", ["recall", "tracking"])  # whose characters are the most and the oddest
def test_every_character_is_a_token_of_any_vocabulary(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glissando.data.corpora.TOKENIZER_TEXT_BYTES", 5000)
    as_bytes = CORPORA.options[task](seq_len=192, batch_size=8)
    merged = build_corpus(replace(as_bytes, tokenizer=BpeOptions(vocab_size=300)))
    assert isinstance(merged.tokenizer, HFTokenizer)
    expected, found = (next(corpus.batches("train")) for corpus in (build_corpus(as_bytes), merged))
    assert expected.n_bytes == found.n_bytes
    for target, said in zip(expected.targets.flatten().tolist(), found.targets.flatten().tolist(), strict=True):
        assert said == target == IGNORED or merged.tokenizer.decode([said]) == chr(target)
    assert next(merged.texts()) == next(build_corpus(as_bytes).texts())


class Halves(Tokenizer):
    """Two tokens a byte."""

    vocab_size, eos_id = 16, 0

    def encode(self, text: str) -> list[int]:
        return [half for byte in text.encode() for half in divmod(byte, 16)]

    def decode(self, ids: Any) -> str:
        raise NotImplementedError

    def to_json(self) -> str:
        raise NotImplementedError


def test_a_vocabulary_without_a_character_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'0' as \[3, 0\].*use data\.tokenizer\.kind bytes"):
        ParityCorpus(Halves())
    lower = train_bpe(iter(["ab"]), 257)
    lower.encode = lambda text: HFTokenizer.encode(lower, text.lower())  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"'A' as .* a token of its own"):
        RecallCorpus(lower)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("recall", {"pairs": 0}, "pairs: expected a number of at least 1, got 0"),
        ("parity", {"length": 0}, "length: expected a number greater than 0, got 0"),
        ("copy", {"length": 0}, "length: expected a number greater than 0, got 0"),
        ("parity", {"seq_len": 40}, r"needs 41 tokens, more than seq_len 40; raise data\.seq_len to 41"),
        ("tracking", {"seq_len": 40}, r"raise data\.seq_len to 41"),
        ("selective_copy", {"seq_len": 144}, r"raise data\.seq_len to 145"),
        ("recall", {"pairs": 48, "seq_len": 999}, "pairs: expected a number of at most 47, got 48"),
        ("recall", {"seq_len": 63}, r"needs 64 tokens, more than seq_len 63; raise data\.seq_len to 64"),
        ("parity", {"length": 6, "valid_rows": 100}, r"fewer than 100 different rows.*lower valid_rows, or raise"),
        ("parity", {"length": 2}, r"no held-out row was found.*raise data\.length"),
        ("tracking", {"items": 1}, "items: expected a number of at least 2, got 1"),
        ("tracking", {"items": 6}, "items: expected a number of at most 5, got 6"),
        ("copy", {"seq_len": 119}, r"needs 120 tokens, more than seq_len 119"),
        ("selective_copy", {"length": 15}, "length: expected a number of at least 16, got 15"),
        ("induction", {"length": 2}, "length: expected a number of at least 3, got 2"),
        ("induction", {"seq_len": 128}, r"raise data\.seq_len to 129"),
    ],
)
def test_senseless_options_are_refused(task: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(task, **options)


@pytest.mark.parametrize("task", slow_where(set(TASKS) - {"tracking", "induction"}, TASKS))
def test_a_model_is_trained_and_scored(task: str, tmp_path: Path) -> None:
    sizes = {"copy": {"length": 5}, "selective_copy": {"length": 20}, "induction": {"length": 20}}.get(task, {})
    values = {
        "model": {"hidden_size": 16, "depth": {"layers": 1}, "mixer": {"kind": "attention", "heads": 2}},
        "data": {"kind": task, "seq_len": 64, "batch_size": 8, "valid_rows": 12, **sizes},
        "training": {"steps": 4, "accelerator": "cpu", "log_every": 2, "sample_every": 10**6},
    }
    run = train(from_dict(RunConfig, values), tmp_path / "run")
    corpus = build_corpus(from_dict(CORPORA.section(), values["data"]))
    found = score(load(run.path), corpus.batches("valid"))
    assert found.n_targets == found.n_bytes == sum(batch.n_bytes for batch in corpus.batches("valid"))
    assert found.floor == 0.0
    assert 0 <= found.accuracy <= 1
    assert 0 < found.bits_per_byte < 9
