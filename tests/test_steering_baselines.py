"""Steering without a dial: the vector by hand, what a hook adds, what a prefix leaves alone, how choices are made."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tolerances import assert_close

from glissando.data.base import IGNORED, Batch, Corpus
from glissando.data.stories import StoriesCorpus
from glissando.data.stories.corpus import first_sentence
from glissando.data.stories.stories import END, generate
from glissando.data.tokenizers import ByteTokenizer
from glissando.errors import ConfigError
from glissando.evaluation.rows import Row, batches_of, spread, valid_rows
from glissando.evaluation.steering import Dials, Trial, trial
from glissando.model import LanguageModel
from research.steering.activation_addition import Addition, changed, mean_differences, places
from research.steering.baselines import GRANTED, compare, matched_strength, selection_trial
from research.steering.conditional import Conditional
from research.steering.guidance import Guidance, Reader
from research.steering.prompt_prefix import KINDS, PASSAGE_BYTES, Prefix, passage, prefix_fits
from research.steering.rows import behind, labelled_texts
from research.steering_fluency import read

EOS = 0


class Letters(Corpus):
    """Texts of one letter each: a is labelled 1, b is labelled -1, c is labelled 0."""

    control_names = ("a",)

    def __init__(self, labels: str = "abc", beginnings: int = 1000) -> None:
        self.tokenizer, self.batch_size, self.seq_len = ByteTokenizer(EOS), 2, 8
        self.labels, self.beginnings = labels, beginnings

    def batches(self, split: str, **_: Any) -> Iterator[Batch]:
        letters = self.labels if split == "train" else "abcb"
        for index in range(10_000 if split == "train" else 6):
            letter = letters[index % len(letters)]
            ids = torch.tensor([[EOS, *[ord(letter)] * (4 + index % 3)]])
            control = torch.tensor([[{"a": 1.0, "b": -1.0, "c": 0.0}[letter]]])
            targets = torch.cat([ids[:, 1:], torch.tensor([[EOS]])], 1)
            yield Batch(ids, targets, targets.numel(), None, control)

    def prompts(self, n: int, *, seed: int = 0) -> list[str]:
        return [f"{i % self.beginnings}: " for i in range(n)]

    def judge(self, text: str) -> dict[str, float | None]:
        a, b = text.count("a"), text.count("b")
        return {"a": (a - b) / (a + b) if a + b else None}


def model_of(layers: int = 2, **config: Any) -> LanguageModel:
    depth = {"kind": "flow", "layers": layers, "n_steps": 2, "control": ["a"]}
    model = LanguageModel.from_config({"hidden_size": 16, "block": {"conv_width": 3}, "depth": depth, **config}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def table_of(**config: Any) -> LanguageModel:
    """A model without a depth to speak of: what it says depends on the last token alone."""
    model = model_of(layers=0, final_norm=False, **config)
    with torch.no_grad():
        model.depth.alpha.zero_()
    return model


def stories() -> StoriesCorpus:
    return StoriesCorpus(ByteTokenizer(10), seq_len=64, batch_size=3, valid_rows=12, labelled=True)


# ---------------------------------------------------------------------- activation addition


def test_the_vector_by_hand():
    """Without a depth an activation is its token's embedding, and each text is read after the end mark."""
    model = table_of()
    e = model.embedding.weight.detach().double()
    expected = (2 * e[EOS] + e[1] + e[2] + e[3]) / 5 - (e[EOS] + e[4]) / 2
    found = mean_differences(model, {1: [[1, 2], [3]], -1: [[4]]})
    assert list(found) == ["input", "flow"]
    for vector in found.values():
        assert_close(vector, expected)


def test_places_are_the_boundaries_of_the_depth():
    assert list(places(model_of(4))) == ["before.0", "before.1", "flow", "after.0", "after.1"]
    assert list(places(LanguageModel.from_config({"hidden_size": 16}))) == ["input", "output"]


@pytest.mark.parametrize("name", ["before.0", "flow", "after.0"])
def test_what_is_added_is_s_u_v_in_whole_texts_and_in_streams(name: str):
    model, ids = model_of(), torch.randint(0, 256, (2, 7))
    steering = Addition(model, name, torch.randn(16).double(), 3.0)
    with torch.no_grad():
        before, seen = model(ids)[0], []
        for u in (0.0, -0.5):
            with steering.turned(u), changed(places(model)[name], lambda x: seen.append(x) or x):
                whole = model(ids)[0]
        assert torch.equal(seen[1], seen[0] - (1.5 * steering.vector).float())
        with steering.turned(-0.5):
            state, streamed = model.init_state(2), []
            for t in range(ids.shape[1]):
                logits, state = model(ids[:, t : t + 1], state)
                streamed.append(logits)
        assert_close(torch.cat(streamed, 1), whole)
        assert (whole - before).abs().max() > 1e-3
        assert torch.equal(model(ids)[0], before)


def test_the_hook_is_removed_after_an_error_too():
    model, ids = model_of(), torch.tensor([[1, 2]])
    with torch.no_grad():
        before = model(ids)[0]
        for name in places(model):
            with pytest.raises(KeyError), Addition(model, name, torch.ones(16), 1.0).turned(1.0):
                raise KeyError
        assert torch.equal(model(ids)[0], before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.slow
def test_no_strength_costs_nothing():
    model, task = model_of(), trial(Letters(), prompts=2)
    nothing = Addition(model, "flow", torch.randn(16), 0.0)
    assert nothing.read(task, 1.0) == task.read(model)
    assert nothing.write(task, 1.0) == task.write(model)
    assert Addition(model, "flow", torch.randn(16), 5.0).read(task, 1.0) != task.read(model)


# ---------------------------------------------------------------------- conditional addition, guidance, the grammar


@torch.no_grad()
def test_a_condition_decides_at_each_position():
    """Where a position stands on the requested side by `threshold`, nothing is added."""
    model, ids, u = model_of(), torch.randint(0, 256, (2, 7)), -0.5
    vector, middle = torch.randn(16).double(), torch.randn(16).double()

    def activations() -> torch.Tensor:
        seen: list[torch.Tensor] = []
        with changed(places(model)["flow"], lambda x: seen.append(x) or x):
            model(ids)
        return seen[0]

    plain = activations()
    sides = u * torch.cosine_similarity(plain - middle.float(), vector.float(), dim=-1)
    for threshold, steered_positions in ((-2.0, 0), (float(sides.median()) + 1e-6, 7), (2.0, 14)):
        with Conditional(model, "flow", vector, middle, 3.0, threshold).turned(u):
            steered = activations()
        applies = sides < threshold
        assert int(applies.sum()) == steered_positions
        assert_close(steered, plain + applies[..., None] * 3.0 * u * vector.float())


@torch.no_grad()
def test_a_guided_reader_streams_what_the_model_computes():
    model, control = model_of().double(), torch.tensor([[0.5]], dtype=torch.float64)
    rows = [[1, 2, 3], [4], [5, 6]]
    reader = Reader(model, rows, control)
    for token in (7, 8):
        rows = [[*row, token] for row in rows]
        reader.read(torch.full((3,), token))
    for row, log_p in zip(rows, reader.log_p, strict=True):
        assert_close(
            log_p, model(torch.tensor([row]), control=torch.tensor([[0.5]]))[0][0, -1].double().log_softmax(-1)
        )


def test_guidance_is_the_condition_at_weight_1_and_the_model_alone_at_0():
    """Greedy texts of a model with a dial; beyond 1 the dial counts more, as a larger u does in log p."""
    model, task = model_of(), replace(trial(Letters(), prompts=3, max_tokens=6), temperature=1e-6)
    model.config.depth.control_trained = True
    dialled = {u: task.write(model, {"a": u}) for u in (-1.0, 1.0)}
    assert dialled[-1.0] != dialled[1.0]
    for u, texts in dialled.items():
        assert Guidance(model, 1.0, "a").write(task, u) == texts
        assert Guidance(model, 0.0, "a").write(task, u) == task.write(model)


def test_the_grammar_reads_a_text_to_where_it_departs():
    story = generate(0, "test", 0)
    text = story.text.removesuffix(END)
    assert read(text) == (True, 1.0, pytest.approx(story.bits))
    half = read(text[: len(text) // 2])
    assert half[:2] == (True, 1.0)
    assert 0 < half.bits < story.bits
    wrong = read(text[:200] + "#" + text[201:])
    assert not wrong.whole
    assert wrong.share * len(text) <= 200


def test_the_strength_that_costs_the_same():
    tried: list[float] = []

    def cost(s: float) -> float:
        tried.append(s)
        return 1 + s * s / 100

    for limit in (1.001, 1.1, 1.5):
        tried.clear()
        found = matched_strength(cost, limit, 64.0)
        assert 0.9 <= math.log(cost(found)) / math.log(limit) <= 1
        assert len(tried) <= 7
    assert matched_strength(cost, 10.0, 2.0) == 2.0
    assert matched_strength(lambda s: 2.0, 1.01, 2.0) is None
    assert matched_strength(lambda s: 0.99 if s < 1 else 2.0, 1.01, 2.0) == pytest.approx(1, abs=0.2)


# ---------------------------------------------------------------------- prompt-prefixing


def test_a_row_behind_a_prefix_by_hand():
    row = Row([EOS, 5, 6], [5, 6, EOS], 3.0)
    assert behind(row, [EOS, 1, 2], EOS) == Row([EOS, 1, 2, 5, 6], [IGNORED, IGNORED, 5, 6, EOS], 3.0)
    middle = Row([5, 6], [6, 7], 2.0)
    assert behind(middle, [EOS, 1], EOS) == Row([EOS, 1, 5, 6], [IGNORED, IGNORED, 6, 7], 2.0)


def test_a_prefix_is_not_scored():
    """What the model without a depth pays depends on the last token alone: nothing for a whole text ahead."""
    model, corpus = table_of(), stories()
    model.tokenizer = corpus.tokenizer
    task = trial(corpus, prompts=2, cost_rows=4)
    texts = labelled_texts(corpus, "mood", 4)
    assert Prefix(model, "story", texts).read(task, 1.0).nats == pytest.approx(task.read(model).nats)
    for kind in KINDS:
        ahead = Prefix(model, kind, texts).chosen(task, -1.0, 4)
        for row, before in zip(task.held_out, ahead, strict=True):
            scored = [target for target in behind(row, before, 10).targets if target != IGNORED]
            assert scored == row.targets
            assert len(before) > 20


def test_a_prefix_is_neither_judged_nor_repeated():
    model, corpus = model_of(), stories()
    model.tokenizer = corpus.tokenizer
    task = trial(corpus, prompts=4, max_tokens=5)
    for kind in KINDS:
        prefix = Prefix(model, kind, labelled_texts(corpus, "mood", 6))
        for text, prompt in zip(prefix.write(task, 1.0), task.prompts, strict=True):
            assert text.startswith(prompt)
            assert len(text) <= len(prompt) + 5
        for u in (1.0, -1.0):
            used = [tuple(ids) for ids in prefix.chosen(task, u, 4)]
            assert len(set(used)) == 4
            assert all(ids[0] == 10 for ids in used)
        again = Prefix(model, kind, labelled_texts(corpus, "mood", 6))
        assert again.chosen(task, 1.0, 9) == prefix.chosen(task, 1.0, 9)


def test_prefixes_have_the_sign_they_are_chosen_for():
    corpus = stories()
    for sign, texts in labelled_texts(corpus, "speech", 2).items():
        assert len(texts) == 2
        for ids in texts:
            assert corpus.judge(corpus.tokenizer.decode(ids))["speech"] == sign


def test_turned_up_it_puts_texts_with_the_label_before_and_turned_down_those_without():
    prefix = Prefix(table_of(), "story", {1: [[97]], -1: [[98]]})
    task = trial(Letters(), prompts=2, max_tokens=4)
    assert prefix.chosen(task, 0.5, 2) == [[EOS, 97, EOS]] * 2
    assert prefix.chosen(task, -2.0, 1) == [[EOS, 98, EOS]]


def test_passages_are_whole_sentences():
    text = 'It rained. "Who is it?" asked the owl. ' + "So they sang. " * 20 + "The end."
    opening, ending = passage(text, "opening"), passage(text, "ending")
    assert text.startswith(opening)
    assert text.endswith(ending)
    for part in (opening, ending):
        assert PASSAGE_BYTES <= len(part) < PASSAGE_BYTES + 20
        assert part[-1] == "."
        assert part[0].isupper()
    assert passage("No stop", "opening") == passage("No stop", "ending") == "No stop"


def test_learned_positions_limit_a_prefix():
    task = trial(Letters(), prompts=2)
    assert prefix_fits(model_of(), task)
    assert not prefix_fits(model_of(max_length=10), task)
    roomy = model_of(max_length=20)
    ahead = Prefix(roomy, "story", {1: [[1] * 50], -1: [[2] * 50]}).chosen(task, 1.0, 1)
    assert len(ahead[0]) + max(len(row.ids) for row in task.held_out) == 20


# ---------------------------------------------------------------------- rows, and how choices are made


def test_rows_are_what_the_corpus_holds_out():
    corpus = stories()
    rows = valid_rows(corpus)
    batches = list(corpus.batches("valid"))
    assert len(rows) == 12
    assert sum(row.n_bytes for row in rows) == pytest.approx(sum(batch.n_bytes for batch in batches))
    again = list(batches_of(rows, 5))
    assert [len(batch.ids) for batch in again] == [5, 5, 2]
    assert sum(int((b.targets != IGNORED).sum()) for b in again) == sum(
        int((b.targets != IGNORED).sum()) for b in batches
    )
    assert spread(rows, 3) == [rows[2], rows[6], rows[10]]
    assert spread(rows, 0) == spread(rows, 99) == rows


def test_what_choices_are_made_on_is_not_what_is_reported():
    corpus = stories()
    report = trial(corpus, prompts=6, cost_rows=4)
    selection = selection_trial(report, 5)
    assert len(selection.prompts) == 5
    assert not set(selection.prompts) & set(report.prompts)
    assert selection.held_out
    assert all(row not in report.held_out for row in selection.held_out)
    texts = [text for rows in labelled_texts(corpus, "mood", 20).values() for text in rows]
    trained_on = {first_sentence(corpus.tokenizer.decode(text)) for text in texts}
    assert not trained_on & {*selection.prompts, *report.prompts}


def test_too_few_beginnings_are_reported():
    report = trial(Letters(beginnings=5), prompts=4)
    with pytest.raises(ConfigError, match="1 held-out beginnings beside the 4"):
        selection_trial(report, 8)
    assert len(selection_trial(trial(Letters(beginnings=7), prompts=4), 8).prompts) == 3


def test_labels_that_are_missing_are_reported():
    with pytest.raises(ConfigError, match=r"no label 'b' \(labels: a\)"):
        labelled_texts(Letters(), "b", 2)
    with pytest.raises(ConfigError, match="a above 0 and 0 below"):
        labelled_texts(Letters("ac"), "a", 2)


def comparison(strengths: tuple[float, ...], base: LanguageModel, model: LanguageModel):
    report: Trial = trial(Letters(), prompts=6, max_tokens=12)
    return compare(Dials(model, report), base, "a", selection_trial(report, 4), strengths)


def test_a_vector_that_must_work_works():
    """Without a depth, adding E_a - E_b raises the logit of a; a dial that does nothing is beaten at any cost."""
    base = table_of()
    with torch.no_grad():
        base.embedding.weight.mul_(0.1)
        base.embedding.weight[[ord("a"), ord("b")]] = 2 * torch.eye(16)[:2]
    result = comparison((1.0, 2.0), base, base)
    assert result.unsteered.success < 0.5
    prefixes, additions = result.baselines
    assert additions.best.success > 0.9
    assert additions.best.cost > 1.05
    assert result.dial.cost == pytest.approx(1.0)  # the model without a depth ignores its dial
    assert additions.as_cheap is None or additions.as_cheap.cost <= GRANTED
    assert len(prefixes.tried) == len(KINDS)
    assert {outcome.prompts for outcome in (*additions.tried, *prefixes.tried)} == {4}
    assert {additions.best.prompts, prefixes.best.prompts, result.dial.prompts} == {6}
    json.dumps(result.as_dict())


@pytest.mark.slow
def test_the_comparison_is_the_same_again():
    model = model_of()
    base = model_of()
    assert comparison((1.0,), base, model).as_dict() == comparison((1.0,), base, model).as_dict()


@pytest.mark.slow
def test_without_room_for_a_prefix_the_addition_is_still_measured():
    base = model_of(max_length=10)
    prefixes, additions = comparison((1.0,), base, base).baselines
    assert prefixes.best is None
    assert "none for a prefix" in prefixes.note
    assert additions.best is not None


@pytest.mark.parametrize("strengths", [(), (0.0,), (-1.0, 2.0), (float("inf"),)])
def test_strengths_are_positive(strengths: tuple[float, ...]):
    model = model_of()
    with pytest.raises(ConfigError, match="positive numbers"):
        comparison(strengths, model, model)
