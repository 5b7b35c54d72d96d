"""Comparisons: the figures of finished runs, their intervals, memory, and the table that is shown meanwhile."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glissando.compare.log import aligned
from glissando.compare.plan import Amount, Comparison, Job
from glissando.compare.results import Finished, accuracy, choose, difference, estimate
from glissando.compare.speed import _Entry, _memory
from glissando.compare.training import with_vocabulary
from glissando.model import LanguageModel


def test_intervals_cover_the_truth_as_often_as_they_say():
    """Rows of random cost: 95 % intervals of a mean hold it in 90 to 99 of 100 draws."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(100):
        n_bytes = rng.integers(50, 150, size=60).astype(float)
        bits = n_bytes * (1 + 0.3 * rng.standard_normal(60))
        found = estimate(bits[None], n_bytes[None])
        held += found.low <= 1.0 <= found.high
    assert 90 <= held <= 99


@pytest.mark.parametrize(("seeds", "quantile", "bias"), [(2, 12.706, 0.798), (5, 2.776, 0.940)])
def test_differences_of_few_seeds_hold_the_truth_as_often_as_they_say(seeds: int, quantile: float, bias: float):
    """Two models are alike; their seeds share an order of the data that does ten times as much as all else.

    The true share is 94 to 96 in 100, of which 200 trials deviate by 1.5; the bounds are 90 and 98.5. Two draws of
    Student's t that know nothing of each other would hold 99.5, and seeds taken as strangers all of them. Widths are
    2 t s / sqrt(S), s being the known deviation times its bias in so small a sample; t is drawn, which costs up to 17 %
    for two seeds.
    """
    rng, n_bytes = np.random.default_rng(0), np.full((seeds, 24), 10.0)
    held, widths = 0, []
    for _ in range(200):
        shared = 1 + 0.05 * rng.standard_normal(24) + 0.2 * rng.standard_normal((seeds, 1))
        a, b = (n_bytes * (shared + 0.02 * rng.standard_normal((seeds, 1))) for _ in range(2))
        found = difference((a, n_bytes), (b, n_bytes))
        held += found.low <= 0 <= found.high
        widths.append(found.high - found.low)
    assert 180 <= held <= 197
    assert np.mean(widths) == pytest.approx(2 * quantile * bias * 0.02 * math.sqrt(2 / seeds), rel=0.25)


def test_seeds_widen_an_interval():
    n_bytes = np.full((2, 100), 10.0)
    rows = np.random.default_rng(0).uniform(0.9, 1.1, 100)
    apart = estimate(n_bytes * rows * np.array([[1.0], [1.5]]), n_bytes)
    alike = estimate(n_bytes * rows * np.array([[1.25], [1.25]]), n_bytes)
    assert apart.value == pytest.approx(alike.value)
    assert apart.low < 1.05 < 1.45 < apart.high
    assert alike.high - alike.low < 0.1


def test_differences_are_taken_on_the_same_rows():
    """A model that costs 1 % more in every row is worse without a doubt, however much the rows differ."""
    n_bytes = np.full((1, 50), 10.0)
    bits = 10 * np.random.default_rng(0).uniform(0.1, 4.0, (1, 50))
    found = difference((1.01 * bits, n_bytes), (bits, n_bytes))
    assert 0 < found.low <= found.value <= found.high
    assert estimate(bits, n_bytes).high - estimate(bits, n_bytes).low > 20 * found.value


def tried(rate: float, nats: list[float], failed: bool = False) -> Finished:
    figures: dict[str, Any] = {"held_out": {"nats": nats, "bytes": [1.0] * len(nats)}}
    return Finished(Job("sweep", "a", 0, rate), Path(), {"failed": "diverged"} if failed else figures)


def test_a_rate_is_chosen_on_rows_that_are_not_reported():
    """0.2 is best where rows are reported (odd), 0.1 where they choose (even)."""
    sweep = [tried(0.1, [1.0, 9.0] * 2), tried(0.2, [2.0, 0.0] * 2), tried(0.4, [], failed=True)]
    assert choose(sweep) == {"a": 0.1}
    assert choose(sweep[2:]) == {}


def test_an_accuracy_without_a_mistake_is_not_certain():
    """50 of 50: a bootstrap has no width there, Wilson's interval has."""
    held = {"correct": [10] * 5, "targets": [10] * 5}
    found = accuracy([Finished(Job("probe", "a", 0, 1e-3, "copy"), Path(), {"held_out": held})])
    assert found is not None
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(50 / (50 + 1.96**2))


def memory(tmp_path: Path, hidden_size: int, layers: int) -> float:
    sizes: dict[str, Any] = {"hidden_size": hidden_size, "depth.layers": layers}
    data = {"batch_size": 2, "valid_rows": 4}
    training = {"accelerator": "cpu"}
    asked = Comparison(["transformer-nano"], tmp_path, Amount("steps", 1), model=sizes, data=data, training=training)
    config = with_vocabulary(asked.config(Job("run", "transformer-nano", 0, 1e-3)))
    return _memory(_Entry(LanguageModel(config.model), config))


def test_memory_is_the_models_own(tmp_path):
    """What imports and compiled kernels take is in neither."""
    tiny, larger = memory(tmp_path, 16, 1), memory(tmp_path, 128, 2)
    assert 2 < tiny < 30
    assert 3 * tiny < larger < 200


def test_the_table_as_text():
    assert aligned([["model", "runs"], ["a-longer-name", "1/3"]]) == ["model          runs", "a-longer-name   1/3"]
