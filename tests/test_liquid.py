"""The liquid mixer, its two dynamics and the gate by a running mean."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_close

from glissando.depth.mean_gate import MeanGate
from glissando.errors import ConfigError
from glissando.mixers import Context
from glissando.mixers.liquid import Dense, Diagonal, Liquid
from glissando.mixers.liquid.zero_order_hold import discretize
from glissando.model import LanguageModel
from glissando.state import leaves, state_bytes


def liquid(hidden_size: int = 6, **options: object) -> Liquid:
    """A mixer in float64, its weights far enough from their start for every path to matter."""
    torch.manual_seed(1)
    mixer = Liquid(hidden_size, **options).double().eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mixer


def inputs(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("preset", "parameters"), [("liquid-ssm-dense", 2_711_669), ("liquid-ssm", None), ("liquid-ssm-nano", None)]
)
def test_presets(preset: str, parameters: int | None):
    """The published count, and every parameter gets a gradient."""
    model = LanguageModel.from_preset(preset, **({"depth": {"layers": 2}} if parameters is None else {}))
    assert parameters in (None, model.num_parameters())
    if parameters is not None:
        return
    torch.manual_seed(0)
    model(torch.randint(0, 256, (1, 12)))[0].square().sum().backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    # Where D starts at zero its input still gets through C; nothing is cut.
    assert not dead, f"no gradient: {dead}"


def test_a_dense_step_is_the_zero_order_hold_of_its_matrix():
    mixer = liquid(dynamics="dense", state_size=4)
    dynamics, dt = mixer.dynamics, torch.tensor([[0.7]], dtype=torch.float64)
    assert isinstance(dynamics, Dense)
    u, before = inputs(1, 1, 4), inputs(1, 4, seed=1)
    tau = dynamics.time_constants((u,), before, dt)[0, 0]
    kept, entered = discretize(dynamics.a - torch.diag(1 / tau), dynamics.b, 0.7)
    assert_close(dynamics((u,), before, dt)[0, 0], kept @ before[0] + entered @ u[0, 0], "x", 1e-12)


def test_dense_dynamics_of_separate_modes_are_diagonal_ones():
    """A of 2 x 2 rotations, B that feeds their first coordinates, one tau for both, and nothing that moves it."""
    n, torch_seed = 3, 2
    torch.manual_seed(torch_seed)
    diagonal = liquid(state_size=2 * n, state_dependence=False).dynamics
    dense = liquid(state_size=2 * n, dynamics="dense", state_dependence=False).dynamics
    assert isinstance(diagonal, Diagonal)
    assert isinstance(dense, Dense)
    with torch.no_grad():
        diagonal.raw_adaptation.fill_(-40.0)
        dense.raw_adaptation.fill_(-40.0)
        for parameter in dense.adapt.parameters():
            parameter.zero_()
        diagonal.bias.zero_()
        diagonal.log_step.zero_()
        diagonal.turn.copy_(torch.tensor([0.5, 1.0, 2.0]))
        dense.raw_tau.copy_(diagonal.raw_tau.repeat_interleave(2))
        decay = diagonal.log_decay.exp()
        blocks = [torch.tensor([[-d, -w], [w, -d]]) for d, w in zip(decay, diagonal.turn, strict=True)]
        dense.a.copy_(torch.block_diag(*blocks))
        dense.b.copy_(torch.eye(2 * n))
    entry, before = inputs(2, 7, n), inputs(2, 2 * n, seed=1)
    paired = torch.stack([entry, torch.zeros_like(entry)], -1).flatten(2)
    dt = inputs(2, 7, seed=2).abs()
    got = dense((paired,), before, dt)
    assert_close(got, diagonal((entry, torch.zeros_like(entry)), before, dt), "x", 1e-11)


def test_a_dense_step_takes_what_a_diagonal_one_takes():
    """A state of another type, inputs in bfloat16 and autocast; and refuses time that runs backwards."""
    x, options = inputs(2, 3, 6).float(), {"dynamics": "dense", "state_size": 4}
    mixer = liquid(**options).float()
    exact = mixer(x, mixer.init_state(2))[0]
    given = mixer(x, mixer.init_state(2, dtype=torch.float64))[0]
    assert_close(given, exact, "y", 1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        _, after = mixer(x, mixer.init_state(2))
    assert after.x.dtype == torch.float32
    for value, message in ((-1.0, "cannot be negative"), (float("nan"), "must be finite")):
        with pytest.raises(ValueError, match=message):
            mixer(x, None, Context(dt=torch.full((2, 3), value)))


def test_the_gated_layer_is_its_equation():
    """W_out (x silu(g)), with the input, z and g the parts of one linear map in this order."""
    mixer, v = liquid(state_size=8), inputs(2, 5, 6)
    entry, z, gate = (v @ mixer.layer.project.weight.T).split([4, 4, 8], -1)
    states = mixer.dynamics((entry, z), torch.zeros(2, 8).double(), None)
    expected = (states * gate / (1 + torch.exp(-gate))) @ mixer.layer.out.weight.T
    assert_close(mixer(v)[0], expected, "y", 1e-12)


def test_the_published_layer_is_its_equation():
    mixer, v = liquid(state_size=8, layer="published"), inputs(2, 5, 6)
    layer = mixer.layer
    u = torch.nn.functional.gelu(layer.entry_norm(layer.entry(v)))
    states = mixer.dynamics((layer.b(u), layer.adapt(u)), torch.zeros(2, 8).double(), None)
    y = layer.scale * (layer.c(layer.state_norm(states)) + layer.d(u)) + layer.shift
    y = y * torch.sigmoid(layer.gate[2](torch.tanh(layer.gate[0](states))))
    expected = layer.down(torch.nn.functional.gelu(layer.up_norm(layer.up(y)))) + layer.residual * v
    assert_close(mixer(v)[0], expected, "out", 1e-12)


def test_the_state_is_as_large_as_it_says_whatever_the_context():
    mixer = liquid(state_size=10).float()
    _, state = mixer(torch.zeros(1, 3, 6), mixer.init_state(1))
    assert state_bytes(state) == 4 * 10
    _, state = mixer(torch.zeros(1, 500, 6), state)
    assert state_bytes(state) == 4 * 10


def test_two_half_steps_are_one_where_tau_sees_the_input_alone():
    mixer = liquid(state_dependence=False)
    x, dt = inputs(2, 5, 6), inputs(2, 5, seed=1).abs()
    whole, after = mixer(x, mixer.init_state(2), Context(dt=dt))
    twice, again = mixer(x.repeat_interleave(2, 1), mixer.init_state(2), Context(dt=dt.repeat_interleave(2, 1) / 2))
    assert_close(twice[:, 1::2], whole, "y", 1e-11)
    assert_close(again.x, after.x, "state", 1e-11)


def test_what_is_observed_of_it():
    def observed(mixer: Liquid, x: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return mixer.observe(x, Context())

    found = observed(liquid(state_size=8, adaptation=0.5), inputs(2, 100, 6))
    assert found["tau_p05"] < found["tau_p50"] < found["tau_p95"]
    assert observed(liquid(state_size=4, dynamics="dense"), inputs(1, 9, 6))["tau_p50"] > 0


def built(**options: object) -> Liquid:
    """With the weights of its start."""
    torch.manual_seed(0)
    return Liquid(64, **options).double()  # type: ignore[arg-type]


def test_where_numbers_start():
    for dynamics in ("diagonal", "dense"):
        assert (built(dynamics=dynamics).dynamics.taus() - 1).abs().max() < 1e-6
    dense = built(dynamics="dense").dynamics
    hippo, drawn = dense.a.detach(), dense.b.detach()
    assert (hippo.diagonal() < 0).all()
    assert hippo.triu(1).abs().max() == 0
    # 4,096 draws: mean 0 +- 0.0016, deviation 0.1 +- 0.0011, and the circular law's radius 0.1 sqrt(64).
    assert abs(float(drawn.mean())) < 0.008
    assert float(drawn.std()) == pytest.approx(0.1, abs=0.006)
    assert float(torch.linalg.eigvals(drawn).abs().max()) == pytest.approx(0.8, abs=0.15)


def test_time_constants_are_in_tokens_and_bounded():
    """tau0 (1 - a) to tau0 (1 + a), over the step: how many tokens it takes."""
    mixer = liquid(state_size=8, adaptation=0.9)
    dynamics = mixer.dynamics
    assert isinstance(dynamics, Diagonal)
    tau = mixer.time_constants(5 * inputs(2, 50, 6), Context())
    unit = (dynamics.taus() / dynamics.log_step.exp()).expand_as(tau)
    share = tau / unit
    assert tau.shape == (2, 50, 4)
    assert ((share - 1).abs() <= dynamics.adaptations()).all()
    assert share.max() > 1.3 > 0.7 > share.min()


@pytest.mark.parametrize("dynamics", ["diagonal", "dense"])
def test_time_constants_go_on_from_a_state(dynamics: str):
    mixer = liquid(state_size=8, adaptation=0.9, dynamics=dynamics)
    given, start = mixer.layer.inputs(3 * inputs(2, 12, 6)), inputs(2, 8, seed=1)
    whole, states = mixer.dynamics.time_constants(given, start, None), mixer.dynamics(given, start, None)
    late = mixer.dynamics.time_constants(tuple(part[:, 5:] for part in given), states[:, 4], None)
    assert_close(late, whole[:, 5:], "tau", 1e-12)
    assert (whole - mixer.dynamics.time_constants(given, 0 * start, None))[:, 0].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_size": 7}, "even for diagonal"),
        ({"adaptation": 1.0}, "adaptation: .*less than 0.999, got 1.0"),
        ({"steps": (0.1, 0.01)}, "liquid.steps must be two numbers in order"),
        ({"dynamics": "dense", "turns": "legs"}, "liquid.turns is of diagonal dynamics"),
        ({"dynamics": "dense", "coupled": False}, "liquid.coupled is of diagonal dynamics"),
        ({"dropout": 0.1}, "published layer"),
        ({"layer": "published", "dropout": 1.0}, "dropout: .*less than 1, got 1.0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        Liquid(6, **options)


# ---------------------------------------------------------------------- the gate by a running mean


def mean_gate() -> MeanGate:
    torch.manual_seed(0)
    return MeanGate(8).double()


def test_the_gate_is_of_the_mean_so_far():
    """By time, and of real tokens alone."""
    gate, y, dt = mean_gate(), inputs(2, 6, 8), inputs(2, 6, seed=1).abs()
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    got, state = gate(y, gate.init_state(2, None, None), Context(mask=mask, dt=dt))
    for row in range(2):
        for t in range(int(mask[row].sum())):
            past = slice(0, t + 1)
            mean = (y[row, past] * dt[row, past, None]).sum(0) / dt[row, past].sum()
            expected = torch.sigmoid(gate.down(torch.nn.functional.gelu(gate.up(mean))))
            assert_close(got[row, t], expected, "gate", 1e-12)
    assert_close(state.time, (dt * mask).sum(1), "time", 1e-12)


def test_the_mean_keeps_nothing_of_the_prompt_alive():
    gate = mean_gate()
    _, state = gate(inputs(2, 50, 8), gate.init_state(2, None, None), Context())
    assert sum(leaf.untyped_storage().nbytes() for leaf in leaves(state)) == state_bytes(state)


def test_no_time_no_mean():
    """Before any time has passed there is nothing to take a mean of: the gate is that of zeros, and finite."""
    gate = mean_gate()
    got, state = gate(inputs(1, 2, 8), gate.init_state(1, None, None), Context(dt=torch.zeros(1, 2).double()))
    zero = torch.sigmoid(gate.down(torch.nn.functional.gelu(gate.up(torch.zeros(8).double()))))
    assert_close(got[0, 1], zero, "gate", 1e-12)
    assert state.mean.abs().max() == 0


@pytest.mark.parametrize("dynamics", ["diagonal", "dense"])
@pytest.mark.parametrize("gap", [10.0, 3e3, 864_000.0, 1e14, 3.4e38])
def test_a_long_gap_keeps_float32s_digits(dynamics: str, gap: float):
    """tau is at most 20, so that a state is gone before its phase is: no turn of an undecayed one is large."""
    torch.manual_seed(0)
    mixer, x = Liquid(16, state_size=16 if dynamics == "dense" else 256, dynamics=dynamics), inputs(2, 12, 16)
    torch.nn.init.constant_(mixer.dynamics.raw_tau, 6.5)  # tau0 = 9.9
    dt = torch.ones(2, 12)
    dt[:, 5:8] = gap
    outcomes = []
    for dtype in (torch.float32, torch.float64):
        mixer.to(dtype).zero_grad()
        y = mixer(x.float().to(dtype), None, Context(dt=dt.to(dtype)))[0]
        y.square().sum().backward()
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in mixer.parameters())
        outcomes.append(y.detach().double())
    assert (outcomes[0] - outcomes[1]).norm() < 1e-5 * outcomes[1].norm()
