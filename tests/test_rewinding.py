"""States that go back: rewind(state(ab), len(b)) = state(a), for every mixer, depth and preset; and what it refuses."""

from __future__ import annotations

import random

import pytest
import torch
from slow import slow_where
from subjects import CASES, STATES, accepts, build, random_ids
from tolerances import assert_close

from glissando.errors import InputError
from glissando.model import LanguageModel
from glissando.state import join_rows, leaves, map_state, select_rows, state_bytes

REACH = 4


class Signals:
    """Columns of ids with every signal that the case takes."""

    def __init__(self, case: str, seed: int, length: int = 60) -> None:
        self.model = build(case)
        generator = torch.Generator().manual_seed(seed)
        self.ids = random_ids(self.model, 3, length, seed)
        names = self.model.config.controls
        self.all = {
            "mask": torch.rand(3, length, generator=generator) < 0.8 if "mask" in accepts(case) and seed % 2 else None,
            "dt": torch.rand(3, length, generator=generator, dtype=torch.float64) + 0.1
            if "dt" in accepts(case)
            else None,
            "control": torch.randn(3, length, len(names), generator=generator, dtype=torch.float64) if names else None,
        }

    def read(self, state, begin: int, end: int, donate: bool = False):
        parts = {name: None if signal is None else signal[:, begin:end] for name, signal in self.all.items()}
        return self.model(self.ids[:, begin:end], state, donate=donate, **parts)


@pytest.mark.parametrize("case", slow_where(CASES.keys() - STATES, CASES))
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_rewound_state_is_the_state_before(case, seed):
    """Columns read in pieces of any length, also longer than can be undone, and undone now and then, go on as a state
    of the same columns without a trail."""
    text, chance = Signals(case, seed), random.Random(seed)
    expected = text.read(text.model.init_state(3), 0, 60)[0]  # by the split law, of any part of it
    counted = text.all["mask"] if text.all["mask"] is not None else torch.ones(3, 60, dtype=torch.bool)
    state = text.model.init_state(3, rewind=REACH)
    at, lately = 0, REACH  # columns read since the last time that some were undone

    def agrees(logits, begin: int, what: str) -> None:
        part = slice(begin, begin + logits.shape[1])
        assert_close(logits[counted[:, part]], expected[:, part][counted[:, part]], what)

    for _ in range(7):
        size = chance.choice([1, 1, 2, 3, 4, 5, 9])
        logits, state = text.read(state, at, at + size, donate=chance.random() < 0.5)
        agrees(logits, at, "logits")
        at += size
        furthest = int(state.trail.ages[:, 0].min())
        assert furthest >= min(REACH, at) or lately < REACH
        back = chance.choice([0, chance.randint(0, furthest)])
        lately = lately + size if back == 0 else 0
        kept = map_state(torch.clone, state)
        undone = text.model.rewind(state, back)
        assert all(map(torch.equal, leaves(kept), leaves(state))), "rewind changed the state that it was given"
        at, state = at - back, undone
        assert torch.equal(state.position, counted[:, :at].sum(1))
        agrees(text.read(state, at, at + 3)[0], at, "after rewinding")


@torch.no_grad()
def test_going_back_again_and_again():
    """As assisted generation does where drafts are mostly wrong: what is undone never lies behind what is kept."""
    text = Signals("mixer:delta-default", 0)
    model, ids = text.model, text.ids
    state, at = model.init_state(3, rewind=8), 0
    for _ in range(12):
        for size in (8, 7):
            _, state = model(ids[:, at : at + size], state, donate=True)
            at += size
        assert int(state.trail.ages.max()) < state.trail.ids.shape[1]
        state, at = model.rewind(state, 8), at - 8
        if at > 35:
            break
    for _ in range(12):
        _, state = model(ids[:, at : at + 8], state, donate=True)
        state = model.rewind(state, 7)
        assert int(state.trail.ages.max()) < state.trail.ids.shape[1]
        state = model.rewind(state, 1)
    plain = model(ids[:, :at], model.init_state(3))[1]
    assert_close(model(ids[:, at : at + 3], state)[0], model(ids[:, at : at + 3], plain)[0], "after many rewinds")


@torch.no_grad()
def test_rows_of_different_age_are_joined_and_selected():
    text = Signals("mixer:delta-default", 0)
    states = []
    for length in (3, 14):
        _, state = text.read(text.model.init_state(3, rewind=REACH), 0, length)
        states.append(state)
    both = select_rows(join_rows(*states), torch.tensor([4, 0]))
    back = text.model.rewind(both, 2)
    assert back.position.tolist() == [12, 1]
    alone = text.read(text.model.init_state(3), 0, 12)[1]
    expected = text.model(text.ids[1:2, 12:15], select_rows(alone, torch.tensor([1])), dt=text.all["dt"][1:2, 12:15])[0]
    found = text.model(text.ids[1:2, 12:15], select_rows(back, torch.tensor([0])), dt=text.all["dt"][1:2, 12:15])[0]
    assert_close(found, expected, "a row that was joined")


@torch.no_grad()
def test_a_change_of_signals_begins_a_new_trail():
    """Without a control its term is absent, which no value stands for: a trail has it in all columns or in none."""
    text = Signals("preset:hybrid-ode-nano", 0)
    model, control = text.model, torch.full((3, len(text.model.config.controls)), 0.3, dtype=torch.float64)
    _, state = model(text.ids[:, :6], model.init_state(3, rewind=REACH))
    _, before = model(text.ids[:, :6], model.init_state(3))
    _, state = model(text.ids[:, 6:8], state, control=control)
    expected, _ = model(text.ids[:, 6:9], before)
    assert_close(model(text.ids[:, 6:9], model.rewind(state, 2))[0], expected, "before the control")
    with pytest.raises(InputError, match="can go back 2 columns of tokens, and 3 are to be undone"):
        model.rewind(state, 3)


def test_hidden_layers_and_gradients_are_those_of_one_call():
    text = Signals("mixer:delta-default", 0)
    plain, traced = [], []
    expected, _ = text.model(text.ids, text.model.init_state(3), hidden=plain)
    found, _ = text.model(text.ids, text.model.init_state(3, rewind=REACH), hidden=traced)
    assert len(plain) == len(traced)
    for one, other in zip(plain, traced, strict=True):
        assert_close(other, one, "hidden")
    for value in (expected, found):
        text.model.zero_grad()
        value.square().sum().backward()
        gradients = [p.grad.clone() for p in text.model.parameters()]
        if value is expected:
            kept = gradients
    for one, other in zip(kept, gradients, strict=True):
        assert_close(other, one, "gradient")


def test_what_it_costs():
    """Nothing without a trail; with one, two states more and 4 N columns."""
    model = build("mixer:liquid-default", torch.float32)
    plain, with_trail = model.init_state(2), model.init_state(2, rewind=8)
    assert plain.trail is None
    columns = 2 * 4 * 8 * (8 + 1 + 4)  # ids, mask and dt of two rows
    assert state_bytes(with_trail) == 3 * state_bytes(plain) + columns + 2 * (2 * 8 + 2)


def test_mistakes():
    model = build("mixer:liquid-default")
    ids = random_ids(model, 2, 6, 0)
    with pytest.raises(InputError, match=r"init_state\(batch_size, rewind=32\)"):
        model.rewind(model(ids, model.init_state(2))[1], 1)
    with pytest.raises(InputError, match="must be a number of tokens of at least 1, or 0 for none, got -2"):
        model.init_state(2, rewind=-2)
    _, state = model(ids, model.init_state(2, rewind=3))
    with pytest.raises(InputError, match=r"go back 3 columns of tokens, and 5 .* rewind=5"):
        model.rewind(state, 5)
    one, other = (model(ids[:1], model.init_state(1, rewind=3), dt=dt)[1] for dt in (None, torch.ones(1, 6).double()))
    with pytest.raises(InputError, match="read with a dt or a control and others without"):
        model.rewind(join_rows(one, other), 1)
    _, state = model(random_ids(model, 2, 2, 0), state)
    with pytest.raises(InputError, match=r"and 100 are to be undone: it has read 8 tokens in all$"):
        model.rewind(state, 100)
    for count in (2.5, "3", None):
        with pytest.raises(InputError, match=f"columns to undo must be a whole number, an int, got {count!r}"):
            model.rewind(state, count)
    with pytest.raises(InputError, match=r"rewind must be a whole number, an int, got 2\.5"):
        model.init_state(2, rewind=2.5)
    with pytest.raises(InputError, match="must not be negative, got -1"):
        model.rewind(state, -1)
    with pytest.raises(InputError, match="embeddings were given"):
        model(model.embedding(ids), state)
    assert len(CASES) > 20


@pytest.mark.parametrize("where", [{"mixer": {"kind": "attention", "dropout": 0.1}}, {"block": {"mlp_dropout": 0.1}}])
def test_dropout_is_refused(where):
    """What is read again would be another state each time."""
    model = LanguageModel.from_config({"hidden_size": 8, "depth": {"layers": 1}, **where})
    ids = torch.arange(8)[None]
    _, state = model.eval()(ids, model.init_state(1, rewind=3))
    expected = leaves(model.rewind(state, 2))
    with pytest.raises(InputError, match=r"dropout would make that another state: call model\.eval\(\)"):
        model.train().rewind(state, 2)
    assert all(map(torch.equal, leaves(model.eval().rewind(state, 2)), expected))
