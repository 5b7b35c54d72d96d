"""Heads of events: densities, survival, intervals, hazards and draws against scipy and numerical integrals."""

from __future__ import annotations

import numpy as np
import pytest
import scipy
import torch

from glissando.errors import ConfigError
from glissando.events.heads import WAITS, Waits, _log_normal_between
from glissando.events.model import EventModel

NAMES = list(WAITS)


def head(
    name: str, kinds: int = 3, features: int = 5, seed: int = 0, centre: float = 0.4, spread: float = 1.7
) -> Waits:
    torch.manual_seed(seed)
    made = WAITS[name](features, kinds, components=4).double()
    made.set_scales(centre, spread)
    return made


def features(*shape: int, size: float = 2.0) -> torch.Tensor:
    return size * torch.randn(*shape, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def grid(last: float = 40.0) -> torch.Tensor:
    """Waits at which an integral over log w is summed."""
    return torch.linspace(-last, last, 20_001, dtype=torch.float64).exp()


def integral(density: torch.Tensor, wait: torch.Tensor) -> np.ndarray:
    return np.trapezoid((density * wait).detach().numpy(), wait.log().numpy(), axis=-1)


@pytest.mark.parametrize("name", NAMES)
def test_the_density_integrates_to_one_and_the_survival_is_its_tail(name: str) -> None:
    made, wait = head(name), grid()
    params = made(features(6, 1))
    density = made.log_density(params, wait).exp()
    assert np.allclose(integral(density, wait), 1, atol=1e-6)
    for place in (8_000, 10_000, 10_600):
        tail = integral(density[:, place:], wait[place:])
        assert np.allclose(made.log_survival(params, wait[place]).exp()[:, 0].detach(), tail, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_likelihood_is_that_of_the_hazards_integrated_numerically(name: str) -> None:
    """log p(w, k) = log lambda_k(w) - integral of the sum of hazards to w; kinds are likely as their hazards are."""
    made, wait = head(name), grid()
    params = made(features(4, 1))
    hazards = made.hazards(params, wait)
    total = hazards.sum(-1)
    density, survival = made.log_density(params, wait), made.log_survival(params, wait)
    likely = survival > -12
    assert torch.allclose(total[likely], (density - survival).exp()[likely], rtol=1e-9)
    place = 10_400
    kind = torch.arange(3).expand(4, 3)
    time, given = made.log_prob(params, wait[place], kind.T[..., None])
    integrated = torch.from_numpy(integral(total[:, : place + 1], wait[: place + 1]))
    expected = hazards[:, place].log() - integrated.unsqueeze(-1)
    assert torch.allclose((time + given)[..., 0].T, expected, atol=1e-6)
    assert torch.allclose(made.log_kinds(params, wait).exp().sum(-1), torch.ones_like(total), rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("resolution", [0.01, 0.5, 3.0])
def test_the_probabilities_of_the_intervals_sum_to_one_beside_the_survival(name: str, resolution: float) -> None:
    made = head(name)
    params = made(features(4, 1))
    wait = resolution * torch.arange(1, 3001, dtype=torch.float64)
    masses = made.log_interval(params, wait, resolution).exp()
    left = made.log_survival(params, wait).exp()
    assert torch.allclose(masses.cumsum(-1) + left, torch.ones_like(left), atol=1e-10)
    kinds = made.log_kinds(params, wait, resolution).exp().sum(-1)
    assert torch.allclose(kinds, torch.ones_like(left), rtol=1e-12)
    time, _ = made.log_prob(params, wait, torch.zeros(1, dtype=torch.int64), resolution)
    assert torch.equal(time.exp(), masses)


def test_the_density_of_a_fine_resolution_is_the_limit_of_its_probabilities() -> None:
    for name in NAMES:
        made, wait = head(name), torch.tensor([0.03, 1.0, 20.0]).double()
        params = made(features(4, 1))
        mass = made.log_interval(params, wait, 1e-6) - np.log(1e-6)
        assert torch.allclose(mass, made.log_density(params, wait), atol=1e-3)
        fine = made.log_kinds(params, wait, 1e-7)
        assert torch.allclose(fine, made.log_kinds(params, wait), atol=1e-4)


def test_intervals_of_a_normal_are_those_of_scipy_in_both_tails_and_both_precisions() -> None:
    upper = torch.tensor([-300.0, -30.0, -8.0, -1.0, 0.0, 0.01, 0.7, 6.0, 30.0, 300.0]).double().unsqueeze(-1)
    width = torch.tensor([1e-7, 1e-4, 0.0199, 0.0201, 0.3, 2.0, 50.0]).double()
    low, high = (upper - width).expand(10, 7), upper.expand(10, 7)
    right = low > 0
    a, b = torch.where(right, -high, low).numpy(), torch.where(right, -low, high).numpy()
    expected = scipy.special.log_ndtr(b) + np.log(-np.expm1(scipy.special.log_ndtr(a) - scipy.special.log_ndtr(b)))
    wide = width.numpy() >= 0.01  # scipy's own difference has no digits for narrower ones
    assert np.allclose(_log_normal_between(upper, width)[:, wide], expected[:, wide], rtol=1e-7, atol=5e-5)
    nodes, weights = np.polynomial.legendre.leggauss(40)
    points = (upper - width / 2).numpy()[..., None] + width.numpy()[..., None] / 2 * nodes
    logs = scipy.stats.norm.logpdf(points) + np.log(weights)
    quadrature = scipy.special.logsumexp(logs, -1) + np.log(width.numpy() / 2)
    assert np.allclose(_log_normal_between(upper, width)[:, :5], quadrature[:, :5], rtol=1e-7, atol=5e-5)
    assert np.allclose(_log_normal_between(upper, width)[3:7, :3], quadrature[3:7, :3], rtol=0, atol=1e-8)
    single = _log_normal_between(upper.float(), width.float()).double()
    assert np.allclose(single, _log_normal_between(upper, width), rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("resolution", [0.0, 1e-7])
def test_waits_of_sixteen_orders_have_finite_likelihoods_and_gradients_in_float32(name: str, resolution: float) -> None:
    made = head(name, spread=0.5).float()
    h = features(5, 1).float().requires_grad_()
    wait = torch.tensor([1e-7, 3e-7, 1e-3, 1.0, 1e4, 1e9])
    params = made(h)
    time, kind = made.log_prob(params, wait, torch.tensor([0, 1, 2, 0, 1, 2]), resolution)
    (time + kind + made.log_survival(params, wait)).sum().backward()
    assert bool(time.isfinite().all())
    assert bool(kind.isfinite().all())
    for gradient in (h.grad, *(each.grad for each in made.parameters())):
        assert gradient is not None
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("resolution", [0.0, 0.25])
def test_float32_agrees_with_float64_far_in_the_tails(name: str, resolution: float) -> None:
    made = head(name)
    h, wait = features(50, 1), torch.tensor([0.25, 0.5, 2.0, 30.0, 1e3, 1e5]).double()
    kind = torch.tensor([0, 1, 2, 0, 1, 2])
    expected = made.log_prob(made(h), wait, kind, resolution)
    survival = made.log_survival(made(h), wait)
    single = made.float()
    params = single(h.float())
    got = single.log_prob(params, wait.float(), kind, resolution)
    for found, exact in zip((*got, single.log_survival(params, wait.float())), (*expected, survival), strict=True):
        assert torch.allclose(found.double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_differences(name: str) -> None:
    made, h = head(name), features(3, 1).requires_grad_()
    wait, kind = torch.tensor([0.25, 1.0, 40.0]).double(), torch.tensor([0, 1, 2])
    for resolution in (0.0, 0.25, 1e-3):
        assert torch.autograd.gradcheck(lambda h, r=resolution: made.log_prob(made(h), wait, kind, r), h)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("after", [0.0, 2.5])
def test_draws_have_the_distribution_and_the_kinds_after_what_is_known_to_be_empty(name: str, after: float) -> None:
    made = head(name)
    params = made(features(1))
    drawn = tuple(each.expand(20_000, *each.shape[1:]) for each in params)
    wait, kind = made.sample(drawn, torch.Generator().manual_seed(2), after)
    again, _ = made.sample(drawn, torch.Generator().manual_seed(2), after)
    assert torch.equal(wait, again)
    assert bool((wait > after).all())
    left = made.log_survival(params, torch.tensor(after).double()) if after else torch.zeros(1).double()
    uniform = 1 - (made.log_survival(params, wait) - left).exp().detach()
    assert scipy.stats.kstest(uniform.numpy(), "uniform").pvalue > 0.01
    expected = made.log_kinds(params, wait).exp().mean(0).detach()
    assert np.allclose(np.bincount(kind, minlength=3) / 20_000, expected, atol=0.012)


@pytest.mark.parametrize("name", NAMES)
def test_draws_at_a_resolution_have_the_probabilities_of_their_intervals(name: str) -> None:
    made = head(name)
    params = made(features(1))
    drawn = tuple(each.expand(20_000, *each.shape[1:]) for each in params)
    wait, _ = made.sample(drawn, torch.Generator().manual_seed(3), resolution=0.5)
    steps = torch.arange(1, 9).double() * 0.5
    assert torch.equal(wait, (wait / 0.5).round() * 0.5)
    observed = (wait.unsqueeze(-1) == steps).double().mean(0)
    assert torch.allclose(observed, made.log_interval(params, steps, 0.5).exp().detach(), atol=0.012)


@pytest.mark.parametrize("name", NAMES)
def test_quantiles_invert_the_survival(name: str) -> None:
    made = head(name)
    params = made(features(4, 1))
    p = torch.tensor([1e-6, 0.1, 0.5, 0.999]).double()
    assert torch.allclose(made.log_survival(params, made.quantile(params, p)).exp(), 1 - p, rtol=1e-9)
    later = made.quantile(params, 0.5, after=7.0)
    ratio = made.log_survival(params, later) - made.log_survival(params, torch.tensor(7.0).double())
    assert torch.allclose(ratio.exp(), torch.tensor(0.5).double())


@pytest.mark.parametrize("name", NAMES)
def test_another_unit_of_time_changes_a_density_by_the_log_of_the_unit_alone(name: str) -> None:
    wait, kind = torch.tensor([0.1, 3.0, 50.0]).double(), torch.tensor([2, 0, 1])
    one, other = head(name), head(name)
    other.load_state_dict(one.state_dict())
    other.set_scales(float(one.centre) + np.log(24), float(one.spread))
    h = features(3)
    time, given = one.log_prob(one(h), wait, kind)
    scaled, same = other.log_prob(other(h), 24 * wait, kind)
    assert torch.allclose(scaled + np.log(24), time, atol=1e-9)
    assert torch.allclose(same, given, atol=1e-9)
    masses = other.log_interval(other(h), 24 * wait, 24 * 0.1)
    assert torch.allclose(masses, one.log_interval(one(h), wait, 0.1), atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_one_kind_is_certain_and_a_new_head_covers_the_waits_that_it_was_scaled_by(name: str) -> None:
    made = head(name, kinds=1)
    params = made(features(2, size=0.0))
    assert not made.log_kinds(params, torch.tensor([1.0, 2.0]).double()).any()
    low, middle, high = (float(made.quantile(params, p)[0].log()) for p in (0.05, 0.5, 0.95))
    assert abs(middle - 0.4) < 1.7
    assert 1.7 < high - low < 4 * 1.7 + 1


def test_a_head_that_does_not_exist_is_an_error_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"model\.head: expected 'mixture' or 'intensity', got 'weibull'"):
        EventModel.from_config({"kinds": 2, "codes": 4, "head": "weibull"})
