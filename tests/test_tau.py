"""The tau mixer: what lambda is, and what is remembered."""

from __future__ import annotations

import pytest
import torch
from graphs import weighted
from tolerances import assert_close

import glissando
from glissando.errors import ConfigError
from glissando.mixers import Attention
from glissando.mixers.tau import Tau
from glissando.mixers.tau import laplacian as graphs
from glissando.mixers.tau.attention import tau_attention
from glissando.mixers.tau.laplacian import energy
from glissando.mixers.tau.layer import Projected, TauState
from glissando.state import state_bytes

GATED = {"importance": True, "forget_gate": True}


def mixer(size: int = 16, seed: int = 0, **options) -> Tau:
    """In float64, its weights large enough for lambdas to differ."""
    torch.manual_seed(seed)
    built = Tau(size, **options)
    built.reset_parameters()
    return built.double()


def projected(m: Tau, x: torch.Tensor, state: TauState | None = None) -> Projected:
    """What attention is computed from, behind the state."""
    return m.project(x, m.energies(x, None if state is None else state.position), state)


def inputs(length: int, size: int = 16, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, length, size, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def test_lambda_is_the_bounded_energy_of_a_head():
    m, x = mixer(heads=2, rope=False, tau=0.7), inputs(5)
    p = projected(m, x)
    keys = m.qk(x)[..., 2 * 8 :].unflatten(-1, (2, 8))
    for h in range(2):
        vector = keys[0, 3, h]
        e = vector @ graphs.chain(8) @ vector / (vector @ vector + 1e-6)
        assert p.k[0, h, 3].item() == pytest.approx((e / (e + 0.7)).item())
    assert (p.k >= 0).all()
    assert (p.k < 1).all()


def test_at_temperature_1_attention_is_an_average():
    """The published form, defect (a): over 1024 random keys it attends to 1023.5 of them; 32 at T = 0.001."""
    keys = torch.rand(1024, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = {}
    for temperature in (1.0, 0.1, 0.01, 0.001):
        weights = (-(keys.unsqueeze(1) - keys).abs() / temperature).softmax(-1)
        counts[temperature] = weights.mul(-weights.log()).nan_to_num().sum(-1).exp().mean().item()
    assert counts[1.0] > 0.97 * 1024
    assert counts[0.001] < 0.01 * 1024


@pytest.mark.parametrize("weights", ["diagonal", "learned"])
def test_learned_graphs_stay_graphs(weights: str):
    m = mixer(laplacian_weights=weights)
    with torch.no_grad():
        m.log_edges.add_(torch.randn_like(m.log_edges))
    found = m.matrix().detach()
    if weights == "learned":
        graphs.validate(found)
        assert not torch.equal(found, m.laplacian.double())
    else:
        assert found.shape == (m.key_size,)
        assert (found > 0).all()
        x = inputs(3, m.key_size)
        assert_close(energy(x, found), energy(x, found.diag()), "a diagonal as a vector and as a matrix", 1e-14)


@pytest.mark.parametrize("options", [{}, GATED])
def test_bytes_of_the_exact_cache(options):
    """(K + 1) / (2 K) of a standard cache, and one number more for each key and head with a gate or importance."""
    length, size = 40, 32
    m = Tau(size, **options)
    _, state = m(torch.randn(1, length, size), m.init_state(1))
    attention = Attention(size, heads=4)
    _, standard = attention(torch.randn(1, length, size), attention.init_state(1))
    kept = state_bytes(standard[:2])
    assert state_bytes((state.k, state.v)) * 2 * m.head_size == kept * (m.head_size + 1)
    extra = 0 if state.e is None else state_bytes(state.e)
    assert extra == (8 * length * 4 if options else 0)
    assert state_bytes(state) - state_bytes((state.k, state.v)) - extra <= 16 + 8 * 4


def test_keys_of_the_previous_token_find_what_followed_before():
    """Untrained, at a low temperature: behind a b ... a, what is attended to is what stands after the first a."""
    m = mixer(heads=1, keys="previous", rope=False, laplacian_weights="diagonal", temperature=1e-4)
    x = inputs(12, batch=1)
    x[0, -1] = x[0, 3]
    p = projected(m, x)
    assert p.k[0, 0, 0] == 0
    assert torch.equal(p.k[..., 1:], p.q[..., :-1])
    y = tau_attention(p.q, p.k, p.v, p.temperature)
    assert_close(y[0, 0, -1], p.v[0, 0, 4], "what followed", 1e-3)


def test_a_graph_from_a_file_comes_with_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graphs.save("chain.safetensors", graphs.chain(8), {"source": "a test"})
    graph = weighted(8, seed=1)
    graphs.save(tmp_path / "random.safetensors", graph, {"source": "a test"})
    options = {"hidden_size": 16, "mixer": {"kind": "tau", "heads": 2, "laplacian": "random.safetensors"}}
    model = glissando.LanguageModel.from_config({**options, "depth": {"layers": 1}})
    kept = model.depth.blocks[0].mixer.laplacian.clone()
    assert_close(kept, graphs.normalise(graph).float())
    model.save(tmp_path / "run")
    (tmp_path / "random.safetensors").unlink()
    assert torch.equal(glissando.load(tmp_path / "run").depth.blocks[0].mixer.laplacian, kept)
    with pytest.raises(ConfigError, match="over 8 features and a head of this model has 4"):
        Tau(16, heads=4, laplacian="chain.safetensors").reset_parameters()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 0}, "heads: .*greater than 0, got 0"),
        ({"heads": 3}, "not a multiple of 3 heads"),
        ({"temperature": 0.0}, "temperature.*greater than 0, got 0.0"),
        ({"tau": float("nan")}, "tau: .*(greater than 0|finite)"),
        ({"key_size": 5}, "RoPE needs an even key size"),
        ({"rope": False, "rope_repeat": 2}, "tau.rope_repeat 2 needs tau.rope: true"),
        ({"horizons": (8.0,)}, "horizons: entry 2 is missing"),
        ({"value_rotation": float("inf")}, "value_rotation: .*finite"),
        ({"temperature": (0.1, 0.2, 0.3)}, "temperature"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        Tau(16, **options)


def test_temperatures_as_a_list():
    listed, paired = (Tau(16, temperature=t) for t in ([0.02, 0.2], (0.02, 0.2)))
    for built in (listed, paired):
        built.reset_parameters()
    assert torch.equal(listed.log_temperature, paired.log_temperature)


@pytest.mark.parametrize("source", ["chian", ""])
def test_a_graph_that_is_neither_known_nor_a_file(source):
    with pytest.raises(ConfigError, match=f"must be `chain`, `saved` or a file .*, got {source!r}"):
        Tau(16, laplacian=source).reset_parameters()


def test_bytes_of_the_latest_lambdas():
    """4 H a row: what the next token's key is."""
    sizes = {}
    for keys in ("own", "previous"):
        m = Tau(32, keys=keys)
        sizes[keys] = state_bytes(m(torch.randn(2, 40, 32), m.init_state(2))[1])
    assert sizes["previous"] - sizes["own"] == 2 * 4 * 4


def test_bytes_of_attention_s_latest_query():
    """H K numbers a row."""
    sizes = {}
    for keys in ("own", "previous"):
        m = Attention(32, keys=keys)
        sizes[keys] = state_bytes(m(torch.randn(2, 40, 32), m.init_state(2))[1])
    assert sizes["previous"] - sizes["own"] == 2 * 32 * 4
