"""The mathematics of the pages is complete: the equations of docs/*.md in plain NumPy give the values of the modules.

Each function stands for the section "The forward pass, complete" of one page, in that page's symbols: sums and loops
over time, nothing of glissando. All weights are random, so that no part that starts at zero is missed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy import exp, tanh
from tolerances import assert_close
from torch import nn

from glissando.mixers import Context, Delta, Liquid, Spectral
from glissando.mixers.liquid import discretize
from glissando.mixers.tau import Tau
from glissando.model import LanguageModel
from glissando.series import SeriesModel

ROOT = Path(__file__).parent.parent
Weights = Mapping[str, np.ndarray]
B, T, D = 2, 7, 12


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def parts(x: np.ndarray, *sizes: int) -> list[np.ndarray]:
    assert sum(sizes) == x.shape[-1]
    return np.split(x, np.cumsum(sizes)[:-1], -1)


def to_complex(x: np.ndarray) -> np.ndarray:
    """Neighbouring pairs as complex numbers."""
    return x[..., 0::2] + 1j * x[..., 1::2]


def pairs(z: np.ndarray) -> np.ndarray:
    return np.stack([z.real, z.imag], -1).reshape(*z.shape[:-1], -1)


def linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def layer_norm(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def rms_norm(gain: np.ndarray, x: np.ndarray) -> np.ndarray:
    return gain * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def rope(x: np.ndarray, t: int, base: float, sign: int = 1) -> np.ndarray:
    """R_t x: entry i with entry i + K/2, by the angle t base^(-2i/K)."""
    half = x.shape[-1] // 2
    angle = sign * t * base ** (-2 * np.arange(half) / x.shape[-1])
    turned = (x[..., :half] + 1j * x[..., half:]) * exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], -1)


def spectral(
    w: Weights, x: np.ndarray, *, projections=True, filter=False, phase_gate=False, channels=None
) -> np.ndarray:
    """docs/continuous-transformer-reference.md, "The forward pass, complete"."""
    gamma, omega = exp(w["log_gamma"]), w["omega"]
    turn = omega + 0.1 * np.sin(w["modulation"])
    n = len(gamma)
    entry, r, g = x, None, None
    if projections:
        entry, r, g = parts(linear(w, "project", x), 2 * n if filter or phase_gate else n, n, 2 * n)
    h, y = np.zeros((len(x), n), complex), []
    for t in range(x.shape[1]):
        u = entry[:, t] if entry.shape[-1] == n else to_complex(entry[:, t])
        if filter:
            k = np.arange(n)
            transform = exp(-2j * math.pi * np.outer(k, k) / n)
            z = u @ transform
            u = z * to_complex(w["numerator"].reshape(-1)) / (abs(z * to_complex(w["denominator"].reshape(-1))) + 0.1)
            u = u @ transform.conj() / n
        if phase_gate:
            phi = (t * omega + math.pi) % (2 * math.pi) - math.pi
            u = u * tanh(abs(u) * w["gate_alpha"] + phi * w["gate_beta"])
        gamma_t = gamma * 8 * sigmoid(r[:, t] + w["decay_bias"]) if projections else gamma
        lambda_t = exp(-gamma_t + 1j * turn)
        h = lambda_t * h + (np.sqrt(1 - abs(lambda_t) ** 2) * u if projections else u)
        y.append(pairs(h) * (silu(g[:, t]) if projections else 1))
    return linear(w, "out", np.stack(y, 1)) if projections else np.stack(y, 1)


def liquid(
    w: Weights, v: np.ndarray, dt: np.ndarray, *, dynamics="diagonal", layer="gated", state_dependence=True,
    coupled=False, input="held", state_size: int,
) -> np.ndarray:  # fmt: skip
    """docs/liquid-reference.md, "The forward pass, complete"."""
    n = state_size
    tau0 = 0.01 * 1000 ** sigmoid(w["dynamics.raw_tau"])
    a = 0.001 + 0.998 * sigmoid(w["dynamics.raw_adaptation"])
    if layer == "gated" and dynamics == "diagonal":
        b, z, g = parts(linear(w, "layer.project", v), n // 2, n // 2, n)
    elif layer == "gated":
        u, g = parts(linear(w, "layer.project", v), n, n)
    else:
        u = gelu(layer_norm(w, "layer.entry_norm", linear(w, "layer.entry", v)))
        if dynamics == "diagonal":
            b = to_complex(linear(w, "layer.b", u))
            z = linear(w, "layer.adapt.3", tanh(layer_norm(w, "layer.adapt.1", linear(w, "layer.adapt.0", u))))
    states = []
    if dynamics == "diagonal":
        step, bias = exp(w["dynamics.log_step"]), w["dynamics.bias"]
        mode = -exp(w["dynamics.log_decay"]) + 1j * w["dynamics.turn"]
        p, q = w["dynamics.state_weights"].T if state_dependence else (0, 0)
        x = np.zeros((len(v), n // 2), complex)
        for t in range(v.shape[1]):
            tau = tau0 * (1 + a * tanh(z[:, t] + bias + p * x.real + q * x.imag))
            zeta, k = mode - 1 / tau, step * dt[:, t, None]
            k_b = step if input == "impulse" else k
            x = exp(k * zeta) * x + (exp(k_b * zeta) - 1) / zeta * (b[:, t] / tau if coupled else b[:, t])
            states.append(pairs(x))
    else:
        x = np.zeros((len(v), n))
        for t in range(v.shape[1]):
            seen = np.concatenate([x, u[:, t]], -1) if state_dependence else u[:, t]
            hidden = tanh(layer_norm(w, "dynamics.adapt.1", linear(w, "dynamics.adapt.0", seen)))
            tau = tau0 * (1 + a * tanh(linear(w, "dynamics.adapt.3", hidden)))
            matrix = np.zeros((len(v), n + 1, n + 1))
            matrix[:, :n, :n] = w["dynamics.a"] - np.eye(n) / tau[:, None, :]
            matrix[:, :n, n] = u[:, t] @ w["dynamics.b"].T
            kept = torch.linalg.matrix_exp(torch.tensor(dt[:, t, None, None] * matrix)).numpy()
            if input == "impulse":
                kept[..., n] = torch.linalg.matrix_exp(torch.tensor(matrix)).numpy()[..., n]
            x = (kept @ np.concatenate([x, np.ones((len(v), 1))], -1)[..., None])[:, :n, 0]
            states.append(x)
    x = np.stack(states, 1)
    if layer == "gated":
        return linear(w, "layer.out", x * silu(g))
    y = w["layer.scale"] * (linear(w, "layer.c", layer_norm(w, "layer.state_norm", x)) + linear(w, "layer.d", u))
    y = (y + w["layer.shift"]) * sigmoid(linear(w, "layer.gate.2", tanh(linear(w, "layer.gate.0", x))))
    y = linear(w, "layer.down", gelu(layer_norm(w, "layer.up_norm", linear(w, "layer.up", y))))
    return y + w["layer.residual"] * v


def tau(
    w: Weights, x: np.ndarray, *, heads: int, head_size: int, key_size: int, keys="own", rope_on=True,
    value_rotation=None, laplacian_weights="fixed", importance=False, forget_gate=False, output_gate=False,
) -> np.ndarray:  # fmt: skip
    """docs/tauformer-reference.md, "The forward pass, complete"."""
    rows, length, _ = x.shape
    if laplacian_weights == "diagonal":
        laplacian = np.diag(exp(w["log_edges"]))
    else:
        links = -w["laplacian"] * (1 - np.eye(key_size))
        if laplacian_weights == "learned":
            links = links * exp((w["log_edges"] + w["log_edges"].T) / 2)
        laplacian = np.diag(links.sum(1)) - links
    sides = linear(w, "qk", x).reshape(rows, length, -1, key_size)
    if rope_on:
        sides = np.stack([rope(sides[:, t], t, 10000.0) for t in range(length)], 1)
    energy = np.einsum("bthi,ij,bthj->bth", sides, laplacian, sides) / ((sides**2).sum(-1) + 1e-6)
    lambdas = energy / (energy + w["tau"])
    lambda_q = lambdas[:, :, :heads]
    lambda_k = lambdas[:, :, heads:]
    if keys == "previous":
        lambda_k = np.concatenate([np.zeros((rows, 1, heads)), lambda_q[:, :-1]], 1)
    v = linear(w, "v", x).reshape(rows, length, heads, head_size)
    temperature = exp(w["log_temperature"])
    g = linear(w, "importance", x) if importance else np.zeros((rows, length, heads))
    c = np.cumsum(np.log(sigmoid(linear(w, "forget", x))), 1) if forget_gate else np.zeros((rows, length, heads))
    y = []
    for i in range(length):
        a = [g[:, j] + c[:, i] - c[:, j] - abs(lambda_q[:, i] - lambda_k[:, j]) / temperature for j in range(i + 1)]
        weights = exp(a) / exp(a).sum(0)
        if value_rotation is None:
            o = sum(weights[j][..., None] * v[:, j] for j in range(i + 1))
        else:
            o = sum(weights[j][..., None] * rope(v[:, j], j - i, value_rotation) for j in range(i + 1))
        y.append(o.reshape(rows, heads * head_size))
    o = np.stack(y, 1)
    return linear(w, "out", o * silu(linear(w, "gate", x)) if output_gate else o)


def delta(
    w: Weights, x: np.ndarray, dt: np.ndarray, *, heads: int, key_size: int, keys="own",
    transition="decay", writes=1, input="held",
) -> np.ndarray:  # fmt: skip
    """docs/delta-reference.md, "The forward pass, complete"."""
    rows, length, _ = x.shape
    own = 0 if keys == "previous" else writes * heads * key_size
    q, k, v, z, r, turn, g = parts(
        linear(w, "project", x), heads * key_size, own, writes * heads * key_size, writes * heads, heads,
        heads if transition == "rotate" else 0, heads * key_size,
    )  # fmt: skip

    def unit(y: np.ndarray) -> np.ndarray:
        return y / np.linalg.norm(y, axis=-1, keepdims=True)

    def rotate_rows(state: np.ndarray, theta: np.ndarray | None) -> np.ndarray:
        """R(theta / 2) S: rows 2n and 2n + 1 as one complex row."""
        if theta is None:
            return state
        turned = (state[..., 0::2, :] + 1j * state[..., 1::2, :]) * exp(1j * theta / 2)[..., None]
        return np.stack([turned.real, turned.imag], -2).reshape(state.shape)

    q = unit(q.reshape(rows, length, heads, key_size))
    if keys == "own":
        k = unit(silu(k).reshape(rows, length, writes, heads, key_size))
    else:
        k = np.concatenate([np.zeros((rows, 1, heads, key_size)), q[:, :-1]], 1)[:, :, None]
    v = silu(v).reshape(rows, length, writes, heads, key_size)
    z = z.reshape(rows, length, writes, heads) + w["write_bias"]
    rate = exp(w["log_rate"]) * 8 * sigmoid(r.reshape(rows, length, heads, 1) + w["decay_bias"])  # 1 / tau
    state, y = np.zeros((rows, heads, key_size, key_size)), []
    for t in range(length):
        time = dt[:, t, None, None]
        kept = exp(-rate[:, t] * time)[..., None]
        theta = 2 * sigmoid(turn[:, t, :, None]) * w["omega"] * time if transition == "rotate" else None
        state = kept * rotate_rows(state, theta)
        for m in range(writes):
            held = time[..., 0] if input == "held" else 1.0
            beta = np.log1p(exp(z[:, t, m])) * held
            e = 1 - exp(-beta)
            b = e
            if writes == 1:
                both = beta + rate[:, t, :, 0] * held
                b = beta * (1 - exp(-both)) / both
            if transition == "reflect":
                e = b = 2 * sigmoid(z[:, t, m])
            key = k[:, t, m]
            found = np.einsum("bhkv,bhk->bhv", state, key)
            change = b[..., None] * v[:, t, m] - e[..., None] * found
            state = state + key[..., :, None] * change[..., None, :]
        state = rotate_rows(state, theta)
        o = rms_norm(w["norm"], np.einsum("bhkv,bhk->bhv", state, q[:, t]))
        y.append(o.reshape(rows, -1) * silu(g[:, t]))
    return linear(w, "out", np.stack(y, 1))


def attention(w: Weights, x: np.ndarray, *, heads: int, forget_gate: bool) -> np.ndarray:
    """docs/attention.md, "The forward pass, complete"."""
    rows, length, width = x.shape
    q, k, v = (part.reshape(rows, length, heads, -1) for part in parts(linear(w, "qkv", x), width, width, width))
    q, k = (np.stack([rope(y[:, t], t, 10000.0) for t in range(length)], 1) for y in (q, k))
    c = np.cumsum(np.log(sigmoid(linear(w, "forget", x))), 1) if forget_gate else np.zeros((rows, length, heads))
    y = []
    for i in range(length):
        s = [(q[:, i] * k[:, j]).sum(-1) / math.sqrt(q.shape[-1]) + c[:, i] - c[:, j] for j in range(i + 1)]
        p = exp(s) / exp(s).sum(0)
        y.append(sum(p[j][..., None] * v[:, j] for j in range(i + 1)).reshape(rows, width))
    return linear(w, "out", np.stack(y, 1))


def flow(
    w: Weights, x: np.ndarray, u: np.ndarray | None, *, layers: int, n_steps: int, heads: int, forget_gate=True,
    method="euler",
) -> np.ndarray:  # fmt: skip
    """docs/hybrid-ode-reference.md, "The forward pass, complete"; u (B, C) or (B, T, C), or none."""

    def under(prefix: str) -> Weights:
        return {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}

    def mixer(block: Weights, x: np.ndarray) -> np.ndarray:
        n, taps = rms_norm(block["mixer_norm.weight"], x), block["conv.weight"]
        count = taps.shape[1]
        past = np.concatenate([np.zeros((len(n), count - 1, n.shape[-1])), n], 1)
        convolved = sum(taps[:, j] * past[:, j : j + n.shape[1]] for j in range(count))
        inner = {name.removeprefix("mixer."): value for name, value in block.items() if name.startswith("mixer.")}
        return attention(inner, convolved, heads=heads, forget_gate=forget_gate)

    def mlp(block: Weights, x: np.ndarray) -> np.ndarray:
        first, second = np.split(linear(block, "mlp.up", rms_norm(block["mlp_norm.weight"], x)), 2, -1)
        return linear(block, "mlp.down", silu(first) * second)

    source, half = rms_norm(np.ones(x.shape[-1]), x), layers // 2
    shortcuts = w.get("shortcuts", np.zeros((layers + 1, x.shape[-1])))

    def blocks(name: str, count: int, x: np.ndarray, first: int) -> np.ndarray:
        for i in range(count):
            block = under(f"{name}.{i}.")
            x = x + shortcuts[first + i] * source
            x = x + mixer(block, x)
            x = x + mlp(block, x)
        return x

    def slope(tau: float, state: np.ndarray) -> np.ndarray:
        h = state + linear(w, "time.2", silu(linear(w, "time.0", np.array([tau]))))
        if u is not None:
            h = h + linear(w, "control", u if u.ndim == 3 else u[:, None])
        h = h + shortcuts[half] * source
        block = under("field.")
        return w["alpha"] * (mixer(block, h) + mlp(block, h))

    a, b = {
        "euler": ([[]], [1]),
        "midpoint": ([[], [1 / 2]], [0, 1]),
        "heun": ([[], [1]], [1 / 2, 1 / 2]),
        "rk4": ([[], [1 / 2], [0, 1 / 2], [0, 0, 1]], [1 / 6, 1 / 3, 1 / 3, 1 / 6]),
    }[method]

    def psi(d: float, tau: float, state: np.ndarray) -> np.ndarray:
        k: list[np.ndarray] = []
        for row in a:
            k.append(slope(tau + sum(row) * d, state + d * sum(share * k[j] for j, share in enumerate(row))))
        return d * sum(share * k[i] for i, share in enumerate(b))

    d = 1 / n_steps
    y = blocks("before", half, x, 0)
    for step in range(n_steps):
        y = y + psi(d, step * d, y)
    return blocks("after", layers - half, y, half + 1)


def series(
    w: Weights, x: np.ndarray, observed: np.ndarray, dt: np.ndarray, s: np.ndarray, z: np.ndarray, step: float
) -> list[tuple[np.ndarray, tuple[np.ndarray, ...]]]:
    """docs/series.md, "The forward pass, complete": the features of each step of one series, and (n, m, c, a)."""
    v, n = (x - w["input_mean"]) / w["input_scale"], np.zeros(x.shape[1])
    m, c, a, read = n, n, n, []
    for o, v_t, g, z_t in zip(observed, v, dt / step, z, strict=True):
        n = n + o
        m = np.where(o, m + (v_t - m) / np.maximum(n, 1), m)
        c, a = np.where(o, v_t, c), np.where(o | (n == 0), 0, a + g)
        times = [ell(g), math.log(1 + g)]
        f = [np.where(o, v_t, 0), o, c, ell(a), m, np.log(1 + n) / 3, times, s, z_t]
        read.append((np.concatenate(f), (n, m, c, a)))
    return read


def ell(x):
    return np.log(1 + 64 * x) / 3


def series_answer(
    w: Weights, h: np.ndarray, known: tuple[np.ndarray, ...], e: float, s: np.ndarray, z: np.ndarray, targets: list[int]
) -> np.ndarray:
    """The same section: the forecast of each target at the horizon e."""
    pair = to_complex(linear(w, "head.pairs", h))
    turned = exp((-np.log(1 + exp(w["head.rate"])) + 1j * w["head.turn"]) * e) * pair
    inner = silu(linear(w, "head.inner", np.concatenate([h, [math.log(1 + e), math.exp(-e)], z])))
    rho = linear(w, "head.out", np.concatenate([turned.real, turned.imag, inner]))
    everything, y = np.concatenate([known[2], known[0] > 0, s, z]), []
    for index, target in enumerate(targets):
        n, m, c, a = (part[target] for part in known)
        age, k = (a + e if n else 0), (1 + n) ** -0.5
        fine, coarse = ell(age), math.log(1 + age)
        history = [1, c, m, math.log(1 + n), c * k, m * k, fine, coarse, c * fine, c * coarse, m * fine, m * coarse]
        f = np.concatenate([part / d for part in (np.array(history), everything) for d in (1, 1 + e, 1 + e / 8)])
        anchor = c + f @ w["anchor.weight"][int(n > 0), index]
        scale, share = w["output_scale"][index], w["share"][index]
        y.append(w["output_mean"][index] + scale * (anchor + share * rho[index]))
    return np.array(y)


def randomised(module: nn.Module) -> Weights:
    """The weights by name, in float64 and far from where they start, and the buffers."""
    module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return {name: value.detach().numpy() for name, value in (*module.named_parameters(), *module.named_buffers())}


def random_input(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


MIXERS = {"spectral": Spectral, "liquid": Liquid, "tau": Tau, "delta": Delta}


def compare(kind: str, page: Callable[..., np.ndarray], options: dict[str, Any], read: dict[str, Any], times: bool):
    """The mixer with `options` against the page's function, which reads options as `read`; dt is uneven if `times`."""
    torch.manual_seed(1)
    mixer = MIXERS[kind](D, **options)
    if kind == "tau":
        mixer.tau.fill_(1.7)  # a calibration sets it
    w, x = randomised(mixer), random_input(B, T, D)
    dt = torch.rand(B, T, dtype=torch.float64) * 2 if times else torch.ones(B, T, dtype=torch.float64)
    with torch.no_grad():
        got, _ = mixer(x, ctx=Context(dt=dt) if times else None)
    given = {"dt": dt.numpy()} if kind in ("liquid", "delta") else {}
    assert_close(got, torch.tensor(page(w, x.numpy(), **given, **read)), kind)


SPECTRAL: dict[str, dict[str, Any]] = {
    "continuous-transformer-nano": {},
    "continuous-transformer": {"projections": False, "filter": True, "phase_gate": True},
    "everything": {"filter": True, "phase_gate": True, "channels": 6},
}


@pytest.mark.parametrize("options", SPECTRAL.values(), ids=SPECTRAL)
def test_spectral(options):
    compare("spectral", spectral, options, options, times=False)


NANO = {"adaptation": 0.9, "coupled": True, "steps": [0.02, 0.7], "turns": "matched"}
LIQUID: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "liquid-ssm-nano": ({**NANO}, {"coupled": True}),
    "liquid-ssm": ({"layer": "published"}, {"layer": "published"}),
    "liquid-ssm-dense": ({"dynamics": "dense", "layer": "published"}, {"dynamics": "dense", "layer": "published"}),
    "input alone": ({"state_dependence": False}, {"state_dependence": False}),
    "dense": ({"dynamics": "dense", "state_dependence": False}, {"dynamics": "dense", "state_dependence": False}),
    "impulse": ({**NANO, "input": "impulse"}, {"coupled": True, "input": "impulse"}),
    "dense impulse": ({"dynamics": "dense", "input": "impulse"}, {"dynamics": "dense", "input": "impulse"}),
}


@pytest.mark.parametrize("times", [False, True], ids=["", "dt"])
@pytest.mark.parametrize(("options", "read"), LIQUID.values(), ids=LIQUID)
def test_liquid(options, read, times):
    compare("liquid", liquid, {**options, "state_size": 8}, {**read, "state_size": 8}, times)


TAU_NANO = {
    "rope": False, "value_rotation": 16.0, "laplacian_weights": "diagonal", "importance": True, "forget_gate": True,
    "output_gate": True,
}  # fmt: skip
TAU: dict[str, dict[str, Any]] = {
    "tauformer-nano": {**TAU_NANO},
    "tauformer": {},
    "learned edges": {"laplacian_weights": "learned"},
    "keys of the token before": {**TAU_NANO, "keys": "previous"},
}


@pytest.mark.parametrize("options", TAU.values(), ids=TAU)
def test_tau(options):
    sizes = {"heads": 4, "head_size": 6, "key_size": 4}
    read = {{"rope": "rope_on"}.get(name, name): value for name, value in options.items()}
    compare("tau", tau, {**sizes, **options}, {**sizes, **read}, times=False)


DELTA: dict[str, dict[str, Any]] = {
    "delta-nano": {"keys": "previous"},
    "impulse": {"keys": "previous", "input": "impulse"},
    "impulse, writes": {"writes": 2, "input": "impulse"},
    "own keys": {},
    "rotate": {"transition": "rotate"},
    "rotate, writes": {"transition": "rotate", "writes": 2},
    "reflect, writes": {"transition": "reflect", "writes": 3},
    "writes": {"writes": 2},
}
DELTA_CASES = [
    pytest.param(options, times, id=name + (", dt" if times else ""))
    for name, options in DELTA.items()
    for times in (False, True)
    if not times or "input" in options or ("keys" not in options and options.get("transition") != "reflect")
]


@pytest.mark.parametrize(("options", "times"), DELTA_CASES)
def test_delta(options, times):
    given = {"heads": 3, "key_size": 4, **options}
    compare("delta", delta, given, given, times)


METHODS, CONTROLS = ("euler", "midpoint", "heun", "rk4"), ("none", "of a text", "of a token")
#: each method, kind of control and kind of shortcut; all of them together are slow
QUICK = {
    ("euler", "none", False), ("midpoint", "of a text", True),
    ("heun", "of a token", False), ("rk4", "of a token", True),
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "control", "shortcuts"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(METHODS, CONTROLS, (False, True))
    ],
)
def test_flow(method, control, shortcuts):
    torch.manual_seed(2)
    depth = {"kind": "flow", "layers": 3, "n_steps": 2, "control": ["a", "b"], "method": method}
    depth["shortcuts"] = shortcuts
    mixer = {"kind": "attention", "heads": 3, "forget_gate": True}
    config = {"hidden_size": D, "vocab_size": 11, "mixer": mixer, "block": {"conv_width": 4}, "depth": depth}
    model = LanguageModel.from_config(config)
    w, x = randomised(model.depth), random_input(B, T, D)
    u = {"none": None, "of a text": random_input(B, 2), "of a token": random_input(B, T, 2)}[control]
    with torch.no_grad():
        got, _ = model.depth(x, None, Context(control=u))
    read = {"layers": 3, "n_steps": 2, "heads": 3, "method": method}
    assert_close(got, torch.tensor(flow(w, x.numpy(), None if u is None else u.numpy(), **read)), "flow")


def test_series():
    torch.manual_seed(3)
    targets, step = [2, 0], 2.0
    config = {"inputs": 3, "outputs": 2, "targets": targets, "hidden_size": D, "forecast": True, "pairs": 4}
    model = SeriesModel.from_config({**config, "static": 1, "future": 1, "depth": {"layers": 1}}).double()
    means, scales = torch.randn(3).double(), torch.rand(3).double() + 0.5
    model.set_scales(input_mean=means, input_scale=scales, time_scale=torch.tensor(step).double())
    w = randomised(model)
    model.anchor.weight.normal_()
    model.share.copy_(torch.tensor([0.3, 0.8]))
    x, dt, horizon = random_input(1, T, 3), torch.rand(1, T).double() * 3, torch.rand(1, T, 2).double() * 9
    static, future, ahead = random_input(1, 1), random_input(1, T, 1), random_input(1, T, 2, 1)
    observed = torch.rand(1, T, 3) < 0.6
    observed[:, :3, 2] = False  # a target without a value
    seen: dict[str, np.ndarray] = {}
    model.entry.register_forward_hook(lambda _, read, __: seen.update(f=read[0][0].numpy()))
    model.norm.register_forward_hook(lambda _, __, h: seen.update(h=h[0].numpy()))
    with torch.no_grad():
        y, _ = model(
            x, observed=observed, dt=dt, horizon=horizon, static=static, future=future, ahead=ahead
        )  # fmt: skip
    s = np.array([static.item(), 1.0])
    steps = series(w, x[0].numpy(), observed[0].numpy(), dt[0].numpy(), s, future[0].numpy(), step)
    assert_close(torch.tensor(seen["f"]), torch.tensor(np.array([f for f, _ in steps])), "features")
    for t, (_, known) in enumerate(steps):
        for j in range(2):
            e = horizon[0, t, j].item() / step
            answer = series_answer(w, seen["h"][t], known, e, s, ahead[0, t, j].numpy(), targets)
            assert_close(y[0, t, j], torch.tensor(answer), f"step {t}, horizon {e:.2f}")


def test_the_recurrence_by_hand():
    """docs/recurrence.md: the numbers behind "the first step", "the gap" and "in two halves"."""
    a, b = torch.tensor([[-1 / 2]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)

    def after(x: float, u: float, dt: float) -> float:
        kept, added = discretize(a, b, dt)
        return float(kept) * x + float(added) * u

    first, half = after(0, 1, 1), after(0, 1, 0.5)
    page = (ROOT / "docs" / "recurrence.md").read_text()
    (written,) = re.findall(r"\* the first step, .*?(?=\n\n)", page, re.DOTALL)
    numbers = [float(number) for number in re.findall(r"= (\d\.\d{3})\$", written)]
    assert numbers == pytest.approx([first, after(first, 0, 3), half, after(half, 1, 0.5)], abs=5e-4)
