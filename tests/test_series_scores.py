"""Scores: errors against plain formulas and scikit-learn, baselines, intervals over series, periods and texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics

from glissando.evaluation.figures import figure_and_axes, label_ends
from glissando.series.heads import make_head
from glissando.series.panel import Clock, Panel
from glissando.series.pictures import Track, draw_errors, draw_forecasts, tracks
from glissando.series.scores import (
    ANCHOR,
    LAST,
    MEAN,
    SEASON,
    Answers,
    auroc,
    average_precision,
    period_of,
    score_classes,
    score_forecasts,
    seasonal_values,
)


def answers(n: int = 4000, error: float = 1.0, channels: int = 2, seed: int = 0) -> Answers:
    """Values with a normal error of deviation 1; the model says so with `error` times its size."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=n) * 3
    target = truth + rng.normal(size=n)
    params = torch.from_numpy(np.stack([truth + (error - 1) * rng.normal(size=n), np.ones(n)], 1))
    last = np.where(rng.random(n) < 0.1, np.nan, truth + rng.normal(size=n))
    return Answers(
        series=rng.integers(0, 40, n),
        channel=rng.integers(0, channels, n),
        target=target,
        params=params,
        horizon=rng.exponential(size=n),
        gap=np.where(np.isnan(last), np.nan, rng.exponential(size=n) * 100),
        scale=np.ones(n),
        row=np.arange(n),
        baselines={LAST: last, MEAN: np.zeros(n), ANCHOR: truth},
    )


def test_errors_coverage_and_intervals_by_channel() -> None:
    given, head = answers(), make_head("gaussian")
    found = score_forecasts(given, head, ["a", "b"], naive=np.array([2.0, 0.0]))
    assert list(found.figures) == ["a", "b"]
    for number, name in enumerate("ab"):
        chosen = given.channel == number
        error = (given.params[:, 0].numpy() - given.target)[chosen]
        row = found.figures[name]["model"]
        assert row["rmse"] == pytest.approx(np.sqrt((error**2).mean()))
        assert row["mae"] == pytest.approx(np.abs(error).mean())
        assert row["crps"] == pytest.approx(1 / np.sqrt(np.pi), rel=0.05)
        assert row["rmse_low"] < row["rmse"] < row["rmse_high"] < row["rmse_low"] + 0.2
        assert row["covered_50%"] == pytest.approx(0.5, abs=0.05)
        assert row["covered_90%"] == pytest.approx(0.9, abs=0.03)
        last = np.where(np.isnan(given.baselines[LAST]), 0.0, given.baselines[LAST])
        other = found.figures[name][LAST]
        assert other["rmse"] == pytest.approx(np.sqrt(((last - given.target)[chosen] ** 2).mean()))
        assert other["crps"] == other["mae"]
        assert other["by_mean"] == np.isnan(given.baselines[LAST][chosen]).mean() > 0
        assert "by_mean" not in found.figures[name][ANCHOR]
        assert other["model_minus_low"] < other["model_minus"] < other["model_minus_high"] < 0
    assert found.figures["a"]["model"]["mase"] == pytest.approx(found.figures["a"]["model"]["mae"] / 2)
    assert "mase" not in found.figures["b"]["model"]
    other = score_forecasts(given, head, ["a", "b"], naive=np.array([2.0, 4.0])).figures["b"][LAST]
    assert other["mase"] == pytest.approx(other["mae"] / 4)


def test_the_first_line_says_where_the_model_is_worse() -> None:
    head = make_head("gaussian")
    good = answers()
    good.baselines[ANCHOR][:] += 0.2
    assert score_forecasts(good, head, ["a", "b"]).headline() == (
        "The model is better than the last value, the mean and the anchor in all 2 channels."
    )
    bad = answers(error=2.0)
    bad.params[bad.channel == 0, 0] = torch.from_numpy(bad.baselines[ANCHOR][bad.channel == 0] + 1e-3)
    bad.baselines[ANCHOR][bad.channel == 0] += 1.0
    table = score_forecasts(bad, head, ["a", "b"]).table()
    assert table.splitlines()[0].startswith("THE MODEL IS NO BETTER than the ")
    assert "than the anchor in 1 of 2 channels (b): use the anchor there" in table.splitlines()[0]
    assert "4,000 scored in 40 series; in brackets 95% intervals" in table
    assert "covered 90%" in table


def test_a_baseline_that_a_channel_has_not_is_left_out_there() -> None:
    given = answers()
    given.baselines[SEASON] = np.where(given.channel == 0, given.baselines[ANCHOR], np.nan)
    found = score_forecasts(given, make_head("gaussian"), ["a", "b"]).figures
    assert found["a"][SEASON] == found["a"][ANCHOR]
    assert SEASON not in found["b"]


def test_a_point_head_and_a_single_series_have_no_intervals() -> None:
    given = answers(channels=1)
    given = given._replace(params=given.params[:, :1], series=np.zeros_like(given.series))
    found = score_forecasts(given, make_head("point"), ["a"])
    row = found.figures["a"]["model"]
    assert row["crps"] == row["mae"]
    assert not [name for name in row if name.startswith(("covered", "rmse_"))]
    assert "no intervals, which need several series" in found.table()


def test_the_interval_is_over_series_and_not_over_values() -> None:
    """Errors that a series shares make the interval wider than independent ones do."""
    rng = np.random.default_rng(0)
    series = np.repeat(np.arange(30), 100)
    shared = rng.normal(size=30)[series]
    widths = []
    for errors in (shared, rng.permutation(shared)):
        given = Answers(series, 0 * series, errors, torch.zeros(3000, 1), *[np.ones(3000)] * 4, {MEAN: np.ones(3000)})
        row = score_forecasts(given, make_head("point"), ["a"]).figures["a"]["model"]
        widths.append(row["rmse_high"] - row["rmse_low"])
    assert widths[0] > 4 * widths[1]


@pytest.mark.parametrize("classes", [2, 4])
def test_classes_are_scored_as_scikit_learn_scores_them(classes: int) -> None:
    rng = np.random.default_rng(classes)
    labels = rng.integers(0, classes, 400)
    logits = rng.normal(size=(400, classes)) + 1.5 * np.eye(classes)[labels]
    names, shares = [f"c{i}" for i in range(classes)], np.full(classes, 1 / classes)
    found = score_classes(logits, labels, np.arange(400) // 4, "y", names, shares)
    row = found.figures["y"]["model"]
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert found.scored == 400
    assert row["accuracy"] == pytest.approx(metrics.accuracy_score(labels, p.argmax(-1)))
    assert row["log_loss"] == pytest.approx(metrics.log_loss(labels, p))
    each = [1] if classes == 2 else range(classes)
    assert row["auroc"] == pytest.approx(np.mean([metrics.roc_auc_score(labels == c, p[:, c]) for c in each]))
    assert row["average_precision"] == pytest.approx(
        np.mean([metrics.average_precision_score(labels == c, p[:, c]) for c in each])
    )
    assert found.headline() == "The model is better than the shares (always c0)."


def test_ranks_with_ties() -> None:
    scores, positive = np.array([1.0, 1.0, 2.0, 0.0, 2.0]), np.array([True, False, True, False, False])
    assert auroc(scores, positive) == pytest.approx(metrics.roc_auc_score(positive, scores))
    assert average_precision(scores, positive) == pytest.approx(metrics.average_precision_score(positive, scores))


def test_a_period_shows_through_gaps_and_jitter_and_none_in_noise() -> None:
    rng = np.random.default_rng(0)
    times, values, noise = [], [], []
    for _ in range(3):
        t = np.flatnonzero(rng.random(600) > 0.3).astype(np.float64)
        t += rng.uniform(-0.2, 0.2, len(t))
        day = np.sin(2 * np.pi * t / 24) + 0.5 * rng.normal(size=len(t))
        times.append(t * 3600.0)
        values.append(np.where(rng.random(len(t)) < 0.1, np.nan, day))
        noise.append(rng.normal(size=len(t)).cumsum())
    assert period_of(times, values, 3600.0) == pytest.approx(24 * 3600.0)
    drift = [v + 2 * walk for v, walk in zip(values, noise, strict=True)]
    calm = [
        np.where(np.isnan(v), np.nan, 3 * np.sin(2 * np.pi * t / 86400.0)) for v, t in zip(values, times, strict=True)
    ]
    assert period_of(times, [a + 0.3 * w for a, w in zip(calm, noise, strict=True)], 3600.0) == pytest.approx(86400.0)
    assert period_of(times, drift, 3600.0) is None
    assert period_of(times, noise, 3600.0) is None
    assert period_of(times, [rng.normal(size=len(t)) for t in times], 3600.0) is None
    assert period_of(times, [np.ones(len(t)) for t in times], 3600.0) is None


def test_the_seasonal_value_is_of_what_was_known_when_asked() -> None:
    times, values = np.arange(10.0), np.array([0.0, 1, 2, np.nan, 4, 5, 6, 7, 8, 9])
    asked, at = np.array([7.0, 7.0, 7.0, 2.0, 1.0]), np.array([8.0, 12.0, 7.5, 7.0, 2.0])
    found = seasonal_values(times, values, asked, at, 4.0, 1.0)
    # 8 - 4; 12 - 4 = 8 is not known at 7, 12 - 8 = 4 is; 3.5 is within half a step of 4; nothing is before 2 and 1
    assert np.array_equal(found, [4.0, 4.0, 4.0, np.nan, np.nan], equal_nan=True)


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path: Path) -> None:
    given = answers()
    path = draw_errors(given, make_head("gaussian"), ["a", "b"], tmp_path / "errors.png", "h")
    t = np.arange(30.0)
    track = Track("s1", "a", t, np.sin(t), t[1:], np.sin(t[:-1]), np.sin(t[:-1]) - 1, np.sin(t[:-1]) + 1)
    other = track._replace(low=None, high=None, channel="b")
    for file in (path, draw_forecasts([track, other, track], tmp_path / "forecasts.png", "h")):
        assert file.read_bytes().startswith(b"\x89PNG")
    same = given._replace(horizon=np.ones_like(given.horizon), gap=np.ones_like(given.gap))
    assert draw_errors(same, make_head("gaussian"), ["a", "b"], tmp_path / "none.png", "h") is None
    assert not (tmp_path / "none.png").exists(), "one distance is a figure of the table, and no curve"


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_names_at_the_ends_of_lines_do_not_overlap(scale: str) -> None:
    figure, (axes,) = figure_and_axes()
    axes.plot([1, 10], [1, 10])
    axes.set_yscale(scale)
    label_ends(axes, [(2.001, "c", "k"), (2.0, "b", "k"), (9.0, "d", "k"), (2.0, "a", "k")])
    places = {each.get_text(): each.xy[1] for each in axes.texts}
    assert list(places) == ["a", "b", "c", "d"]
    apart = np.diff([*places.values()]) * axes.get_window_extent().height * 72 / figure.dpi
    assert apart.min() > 10
    assert places["d"] == pytest.approx(axes.transAxes.inverted().transform(axes.transData.transform((1, 9)))[1])


def test_forecasts_of_another_origin_are_another_line(tmp_path: Path) -> None:
    """Forecasts that follow each other in time from one origin are a line; each step's of the next are one line too."""
    none = np.zeros((40, 0), int)
    panel = Panel(
        names=["s"], starts=np.array([0, 40]), times=np.arange(40.0), gaps=np.ones(40), values=np.zeros((40, 1)),
        codes=none, future=none, static=none[:1], static_codes=none[:1], rows=np.arange(40), scored=np.ones(40, bool),
        clock=Clock("row", "row", np.zeros(1)), report=[], source="frame", unit="row",
    )  # fmt: skip
    rows = np.r_[11:16, 21:26]
    for horizon, breaks in ((rows % 10, [5]), (np.ones(10), None)):
        given = Answers(
            np.zeros(10, int), np.zeros(10, int), np.zeros(10), torch.zeros(10, 1).double(), horizon.astype(float),
            np.ones(10), np.ones(10), rows, {},
        )  # fmt: skip
        (track,) = tracks(given, panel, panel.values, ["a"], make_head("point"))
        assert (None if track.breaks is None else track.breaks.tolist()) == breaks
        assert track.at.tolist() == rows.tolist()
    draw_forecasts([track._replace(breaks=np.array([5]))], tmp_path / "forecasts.png", "h")
