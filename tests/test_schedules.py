"""Learning-rate schedules against their closed forms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glissando.errors import UnknownNameError
from glissando.training.schedules import SCHEDULES


def schedule(options):
    return SCHEDULES.class_of(options)(options)


def factor(kind, step=100, share=0.0, grad_norm=1.0, **options):
    return schedule(SCHEDULES.read({"kind": kind, **options})).factor(step, share, grad_norm)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_warmup_cosine_at_its_landmarks(ratio):
    def at(step, share):
        return factor("warmup-cosine", step, share, warmup_steps=10, final_ratio=ratio)

    assert at(0, 0.0) == pytest.approx(0.1)  # the first of ten steps of the rise
    assert at(9, 0.0) == pytest.approx(1.0)
    assert at(50, 0.5) == pytest.approx((1 + ratio) / 2)
    assert at(99, 1.0) == pytest.approx(ratio)
    assert at(200, 1.5) == pytest.approx(ratio)  # past the end it stays there
    assert at(30, 0.3) == pytest.approx(ratio + (1 - ratio) * (1 + math.cos(0.3 * math.pi)) / 2)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(0, 19), st.floats(1e-9, 1e9))
def test_every_kind_rises_linearly(kind, step, grad_norm):
    rising = factor(kind, step, grad_norm=grad_norm, warmup_steps=20)
    assert rising == pytest.approx((step + 1) / 20 * factor(kind, 20, grad_norm=grad_norm, warmup_steps=20))


@given(st.integers(1, 10**6), st.floats(0, 1), st.integers(0, 10**6))
def test_the_rate_has_risen_after_a_tenth_of_the_budget(warmup, share, step):
    """Whatever the budget is counted in, and by share of that tenth at least."""
    rising = factor("constant", step, share, warmup_steps=warmup)
    assert rising == max(min(1.0, share / 0.1), min(1.0, (step + 1) / warmup))
    assert rising == 1.0 or share < 0.1


@given(st.integers(1, 1000), st.integers(10, 1000), st.data())
def test_a_long_budget_of_steps_rises_by_steps_alone(warmup, times, data):
    steps = warmup * times
    step = data.draw(st.integers(0, steps - 1))
    assert factor("constant", step, step / steps, warmup_steps=warmup) == min(1.0, (step + 1) / warmup)


def test_without_warmup_the_first_step_is_whole():
    assert factor("constant", 0, warmup_steps=0) == 1.0


@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1e30))
def test_constant_is_constant(step, share, grad_norm):
    assert factor("constant", step, share, grad_norm, warmup_steps=0) == 1.0


def cuts(losses):
    plateau = schedule(SCHEDULES.read({"kind": "plateau", "warmup_steps": 0}))
    found = []
    for loss in losses:
        plateau.observe_validation(loss)
        found.append(plateau.factor(0, 0.0, 1.0))
    return found


def test_plateau_cuts_once_patience_is_over_and_counts_anew():
    losses = [3.0, 2.0, 2.0, 2.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert cuts(losses) == [1, 1, 1, 1, 1, 1, 1, 0.5, 0.5]
    assert cuts([1.0] * 7) == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]


def test_plateau_cuts_at_most_five_times():
    assert cuts([1.0] * 50)[-1] == 0.5**5


def test_plateau_goes_on_where_it_was():
    losses = [2.0, 1.0, 1.5, 1.5, 1.5, 0.5, 0.7, 0.7, 0.7, 0.7]
    whole = schedule(SCHEDULES.read("plateau"))
    for at, loss in enumerate(losses):
        later = schedule(SCHEDULES.read("plateau"))
        later.load_state_dict(whole.state_dict())
        for other in losses[at:]:
            later.observe_validation(other)
        whole.observe_validation(loss)
        expected = schedule(SCHEDULES.read("plateau"))
        for other in losses:
            expected.observe_validation(other)
        assert later.state_dict() == expected.state_dict()


@given(st.floats(0, 1e12))
def test_homeostatic_is_a_sigmoid_of_the_inverse_gradient(grad_norm):
    x = 1 / (grad_norm + 1e-6) - 0.5
    expected = 1 / (1 + math.exp(-x)) if x < 700 else 1.0
    assert factor("homeostatic", grad_norm=grad_norm, warmup_steps=0) == pytest.approx(expected, rel=1e-12)


def test_homeostatic_at_its_ends():
    assert factor("homeostatic", grad_norm=0.0, warmup_steps=0) == 1.0
    assert factor("homeostatic", grad_norm=2.0, warmup_steps=0) == pytest.approx(0.5, abs=1e-6)
    assert factor("homeostatic", grad_norm=1e300, warmup_steps=0) == pytest.approx(1 / (1 + math.exp(0.5)))


def test_an_unknown_kind_is_an_error():
    with pytest.raises(UnknownNameError, match="warmup-cosine"):
        schedule(SCHEDULES.read("warmup-cosin"))
