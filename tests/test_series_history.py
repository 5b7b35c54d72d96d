"""What a step knows of the past: the recursion by hand, streamed as at once, and nothing of what was not observed."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import assert_close
from torch import Tensor

from glissando.series.anchor import _own
from glissando.series.history import Past, history, nothing
from glissando.state import map_state


def drawn(batch: int = 3, length: int = 40, channels: int = 4, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(batch, length, channels, generator=generator, dtype=torch.float64)
    observed = torch.rand(batch, length, channels, generator=generator) < 0.3
    observed[..., 0] = False  # never
    observed[..., 1] = True
    gaps = 5 * torch.rand(batch, length, generator=generator, dtype=torch.float64)
    return values, observed, gaps


def by_hand(values: Tensor, observed: Tensor, gaps: Tensor) -> Past:
    """One cell at a time."""
    found = Past(*(torch.zeros_like(values) for _ in Past._fields))
    for b in range(values.shape[0]):
        for k in range(values.shape[2]):
            seen: list[float] = []
            age = 0.0
            for t in range(values.shape[1]):
                age += float(gaps[b, t])
                if observed[b, t, k]:
                    seen.append(float(values[b, t, k]))
                    age = 0.0
                if seen:
                    mean = sum(seen) / len(seen)
                    square = sum((value - mean) ** 2 for value in seen)
                    for part, value in zip(found, (seen[-1], age, mean, len(seen), square), strict=True):
                        part[b, t, k] = value
    return found


def test_it_is_the_recursion():
    values, observed, gaps = drawn()
    for name, got, expected in zip(
        Past._fields, history(values, observed, gaps), by_hand(values, observed, gaps), strict=True
    ):
        assert_close(got, expected, name)


@pytest.mark.parametrize("cuts", [[1] * 40, [7, 1, 12, 20]])
def test_streamed_it_is_the_same(cuts: list[int]):
    values, observed, gaps = drawn()
    past, pieces = nothing(3, 4, dtype=torch.float64), []
    for piece in zip(*(part.split(cuts, 1) for part in (values, observed, gaps)), strict=True):
        pieces.append(history(*piece, past))
        past = map_state(lambda part: part[:, -1], pieces[-1])
    for name, got, expected in zip(
        Past._fields, zip(*pieces, strict=True), history(values, observed, gaps), strict=True
    ):
        assert_close(torch.cat(got, 1), expected, name)


@pytest.mark.parametrize("value", [math.nan, 0.0, 1e9])
def test_what_was_not_observed_changes_nothing(value: float):
    values, observed, gaps = drawn()
    other = torch.where(observed, values, value)
    for got, expected in zip(history(other, observed, gaps), history(values, observed, gaps), strict=True):
        assert torch.equal(got, expected)


def test_another_series_knows_nothing_of_the_one_before():
    """Several series in a row, where each begins anew, are those series alone."""
    values, observed, gaps = drawn(3, 10)
    first = torch.zeros(1, 30, dtype=torch.bool)
    first[0, ::10] = True
    together = history(*(part.flatten(0, 1)[None] for part in (values, observed, gaps)), first=first)
    for got, expected in zip(together, history(values, observed, gaps), strict=True):
        assert_close(got[0], expected.flatten(0, 1))


def test_ages_stay_exact_in_float32():
    """A thousand steps of one hour after a year: an age is a sum of few gaps, not a difference of many."""
    gaps = torch.full((1, 2000), 1e-3)
    gaps[0, 0] = 1e5
    observed = torch.zeros(1, 2000, 1, dtype=torch.bool)
    observed[0, ::4] = True
    found = history(torch.randn(1, 2000, 1), observed, gaps)
    assert found.age.dtype == torch.float32
    assert_close(found.age[0, 3::4, 0], torch.full((500,), 3e-3), tolerance=1e-8)


def test_the_anchor_reads_the_age_that_the_last_value_has_when_it_is_asked_for() -> None:
    known = Past(*(torch.tensor([[[value]]], dtype=torch.float64) for value in (2.0, 0.5, 1.0, 3.0, 0.0)))
    found = _own(known, torch.full((1, 1), 1.5, dtype=torch.float64), [0])
    assert found[0, 0, 0, 7] == pytest.approx(math.log1p(0.5 + 1.5))
