"""Numbers that were lost or made up without a word: states of other models, shut gates, tables of another size."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from glissando import grow
from glissando.errors import InputError
from glissando.kernels.rope import rotate, rotation
from glissando.kernels.short_conv import short_conv
from glissando.mixers.attention.attend import attention
from glissando.mixers.spectral import Spectral
from glissando.model import LanguageModel

SMALL = {"vocab_size": 20, "hidden_size": 16, "depth": {"layers": 2}}


def small(**options) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel.from_config(SMALL | options).double().eval()


def test_a_model_grows_into_its_first_tau_layer():
    model = LanguageModel.from_config(SMALL | {"mixer": ["attention", "attention", "tau"]}).eval()
    ids = torch.arange(12).view(2, 6)
    grown = grow(model, layers=1)
    torch.testing.assert_close(grown(ids)[0], model(ids)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "pairs"), [(64, 16), (64, 64), (2, 16), (2, 64)])
def test_a_table_of_another_size_is_refused(heads, pairs):
    """The kernel wrote beyond the end of what it had made."""
    x, table = torch.ones(1, 64, heads, 64), torch.ones(2, 1, 64, 1, pairs)
    for backend in ("auto", "reference"):
        with pytest.raises(ValueError, match="K/2 = 32"):
            rotate(x, table, backend)


@pytest.mark.parametrize("reading", [-60.0, -87.0, -120.0])
def test_a_gate_that_is_shut_has_gradients(reading):
    """sqrt(1 - exp(-2 gamma)) is 0 there, and its slope was infinite: one such token made every gradient NaN."""
    torch.manual_seed(0)
    mixer = Spectral(8)
    mixer.reset_parameters()
    for linear in (mixer.project, mixer.out):  # a model gives them their numbers
        torch.nn.init.normal_(linear.weight, std=0.3)
    with torch.no_grad():
        mixer.decay_bias[0] = reading
    mixer(torch.randn(1, 6, 8))[0].square().sum().backward()
    assert mixer.decay_bias.grad is not None
    assert all(p.grad.isfinite().all() for p in mixer.parameters() if p.grad is not None)


GATED = {"mixer": {"kind": "attention", "heads": 2, "forget_gate": True}}
PREVIOUS = {"mixer": {"kind": "attention", "heads": 2, "keys": "previous"}}
PLAIN = {"mixer": {"kind": "attention", "heads": 2}}
CONVOLVED = PLAIN | {"block": {"conv_width": 4}}
TAU = {"mixer": {"kind": "tau", "heads": 2}}
TAU_GATED = {"mixer": {"kind": "tau", "heads": 2, "forget_gate": True}}
TAU_PREVIOUS = {"mixer": {"kind": "tau", "heads": 2, "keys": "previous"}}
PAIRS = [
    (PLAIN, GATED), (PLAIN, PREVIOUS), (PLAIN, CONVOLVED), (TAU, TAU_GATED),
    (TAU, TAU_PREVIOUS),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), PAIRS + [(b, a) for a, b in PAIRS])
def test_a_state_with_other_parts_is_refused(one, other):
    """It was taken, and what it lacked was left out of every later token."""
    theirs, ours, ids = small(**one), small(**other), torch.arange(8).unsqueeze(0)
    state = theirs(ids, theirs.init_state(1))[1]
    with pytest.raises(InputError, match="the state is of another model"):
        ours(ids, state)


def test_a_key_bias_is_exact_under_autocast_of_float16():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 256, 16) for _ in range(3))
    bias = torch.linspace(-700, 0, 256, dtype=torch.float64).expand(1, 2, 256)
    exact = attention(q.double(), k.double(), v.double(), visible="causal", key_bias=bias, backend="reference")
    with torch.autocast("cpu", torch.float16):
        found = attention(q.half(), k.half(), v.half(), visible="causal", key_bias=bias)
    assert found.dtype == torch.float16
    assert float((found - exact).abs().max()) < 0.005


def test_tables_without_numbers_are_not_remembered():
    model, ids = small(**PLAIN), torch.arange(7).unsqueeze(0)
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True):
            rotation_of_nothing = model(torch.zeros(1, 11, dtype=torch.long))[0]
        assert rotation_of_nothing.shape == (1, 11, 20)
        longer = torch.arange(11).unsqueeze(0)
        torch.testing.assert_close(model(longer)[0], model(longer, model.init_state(1))[0])
        assert model(ids)[0].isfinite().all()


def test_padding_that_is_nan_stays_out_of_the_mean_gate():
    from glissando.depth.mean_gate import MeanGate
    from glissando.mixers import Context

    torch.manual_seed(0)
    gate = MeanGate(8).double()
    y, mask = torch.randn(1, 4, 8, dtype=torch.float64), torch.tensor([[True, True, False, True]])
    y[0, 2] = torch.nan
    state = gate(y, gate.init_state(1, None, None), Context(mask=mask))[1]
    seen = gate(y[:, mask[0]], gate.init_state(1, None, None), Context())[1]
    torch.testing.assert_close(state.mean, seen.mean)


def test_a_past_of_another_length_is_refused():
    for backend in ("reference", "numba"):
        with pytest.raises(ValueError, match="past must be"):
            short_conv(torch.ones(1, 5, 4), torch.ones(4, 3), torch.ones(1, 7, 4), backend)


def test_a_rotation_fits_its_own_table():
    x = torch.randn(1, 64, 4, 32)
    table = rotation(torch.arange(64)[None], 32, 1e4, 32, torch.float32).unsqueeze(-2)
    torch.testing.assert_close(rotate(x, table), rotate(x, table, "reference"))
