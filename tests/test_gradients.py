"""The picture of gradients: which parts depart from where they were, and names that stay legible."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from training_runs import configuration

from glissando.errors import RunError
from glissando.training.fit import train
from research.gradients import (
    departure,
    merged,
    plot_gradients,
    read_norms,
    running_median,
    spread,
    window_of,
)


def curve(end: float, n: int = 100) -> np.ndarray:
    """From 1 to `end` at an even pace in the logarithm."""
    return np.logspace(0, np.log10(end), n)


@pytest.mark.parametrize(("end", "verb"), [(1e4, "explodes"), (1e-4, "vanishes")])
def test_a_part_departs_where_its_median_is_a_hundred_times_off(end: float, verb: str):
    """Over a decade in 25 rows the medians of windows 50 rows apart are 100 times apart, and no nearer ones."""
    result = departure(curve(end, 101), 10)
    assert result is not None
    assert result.verb == verb
    assert result.row == pytest.approx(5 + 50, abs=1)


@pytest.mark.parametrize(
    "norms",
    [
        curve(90.0),
        curve(1 / 90),
        np.where(np.arange(100) == 50, 1e6, 1.0),  # a single step is no trend
        np.where(np.arange(100) < 10, 0.0, 1.0),  # nothing to be compared with
        curve(1e9, 15),  # too short for two windows
    ],
)
def test_what_is_no_departure(norms: np.ndarray):
    assert departure(norms, 10) is None


def test_a_part_whose_gradient_stops_vanishes():
    result = departure(np.where(np.arange(100) < 50, 1.0, 0.0), 10)
    assert result is not None
    assert result.verb == "vanishes"


def test_short_runs_are_not_judged():
    assert window_of(9) == 1
    assert departure(np.array([1.0, 1e9]), window_of(2)) is None


def test_parts_become_blocks_where_there_are_many():
    one, two = np.full(3, 3.0), np.full(3, 4.0)
    many = {
        "depth.before.0.mixer": one,
        "depth.before.0.mlp": two,
        "depth.time.0.weight": one,
        "depth.time.2.bias": two,
    }
    assert merged(many, most=4) == many
    blocks = merged(many, most=3)
    assert list(blocks) == ["depth.before.0", "depth.time"]
    assert np.array_equal(blocks["depth.before.0"], np.full(3, 5.0))


def test_labels_are_moved_apart_and_no_further():
    assert spread([0.1, 0.5, 0.9]) == [0.1, 0.5, 0.9]
    assert spread([0.5, 0.5, 0.9], gap=0.1) == pytest.approx([0.45, 0.55, 0.9])
    crowded = spread([1.0] * 30)
    assert np.diff(crowded).min() > 0.03
    assert crowded[0] >= 0
    assert crowded[-1] <= 1 + 1e-9
    assert spread([0.4]) == [0.4]


def test_running_median():
    assert running_median(np.array([1.0, 9, 2, 3, 4]), 3).tolist() == [5, 2, 3, 3, 3.5]
    assert running_median(np.array([1.0, 9]), 1).tolist() == [1, 9]


def log(folder: Path, parts: dict[str, np.ndarray]) -> Path:
    rows = np.stack(list(parts.values())).T
    with (folder / "metrics.csv").open("w") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "grad_norm", *(f"grad_norm/{part}" for part in parts)])
        writer.writerows([i + 1, np.linalg.norm(row), *row] for i, row in enumerate(rows))
    return folder


def test_the_picture_claims_nothing_where_nothing_departs(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("matplotlib.axes.Axes.annotate", lambda self, text, *a, **k: said.append(text))
    monkeypatch.setattr("matplotlib.axes.Axes.text", lambda self, x, y, text, *a, **k: said.append(text))
    plot_gradients(log(tmp_path, {"embedding": curve(3.0), "depth.control": curve(2.0)}), tmp_path / "a.png")
    assert sorted(said) == ["all", "control", "embedding"]
    said.clear()
    plot_gradients(log(tmp_path, {"embedding": curve(3e3), "depth.control": np.zeros(100)}), tmp_path / "b.png")
    assert "embedding: explodes" in said
    assert any("a factor of 100" in line and "0 throughout: control" in line for line in said)


@pytest.mark.slow
def test_a_run_has_a_picture_of_its_gradients(tmp_path):
    run = train(configuration(tmp_path, {"training": {"log_every": 1}}), tmp_path / "run")
    steps, total, parts = read_norms(run.path)
    assert len(steps) == 12
    assert next(iter(parts)) == "embedding"
    assert np.allclose(np.sqrt(sum(np.square(norms) for norms in parts.values())), total, rtol=1e-5)
    assert plot_gradients(run.path, tmp_path / "gradients.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(RunError, match="no rows to draw"):
        plot_gradients(tmp_path, tmp_path / "none.png")
