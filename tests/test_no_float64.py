"""Devices without float64: the CPU stands in for one, where any tensor of float64 raises."""

from __future__ import annotations

import math

import pytest
import torch
from subjects import CASES, ragged, random_ids
from subjects import build_one_layer as build
from test_laws import gradients, in_pieces
from tolerances import assert_close, assert_tensors_close
from without_float64 import no_float64

from glissando.kernels import precise
from glissando.kernels.rope import rotation
from glissando.mixers.spectral.operators import phases
from glissando.state import leaves

#: one of each form for such devices: these run every time, the others with the slow ones
QUICK = (
    "mixer:attention-forget-window-grouped", "mixer:delta-rotate", "mixer:liquid-default", "mixer:spectral-everything",
    "mixer:tau-gated", "mixer:liquid-published",
)  # fmt: skip
cases = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)


def weigh(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A scalar that depends on every logit at a real position, with the same weights in every type."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    return (logits * weights.to(logits.dtype))[mask].sum()


@pytest.mark.filterwarnings("ignore:.*no kernel runs:RuntimeWarning")
@cases
def test_laws_without_float64(case: str):
    """Values and gradients are those of float64; the split law and that of a batch hold at float32's tolerance."""
    model = build(case, torch.float32)
    ids = random_ids(model, 3, 14, seed=5)
    masked = "mask" in model.depth.accepts
    mask = ragged(*ids.shape, seed=5) if masked else torch.ones_like(ids, dtype=torch.bool)
    given = {"mask": mask} if masked else {}
    with no_float64():
        whole = model(ids, **given)[0]
        grads = gradients(model, weigh(whole, mask))
        pieces, state = in_pieces(model, ids, [5, 6, 10], mask if masked else None)
        split_grads = gradients(model, weigh(pieces, mask))
        assert not [leaf for leaf in leaves(state) if leaf.dtype in (torch.float64, torch.complex128)]
        with torch.no_grad():
            donated, _ = in_pieces(model, ids, [7, *range(11, 14)], mask if masked else None, donate=True)
            alone = model(ids[1:2, mask[1]])[0]
    assert_close(pieces[mask], whole[mask], "split")
    assert_close(donated[mask], whole[mask], "token by token")
    assert_close(alone[0], whole[1, mask[1]], "a row alone")
    assert_tensors_close(split_grads, grads, "split gradient of")
    exact = build(case)
    exact.load_state_dict(model.state_dict())
    expected = exact(ids, **given)[0]
    assert_close(whole[mask], expected[mask].float(), "values")
    expected_grads = gradients(exact, weigh(expected, mask))
    assert_tensors_close(grads, {n: g.float() for n, g in expected_grads.items()}, "gradient of")


def test_float64_raises_where_the_cpu_stands_in():
    with no_float64():
        assert not precise.has_float64("cpu")
        for mistake in (
            lambda: torch.zeros(2, dtype=torch.float64),
            lambda: torch.ones(2).double(),
            lambda: torch.tensor([1.0], dtype=torch.float64),
            lambda: torch.ones(2, dtype=torch.complex64).to(torch.complex128),
        ):
            with pytest.raises(TypeError, match="stands in for one without float64"):
                mistake()
    assert precise.has_float64("cpu")
    assert not precise.has_float64("mps")


def test_phases_at_ten_million():
    """t omega modulo 2 pi within 1e-6 rad at position 10^7, and its gradient, which is t."""
    omega = torch.tensor([3.1, 1.0, 0.7312, 1e-4, 0.05]).requires_grad_()
    start = torch.tensor([10_000_000 - 3])
    expected = torch.remainder((start + 3).double() * omega.detach().double() + math.pi, 2 * math.pi) - math.pi
    with no_float64():
        found = phases(omega, start, 4)[0, -1]
        found.sum().backward()
    gap = (found.detach().double() - expected).abs()
    assert torch.minimum(gap, 2 * math.pi - gap).max() < 1e-6
    assert torch.equal(omega.grad, torch.full_like(omega, 10_000_000.0))


def test_rotations_at_ten_million():
    where = torch.tensor([0, 1, 12_345, 10_000_000])
    expected = rotation(where, 64, 1e4, 64, torch.float32)
    with no_float64():
        found = rotation(where, 64, 1e4, 64, torch.float32)
    assert (found - expected).abs().max() < 1e-6
    plain = (where.float().unsqueeze(-1) * 1e4 ** (-torch.arange(0, 64, 2) / 64)).cos()
    assert (plain - expected[0]).abs().max() > 0.01, "what float32 alone makes of it"


def test_gradients_of_a_sum_of_angles():
    x = torch.randn(2, 3, 50, requires_grad=True)
    weights = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(1))
    with no_float64():
        precise.angle_sum(x, 2).mul(weights).sum().backward()
    assert_close(x.grad, weights.flip(-1).cumsum(-1).flip(-1), tolerance=1e-5)
