"""The published forms equal the publications' own programs, on the same weights, in float64.

The Tauformer's publication has no program; its equations are in test_repaired_equations.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import programs
import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_close
from torch import Tensor, nn

from research.published.continuous_transformer import PublishedContinuousTransformer
from research.published.hybrid_ode import PublishedHybrid
from research.published.liquid_ssm import Core, PublishedLiquid
from research.published.minimal_transformer import TAB, PublishedMinimal

pytestmark = pytest.mark.sources
SAME = 1e-6


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@dataclass
class System:
    """A program and our published form of it, of the same options, and how its parameters are called in ours."""

    theirs: Callable[..., nn.Module]
    ours: Callable[..., nn.Module]
    small: tuple[int, ...]
    large: tuple[int, ...]
    renamed: dict[str, str]

    def names(self, model: nn.Module) -> dict[str, str]:
        result = {}
        for name, _ in model.named_parameters():
            result[name] = name
            for pattern, new in self.renamed.items():
                result[name] = re.sub(pattern, new, result[name])
        return result


def as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def in_our_shape(name: str, value: Tensor) -> Tensor:
    """The Continuous Transformer's biases: real parts, then imaginary ones; ours are pairs."""
    return value.unflatten(-1, (2, -1)).transpose(-1, -2) if name == "depth_emb" else value


@pytest.fixture
def systems(monkeypatch: pytest.MonkeyPatch) -> dict[str, System]:
    """Options are their positional ones, in their order."""
    minimal, continuous = programs.minimal(monkeypatch), programs.continuous()
    hybrid, liquid = programs.hybrid(), programs.liquid()
    return {
        "minimal": System(
            minimal["MinimalTransformer"],
            lambda vocab, size, heads, layers, ffn: PublishedMinimal(size, heads, ffn, layers, vocab_size=vocab),
            (256, 4, 2, 2, 8),
            (64, 32, 2, 2, 64),
            {"^token_embed": "embedding", "^layers": "blocks", r"\.W(.)": r".w\1", "ff_in": "up", "ff_out": "down",
             "output_proj": "head"},
        ),
        "continuous": System(
            lambda size, steps: continuous["ContinuousTransformer"](size, steps, use_checkpoint=False),
            PublishedContinuousTransformer,
            (12, 3),
            (256, 6),
            {"^embed": "embedding", "to_complex": "lift", "r.F$": "r.filter", "r.G$": "r.gate",
             "omega_mod": "modulation", "depth_emb": "biases", "out_re": "head_real", "out_im": "head_imag"},
        ),
        "hybrid": System(
            lambda vocab, size, heads: hybrid["HybridODETransformer"](vocab, size, heads),
            PublishedHybrid,
            (41, 16, 4),
            (64, 64, 4),
            {"tok_emb": "embedding", "pos_emb": "positions", "early_blocks": "blocks",
             "ode_block.func": "blocks.2.field", "late_blocks.0": "blocks.3", "late_blocks.1": "blocks.4",
             "output_scale": "alpha", "ln_f": "norm", r"field\.(ln.|attn|mlp)": r"field.inner.\1", r"attn\.": "",
             r"mlp\.": "", "proj": "out", "fc1": "up", "fc2": "down"},
        ),
        "liquid": System(
            liquid["LiquidSSMLanguageModel"],
            lambda *sizes: PublishedLiquid(*sizes[:3], layers=sizes[3], length=sizes[4]),
            (11, 16, 8, 2, 12),
            (64, 64, 32, 2, 32),
            {"token_embedding": "embedding", "position_embedding": "positions", "liquid_layers": "layers",
             "layer_norms": "norms", "output_norm": "norm", "lm_head": "head", "global_adaptation": "gate",
             "sequence_adapter": "gate", "liquid_ssm": "core", "_continuous": "", r"time_controller\.": "",
             "tau_adaptation": "phi", "adaptation_rate": "a", "output_scale": "scale", "output_bias": "shift",
             "state_normalizer": "norm", "(in|out)put_projection": r"\1put", "residual_weight": "residual"},
        ),
    }  # fmt: skip


EVERY = pytest.mark.parametrize("name", ["minimal", "continuous", "hybrid", "liquid"])


def copied(system: System, spread: float = 0.2) -> tuple[nn.Module, nn.Module]:
    """Both in evaluation mode with the same weights, those of the program as it starts and moved."""
    theirs, ours = system.theirs(*system.small).eval(), system.ours(*system.small).eval()
    names = system.names(theirs)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    ours.load_state_dict({names[n]: in_our_shape(n, p.detach()) for n, p in theirs.named_parameters()})
    return theirs, ours


def ids(vocab: int, rows: int, length: int) -> Tensor:
    return torch.randint(1, vocab, (rows, length), generator=torch.Generator().manual_seed(1))


def logits_of(model: nn.Module, given: Tensor) -> Tensor:
    out = model(given)
    return out["logits"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out


@EVERY
def test_the_logits_and_all_gradients_are_the_programs(systems: dict[str, System], name: str):
    system = systems[name]
    expected, actual = copied(system)
    inputs = ids(11, 9, 9)  # the minimal program runs where there are as many rows as tokens
    names, logits = system.names(expected), []
    for model in (expected, actual):
        logits.append(logits_of(model, inputs))
        F.cross_entropy(logits[-1].flatten(0, 1), inputs.roll(-1, 1).flatten()).backward()
    assert_close(logits[1], logits[0], "logits", SAME)
    mine = dict(actual.named_parameters())
    assert set(mine) == set(names.values())
    for parameter, value in expected.named_parameters():
        grad = mine[names[parameter]].grad
        assert (grad is None) == (value.grad is None), parameter
        if grad is not None:
            assert_close(as_real(grad), as_real(in_our_shape(parameter, value.grad)), parameter, SAME)


@EVERY
def test_it_starts_as_the_program_does(systems: dict[str, System], name: str):
    """What the program starts with every time is ours too; else means and deviations are, as near as the draws tell."""
    system = systems[name]
    theirs, again, ours = (make(*system.large) for make in (system.theirs, system.theirs, system.ours))
    names = system.names(theirs)
    for parameter, value in theirs.named_parameters():
        a, b = (as_real(x.detach()) for x in (in_our_shape(parameter, value), ours.get_parameter(names[parameter])))
        assert a.shape == b.shape, parameter
        if torch.equal(value, again.get_parameter(parameter)):
            assert_close(b, a, parameter)
            continue
        n = a.numel()
        assert abs(float(b.std() / a.std()) - 1) < 5 * n**-0.5, parameter
        assert abs(float(b.mean() - a.mean())) < 5 * float(a.std()) * (2 / n) ** 0.5, parameter


# ---------------------------------------------------------------------- the Minimal Transformer


def test_the_minimal_programs_training_step_scores_padding_too(systems: dict[str, System]):
    expected, actual = copied(systems["minimal"])
    inputs = ids(256, 9, 10)
    inputs[:, 4], inputs[3:, 8:] = TAB, 0
    assert_close(actual.training_step(inputs), expected.training_step(inputs, 0), "loss", SAME)
    assert_close(
        actual.training_step(inputs),
        F.cross_entropy(actual(inputs[:, :-1]).mT, inputs[:, 1:]),
        "of every target",
    )


@pytest.mark.parametrize("shape", [(2, 5), (5, 2), (1, 1), (3, 3)])
def test_the_minimal_program_fails_where_ours_does(systems: dict[str, System], shape: tuple[int, int]):
    failed = []
    for model in copied(systems["minimal"]):
        try:
            model(ids(256, *shape))
            failed.append(False)
        except RuntimeError:
            failed.append(True)
    assert failed == [shape[0] != shape[1]] * 2


# ---------------------------------------------------------------------- the hybrid


def test_a_control_steers_the_hybrid_program_as_it_does_ours(systems: dict[str, System]):
    expected, actual = copied(systems["hybrid"])
    inputs, control = ids(41, 3, 7), torch.randn(3, 4, requires_grad=True)
    logits = [model(inputs, control) for model in (expected, actual)]
    assert_close(logits[1], logits[0], "logits", SAME)
    assert (logits[0] - expected(inputs)).abs().max() > 1e-3
    for each in logits:
        each.sum().backward()
        assert control.grad is None  # the adjoint does not receive it


# ---------------------------------------------------------------------- the liquid model


def test_where_the_matrix_is_singular_the_liquid_program_is_exact(systems: dict[str, System]):
    """A - 1 / tau is nilpotent, as tau follows nothing and A has 1 / tau on its diagonal."""
    expected, actual = copied(systems["liquid"])
    with torch.no_grad():
        for layer in actual.layers:
            layer.core.phi[3].weight.zero_(), layer.core.phi[3].bias.zero_(), layer.core.log_tau.zero_()
            layer.core.A.copy_(torch.eye(8) + 3 * torch.randn(8, 8).tril(-1))
            assert torch.linalg.matrix_rank(layer.core.A - torch.eye(8)) < 8
        mine, names = dict(actual.named_parameters()), systems["liquid"].names(expected)
        for name, parameter in expected.named_parameters():
            parameter.copy_(mine[names[name]])
        assert_close(actual(ids(11, 2, 9)), expected(ids(11, 2, 9))["logits"], "logits", SAME)


def test_the_liquid_programs_bounds_and_repairs_are_ours(systems: dict[str, System]):
    """Clamps of tau, dt, A, states, logits, a and r; NaN, both infinities, ids that do not exist, and a long input."""
    reference, actual = copied(systems["liquid"], spread=3.0)
    inputs = torch.cat([ids(11, 2, 9), torch.tensor([[-7, 99, 3, 4, 5, 6, 7]] * 2)], 1)
    with torch.no_grad():
        for matrix, head in (
            (reference.liquid_layers[0].liquid_ssm.A_continuous, reference.lm_head),
            (actual.layers[0].core.A, actual.head),
        ):
            matrix[2, 3] = 30
            head.bias[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        result, expected = actual(inputs), reference(inputs)["logits"]
    assert_close(result, expected, "logits", SAME)
    assert expected.shape == (2, 12, 11)
    assert expected[0, 0, :3].tolist() == [0, 50, 50]


def test_the_liquid_program_draws_the_same_tokens(systems: dict[str, System]):
    expected, actual = copied(systems["liquid"])
    for length, seed in ((5, 0), (9, 2)):  # the table of positions has 12
        inputs, drawn = ids(11, 1, length), []
        for model in (expected, actual):
            torch.manual_seed(seed)
            more = model.generate(inputs, 14) if model is expected else model.generate(inputs, 14 - length)
            drawn.append(more["generated_ids"] if isinstance(more, dict) else more)
        assert torch.equal(*drawn)
        assert drawn[0].shape[1] > length
    for model in (expected, actual):
        with pytest.raises(RuntimeError, match="Tensor with 2 elements"):
            model.generate(ids(11, 2, 4), 6)


def test_the_core_of_the_liquid_programs_demonstration():
    """Fewer inputs than states; two steps, the second from a state that is not 0."""
    expected, actual = programs.liquid()["LiquidSSMCore"](16, 8, 6), Core(6, 16, hippo=True, inputs=8)
    names = {"_continuous": "", r"time_controller\.": "", "tau_adaptation": "phi", "adaptation_rate": "a",
             "output_scale": "scale", "output_bias": "shift", "state_normalizer": "norm"}  # fmt: skip
    moved = {name: p.detach() + 0.1 * torch.randn_like(p) for name, p in expected.named_parameters()}
    expected.load_state_dict(moved, strict=False)
    for pattern, new in names.items():
        moved = {re.sub(pattern, new, name): value for name, value in moved.items()}
    actual.load_state_dict(moved)
    u = torch.randn(3, 2, 8)
    steps = [expected(now, return_diagnostics=True) for now in u.unbind(1)]
    for got, name in zip((*actual(u), actual.run(u)[1]), ("output", "state", "time_constants"), strict=True):
        assert_close(got, torch.stack([step[name] for step in steps], 1), name, SAME)
