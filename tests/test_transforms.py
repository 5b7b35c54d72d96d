"""torch.func's transforms and derivatives of higher order, of a model whose `backend` is `reference`."""

from __future__ import annotations

import pytest
import torch
from subjects import CASES, ragged, random_ids
from subjects import build_one_layer as build
from tolerances import assert_close
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from glissando.depth.solvers import integrate
from glissando.errors import UnknownNameError
from glissando.model import LanguageModel
from glissando.series import SeriesModel

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own, in jvp

#: every form of every mixer, and one model of each other depth
MIXERS = [case for case in CASES if case.startswith("mixer:")]
DEPTHS = [case for case in CASES if case.startswith("depth:")]
#: these run every time, the others with the slow ones
QUICK = (
    "mixer:attention-forget", "mixer:delta-rotate", "mixer:liquid-default", "mixer:spectral-everything",
    "mixer:tau-gated",
)  # fmt: skip
cases = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in MIXERS + DEPTHS]
)


def problem(case: str) -> tuple[LanguageModel, dict[str, Tensor], Tensor]:
    """A model in plain tensor code, its parameters and ids (3, 9)."""
    model = build(case).eval()
    model.backend = "reference"
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return model, parameters, random_ids(model, 3, 9, seed=2)


def losses(model: LanguageModel, parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
    return functional_call(model, parameters, (ids,))[0].square().mean((1, 2))


@cases
def test_transforms_agree_with_the_kernels(case: str):
    """Gradients of each row (vmap of grad), a directional derivative (jvp), a second derivative (double backward)."""
    model, parameters, ids = problem(case)
    model.backend = "auto"
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = [
        torch.autograd.grad(model(row[None])[0].square().mean(), list(wanted.values()), allow_unused=True)
        for row in ids
    ]

    def of_row(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return losses(model, parameters, row[None]).sum()

    got = vmap(grad(of_row), (None, 0))(parameters, ids)
    for row, gradients in enumerate(rows):
        for name, gradient in zip(wanted, gradients, strict=True):
            expected = torch.zeros_like(wanted[name]) if gradient is None else gradient
            assert_close(got[name][row], expected, f"row {row}: {name}")

    generator = torch.Generator().manual_seed(1)
    tangents = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in parameters.items()}
    _, slopes = jvp(lambda p: losses(model, p, ids), (parameters,), (tangents,))
    for row in range(len(ids)):
        assert_close(slopes[row], sum((got[n][row] * t).sum() for n, t in tangents.items()), f"jvp of row {row}")

    model.backend = "reference"  # create_graph alone does not tell an operation that a second derivative will come
    along = torch.autograd.grad(model(ids)[0].square().mean(), [*wanted.values()], create_graph=True, allow_unused=True)
    slope = sum((g * t).sum() for g, t in zip(along, tangents.values(), strict=True) if g is not None)
    assert isinstance(slope, Tensor)
    second = torch.autograd.grad(slope, [*wanted.values()], allow_unused=True)
    curvature = sum((g * t).sum() for g, t in zip(second, tangents.values(), strict=True) if g is not None)

    assert isinstance(curvature, Tensor)
    _, changes = jvp(grad(lambda p: losses(model, p, ids).mean()), (parameters,), (tangents,))
    assert_close(curvature, sum((changes[n] * t).sum() for n, t in tangents.items()), "forward over reverse")


def test_masks_and_times_may_vary_under_vmap():
    model = SeriesModel.from_config(
        {"mixer": ["delta", "liquid"], "hidden_size": 16, "inputs": 2, "outputs": 1}
    ).double()
    model.backend = "reference"
    x, dt, mask = torch.randn(4, 8, 2).double(), torch.rand(4, 8).double(), ragged(4, 8, seed=0).sort(1, True).values
    alone = vmap(lambda x, dt, mask: model(x[None], dt=dt[None], mask=mask[None])[0][0])(x, dt, mask)
    assert_close(alone[mask], model(x, dt=dt, mask=mask)[0][mask])
    with pytest.raises(ValueError, match="cannot be negative"):
        vmap(lambda x, dt: model(x[None], dt=dt[None])[0])(x, -dt)


def test_an_unknown_backend_is_refused():
    model, _, ids = problem("mixer:delta-default")
    model.backend = "refrence"  # type: ignore[assignment]
    with pytest.raises(UnknownNameError, match="Did you mean"):
        model(ids)


def test_a_field_needs_no_weights_and_not_even_a_state():
    h = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for field in (lambda tau, h: -h, lambda tau, h: torch.ones_like(h)):
        expected = torch.autograd.grad(integrate(field, h, n_steps=4).sum(), h)[0]
        got = torch.autograd.grad(integrate(field, h, n_steps=4, checkpointed=True).sum(), h)[0]
        assert_close(got, expected)
