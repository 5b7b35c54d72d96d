"""The stories as batches: rows that are functions of the seed, whole held-out stories, exact floors, prompts."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from glissando.data.base import IGNORED, Shard
from glissando.data.stories.corpus import StoriesCorpus
from glissando.data.stories.oracle import oracle, word_mood
from glissando.data.stories.parser import ParseError
from glissando.data.stories.stories import entropy_floor, generate, parse, story_bits
from glissando.data.tokenizers import ByteTokenizer
from glissando.errors import UnknownNameError


class Bytes(ByteTokenizer):
    """A line feed ends a document."""

    def __init__(self):
        super().__init__(10)


@pytest.fixture(scope="module")
def corpus():
    return StoriesCorpus(Bytes(), seq_len=512, batch_size=4, seed=7, valid_rows=18)


@pytest.mark.parametrize(("seq_len", "at_least"), [(64, 1), (2000, 2)])
def test_training_rows_are_whole_stories(seq_len, at_least):
    corpus = StoriesCorpus(Bytes(), seq_len=seq_len, batch_size=4, seed=7)
    batch = next(corpus.batches("train"))
    assert batch.control is None
    assert torch.equal(batch.mask, batch.targets != IGNORED)
    texts = []
    for ids, targets in zip(batch.ids, batch.targets, strict=True):
        row = Bytes().decode(targets[targets != IGNORED].tolist())
        assert Bytes().decode(ids[: len(row)].tolist()) == "\n" + row[:-1]
        stories = row.splitlines(keepends=True)
        assert len(stories) >= at_least
        assert len(stories) == 1 or len(row) <= seq_len
        texts += stories
    assert batch.n_bytes == sum(map(len, texts))
    assert batch.floor_bits == pytest.approx(sum(story_bits(text) for text in texts), abs=1e-9)


def test_held_out_rows_are_whole_stories_with_their_exact_floor(corpus):
    batches = list(corpus.batches("valid"))
    assert [len(batch.ids) for batch in batches] == [4, 4, 4, 4, 2]
    texts = []
    for batch in batches:
        assert batch.ids.shape[1] % 64 == 0
        assert torch.equal(batch.mask, batch.targets != IGNORED)
        assert batch.n_bytes == int(batch.mask.sum())
        rows = [Bytes().decode(row[row != IGNORED].tolist()) for row in batch.targets]
        assert batch.floor_bits == pytest.approx(sum(story_bits(text) for text in rows), abs=1e-9)
        assert batch.control is None
        for text, ids in zip(rows, batch.ids, strict=True):
            assert Bytes().decode(ids[: len(text)].tolist()) == "\n" + text[:-1]
        texts += rows
    assert sorted(texts) == sorted(generate(0, "valid", index).text for index in range(18))
    assert [len(text) for text in texts] == sorted(len(text) for text in texts)
    assert len(list(corpus.batches("valid", start=3))) == 2


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_order_laws(cut, labelled, order_laws):
    order_laws(StoriesCorpus(Bytes(), seq_len=256, batch_size=4, seed=7, valid_rows=18, cut=cut, labelled=labelled))


def test_the_floor_of_shards_adds_up(corpus):
    for split in ("train", "valid"):
        shards = [corpus.batches(split, start=1, shard=Shard(rank, 4)) for rank in range(4)]
        floors = [sum(next(shard).floor_bits for shard in shards) for _ in range(4)]
        assert floors == pytest.approx([batch.floor_bits for batch in islice(corpus.batches(split, start=1), 4)])


def test_texts_are_whole_stories(corpus):
    assert [parse(text).plot for text in islice(corpus.texts(), 3)]
    assert len(list(corpus.texts("valid"))) == 18


def test_held_out_stories_do_not_depend_on_the_seed(corpus):
    other = StoriesCorpus(Bytes(), batch_size=4, seed=8, valid_rows=18)
    ours, theirs = next(corpus.batches("valid")), next(other.batches("valid"))
    assert torch.equal(ours.targets, theirs.targets)
    assert not torch.equal(next(corpus.batches("train")).ids[:, :400], next(other.batches("train")).ids[:, :400])


def test_labelled_held_out_rows_carry_what_the_grammar_says_of_them():
    corpus = StoriesCorpus(Bytes(), seq_len=64, batch_size=3, valid_rows=5, labelled=True)
    for batch in corpus.batches("valid"):
        for targets, control in zip(batch.targets, batch.control, strict=True):
            text = Bytes().decode(targets[targets != IGNORED].tolist())
            assert control.tolist() == list(parse(text).labels.values())


def test_labelled_training_rows_are_one_story_with_its_labels():
    corpus = StoriesCorpus(Bytes(), seq_len=64, batch_size=3, labelled=True)
    batch = next(corpus.batches("train"))
    assert batch.control.shape == (3, len(corpus.control_names))
    for targets, control in zip(batch.targets, batch.control, strict=True):
        labels = oracle(Bytes().decode(targets[targets != IGNORED].tolist()))
        assert control.tolist() == [labels[name] for name in corpus.control_names]


def test_prompts_are_held_out_and_decide_no_label(corpus):
    prompts = corpus.prompts(20)
    assert len(set(prompts)) > 15
    assert corpus.prompts(20) == prompts != corpus.prompts(20, seed=1)
    for prompt in prompts:
        assert prompt.endswith(".")
        assert word_mood(prompt) is None
        with pytest.raises(ParseError) as caught:
            parse(prompt)
        assert caught.value.position == len(prompt)
        assert not {"mood", "speech"} & set(caught.value.slots)


def test_the_corpus_states_its_floor(corpus):
    assert corpus.entropy_floor == corpus.describe()["entropy_floor"] == entropy_floor()


def test_an_unknown_split_is_refused_at_once(corpus):
    with pytest.raises(UnknownNameError, match="Did you mean 'valid'"):
        corpus.batches("valido")
