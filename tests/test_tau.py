"""The tau mixer: what lambda is, what is remembered, and how well the bounded memory remembers."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_close

import glissando
from glissando import laplacian as graphs
from glissando.cli import main
from glissando.errors import ConfigError
from glissando.mixers import Attention, Context
from glissando.mixers import tau as tau_module
from glissando.mixers.tau import Tau
from glissando.mixers.tau_cache import Projected, TauState, bin_error
from glissando.ops.energy import edges_pay, energy, energy_edges
from glissando.ops.tau_attention import attend, exponents, tau_attention
from glissando.state import leaves, state_bytes

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


@pytest.mark.parametrize("keys", ["own", "previous"])
def test_many_vectors_are_measured_by_their_edges(keys: str, monkeypatch, tmp_path):
    """4,096 vectors and more on a sparse graph: the same lambdas, gradients and continuations as by the matrix."""
    file = tmp_path / "graph.safetensors"
    graphs.save(file, graphs.random_graph(64, 6, seed=3), {})
    m = mixer(128, heads=2, value_heads=2, head_size=64, keys=keys, laplacian=str(file))
    length = 4096 // (m.sides * m.heads) + 1
    x, used = inputs(length, 128, batch=1).requires_grad_(), []
    found = {}
    for form in ("edges", "matrix"):
        if form == "matrix":
            monkeypatch.setattr(tau_module, "edges_pay", lambda *_: False)
        else:
            monkeypatch.setattr(tau_module, "energy_edges", lambda *given: used.append(0) or energy_edges(*given))
        e = m.energies(x)
        grads = torch.autograd.grad((e * e.detach().cos()).sum(), [x, m.qk.weight])
        found[form] = [e.detach(), *grads]
    assert len(used) == 1
    for name, by_edges, by_matrix in zip(("E", "x", "W"), found["edges"], found["matrix"], strict=True):
        assert_close(by_edges, by_matrix, name, 1e-10)
    monkeypatch.undo()
    with torch.no_grad():  # the prompt by its edges, and then token by token by the matrix
        whole, _ = m(x, m.init_state(1))
        first, state = m(x[:, :-1], m.init_state(1))
        last, _ = m(x[:, -1:], state)
    assert_close(torch.cat([first, last], 1), whole, "split")


def test_where_edges_pay():
    """Many vectors, sparse graphs, a CPU, and nobody who compiles."""
    sparse, few = graphs.chain(64), torch.empty(4095, 64)
    many = torch.empty(4096, 64)
    assert edges_pay(many, sparse)
    assert not edges_pay(few, sparse)
    assert not edges_pay(many, graphs.random_graph(64, 30, seed=0))
    assert not edges_pay(many.to("meta"), sparse.to("meta"))


@pytest.mark.parametrize("options", [{}, GATED, {"importance": True, "value_heads": 2, "head_size": 8}])
def test_bytes_of_the_exact_cache(options):
    """(K + 1) / (2 K) of a standard cache, and one number more for each key and head with a gate or importance."""
    length, size = 40, 32
    m = Tau(size, **options)
    _, state = m(torch.randn(1, length, size), m.init_state(1))
    attention = Attention(size, heads=4)
    _, standard = attention(torch.randn(1, length, size), attention.init_state(1))
    kept = state_bytes(standard[:2])
    if options.get("value_heads"):
        assert state_bytes((state.k, state.v)) == 4 * length * (2 * 8 + 4)
    else:
        assert state_bytes((state.k, state.v)) * 2 * m.head_size == kept * (m.head_size + 1)
    extra = 0 if state.e is None else state_bytes(state.e)
    assert extra == (8 * length * 4 if options else 0)
    assert state_bytes(state) - state_bytes((state.k, state.v)) - extra <= 8 + 8 * 4


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


@pytest.mark.parametrize("options", [{}, GATED], ids=["plain", "gated"])
@pytest.mark.parametrize("bins", [64, 1024])
def test_the_binned_cache_obeys_the_split_law_within_its_bound(bins: int, options):
    """Against the exact cache: the output is an average of values, whose weights are off by bin_error at most."""
    options = {
        "heads": 2,
        "value_heads": 1,
        "head_size": 8,
        "temperature": 0.05,
        "laplacian_weights": "diagonal",
        **options,
    }
    exact, binned = mixer(**options), mixer(cache="binned", bins=bins, **options)
    x = inputs(90)
    p, past = projected(exact, x), exact.init_state(2)
    state, got, expected = binned.init_state(2), [], []
    for start, end in ((0, 30), (30, 60), (60, 61), (61, 62), (62, 90)):
        part = p._replace(
            q=p.q[..., start:end], k=p.k[..., start:end], v=p.v[:, :, start:end],
            importance=None if p.importance is None else p.importance[..., start:end],
            decay=None if p.decay is None else p.decay[..., start:end] - p.decay[..., start - 1 : start]
            if start else p.decay[..., start:end],
        )  # fmt: skip
        y, state = binned.cache.attend(part, state, end - start, False)
        z, past = exact.cache.attend(part, past, end - start, False)
        got.append(y)
        expected.append(z)
    error = (torch.cat(got, 2) - torch.cat(expected, 2)).abs().max().item()
    bound = 2 * bin_error(bins, 0.05) * p.v.abs().max().item()
    assert 0 < error <= bound


def test_bins_and_their_error():
    """At most 1 % at T = 0.05 and 1024 bins: for every key and query of one bin, measured on a grid."""
    temperature, bins = 0.05, 1024
    assert bin_error(bins, temperature) < 0.01
    m = mixer(heads=1, temperature=temperature, cache="binned", bins=bins)
    p = projected(m, inputs(1, batch=1))
    worst = 0.0
    for k in torch.linspace(0.5, 0.5 + 1 / bins, 9, dtype=torch.float64)[:-1]:
        for q in torch.linspace(0.499, 0.502, 40, dtype=torch.float64):
            one = p._replace(q=torch.full_like(p.q, 0.1), k=torch.full_like(p.k, k))
            _, state = m.cache.attend(one, m.init_state(1), 1, False)
            sums, level = m.cache._past(p._replace(q=torch.full_like(p.q, q)), state)
            weight = sums[0, 0, 0, -1].item() * level.exp().item()
            worst = max(worst, abs(weight / torch.exp(-(q - k).abs() / temperature).item() - 1))
    assert 1e-4 < worst <= bin_error(bins, temperature)


def test_the_binned_cache_is_smaller_from_its_context_on():
    """Constant, and below the exact one from 2 M (K + 3) / (K + 1) tokens on: here K = 8."""
    bins, size = 32, 16
    exact, binned = (Tau(size, heads=2, cache=cache, bins=n) for cache, n in (("exact", None), ("binned", bins)))
    sizes = {}
    for length in (10, 2 * bins, 2 * bins + 16):
        for name, m in (("exact", exact), ("binned", binned)):
            _, state = m(torch.randn(1, length, size), m.init_state(1))
            sizes[name, length] = state_bytes(state)
    assert sizes["binned", 10] == sizes["binned", 2 * bins + 16]
    assert sizes["exact", 2 * bins] < sizes["binned", 10] < sizes["exact", 2 * bins + 16]


@torch.no_grad()
@pytest.mark.parametrize("keys", ["own", "previous"])
def test_the_binned_cache_attends_to_the_nearest_however_low_the_temperature(keys: str):
    """In float32 all of a query's past may be e^-100 of the largest weight elsewhere; its own sums must not vanish."""
    options = {"heads": 2, "keys": keys, "rope": False, "laplacian_weights": "diagonal", "temperature": 1e-3, **GATED}
    exact, binned, x = mixer(**options), mixer(cache="binned", bins=8192, **options).float(), inputs(64)
    p, past, state = projected(exact, x), exact.init_state(2), binned.init_state(2)
    for t in range(64):
        at = slice(t, t + 1)
        step = p._replace(q=p.q[..., at], k=p.k[..., at], v=p.v[:, :, at],
                              importance=60 * p.importance[..., at], decay=p.decay[..., :1])  # fmt: skip
        expected, past = exact.cache.attend(step, past, 1, False)
        single = Projected(*(part.float() for part in step[:5]), step.decay)
        got, state = binned.cache.attend(single, state, 1, False)
        bound = (2 * bin_error(8192, 1e-3) + 1e-3) * p.v.abs().max().item()
        assert float((got - expected).abs().max()) <= bound, t


def test_a_binned_cache_keeps_padding_out():
    m = mixer(cache="binned", bins=64, **GATED)
    x = inputs(12)
    mask = torch.arange(12) < torch.tensor([[12], [5]])
    _, padded = m(x, m.init_state(2), Context(mask=mask))
    _, alone = m(x[1:, :5], m.init_state(1))
    for got, expected in zip(leaves(padded), leaves(alone), strict=True):
        got, expected = got[1:].double(), expected.double()
        empty = expected < -1e299  # the level of a bin without a key
        assert torch.equal(got < -1e299, empty)
        assert_close(got.masked_fill(empty, 0), expected.masked_fill(empty, 0))


def test_the_binned_cache_carries_gradients():
    """Through the sums to the keys of an earlier call."""
    m = mixer(cache="binned", bins=64, laplacian_weights="diagonal", **GATED)
    x = inputs(20).requires_grad_()
    _, state = m(x[:, :19], m.init_state(2))
    y, _ = m(x[:, 19:], state)
    y.sum().backward()
    assert (x.grad[:, :19].norm(dim=-1) > 0).all()


def test_a_graph_from_a_file_comes_with_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["laplacian", "build", "--chain", "--size", "8", "--out", "chain.safetensors"]) == 0
    graph = graphs.random_graph(8, 3, seed=1)
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
        ({"heads": 4, "value_heads": 3}, "cannot share 3 value_heads"),
        ({"heads": 3}, "not a multiple of 3 heads of values"),
        ({"temperature": 0.0}, "temperature.*greater than 0, got 0.0"),
        ({"tau": float("nan")}, "tau: .*(greater than 0|finite)"),
        ({"key_size": 5}, "RoPE needs an even key size"),
        ({"rope_base": -5.0}, "tau.rope_base must be above 1, got -5"),
        ({"rope": False, "rope_base": 5.0}, "tau.rope_base 5.0 needs tau.rope: true"),
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


def test_the_cache_of_a_trained_model_can_be_chosen(tmp_path, capsys):
    options = {"hidden_size": 16, "mixer": {"kind": "tau", "heads": 2}, "depth": {"layers": 1}}
    glissando.LanguageModel.from_config(options).save(tmp_path / "tau")
    glissando.LanguageModel.from_config({"hidden_size": 16, "depth": {"layers": 1}}).save(tmp_path / "softmax")
    model = glissando.load(tmp_path / "tau", {"mixer.cache": "binned", "mixer.bins": 8})
    assert model.init_state(1).depth[0].mixer.up.shape == (1, 2, 8, 9)
    command = ["generate", str(tmp_path / "tau"), "--prompt", "a", "--max_tokens", "3", "--mixer.cache", "binned"]
    assert main(command) == 0
    assert main([command[0], str(tmp_path / "softmax"), *command[2:]]) == 2
    assert "mixer.cache" in capsys.readouterr().err


def test_a_long_call_behind_a_binned_past_equals_short_ones():
    m, x = mixer(heads=2, cache="binned", bins=16, keys="previous", **GATED), inputs(620)
    _, state = m(x[:, :10], m.init_state(2))
    p, asked = projected(m, x[:, 10:], state), []
    ask = m.cache._attend_to_bins
    m.cache._attend_to_bins = lambda q, *rest: asked.append(q.shape[-1]) or ask(q, *rest)
    y, after = m.cache.attend(p, state, 610, False)
    assert asked == [256, 256, 98]
    assert torch.equal(after.latest, p.q[..., -1])
    m.cache._attend_to_bins = ask
    sums, top = ask(p.q, p.temperature.view(-1, 1, 1), state)
    own, lse = attend(p.q, p.k, p.v, p.temperature, exponents(p.k, p.importance,
                      p.decay + state.total.unsqueeze(-1)))  # fmt: skip
    weight = (lse - top).exp().unsqueeze(-1)
    assert_close(y, (own * weight + sums[..., :-1]) / (weight + sums[..., -1:]), "y", 1e-9)


@pytest.mark.parametrize("cache", ["exact", "binned"])
def test_bytes_of_the_latest_lambdas(cache):
    """4 H a row: what the next token's key is."""
    sizes = {}
    for keys in ("own", "previous"):
        m = Tau(32, keys=keys, cache=cache)
        sizes[keys] = state_bytes(m(torch.randn(2, 40, 32), m.init_state(2))[1])
    assert sizes["previous"] - sizes["own"] == 2 * 4 * 4


def test_bytes_of_attention_s_latest_query():
    """H K numbers a row."""
    sizes = {}
    for keys in ("own", "previous"):
        m = Attention(32, keys=keys)
        sizes[keys] = state_bytes(m(torch.randn(2, 40, 32), m.init_state(2))[1])
    assert sizes["previous"] - sizes["own"] == 2 * 32 * 4
