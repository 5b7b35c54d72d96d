"""The equations of the tau mixer and of attention, every option on, written out with matrices."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_close
from torch import Tensor

from glissando.errors import ConfigError
from glissando.mixers.attention import Attention
from glissando.mixers.tau import Tau

LENGTH, WIDTH = 90, 20


def prepared(mixer):
    """In float64, its weights far enough from where they start for every part to matter."""
    mixer.reset_parameters()
    mixer.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return mixer


def inputs() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def turned(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """x (B, T, H, K) with its pairs (i, i + K/2) turned by positions (T,) times their frequency."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([base ** (-i / half) for i in range(half)], dtype=torch.float64)
    angle = (positions.unsqueeze(-1) * frequencies).view(1, -1, 1, half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def gated_logits(mixer, x: Tensor) -> Tensor:
    """g_j + C_i - C_j (B, T, T, H), -inf in the future; g is 0 without an importance."""
    importance = getattr(mixer, "importance", None)
    g = 0 * x[..., :4] if importance is None else x @ importance.weight.T
    c = F.logsigmoid(x @ mixer.forget.weight.T + mixer.forget.bias).cumsum(1)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return (g.unsqueeze(1) + c.unsqueeze(2) - c.unsqueeze(1)).masked_fill(future[None, :, :, None], -math.inf)


@pytest.mark.parametrize("keys", ["own", "previous"])
def test_tau_with_everything(keys):
    options = {"heads": 4, "head_size": 6, "key_size": 8, "temperature": 0.1, "tau": 0.7}
    gates = {"importance": True, "forget_gate": True, "output_gate": True, "laplacian_weights": "learned"}
    m, x = prepared(Tau(WIDTH, value_rotation=16, keys=keys, **options, **gates)), inputs()
    positions = torch.arange(LENGTH, dtype=torch.float64)
    rotated = turned((x @ m.qk.weight.T).view(2, LENGTH, -1, 8), positions, 10000.0)
    energy = torch.einsum("bthi,ij,bthj->bth", rotated, m.matrix(), rotated) / (rotated.square().sum(-1) + 1e-6)
    q, *k = (energy / (energy + m.tau)).split(4, -1)
    k = k[0] if k else F.pad(q[:, :-1], (0, 0, 1, 0))
    logits = gated_logits(m, x) - (q.unsqueeze(2) - k.unsqueeze(1)).abs() / m.log_temperature.exp()
    weights = logits.softmax(2)
    v = (x @ m.v.weight.T).view(2, LENGTH, 4, 6)
    mixed = torch.stack(
        [torch.einsum("bjh,bjhd->bhd", weights[:, i], turned(v, positions - i, 16.0)) for i in range(LENGTH)], 1
    )
    expected = (mixed.flatten(2) * F.silu(x @ m.gate.weight.T)) @ m.out.weight.T
    assert_close(m(x)[0], expected)
    state, parts = m.init_state(2), []
    for part in x.split([40, 1, 1, 48], 1):
        y, state = m(part, state)
        parts.append(y)
    assert_close(torch.cat(parts, 1), expected)


@pytest.mark.parametrize("keys", ["own", "previous"])
def test_attention_with_everything(keys):
    options = {"heads": 4, "kv_heads": 2 if keys == "own" else 4, "head_size": 5, "rope": False, "keys": keys}
    m, x = prepared(Attention(WIDTH, forget_gate=True, **options)), inputs()
    if keys == "own":
        q, k, v = (x @ m.qkv.weight.T).view(2, LENGTH, 8, 5).split([4, 2, 2], 2)
        k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    else:
        q, v = (x @ m.qkv.weight.T).view(2, LENGTH, 8, 5).split([4, 4], 2)
        k = torch.cat([torch.zeros_like(q[:, :1]), q[:, :-1]], 1)
    logits = gated_logits(m, x) + torch.einsum("bihd,bjhd->bijh", q, k) / math.sqrt(5)
    mixed = torch.einsum("bijh,bjhd->bihd", logits.softmax(2), v).flatten(2)
    assert_close(m(x)[0], mixed @ m.out.weight.T)


def test_forget_gates_start_with_their_horizons():
    """Whatever the token, each head keeps 1 - 1 / horizon."""
    m = Tau(WIDTH, heads=4, rope=False, forget_gate=True, horizons=(2.0, 54.0))
    kept = torch.sigmoid(m.forget(torch.randn(3, WIDTH)))
    horizons = torch.tensor([2.0, 6.0, 18.0, 54.0])
    assert_close(kept, (1 - 1 / horizons).expand(3, 4))
    with pytest.raises(ConfigError, match=r"horizons\[1\]: .*greater than 1, got 1.0"):
        Tau(WIDTH, rope=False, forget_gate=True, horizons=(1.0, 8.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"laplacian": "a.safetensors", "laplacian_weights": "diagonal"}, "would not be used"),
        ({"value_rotation": 16.0, "head_size": 5, "key_size": 4}, "needs an even head size, got 5"),
        ({"value_rotation": 0.5}, "value_rotation: .*greater than 1, got 0.5"),
    ],
)
def test_options_that_would_do_nothing_or_fail_later(options, message):
    with pytest.raises(ConfigError, match=message):
        Tau(WIDTH, **options)


def test_previous_queries_as_keys_need_heads_of_their_own():
    with pytest.raises(ConfigError, match="kv_heads is 2; leave kv_heads out"):
        Attention(WIDTH, keys="previous", kv_heads=2, rope=False)


def test_names_of_features_make_no_difference():
    """A graph over relabelled features, its query and key rows relabelled too, is the same model: what a domain's graph
    can tell a model whose projections are learned from random ones is its spectrum, not which feature stands where."""
    m, x = prepared(Tau(WIDTH, heads=2, head_size=8, rope=False)), inputs()
    expected = m(x)[0]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        m.laplacian.copy_(m.laplacian[order][:, order])
        rows = m.qk.weight.unflatten(0, (-1, 8))[:, order].flatten(0, 1)
        m.qk.weight.copy_(rows)
    assert_close(m(x)[0], expected, "y", 1e-12)


def test_different_heads_may_start_at_different_temperatures():
    m = Tau(WIDTH, heads=3, head_size=4, temperature=(1.0, 0.01))
    m.reset_parameters()
    assert_close(m.log_temperature.exp(), torch.tensor([1.0, 0.1, 0.01]), "T", 1e-6)
    with pytest.raises(ConfigError, match=r"temperature\[2\]: .*greater than 0, got 0.0"):
        Tau(WIDTH, temperature=(1.0, 0.0))
