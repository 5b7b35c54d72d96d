"""Studies for readers of the publications: contexts by definition, the slope over tau, the inverse of a dial."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_close

from glissando.model import LanguageModel
from research import beyond_length, calibrations
from research.audit.claim import Plan
from research.audit.tau.training import tau_mixers
from research.audit.training import losses
from research.dial_probability import inverse


def test_a_token_within_the_length_is_predicted_from_the_tokens_before_it_alone():
    model = LanguageModel.from_config({"hidden_size": 16, "vocab_size": 32, "depth": {"layers": 1}}).double().eval()
    rows, length = torch.randint(0, 32, (2, 33)), 8
    within = beyond_length.bits_within(model, rows, length)
    assert within.shape == (2, 32)
    assert_close(within[:, :length], beyond_length.bits(model, rows)[:, :length])
    for position in range(length, 32):
        start = position - length + length // 2 - position % (length // 2)  # of the window that scores it
        context = beyond_length.bits(model, rows[:, start : position + 2])
        assert length // 2 <= position - start < length
        assert_close(within[:, position], context[:, -1])


def watched(way: str, learned: bool) -> calibrations.Watch:
    plan = Plan(quick=True)
    torch.manual_seed(0)
    return calibrations.Watch(calibrations.new_model(calibrations.size_of(plan)), way, learned, plan)


@pytest.mark.parametrize("learned", [False, True])
def test_the_slope_is_that_of_the_held_out_loss_over_a_tau_that_layers_share(learned):
    watch = watched("start", learned)
    watch.record(0)
    assert all(mixer.tau is watch.tau for mixer in tau_mixers(watch.model))
    assert any(p is watch.tau for p in watch.model.parameters()) == learned
    assert watch.tau.requires_grad == learned
    assert watch.lines[0]["tau"] == pytest.approx(watch.lines[0]["median"], rel=2e-3)
    watch.model.double()
    values = []
    with torch.no_grad():
        for tau in (watch.lines[0]["tau"] + 1e-3, watch.lines[0]["tau"] - 1e-3):
            for mixer in tau_mixers(watch.model):
                mixer.tau.fill_(tau)
            values.append(float(losses(watch.model, watch.rows).mean()))
    assert (values[0] - values[1]) / 2e-3 == pytest.approx(watch.lines[0]["slope"], rel=1e-2)


def test_drift_recalibrates_where_the_energies_have_moved_and_the_loss_has_fallen():
    for way, moved, loss, expected in (
        ("drift", 1.2, 1.0, True),
        ("drift", 1.2, 9.9, False),
        ("drift", 1.01, 1.0, False),
        ("periodic", 1.01, 9.9, True),
        ("start", 1.2, 1.0, False),
    ):
        watch = watched(way, False)
        median = float(watch.energies().median())
        watch.tau.fill_(median / moved)
        watch.lines.append({"loss": 6.0 if loss == 1.0 else 0.0})  # what the untrained model is compared with
        watch(calibrations.EVERY)
        assert (float(watch.tau) == pytest.approx(median, rel=2e-3)) == expected, (way, moved, loss)


def test_the_dial_for_a_probability_is_where_the_rising_curve_reaches_it():
    values = (-1.0, -0.5, 0.0, 0.5, 1.0)
    assert inverse(values, (0.0, 0.2, 0.4, 0.6, 1.0), 0.5) == pytest.approx(0.25, abs=1e-3)
    assert inverse(values, (0.1, 0.3, 0.1, 0.5, 0.9), 0.2) == pytest.approx(-0.25, abs=1e-3)  # a fall is evened out
    assert inverse(values, (0.3, 0.4, 0.5, 0.6, 0.7), 0.9) == 1.0
