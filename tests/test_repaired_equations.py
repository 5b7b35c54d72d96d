"""Every published preset is its publication's equations with the defects mended, and nothing else.

Each is written out here a second time from the publication's text: sums over time as sums, attention as a table of
scores, Euler's steps as steps, a matrix exponential as its series. Weights are those of the preset, moved from where
they start; logits and the gradients of all parameters agree in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_close
from torch import Tensor

from glissando.model import LanguageModel
from research.published.tauformer import PublishedTauformer

Weights = Mapping[str, Tensor]
VOCAB, LENGTH = 11, 7


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def layer_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def rms_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def heads(x: Tensor, number: int) -> Tensor:
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


def attend(scores: Tensor, v: Tensor) -> Tensor:
    """Causal softmax of scores (B, H, T, T) over v (B, H, T, K), heads side by side again."""
    length = v.shape[2]
    weights = scores.exp() * torch.ones(length, length).tril()
    return ((weights / weights.sum(-1, keepdim=True)) @ v).transpose(1, 2).flatten(2)


def products(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


# ---------------------------------------------------------------------- the Minimal Transformer


def minimal(w: Weights, ids: Tensor) -> Tensor:
    """h <- ln1(h + Wo attn(ln1(h))), h <- ln2(h + ff(h)); q, k and v rotated, as the text beside the code asks."""

    def rotated(x: Tensor) -> Tensor:
        """(B, H, T, 2): one pair a head, at the rate 10000^0."""
        t = torch.arange(LENGTH).double().view(-1, 1)
        a, b = x.split(1, -1)
        return torch.cat([a * t.cos() - b * t.sin(), a * t.sin() + b * t.cos()], -1)

    h = w["embedding.weight"][ids]
    for layer in ("depth.blocks.0", "depth.blocks.1"):
        a = layer_norm(w, f"{layer}.mixer_norm", h)
        q, k, v = (rotated(heads(x, 2)) for x in linear(w, f"{layer}.mixer.qkv", a).chunk(3, -1))
        h = layer_norm(w, f"{layer}.mixer_norm", h + linear(w, f"{layer}.mixer.out", attend(products(q, k), v)))
        fed = linear(w, f"{layer}.mlp.down", linear(w, f"{layer}.mlp.up", h).relu())
        h = layer_norm(w, f"{layer}.mlp_norm", h + fed)
    return linear(w, "head", h)


# ---------------------------------------------------------------------- the Continuous Transformer


def continuous(w: Weights, ids: Tensor) -> Tensor:
    """The sum over time ends at the present; P divides by the root of mean |z - mu|^2."""

    def pairs(x: Tensor) -> Tensor:
        return torch.complex(x[..., 0::2], x[..., 1::2])

    o = "depth.blocks.0.mixer"
    f, g = (torch.complex(*w[f"{o}.{name}"].unbind(-1)) for name in ("numerator", "denominator"))
    omega, gamma = w[f"{o}.omega"], w[f"{o}.log_gamma"].exp()
    turn = omega + 0.1 * w[f"{o}.modulation"].sin()
    z = pairs(linear(w, "lift", w["embedding.weight"][ids]))
    for bias in w["depth.step_bias"]:
        z = z + pairs(bias)
        spectrum = torch.fft.fft(z)
        s = torch.fft.ifft(spectrum * f / ((spectrum * g).abs() + 0.1))
        phase = [torch.remainder(t * omega + math.pi, 2 * math.pi) - math.pi for t in range(LENGTH)]
        u = s * torch.tanh(s.abs() * w[f"{o}.gate_alpha"] + torch.stack(phase) * w[f"{o}.gate_beta"])
        h = [
            sum(torch.exp(torch.complex(-gamma, turn) * (t - j)) * u[:, j] for j in range(t + 1)) for t in range(LENGTH)
        ]
        z = z + w["depth.blocks.0.mixer_scale"] * torch.stack(h, 1)
        z = z - z.mean(-1, keepdim=True)
        z = z / ((z * z.conj()).real.mean(-1, keepdim=True) + 1e-6).sqrt()
    real, imaginary = w["head.weight"].unbind(-1)
    return z.real @ real.T + z.imag @ imaginary.T + w["head.bias"].sum(-1)


# ---------------------------------------------------------------------- the hybrid and its baseline


def branch(w: Weights, block: str, x: Tensor) -> Tensor:
    q, k, v = (
        heads(y, 4) for y in linear(w, f"{block}.mixer.qkv", layer_norm(w, f"{block}.mixer_norm", x)).chunk(3, -1)
    )
    return linear(w, f"{block}.mixer.out", attend(products(q, k), v))


def fed(w: Weights, block: str, x: Tensor) -> Tensor:
    return linear(w, f"{block}.mlp.down", gelu(linear(w, f"{block}.mlp.up", layer_norm(w, f"{block}.mlp_norm", x))))


def gpt(
    w: Weights, ids: Tensor, blocks: tuple[str, ...] = (), flow: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    x = w["embedding.weight"][ids] + w["position_embedding.weight"][:LENGTH]
    for block in blocks or [f"depth.blocks.{i}" for i in range(6)]:
        if flow is not None and block == "depth.after.0":
            x = flow(x)
        x = x + branch(w, block, x)
        x = x + fed(w, block, x)
    return linear(w, "head", layer_norm(w, "norm", x))


def hybrid(w: Weights, ids: Tensor, control: Tensor | None = None) -> Tensor:
    """Four Euler steps, through which gradients go as they are."""

    def flow(x: Tensor) -> Tensor:
        for step in range(4):
            tau = linear(w, "depth.time.0", torch.tensor([step / 4]))
            at = x + linear(w, "depth.time.2", tau * torch.sigmoid(tau))
            if control is not None:
                at = at + linear(w, "depth.control", control).unsqueeze(1)
            x = x + w["depth.alpha"] * (branch(w, "depth.field", at) + fed(w, "depth.field", at)) / 4
        return x

    around = ("depth.before.0", "depth.before.1", "depth.after.0", "depth.after.1")
    return gpt(w, ids, around, flow)


# ---------------------------------------------------------------------- the liquid model


def exponential(x: Tensor) -> Tensor:
    """The series of exp(x / 2^12), squared twelve times."""
    y = term = torch.eye(len(x))
    for k in range(1, 9):
        term = term @ x / 2**12 / k
        y = y + term
    for _ in range(12):
        y = y @ y
    return y


def liquid(w: Weights, ids: Tensor) -> Tensor:
    """A token holds its input and its tau for a time of 1; what detached, clamped or replaced is gone; the gate's mean
    ends at the present. tau0 is within 0.01 and 10 and a within 0.001 and 0.999 by logistic maps."""

    def layer(block: str, x: Tensor) -> Tensor:
        m, d = f"{block}.mixer.layer", f"{block}.mixer.dynamics"
        u = gelu(layer_norm(w, f"{m}.entry_norm", linear(w, f"{m}.entry", x)))
        still = 0.01 * 1000 ** torch.sigmoid(w[f"{d}.raw_tau"])
        a = 0.001 + 0.998 * torch.sigmoid(w[f"{d}.raw_adaptation"])
        rows = []
        for row in u:
            s, states = torch.zeros(len(still)), []
            for now in row:
                inner = layer_norm(w, f"{d}.adapt.1", linear(w, f"{d}.adapt.0", torch.cat([s, now])))
                tau = still * (1 + a * torch.tanh(linear(w, f"{d}.adapt.3", torch.tanh(inner))))
                system = torch.cat([w[f"{d}.a"] - torch.diag(1 / tau), (w[f"{d}.b"] @ now).unsqueeze(1)], 1)
                s = (exponential(F.pad(system, (0, 0, 0, 1))) @ torch.cat([s, torch.ones(1)]))[:-1]
                states.append(s)
            rows.append(torch.stack(states))
        states = torch.stack(rows)
        y = linear(w, f"{m}.c", layer_norm(w, f"{m}.state_norm", states)) + linear(w, f"{m}.d", u)
        y = w[f"{m}.scale"] * y + w[f"{m}.shift"]
        y = y * torch.sigmoid(linear(w, f"{m}.gate.2", torch.tanh(linear(w, f"{m}.gate.0", states))))
        y = linear(w, f"{m}.down", gelu(layer_norm(w, f"{m}.up_norm", linear(w, f"{m}.up", y))))
        return y + w[f"{m}.residual"] * x

    x = w["embedding.weight"][ids] + w["position_embedding.weight"][:LENGTH]
    for block in ("depth.blocks.0", "depth.blocks.1"):
        h = layer(block, layer_norm(w, f"{block}.mixer_norm", x))
        mean = torch.stack([h[:, : t + 1].mean(1) for t in range(LENGTH)], 1)
        x = x + h * torch.sigmoid(linear(w, "depth.gate.down", gelu(linear(w, "depth.gate.up", mean))))
    return linear(w, "head", layer_norm(w, "norm", x))


# ---------------------------------------------------------------------- the Tauformer


def scalars(x: Tensor, tau: Tensor) -> Tensor:
    """E / (E + tau) of rotated x (B, H, T, K), E = x'Lx / (x'x + eps) over the chain of its K features: (B, H, T)."""
    length, size = x.shape[-2:]
    angle = torch.arange(length).double().view(-1, 1) * 10000 ** (-torch.arange(size // 2) / (size // 2))
    a, b = x.chunk(2, -1)
    x = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    energy = x.diff().square().sum(-1) / (x.square().sum(-1) + 1e-6)
    return energy / (energy + tau)


def tauformer(w: Weights, ids: Tensor) -> Tensor:
    """With a temperature a head that is learned, and gradients through E."""
    x = w["embedding.weight"][ids]
    for block in ("depth.blocks.0", "depth.blocks.1"):
        a = rms_norm(w, f"{block}.mixer_norm", x)
        tau, temperature = w[f"{block}.mixer.tau"], w[f"{block}.mixer.log_temperature"].exp().view(-1, 1, 1)
        q, k = (scalars(heads(y, 6), tau) for y in linear(w, f"{block}.mixer.qk", a).chunk(2, -1))
        logits = -(q.unsqueeze(-1) - k.unsqueeze(-2)).abs() / temperature
        x = x + linear(w, f"{block}.mixer.out", attend(logits, heads(linear(w, f"{block}.mixer.v", a), 6)))
        inner = linear(w, f"{block}.mlp.up", rms_norm(w, f"{block}.mlp_norm", x)).relu().square()
        x = x + linear(w, f"{block}.mlp.down", inner)
    return linear(w, "head", rms_norm(w, "norm", x))


def test_the_published_tauformer_is_its_equations():
    """At temperature 1; queries and keys are normalised before, which E does not see but for eps."""
    model = moved(PublishedTauformer(VOCAB, 48, 6, 2))
    w, ids = dict(model.state_dict()), some_ids()

    def norm(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()

    x = w["embedding.weight"][ids]
    for block in ("blocks.0", "blocks.1"):
        q, k = (scalars(norm(heads(linear(w, f"{block}.{n}", norm(x)), 6)), w["tau"]) for n in ("wq", "wk"))
        v = heads(linear(w, f"{block}.wv", norm(x)), 6)
        x = x + linear(w, f"{block}.wo", attend(-(q.unsqueeze(-1) - k.unsqueeze(-2)).abs(), v))
        x = x + linear(w, f"{block}.down", linear(w, f"{block}.up", norm(x)).relu().square())
    assert_close(model(ids), linear(w, "head", norm(x)), "logits")


# ---------------------------------------------------------------------- beside the presets


def some_ids(vocab: int = VOCAB) -> Tensor:
    return torch.randint(vocab, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def moved(model: Any) -> Any:
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("tau"):
                buffer.fill_(0.4)
    return model


SMALL: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "minimal-transformer": (minimal, {}),
    "continuous-transformer": (continuous, {"hidden_size": 10}),
    "gpt": (gpt, {"vocab_size": VOCAB, "hidden_size": 16}),
    "hybrid-ode": (hybrid, {"vocab_size": VOCAB, "hidden_size": 16}),
    "liquid-ssm-dense": (
        liquid,
        {"vocab_size": VOCAB, "hidden_size": 12, "mixer": {"kind": "liquid", "state_size": 6}, "depth": {"layers": 2}},
    ),
    "tauformer": (
        tauformer,
        {"vocab_size": VOCAB, "hidden_size": 48, "mixer": {"kind": "tau", "head_size": 8}, "depth": {"layers": 2}},
    ),
}


@pytest.fixture(autouse=True)
def _float64(monkeypatch: pytest.MonkeyPatch):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("preset", SMALL)
def test_a_preset_is_the_mended_equations(preset: str):
    written, options = SMALL[preset]
    same(moved(LanguageModel.from_preset(preset, **options)), written)


def test_a_control_enters_the_hybrids_field():
    model, control = moved(LanguageModel.from_preset("hybrid-ode", **SMALL["hybrid-ode"][1])), torch.randn(2, 4)
    same(model, lambda w, ids: hybrid(w, ids, control), control=control)


def same(model: LanguageModel, written: Callable[[Weights, Tensor], Tensor], **signals: Tensor) -> None:
    """Logits, and the gradients of a loss in every parameter, to 1e-9."""
    ids = some_ids()
    result = []
    for forward in (
        lambda: model(ids, **signals)[0],
        lambda: written({**dict(model.named_parameters()), **dict(model.named_buffers())}, ids),
    ):
        model.zero_grad()
        logits = forward()
        F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        result.append((logits.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (logits, gradients), (expected, others) = result
    assert_close(logits, expected, "logits")
    for name, gradient in others.items():
        assert (gradient is None) == (gradients[name] is None), name
        if gradient is not None:
            assert_close(gradients[name], gradient, name)
