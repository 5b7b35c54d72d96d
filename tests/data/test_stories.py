"""The stories' laws: one derivation a text, exact information, an exact floor, labels, and data order."""

from __future__ import annotations

import hashlib
import random
import statistics
import string
import time
from collections import Counter
from itertools import pairwise
from math import fsum, log2, sqrt

import pytest

from glissando.data.stories.grammar import (
    Builder,
    Choice,
    Item,
    Pool,
    Ref,
    Switch,
    Text,
    assign,
    every_node,
    with_capitals,
)
from glissando.data.stories.lexicon import number_items
from glissando.data.stories.lexicon import pools as all_pools
from glissando.data.stories.oracle import judge, oracle, word_mood
from glissando.data.stories.parser import ParseError, Reader
from glissando.data.stories.stories import (
    PLOTS,
    entropy_floor,
    expected_bits,
    expected_bytes,
    generate,
    grammar,
    parse,
    sample_text,
    story_bits,
)
from glissando.errors import UnknownNameError
from research.stories.check import Checker, GrammarError
from research.stories.costs import CostReader, byte_costs, mentions
from research.stories.exact import Expectation

_FUNCTION_WORDS = frozenset(
    """the and one was all with some that had did for from both this will does why its out how who has have not are
    her his him she they there too very just only into upon near under beside behind over around without until been
    more than what you your can may let would never ever""".split()  # noqa: SIM905
)


def toy(template, **pools):
    """A checked grammar of one template; pools are lists of words."""
    made = {
        name: Pool(name, tuple(Item(w, with_capitals({"": w})) for w in words), tuple(1.0 for _ in words))
        for name, words in pools.items()
    }
    root = Builder(made, {}, number_items()).template(template)
    Checker().check(root, {})
    return root


@pytest.fixture(scope="module")
def stories():
    return [generate(3, "train", index) for index in range(8_000)]


# ---- the engine refuses what is ambiguous or malformed, when it is built


@pytest.mark.parametrize(
    ("template", "pools"),
    [
        ("a [cat|cats] ran", {}),
        ("[one|one two] three", {}),
        ("an [|old] owl", {}),
        ("{x=names}[{x}|{y=names}]", {"names": ["Ann", "Bob"]}),
        ("{x=names}[ {x} sat| Bob ran and {x} sat| Bob sat]", {"names": ["Ann", "Bob"]}),
        ("{x=names} saw {=others}", {"names": ["Ann", "Bob"], "others": ["fox", "fox terrier"]}),
        ("{x=names}{y=others}[{x}{y}|{y}{x}]", {"names": ["a", "ab"], "others": ["c", "d"]}),
    ],
)
def test_an_ambiguous_choice_is_refused(template, pools):
    with pytest.raises(GrammarError, match="ambiguous choice"):
        toy(template, **pools)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{cat}", "not set it"),
        ("[one{!kept=yes}|two] and {kept}", "not set it"),
        ("[one{!kept=yes}|two{!kept=no}][kept? yes=a]", r"no branch for \['no'\]"),
        ("na\u00efve", "ASCII"),
    ],
)
def test_a_malformed_grammar_is_refused(template, message):
    with pytest.raises(GrammarError, match=message):
        toy(template)


def enumerate_texts(root):
    """Every text of a small grammar with its probability: a plain walk over all choices."""
    result = Counter()

    def walk(seq, slots, text, p):
        for k, node in enumerate(seq):
            if isinstance(node, Choice | Switch):
                branches = zip(node.alternatives, node.probabilities, strict=True) if isinstance(node, Choice) else ()
                for alternative, q in branches or [(node.branches[slots[node.slot].key], 1.0)]:
                    walk(alternative + seq[k + 1 :], dict(slots), text, p * q)
                return
            if isinstance(node, Text):
                text += node.text
            elif isinstance(node, Ref):
                text += slots[node.slot].forms[node.form]
            else:
                assign(node, slots)
        assert text not in result
        result[text] = p

    walk(root, {}, "", 1.0)
    return dict(result)


TOY = """{x=names} has [two{!n=2}|three{!n=3}] nuts, {y=others} and [2%finds{!m=1} one|buys{!m=2} two]{s#n+m}: {s}.
    [s? 3=A few|4=Some [good|old]|5={^y}] for {x}. [Then{z:=x}|Or {z=others}] [s? 5={y<>z}it|3,4={z}] {z} {y}."""


def test_expectations_equal_full_enumeration():
    root = toy(TOY, names=["Ann", "Bo"], others=["cat", "zebra"])
    texts = enumerate_texts(root)
    assert fsum(texts.values()) == pytest.approx(1, abs=1e-12)
    exact = Expectation(root).run()
    assert exact.bits == pytest.approx(-fsum(p * log2(p) for p in texts.values()), abs=1e-9)
    assert exact.bytes == pytest.approx(fsum(p * len(text) for text, p in texts.items()), abs=1e-9)
    for text, p in texts.items():
        assert sum(Reader(text).read_all(root).bits) == pytest.approx(-log2(p), abs=1e-9)


def test_byte_costs_are_the_conditional_information_of_each_byte():
    root = toy(TOY, names=["Ann", "Bo"], others=["cat", "zebra"])
    texts = enumerate_texts(root)

    def mass(prefix):
        return fsum(p for text, p in texts.items() if text.startswith(prefix))

    for text in texts:
        costs = CostReader(text).read_all(root).costs
        for n, cost in enumerate(costs):
            assert cost == pytest.approx(log2(mass(text[:n]) / mass(text[: n + 1])), abs=1e-9)


def test_swaps_move_what_slots_hold():
    root = toy("{a=x} {b=y}[{a<>b}. swap|. stay] {a} {b}", x=["p"], y=["q"])
    assert set(enumerate_texts(root)) == {"p q. swap q p", "p q. stay p q"}


# ---- the stories themselves


@pytest.mark.slow
def test_the_parser_agrees_with_the_generator(stories):
    for story in stories[:4000]:
        derivation = parse(story.text)
        assert derivation.bits == pytest.approx(story.bits, abs=1e-9)
        assert (derivation.labels, derivation.plot) == (story.labels, story.plot)


def test_probabilities_sum_to_one_at_every_choice_point():
    choices = [node for node in every_node(grammar()) if isinstance(node, Choice)]
    assert len(choices) > 300
    for choice in choices:
        assert fsum(choice.probabilities) == pytest.approx(1, abs=1e-12)
        assert fsum(2**-b for b in choice.bits) == pytest.approx(1, abs=1e-12)


@pytest.mark.slow
def test_the_expectations_are_those_of_the_grammar():
    expectation = Expectation(grammar()).run()
    for key in "+0-":
        assert all(expectation.probability(name, key) == pytest.approx(1 / 3, abs=1e-9) for name in ("mood", "speech"))
    assert expected_bits() == pytest.approx(expectation.bits, rel=1e-14)
    assert expected_bytes() == pytest.approx(expectation.bytes, rel=1e-14)


def test_the_floor_agrees_with_sampling(stories):
    for exact, values in (
        (expected_bits(), [story.bits for story in stories]),
        (expected_bytes(), [len(story.text) for story in stories]),
        # Given the floor, bits - floor * bytes has mean zero: the ratio itself, without the bias of a ratio.
        (0.0, [story.bits - entropy_floor() * len(story.text) for story in stories]),
    ):
        assert abs(statistics.fmean(values) - exact) < 4 * statistics.stdev(values) / sqrt(len(values))


def test_a_false_floor_would_be_noticed(stories):
    wrong = 1.01 * expected_bytes()
    lengths = [len(story.text) for story in stories]
    assert abs(statistics.fmean(lengths) - wrong) > 4 * statistics.stdev(lengths) / sqrt(len(lengths))


def test_the_floor_is_that_of_language():
    assert 0.25 < entropy_floor() < 0.65
    assert entropy_floor() == expected_bits() / expected_bytes()


def test_the_stories_are_those_that_published_figures_were_measured_on():
    """Any change of a word or a weight changes every figure: it must be meant, and these two with it."""
    digest = hashlib.sha256("".join(generate(0, "valid", index).text for index in range(256)).encode())
    assert digest.hexdigest()[:16] == "6adcaf527aa26701"
    assert entropy_floor() == pytest.approx(0.2901128237, abs=1e-9)


def test_labels_are_drawn_with_the_stated_probability(stories):
    p = 1 / 3
    for name in ("mood", "speech"):
        counts = Counter(story.labels[name] for story in stories)
        for value in (1, 0, -1):
            assert abs(counts[value] / len(stories) - p) < 4 * sqrt(p * (1 - p) / len(stories))


@pytest.mark.slow
def test_no_story_has_two_derivations_and_none_is_long(stories):
    _, shortest, longest = Checker().check(grammar(), {})
    assert longest <= 900
    assert shortest >= 300
    for story in stories[:5000]:
        assert story.text.isascii()
        assert story.text.endswith("\n")
        assert story.text.count("\n") == 1
        assert shortest <= len(story.text) <= longest
        assert "  " not in story.text
    assert statistics.quantiles([len(story.text) for story in stories], n=50)[-1] <= 750


def test_the_stories_are_varied(stories):
    assert len(PLOTS) >= 15
    forms = (form for pool in all_pools(number_items()).values() for item in pool.items for form in item.forms.values())
    said = {word.strip(".,!?;").lower() for form in forms for word in form.split()}
    assert len({word for word in said if len(word) > 2} - _FUNCTION_WORDS) >= 300
    assert {story.plot for story in stories} == set(PLOTS)
    assert len({story.text for story in stories}) == len(stories)


def test_articles_agree_and_sentences_start_with_capitals(stories):
    for story in stories[:1500]:
        for article, noun in pairwise(story.text.replace('"', " ").split()):
            if article.lower() in ("a", "an"):
                consonant = noun[0] not in "aeiou" or noun.startswith(("one", "use", "uni"))
                expected = "a" if consonant and not noun.startswith("hour") else "an"
                assert article.lower() == expected, f"{article} {noun}"
        assert story.text[0].isupper()
        for sentence_end in (". ", "! ", "? "):
            for part in story.text.split(sentence_end)[1:]:
                assert part[0].isupper() or part[0] == '"', part[:40]


PRONOUNS = {"he", "him", "his", "self"}


def long_gaps(story):
    """Facts said again, by name, at least 200 characters after they were last said."""
    last, far = {}, set()
    for mention in mentions(story.text):
        if mention.form.lstrip("^") in PRONOUNS:
            continue
        if mention.item in last and mention.position - last[mention.item] >= 200:
            far.add(mention.item)
        last[mention.item] = mention.position
    return far


@pytest.mark.slow
def test_facts_return_after_two_hundred_characters(stories):
    by_plot = {plot: [s for s in stories if s.plot == plot][:60] for plot in PLOTS}
    for plot, sample in by_plot.items():
        assert min(len(long_gaps(story)) for story in sample) >= 2, plot


def test_quoted_facts_cost_nothing(stories):
    for story in stories[:60]:
        costs = byte_costs(story.text)
        first = {}
        for mention in mentions(story.text):
            text = mention.item.forms[mention.form]
            known = first.setdefault(mention.item, mention.position) != mention.position
            if known and mention.position - first[mention.item] > 200:
                # The choice of the sentence may end inside the first byte or two of it, never later.
                assert fsum(costs[mention.position + 2 : mention.position + len(text)]) < 2.0
        assert fsum(costs) == pytest.approx(story.bits, abs=1e-9)
        assert min(costs) >= 0


def test_corrupted_stories_are_rejected_where_they_depart(stories):
    rng = random.Random(5)
    rejected = 0
    for story in stories[:500]:
        at = rng.randrange(len(story.text))
        byte = rng.choice(string.ascii_lowercase + " .")
        corrupt = story.text[:at] + byte + story.text[at + 1 :]
        if corrupt == story.text:
            continue
        try:
            bits = story_bits(corrupt)
        except ParseError as error:
            rejected += 1
            assert error.position >= at
            assert error.expected
            assert f"at byte {error.position}" in str(error)
            assert all(not corrupt[error.position :].startswith(option) for option in error.expected)
        else:  # another story of the grammar, one letter away: it has its own information
            assert bits > 0
    assert rejected > 475


@pytest.mark.parametrize("text", ["", "\n", "Once upon a time", "Once upon a time, there was a cat."])
def test_beginnings_and_strangers_are_not_stories(text):
    with pytest.raises(ParseError, match="expected"):
        parse(text)
    assert oracle(text) is None


def test_text_after_the_end_is_not_part_of_a_story(stories):
    with pytest.raises(ParseError, match="expected 'the end of the text'"):
        parse(stories[0].text + stories[1].text)


def test_generation_is_a_pure_function_of_seed_split_and_index():
    later = generate(1, "train", 500)
    assert generate(1, "train", 500) == later
    others = [
        generate(2, "train", 500),
        generate(1, "valid", 500),
        generate(1, "test", 500),
        generate(1, "train", 501),
    ]
    assert later.text not in {other.text for other in others}
    assert sample_text(2, seed=4) == generate(4, "test", 0).text + generate(4, "test", 1).text
    with pytest.raises(UnknownNameError, match="Did you mean 'train'"):
        generate(1, "trian", 0)


def test_sampling_is_fast():
    generate(0, "train", 0)
    best = 0.0
    for trial in range(9):
        start = time.process_time()
        size = sum(len(generate(0, "train", 1000 * trial + index).text) for index in range(100))
        best = max(best, size / (time.process_time() - start))
        if best > 1e6:
            break
    assert best > 1e6


# ---- labels


def test_the_oracle_reads_the_labels_of_whole_stories(stories):
    for story in stories[:150]:
        assert oracle(story.text) == story.labels
        assert judge(story.text.rstrip("\n")) == oracle(story.text.rstrip("\n")) == story.labels


def test_the_judge_reads_the_mood_of_text_that_does_not_parse(stories):
    """Even with the sentence that decides the mood left out."""
    right = 0
    for story in stories[:200]:
        sentences = story.text.strip().split(". ")
        text = ". ".join(sentences[:1] + sentences[3:])
        assert oracle(text) is None
        mood = judge(text)["mood"]
        right += mood is not None and round(mood) == story.labels["mood"]
    assert right > 194


def test_mood_shows_at_the_beginning_the_middle_and_the_end(stories):
    thirds = [0, 0, 0]
    for story in stories[:200]:
        n = len(story.text) // 3
        for k in range(3):
            thirds[k] += word_mood(story.text[k * n : (k + 1) * n]) is not None
    assert min(thirds) > 0.8 * 200, thirds


def test_the_judge_counts_quoted_lines(stories):
    for story in stories[:150]:
        assert judge(story.text + "!")["speech"] == story.labels["speech"]


def test_the_judge_has_no_opinion_without_evidence():
    assert oracle("Tables exist") is None
    assert judge("Tables exist") == {"mood": None, "speech": None}
