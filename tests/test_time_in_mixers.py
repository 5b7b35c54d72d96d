"""What dt does in the mixers that take impulses, against closed forms written out here."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from tolerances import assert_close
from torch import Tensor, nn

from glissando.backbone import _warn_of_held_input
from glissando.mixers import Attention, Context, Delta, Liquid, LiquidConfig, Spectral
from glissando.mixers.liquid.scan import Modes, liquid
from glissando.mixers.tau import Tau
from glissando.model import LanguageModel, ModelConfig

ROOT = Path(__file__).parent.parent
DT = torch.tensor([[1.0, 2.5, 0.0, 4.0]], dtype=torch.float64)


def turned(x: Tensor, times: Tensor) -> Tensor:
    """Pairs (T, 2) turned by one radian per unit of time."""
    cos, sin = times.cos(), times.sin()
    return torch.stack([x[:, 0] * cos - x[:, 1] * sin, x[:, 0] * sin + x[:, 1] * cos], -1)


def forgotten(forget: nn.Linear, x: Tensor) -> Tensor:
    """C_i - C_j (T, T) with C the sum of dt log sigmoid."""
    total = (DT[0] * nn.functional.logsigmoid(forget(x)[:, 0])).cumsum(0)
    return total[:, None] - total[None]


def mixed(logits: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones_like(logits).triu(1).bool()
    return logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def test_attention_rotates_and_forgets_by_time():
    torch.manual_seed(0)
    mixer, x = Attention(2, heads=1, forget_gate=True).double(), torch.randn(1, 4, 2, dtype=torch.float64)
    nn.init.normal_(mixer.forget.weight)
    times, (q, k, v) = DT[0].cumsum(0), mixer.qkv(x[0]).split(2, -1)
    logits = turned(q, times) @ turned(k, times).T / 2**0.5 + forgotten(mixer.forget, x[0])
    assert_close(mixer(x, None, Context(dt=DT))[0][0], mixer.out(mixed(logits, v)))


def test_tau_forgets_by_time():
    torch.manual_seed(0)
    mixer = Tau(2, heads=1, forget_gate=True, rope=False, temperature=0.1).double()
    x = torch.randn(1, 4, 2, dtype=torch.float64)
    nn.init.normal_(mixer.forget.weight)

    def energy(part: Tensor) -> Tensor:
        return ((part @ mixer.matrix()) * part).sum(-1) / (part.square().sum(-1) + mixer.config.eps)

    q, k = (e / (e + mixer.tau) for e in map(energy, mixer.qk(x[0]).split(2, -1)))
    logits = forgotten(mixer.forget, x[0]) - (q[:, None] - k[None]).abs() / mixer.log_temperature.exp()
    assert_close(mixer(x, None, Context(dt=DT))[0][0], mixer.out(mixed(logits, mixer.v(x[0]))), tolerance=1e-6)


def test_a_spectral_state_ages_as_over_tokens_of_zero():
    torch.manual_seed(0)
    mixer = Spectral(6).double()
    with torch.no_grad():
        mixer.project.weight[6:12] = 0  # the decay does not depend on the token
    x, dt = torch.randn(1, 3, 6, dtype=torch.float64), torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.float64)
    spread = torch.zeros(1, 6, 6, dtype=torch.float64)
    spread[:, [0, 3, 5]] = x
    assert_close(mixer(x, None, Context(dt=dt))[0], mixer(spread)[0][:, [0, 3, 5]])


def test_a_delta_state_ages_and_then_takes_the_impulse():
    """With constant rates: what an event writes does not depend on dt, and what was there decays by exp(-dt / tau)."""
    torch.manual_seed(0)
    mixer = Delta(4, heads=1, horizons=[3, 3], input="impulse").double()
    with torch.no_grad():
        mixer.project.weight[-5] = 0  # the rate does not depend on the token
        rate = mixer.log_rate.exp() * 8 * torch.sigmoid(mixer.decay_bias)
    x, s = torch.randn(1, 1, 4, dtype=torch.float64), torch.randn(1, 1, 4, 4, dtype=torch.float64)

    def after(time: float, start: Tensor) -> Tensor:
        ctx = Context(dt=torch.full((1, 1), time, dtype=torch.float64))
        return mixer(x, mixer.init_state(1)._replace(s=start), ctx)[1].s

    written = after(0.0, 0 * s)
    assert written.abs().max() > 0.01
    assert_close(after(5.0, 0 * s), written)
    assert_close(after(5.0, s) - written, (after(0.0, s) - written) * torch.exp(-5 * rate))


def test_delta_horizons_are_in_the_unit_of_dt():
    """Also those below 1: a state decays by exp(-dt / horizon), so that units cancel."""
    x, start = torch.randn(1, 1, 4, dtype=torch.float64), torch.randn(1, 1, 4, 4, dtype=torch.float64)
    kept = []
    for unit in (1.0, 0.01):
        torch.manual_seed(0)
        mixer = Delta(4, heads=1, horizons=[3 * unit, 3 * unit], input="impulse").double()
        with torch.no_grad():
            mixer.project.weight[-5] = 0
        s = [
            mixer(x, mixer.init_state(1)._replace(s=each), Context(dt=torch.full((1, 1), 5 * unit).double()))[1].s
            for each in (start, 0 * start)
        ]
        kept.append(s[0] - s[1])
    assert kept[0].abs().max() > 0.01
    assert_close(kept[1], kept[0], tolerance=1e-6)  # the rates are logarithms in float32


@pytest.mark.parametrize("dynamics", ["diagonal", "dense"])
def test_a_liquid_state_ages_and_then_takes_the_impulse(dynamics: str):
    """What an event adds does not depend on dt, and what was there decays as it does without one."""
    torch.manual_seed(0)
    options = {"state_size": 6, "dynamics": dynamics, "state_dependence": False}
    mixer = Liquid(4, input="impulse", **options).double()
    held = Liquid(4, **options).double()
    held.load_state_dict(mixer.state_dict())
    x, start = torch.randn(1, 1, 4, dtype=torch.float64), torch.randn(1, 6, dtype=torch.float64)

    def after(mixer: Liquid, time: float, start: Tensor) -> Tensor:
        ctx = Context(dt=torch.full((1, 1), time, dtype=torch.float64))
        return mixer(x, mixer.init_state(1)._replace(x=start), ctx)[1].x

    written = after(held, 1.0, 0 * start)
    assert written.abs().max() > 1e-4
    for time in (0.0, 0.2, 7.0):
        assert_close(after(mixer, time, 0 * start), written, tolerance=1e-12)
        aged = after(held, time, start) - after(held, time, 0 * start)
        assert_close(after(mixer, time, start), written + aged, tolerance=1e-12)


def test_the_example_of_the_page():
    """docs/liquid.md, "Held inputs and impulses": three events at 0, 0.1 and 2.1, and one mode."""
    one = torch.ones(1, dtype=torch.float64)
    modes = Modes(one / 4, 0 * one, one, 4 * one, 0 * one)  # zeta = -1/4 - 1/4
    b, dt = torch.ones(1, 3, 1, dtype=torch.float64), torch.tensor([[0, 0.1, 2]], dtype=torch.float64)
    page = (ROOT / "docs" / "liquid.md").read_text()
    for kind, line in (("held", r"\* held: .*"), ("impulse", r"\* impulses: .*")):
        x = liquid(b, 0 * b, modes, torch.zeros(1, 1, 2).double(), dt, impulse=kind == "impulse")[0, :, 0, 0].tolist()
        written = [float(number) for number in re.findall(r"= ([\d.]+)\$", re.search(line, page)[0])]
        assert written == pytest.approx(x, abs=5e-4), kind


def test_no_time_and_held_inputs_are_worth_a_warning(monkeypatch: pytest.MonkeyPatch):
    """Once; not of padding, and not where inputs are impulses."""
    monkeypatch.setattr("glissando.backbone._warn_of_held_input", cache(_warn_of_held_input.__wrapped__))
    ids, dt = torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[1.0, 2.0, 0.0]])

    def model(**options: object) -> LanguageModel:
        return LanguageModel(ModelConfig(vocab_size=3, hidden_size=8, mixer=LiquidConfig(**options)))

    model(input="impulse")(ids, dt=dt)
    model()(ids, dt=dt, mask=torch.tensor([[True, True, False]]))
    with pytest.warns(UserWarning, match=r"Liquid holds its input over dt: .* use --model.mixer.input impulse"):
        model()(ids, dt=dt)
    model()(ids, dt=dt)  # a second warning would be an error
