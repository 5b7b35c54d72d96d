"""The same signal or the same events at another speed: with its time scale, a model's answers are the same.

Numbers of every kind are read in units of the time scale, so that units cancel before anything is computed: exactly
where the speed is a power of two, and to rounding where it is not. Where a mixer stands alone, its own rates are the
only unit, and held inputs alone have nothing beside them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tolerances import assert_close
from torch import Tensor

from glissando.events import EventModel
from glissando.events.batches import Targets
from glissando.mixers import Context, Liquid
from glissando.series import SeriesModel

MIXERS: dict[str, Any] = {
    "attention": {"kind": "attention", "heads": 2, "forget_gate": True},
    "delta": {"kind": "delta", "heads": 2, "input": "impulse"},
    "delta-held": {"kind": "delta", "heads": 2},
    "delta-rotate": {"kind": "delta", "heads": 2, "transition": "rotate"},
    "liquid": {"kind": "liquid", "input": "impulse", "adaptation": 0.9},
    "liquid-held": {"kind": "liquid", "adaptation": 0.9, "coupled": True},
    "liquid-dense": {"kind": "liquid", "dynamics": "dense", "state_size": 4, "input": "impulse"},
    "spectral": {"kind": "spectral"},
    "tau": {"kind": "tau", "heads": 2, "rope": False, "forget_gate": True},
}
mixers = pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
pytestmark = pytest.mark.filterwarnings("ignore:dt is 0 at some steps")


def moved(model: torch.nn.Module) -> Any:
    """The model in float64, with weights far enough from their start for every path to matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.double().eval()


def gaps(rows: int, length: int) -> Tensor:
    """Times between steps, some of which take none."""
    return (3 * torch.rand(rows, length, dtype=torch.float64) - 0.5).relu()


def require_same(got: Tensor, expected: Tensor, speed: float) -> None:
    assert_close(got, expected, "answers", 0 if math.log2(speed).is_integer() else 1e-12)


@mixers
@pytest.mark.parametrize(("speed", "time"), [(2.0, "log"), (0.7, "linear")])
def test_a_series_at_another_speed(mixer: dict, speed: float, time: str):
    torch.manual_seed(0)
    options = {"hidden_size": 16, "depth": {"layers": 1}, "mixer": mixer, "dt": time, "forecast": True}
    model = moved(SeriesModel.from_config({**options, "inputs": 2, "outputs": 2}))
    x, dt, horizon = torch.randn(2, 9, 2).double(), gaps(2, 9), 4 * torch.rand(2, 9, 2).double()
    observed = torch.rand(2, 9, 2) < 0.7
    with torch.no_grad():
        model.set_scales(time_scale=0.75)
        expected = model(x, dt=dt, horizon=horizon, observed=observed)[0]
        other = model(x, dt=dt / speed, horizon=horizon / speed, observed=observed)[0]
        model.set_scales(time_scale=0.75 / speed)
        got = model(x, dt=dt / speed, horizon=horizon / speed, observed=observed)[0]
    require_same(got, expected, speed)
    assert not torch.allclose(other, expected)  # another time scale is another model


@mixers
@pytest.mark.parametrize("speed", [pytest.param(0.5, marks=pytest.mark.slow), 1.5])
def test_events_at_another_speed(mixer: dict, speed: float):
    """A density is of one unit of time: its logarithm moves by that of the speed, and that of a censored wait not."""
    torch.manual_seed(0)
    options = {"hidden_size": 16, "depth": {"layers": 1}, "mixer": mixer, "kinds": 3, "codes": 5}
    model = moved(EventModel.from_config(options))
    codes, dt, n = torch.randint(2, 5, (2, 9)), gaps(2, 9), 18
    wait, kind = gaps(2, 9).flatten() + 0.1, torch.randint(-1, 3, (n,))

    def scored(speed: float) -> tuple[Tensor, Tensor, Tensor]:
        model.time_scale.fill_(0.75 / speed)
        none = torch.full((n,), -1)
        targets = Targets(torch.arange(n), wait / speed, torch.zeros(n).double(), kind, none, none)
        with torch.no_grad():
            h = model(codes, dt=dt / speed)[0]
            return h, *model.log_likelihood(h.flatten(0, 1), targets)

    h, when, which = scored(1.0)
    got_h, got_when, got_which = scored(speed)
    require_same(got_h, h, speed)
    require_same(got_which, which, speed)
    assert_close(got_when, when + math.log(speed) * (kind >= 0).double(), "density", 1e-12)


@pytest.mark.parametrize("speed", [0.7, 2.0])
def test_a_liquid_mode_counts_time_in_its_own_steps(speed: float):
    """A held input enters by the product of step and dt alone: faster modes read a faster signal the same way. An
    impulse has a strength of its own, which is that of one unit of time."""
    for kind in ("held", "impulse"):
        torch.manual_seed(0)
        mixer = moved(Liquid(8, input=kind, adaptation=0.9, coupled=True))
        x, dt = torch.randn(2, 9, 8).double(), gaps(2, 9)
        with torch.no_grad():
            expected = mixer(x, None, Context(dt=dt))[0]
            mixer.dynamics.log_step.add_(math.log(speed))
            got = mixer(x, None, Context(dt=dt / speed))[0]
        if kind == "held":
            assert_close(got, expected, "y", 1e-12)
        else:
            assert not torch.allclose(got, expected)
