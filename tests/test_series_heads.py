"""Heads: densities, quantiles, samples and scores against torch.distributions, scipy and numerical integrals."""

from __future__ import annotations

import numpy as np
import pytest
import scipy
import torch

from glissando.errors import ConfigError
from glissando.series.heads import HEADS, LEVELS, Quantiles, make_head, student_cdf, student_quantile

SPREAD = ["gaussian", "student", "quantiles"]


def parameters(name: str, *shape: int, seed: int = 0) -> torch.Tensor:
    head = make_head(name)
    raw = torch.randn(*shape, 2 * head.width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return head.affine(head.parameters(raw), torch.tensor([3.0, -1.0]).double(), torch.tensor([2.0, 0.1]).double())


@pytest.mark.parametrize("name", HEADS)
def test_sizes_and_the_start_at_a_standard_normal(name: str) -> None:
    head = make_head(name)
    params = head.parameters(torch.zeros(4, 5, 3 * head.width))
    assert params.shape == (4, 5, 3, head.width)
    assert torch.allclose(head.mean(params), torch.zeros(4, 5, 3), atol=1e-6)
    if name != "point":
        params = head.parameters(torch.zeros(1, head.width, dtype=torch.float64))
        expected = scipy.stats.t(8).ppf(LEVELS) if name == "student" else scipy.stats.norm.ppf(LEVELS)
        assert np.allclose(head.quantile(params, LEVELS)[0, 0].numpy(), expected, atol=1e-6)


def test_likelihoods_are_those_of_the_distributions() -> None:
    target = torch.linspace(-40, 40, 21).double().unsqueeze(-1).expand(21, 2)
    for name, distribution in (
        ("gaussian", lambda m, s: torch.distributions.Normal(m, s)),
        ("student", lambda m, s, df: torch.distributions.StudentT(df, m, s)),
    ):
        params = parameters(name, 21)
        expected = -distribution(*params.unbind(-1)).log_prob(target)
        assert torch.allclose(make_head(name).each_loss(params, target), expected, rtol=1e-10)
    assert bool((parameters("student", 1000)[..., 2] > 2).all())


def test_students_distribution_function_and_quantiles_are_those_of_scipy() -> None:
    z = torch.tensor([-1e3, -40.0, -3.0, -0.2, 0.0, 1e-9, 0.7, 2.0, 15.0, 1e6]).double()
    df = torch.tensor([2.001, 2.5, 5.0, 30.0, 1e3]).double().unsqueeze(-1)
    assert np.allclose(student_cdf(z, df), scipy.stats.t.cdf(z, df), rtol=1e-9, atol=1e-300)
    p = torch.tensor([1e-4, 0.01, 0.1, 0.5, 0.6, 0.95, 0.9999]).double()
    assert np.allclose(student_quantile(p, df), scipy.stats.t.ppf(p, df), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["gaussian", "student"])
def test_crps_is_the_integral_over_the_distribution_function(name: str) -> None:
    head, params = make_head(name), parameters(name, 3)
    target = torch.tensor([[3.0, -1.0], [9.0, -1.3], [-2.0, -0.95]]).double()
    found = head.crps(params, target)
    for row in range(3):
        for column in range(2):
            mean, scale, *df = params[row, column].tolist()
            known = scipy.stats.t(*df, mean, scale) if df else scipy.stats.norm(mean, scale)
            x = mean + scale * np.sinh(np.linspace(-14, 14, 40_001))
            y = (known.cdf(x) - (x >= target[row, column].item())) ** 2
            assert found[row, column].item() == pytest.approx(np.trapezoid(y, x), rel=2e-3)


def test_the_crps_of_quantiles_is_near_that_of_the_distribution() -> None:
    """For the usual levels, within 2 %: comparable with the exact one of the other heads."""
    target = torch.randn(20_000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    quantiles, normal = (make_head(name) for name in ("quantiles", "gaussian"))
    found = [head.crps(head.parameters(target.new_zeros(head.width)), target).mean() for head in (quantiles, normal)]
    assert float(found[0] / found[1]) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("name", SPREAD)
def test_samples_have_the_quantiles_and_the_mean_and_repeat_with_a_seed(name: str) -> None:
    head, params = make_head(name), parameters(name, 2)
    draws = head.sample(params, 40_000, torch.Generator().manual_seed(1))
    assert draws.shape == (40_000, 2, 2)
    assert torch.equal(draws, head.sample(params, 40_000, torch.Generator().manual_seed(1)))
    levels = [0.02, 0.25, 0.5, 0.8, 0.97]
    below = (draws.unsqueeze(-1) <= head.quantile(params, levels)).double().mean(0)
    assert torch.allclose(below, torch.tensor(levels).double().expand_as(below), atol=0.01)
    deviation = draws.std(0)
    assert bool(((draws.mean(0) - head.mean(params)).abs() < 0.05 * deviation).all())


def test_quantiles_ascend_and_their_loss_is_least_at_the_samples_quantiles() -> None:
    head = Quantiles([0.1, 0.5, 0.9])
    raw = torch.randn(200, 3 * 3, dtype=torch.float64) * 20
    assert bool((head.parameters(raw).diff(dim=-1) > 0).all())
    target = torch.from_numpy(np.random.default_rng(0).gamma(2.0, size=500)).unsqueeze(-1)
    raw = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    for step in range(400):
        total, weight = head.loss(head.parameters(raw).expand(500, 1, 3), target)
        with torch.no_grad():
            raw -= 5 / (1 + step / 40) * torch.autograd.grad(total, raw)[0] / weight
    found = head.parameters(raw.detach())[0]
    assert np.allclose(found, np.quantile(target, [0.1, 0.5, 0.9]), atol=0.05)
    assert torch.equal(head.quantile(found, [0.1, 0.5, 0.9]), found)


@pytest.mark.parametrize("name", HEADS)
def test_targets_that_are_missing_change_nothing_and_have_no_gradient(name: str) -> None:
    head = make_head(name)
    raw = torch.randn(6, 2 * head.width, dtype=torch.float64, requires_grad=True)
    target = torch.randn(6, 2, dtype=torch.float64)
    missing = torch.zeros(6, 2, dtype=torch.bool)
    missing[1, 0] = missing[4, 1] = True
    total, weight = head.loss(head.parameters(raw), target.masked_fill(missing, torch.nan))
    gradient = torch.autograd.grad(total, raw)[0]
    assert weight == 10
    assert bool(gradient.isfinite().all())
    assert not gradient.unflatten(-1, (2, -1))[missing].any()
    assert torch.allclose(total, head.each_loss(head.parameters(raw), target)[~missing].sum())


@pytest.mark.parametrize("name", HEADS)
def test_gradients_are_those_of_differences_and_finite_far_away(name: str) -> None:
    head = make_head(name)
    raw = torch.randn(3, head.width, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[0.3], [-4.0], [9.0]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda raw: head.loss(head.parameters(raw), target)[0], raw)
    far = (torch.tensor([-80.0, 0.0, 80.0]).unsqueeze(-1).expand(3, head.width) * 1.0).requires_grad_()
    total, _ = head.loss(head.parameters(far), target.float() * 1e4)
    total.backward()
    assert bool(total.isfinite())
    assert bool(far.grad.isfinite().all())


@pytest.mark.parametrize("name", HEADS)
def test_affine_parameters_are_those_of_the_scaled_variable(name: str) -> None:
    head = make_head(name)
    raw = torch.randn(5, 2 * head.width, dtype=torch.float64)
    shift, scale = torch.tensor([10.0, -3.0]).double(), torch.tensor([0.5, 7.0]).double()
    params = head.parameters(raw)
    moved = head.affine(params, shift, scale)
    assert torch.allclose(head.mean(moved), shift + scale * head.mean(params))
    assert torch.allclose(head.affine(moved, -shift / scale, 1 / scale), params)
    target = torch.randn(5, 2, dtype=torch.float64)
    assert torch.allclose(head.crps(moved, shift + scale * target), scale * head.crps(params, target))
    if name != "point":
        levels = [0.01, 0.3, 0.99]
        expected = shift.unsqueeze(-1) + scale.unsqueeze(-1) * head.quantile(params, levels)
        assert torch.allclose(head.quantile(moved, levels), expected)


def test_what_cannot_be_asked_is_refused() -> None:
    params = torch.zeros(1, 1, 1)
    with pytest.raises(ConfigError, match="predicts no spread"):
        make_head("point").quantile(params, [0.5])
    with pytest.raises(ConfigError, match="predicts no spread"):
        make_head("point").sample(params, 3)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        make_head("gaussian").quantile(torch.ones(1, 1, 2), [0.5, 1.0])
    with pytest.raises(ConfigError, match="ascending"):
        make_head("quantiles", [0.5, 0.1])
