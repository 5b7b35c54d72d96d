"""The published forms are what their authors describe, defects included."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import assert_close

from research.published.continuous_transformer import (
    CONTEXT,
    PublishedContinuousTransformer,
    frequencies,
    standardise,
)


@pytest.fixture
def model() -> PublishedContinuousTransformer:
    torch.manual_seed(0)
    return PublishedContinuousTransformer(hidden_size=16, steps=3)


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1))


def test_it_has_the_published_number_of_parameters() -> None:
    model = PublishedContinuousTransformer()
    assert sum(p.numel() for p in model.parameters()) == 2_905_601
    assert sum(p.numel() for p in model.operator.parameters()) == 7_169


def test_the_last_token_changes_the_first_logits(model: PublishedContinuousTransformer) -> None:
    tokens = ids(1, 32)
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 256
    with torch.no_grad():
        assert (model(tokens) - model(changed))[0, 0].abs().max() > 1e-6


@pytest.mark.parametrize("length", [1, 2, 33])
def test_the_logits_are_finite(model: PublishedContinuousTransformer, length: int) -> None:
    with torch.no_grad():
        logits = model(ids(2, length))
    assert logits.shape == (2, length, 256)
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


def test_every_parameter_gets_a_gradient_and_checkpointing_changes_none(model: PublishedContinuousTransformer) -> None:
    gradients = []
    for model.checkpoint in (True, False):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(ids(2, 12)).flatten(0, 1), ids(2, 12).flatten()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 0, name
        assert torch.equal(gradient, gradients[1][name]), name


def test_time_is_a_circular_convolution(model: PublishedContinuousTransformer) -> None:
    """Against the sum h_t = sum_j K_j u_((t - j) mod T), with everything else of the step written out."""
    step, size, length = model.operator, 16, 5
    z = torch.randn(1, length, size, dtype=torch.complex64)
    with torch.no_grad():
        spectrum = torch.fft.fft(z)
        s = torch.fft.ifft(spectrum * step.filter / ((spectrum * step.gate).abs() + 0.1))
        u = s * torch.tanh(0.5 * s.abs())  # beta starts at 0, so the phase does not count yet
        factor = torch.exp(torch.complex(-step.log_gamma.exp(), step.omega + 0.1 * step.modulation.sin()))
        h = torch.stack([sum(factor**j * u[:, (t - j) % length] for j in range(length)) for t in range(length)], 1)
        got, expected = step(z, torch.zeros(size)), standardise(z + 0.1 * h)
    assert_close(torch.view_as_real(got), torch.view_as_real(expected), "one step")


def test_p_uses_the_pseudo_variance() -> None:
    """Unit pseudo-variance after P; and four phases a quarter turn apart, whose pseudo-variance is 0, explode."""
    z = torch.randn(3, 64, dtype=torch.complex128)
    pseudo = (standardise(z) ** 2).mean(-1)
    assert_close(torch.view_as_real(pseudo), torch.view_as_real(torch.ones_like(pseudo)), tolerance=1e-4)
    spread = torch.tensor([1, 1j, -1, -1j], dtype=torch.complex128)
    assert standardise(spread).abs().min() > 1e5


def test_the_frequencies_fall_from_their_first_to_1e_minus_4() -> None:
    omega = frequencies(8)
    assert math.isclose(omega[-1].item(), 1e-4, rel_tol=1e-5)
    assert math.isclose(omega[0].item(), 1e4 ** (-1 / math.sqrt(15)), rel_tol=1e-5)
    assert (omega.diff() < 0).all()


def test_decoding_reads_the_last_context_again(model: PublishedContinuousTransformer) -> None:
    tokens = ids(1, CONTEXT + 3)
    with torch.no_grad():
        expected = model(tokens[:, 3:])[:, -1]
    assert torch.equal(model.next_logits(tokens), expected)
