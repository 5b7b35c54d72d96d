"""The spectral mixer and its operations against their equations written plainly."""

from __future__ import annotations

import importlib
import math
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from numba import config as numba_config
from tolerances import assert_close
from torch import Tensor

import glissando
from glissando.errors import ConfigError
from glissando.kernels import compiled
from glissando.kernels.complex_norm import complex_norm
from glissando.kernels.plain import plain_operations
from glissando.mixers import Context
from glissando.mixers.spectral import Spectral
from glissando.mixers.spectral.operators import gated_scan, phase_gate, phases, rational_filter
from glissando.model import LanguageModel
from glissando.presets import load_preset
from glissando.state import state_bytes
from glissando.training.optimizer import optimizer_groups
from research.pictures import base_rates

BACKENDS = ("reference", "numba")


def complex_randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.complex128).requires_grad_()


def with_gradients(y: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    loss = (y * weight).sum()
    return [y.detach(), *torch.autograd.grad(loss.real if loss.is_complex() else loss, inputs)]


def assert_backends_agree(results: list[list[Tensor]]) -> None:
    for got, expected in zip(*results, strict=True):
        assert_close(torch.view_as_real(got) if got.is_complex() else got,
                     torch.view_as_real(expected) if expected.is_complex() else expected, "backends")  # fmt: skip


def test_rational_filter_backends_agree():
    torch.manual_seed(0)
    z, f = complex_randn(2, 300, 7), complex_randn(7)
    g = torch.rand(7, dtype=torch.float64).requires_grad_()
    assert_backends_agree([with_gradients(rational_filter(z, f, g, 0.1, b), (z, f, g)) for b in BACKENDS])


def test_rational_filter_of_nothing_is_nothing():
    """|z| has no slope at 0: the gradient there is that of z F / c, and no NaN."""
    z = torch.zeros(1, 2, 4, dtype=torch.complex128, requires_grad=True)
    f, g = complex_randn(4), torch.rand(4, dtype=torch.float64).requires_grad_()
    for backend in BACKENDS:
        y = rational_filter(z, f, g, 0.1, backend)
        assert y.abs().max() == 0
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.real.sum(), (z, f, g)))


def test_phase_gate_backends_agree():
    torch.manual_seed(0)
    s, position = complex_randn(2, 600, 5), torch.tensor([0, 1000])
    alpha, beta, omega = (torch.randn(5, dtype=torch.float64).requires_grad_() for _ in range(3))
    inputs = (s, alpha, beta, omega)
    assert_backends_agree([with_gradients(phase_gate(*inputs, position, b), inputs) for b in BACKENDS])


@pytest.mark.parametrize("backend", BACKENDS)
def test_phases_are_exact_at_ten_million(backend: str):
    """The phase at t = 10^7 against integer arithmetic with 40 digits; and after walking there in long strides."""
    from decimal import Decimal, getcontext

    getcontext().prec = 40
    pi = Decimal("3.141592653589793238462643383279502884197")
    omega = torch.tensor([1.0, 0.7312, 1e-4, 0.05], dtype=torch.float32)
    start, steps = 10_000_000 - 500, 501
    expected = []
    for w in omega.tolist():
        angle = Decimal(w) * 10_000_000 % (2 * pi)
        expected.append(float(angle if angle < pi else angle - 2 * pi))
    # s = 1, alpha = 0 and beta = 10^-3 make the gate tanh(phi / 1000), from which phi can be read.
    s = torch.ones(1, steps, 4, dtype=torch.complex128)
    zero, small = torch.zeros(4, dtype=torch.float64), torch.full((4,), 1e-3, dtype=torch.float64)
    gated = phase_gate(s, zero, small, omega.double(), torch.tensor([start]), backend)
    got = torch.atanh(gated[0, -1].real) * 1e3
    assert (got - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-6
    assert (phases(omega, torch.tensor([start]), steps)[0, -1] - torch.tensor(expected)).abs().max() < 1e-6


def test_complex_norm_backends_agree_and_standardise():
    torch.manual_seed(0)
    x = torch.randn(2, 9, 12, dtype=torch.float64).requires_grad_()
    assert_backends_agree([with_gradients(complex_norm(x, 1e-6, b), (x,)) for b in BACKENDS])
    z = torch.view_as_complex(complex_norm(x, 0.0).detach().unflatten(-1, (-1, 2)))
    assert_close(z.abs().square().mean(-1), torch.ones(2, 9, dtype=torch.float64))
    assert z.mean(-1).abs().max() < 1e-12


def test_complex_norm_survives_circular_noise():
    """Where the pseudo-variance vanishes (z = 1, i, -1, -i) the published form divides by nothing."""
    z = torch.tensor([1, 1j, -1, -1j], dtype=torch.complex128)
    assert (z - z.mean()).square().mean().abs() < 1e-15
    y = complex_norm(torch.view_as_real(z).flatten()[None, None])
    assert y.abs().max() < 1.5


def published_operator(z: Tensor, mixer: Spectral) -> Tensor:
    """One operator: filter, gate and the causal convolution with K(t), written as sums. z (T, N)."""
    f, g = torch.view_as_complex(mixer.numerator), torch.view_as_complex(mixer.denominator)
    spectrum = torch.fft.fft(z)
    s = torch.fft.ifft(spectrum * f / ((spectrum * g).abs() + 0.1))
    t = torch.arange(len(z), dtype=torch.float64)[:, None]
    phi = (t * mixer.omega + math.pi) % (2 * math.pi) - math.pi
    u = s * torch.tanh(s.abs() * mixer.gate_alpha + phi * mixer.gate_beta)
    w = mixer.omega + 0.1 * torch.sin(mixer.modulation)
    rows = []
    for i in range(len(z)):
        age = (i - t[: i + 1]).to(torch.complex128)
        rows.append((torch.exp((-mixer.log_gamma.exp() + 1j * w) * age) * u[: i + 1]).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operations_take_any_layout(dtype: torch.dtype):
    """Strided and conjugate inputs, expanded gradients, negative and large omega, rows at different positions."""
    torch.manual_seed(0)
    wide = torch.complex64 if dtype == torch.float32 else torch.complex128
    z = torch.randn(5, 40, 3, dtype=wide).transpose(1, 2)[::2].conj().requires_grad_()  # (3, 3, 40)
    f, g = torch.randn(40, dtype=wide).requires_grad_(), torch.rand(80, dtype=dtype)[::2].requires_grad_()
    vectors = tuple(v.requires_grad_() for v in 9 * torch.randn(3, 40, dtype=dtype))
    position = torch.tensor([7, 0, 5, 0, 10**4, 0])[::2]
    for run, inputs in (
        (lambda b: rational_filter(z, f, g, 0.1, b), (z, f, g)),
        (lambda b: phase_gate(z, *vectors, position, b), (z, *vectors)),
        (lambda b: complex_norm(torch.view_as_real(z.resolve_conj()).flatten(2), 1e-6, b), (z,)),
    ):
        outcomes = []
        for backend in BACKENDS:
            y = run(backend)
            outcomes.append([y.detach(), *torch.autograd.grad(y.abs().sum(), inputs)])
        assert_backends_agree(outcomes)


def test_nothing_in_nothing_out():
    empty = torch.zeros(0, 3, 4, dtype=torch.complex64)
    one = torch.ones(4)
    assert rational_filter(empty, one + 0j, one).shape == empty.shape
    assert phase_gate(empty, one, one, one, torch.zeros(0, dtype=torch.int64)).shape == empty.shape
    for preset in ("continuous-transformer", "continuous-transformer-nano"):
        model = LanguageModel.from_preset(preset, hidden_size=16)
        assert model(torch.zeros(0, 5, dtype=torch.int64))[0].shape == (0, 5, 256)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_complex_norm_cannot_take_is_refused(backend: str):
    with pytest.raises(ValueError, match="even last dimension"):
        complex_norm(torch.zeros(1, 2, 5), 1e-6, backend)
    with pytest.raises(ValueError, match="Did you mean 'numba'"):
        complex_norm(torch.zeros(1, 2, 4), 1e-6, "nunba")


def test_a_kernel_is_compiled_anew_when_another_file_that_it_uses_changes(tmp_path, monkeypatch):
    head = "from glissando.kernels.compiled import kernel\n"
    inner = head + "_SCALE = {}\n@kernel\ndef scaled(x):\n    return _SCALE * x\n"
    outer = head + "from inner_kernels import scaled\n@kernel\ndef run(x):\n    return scaled(x)\n"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "outer_kernels.py").write_text(outer)
    for scale in (2.0, 25.0):
        (tmp_path / "inner_kernels.py").write_text(inner.format(scale))
        compiled._kernels_of.cache_clear()
        for name in ("inner_kernels", "outer_kernels"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        assert importlib.import_module("outer_kernels").run(1.0) == scale


@pytest.fixture
def compiled_in(tmp_path, monkeypatch):
    """compiled_in(cache): a new module's kernel, compiled with that cache -> its value at 1 and the module's folder."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(numba_config, "CACHE_DIR", "")
    monkeypatch.syspath_prepend(tmp_path / "package")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "package").mkdir()
    text = "from glissando.kernels.compiled import kernel\n@kernel\ndef run(x):\n    return 2 * x\n"
    (tmp_path / "package" / "one_kernel.py").write_text(text)

    def compile_in(cache):
        monkeypatch.setenv("GLISSANDO_CACHE", str(cache))
        monkeypatch.delitem(sys.modules, "one_kernel", raising=False)
        compiled._kernel_directory.cache_clear()
        importlib.invalidate_caches()
        return importlib.import_module("one_kernel").run(1.0), tmp_path / "package"

    yield compile_in
    compiled._kernel_directory.cache_clear()


def test_compiled_kernels_are_kept_in_the_users_cache_by_version_and_not_in_the_package(tmp_path, compiled_in):
    value, package = compiled_in(tmp_path / "cache")
    assert value == 2
    assert len([*(tmp_path / "cache" / "kernels" / glissando.__version__).glob("one_kernel.run-*.nbc")]) == 1
    assert [path.name for path in package.rglob("*")] == ["one_kernel.py"]
    assert numba_config.CACHE_DIR == "", "other packages' kernels go where they went"


def test_a_copy_of_the_package_elsewhere_is_not_compiled_anew(tmp_path, compiled_in, monkeypatch):
    _, package = compiled_in(tmp_path / "cache")
    assert not sys.modules["one_kernel"].run.stats.cache_hits
    shutil.copytree(package, tmp_path / "copy")
    monkeypatch.syspath_prepend(tmp_path / "copy")
    assert compiled_in(tmp_path / "cache")[0] == 2
    copied = sys.modules["one_kernel"]
    assert Path(copied.__file__).parent.name == "copy"
    assert sum(copied.run.stats.cache_hits.values()) == 1
    assert copied.run(3) == 6, "another signature"
    assert len([*(tmp_path / "cache" / "kernels" / glissando.__version__).glob("one_kernel.run-*.nbc")]) == 2


def test_a_cache_that_cannot_be_written_is_reported_and_is_no_obstacle(tmp_path, compiled_in):
    (tmp_path / "file").write_text("")
    compiled._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"cannot make .*Set NUMBA_CACHE_DIR to a writable folder"):
        value, package = compiled_in(tmp_path / "file")
    assert value == 2
    assert [path.name for path in package.rglob("*")] == ["one_kernel.py"]


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own doings
@pytest.mark.slow
def test_compiled_by_torch_it_computes_the_same():
    """torch.compile with its eager backend: what it traces must be what runs (no C++ compiler is needed for that)."""
    torch.manual_seed(0)
    for preset, depth in (("continuous-transformer", {"n_steps": 2}), ("continuous-transformer-nano", {"layers": 1})):
        model = LanguageModel.from_preset(preset, hidden_size=16, depth=depth).double()
        ids = torch.randint(0, 256, (2, 20))
        torch._dynamo.reset()
        got = torch.compile(model, backend="eager")(ids)[0]  # before any kernel may have run
        assert_close(got, model(ids)[0], preset)


def test_what_has_no_effect_is_refused():
    with pytest.raises(ConfigError, match="channels"):
        Spectral(8, projections=False, channels=3)
    with pytest.raises(ConfigError, match=r"mlp\.hidden"):
        LanguageModel.from_config({"block": {"mlp": {"kind": "none", "hidden": 7}}})


def test_weight_decay_acts_on_matrices_alone():
    model = LanguageModel.from_preset("continuous-transformer", hidden_size=8)
    decayed = {
        id(p) for group in optimizer_groups(model, {}, 0.1, 1e-8) if group["weight_decay"] for p in group["params"]
    }
    assert {n for n, p in model.named_parameters() if id(p) in decayed} == {
        "embedding.weight",
        "lift.weight",
        "head.weight",
    }


def test_the_published_operator_is_its_equation():
    torch.manual_seed(0)
    options = {k: v for k, v in load_preset("continuous-transformer")["model"]["mixer"].items() if k != "kind"}
    mixer = Spectral(12, **options)
    mixer.reset_parameters()
    mixer.double()
    with torch.no_grad():
        mixer.gate_beta.normal_()
    x = torch.randn(1, 20, 12, dtype=torch.float64)
    got = mixer(x)[0][0]
    expected = published_operator(torch.view_as_complex(x[0].unflatten(-1, (6, 2))), mixer)
    assert_close(got, torch.view_as_real(expected).flatten(1), "operator")


def test_published_size():
    """2,905,601 with F and G counted once, as published; its step biases are pairs of real numbers there too."""
    model = LanguageModel.from_preset("continuous-transformer")
    halves = sum(p[..., 0].numel() for n, p in model.named_parameters() if n.endswith(("numerator", "denominator")))
    assert model.num_parameters() - halves == 2_905_601


def test_without_projections_frequencies_are_those_published():
    mixer = Spectral(16, projections=False)
    mixer.reset_parameters()
    n = torch.arange(mixer.channels)
    root = (2 * n + 1).sqrt()
    assert_close(mixer.omega.detach(), torch.exp(-root / root.max() * math.log(1e4)))


def test_with_projections_a_channel_turns_as_fast_as_it_decays():
    mixer = Spectral(16, channels=4096)
    mixer.reset_parameters()
    gamma, turn = base_rates(mixer)
    log_time, log_period = -gamma.detach().log(), torch.log(2 * math.pi / turn.detach().abs())
    residue = log_period - math.log(6) - 0.7 * log_time
    assert float(log_time.exp().min()) == pytest.approx(1, abs=1e-4)
    assert float(log_time.exp().max()) == pytest.approx(32, rel=1e-3)
    assert float(residue.mean()) == pytest.approx(0, abs=0.02)
    assert float(residue.std()) == pytest.approx(0.3, abs=0.03)


def one_pass_and_plain(dtype: torch.dtype, autocast: bool, with_state: bool, lengths: list[int] | None = None):
    """y, the state and all gradients of the layer by the kernel and by tensor operations."""
    torch.manual_seed(0)
    mixer, x = Spectral(24, channels=21).to(dtype), torch.randn(3, 300, 24, dtype=dtype, requires_grad=True)
    mask = None if lengths is None else torch.arange(300) < torch.tensor(lengths)[:, None]
    h = torch.randn(3, 21, 2, dtype=dtype, requires_grad=True)
    for operations in (nullcontext(), plain_operations()):
        state = mixer.init_state(3)._replace(h=h) if with_state else None
        with operations, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y, after = mixer(x, state, Context(mask=mask))
        outputs = [y] if after is None else [y, after.h]
        loss = sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)).double().sum() for o in outputs)
        yield [*outputs, *torch.autograd.grad(loss, [x, *mixer.parameters(), *([h] if with_state else [])])]


@pytest.mark.parametrize("lengths", [None, [300, 1, 77]], ids=["whole", "mask"])
@pytest.mark.parametrize("with_state", [False, True], ids=["empty", "state"])
@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float64, False), (torch.float32, False), (torch.float32, True)])
def test_one_pass_is_the_operations_one_after_the_other(dtype, autocast, with_state, lengths):
    for got, expected in zip(*one_pass_and_plain(dtype, autocast, with_state, lengths), strict=True):
        assert_close(got, expected, tolerance=5e-2 if autocast else 1e-11 if dtype == torch.float64 else 2e-5)


def test_a_start_state_of_another_shape_or_layout():
    mixer, x = Spectral(8, channels=5), torch.randn(3, 6, 8)
    for shape in ((1, 5, 2), (3, 4, 2), (3, 9, 2)):
        with pytest.raises(ValueError, match=r"h0 must be \(3, 5, 2\)"):
            mixer(x, mixer.init_state(3)._replace(h=torch.zeros(shape)))
    with pytest.raises(ValueError, match="time >= 1"):
        mixer(x[:, :0])
    h = torch.randn(5, 3, 2).transpose(0, 1).requires_grad_()
    grads = [torch.autograd.grad(mixer(x, mixer.init_state(3)._replace(h=z))[0].sum(), h) for z in (h, h.contiguous())]
    assert torch.equal(*(grad for (grad,) in grads))
    assert float(grads[0][0].abs().max()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_pass_has_gradients_where_a_gate_is_shut_or_open(dtype: torch.dtype):
    """Decays of 0 and of infinity, and output gates beyond what an exponential holds."""
    v, rate, gate = [0.5, 1.0, -0.3], [-1e4, -90.0, 1e4], [-1e38, 1e3, -100.0, 100.0, 0.0, 1.0]
    parts = torch.tensor(v + rate + gate, dtype=dtype).expand(1, 4, 12).clone()
    gammas, bias = torch.tensor([0.1, 2.0, 8.0], dtype=dtype), torch.zeros(3, dtype=dtype)
    factor = torch.tensor([[0.6, 0.8]] * 3, dtype=dtype)
    inputs = [z.requires_grad_() for z in (parts, gammas, bias, factor, torch.ones(1, 3, 2, dtype=dtype))]
    y, h = gated_scan(*inputs)
    assert y.isfinite().all()
    assert h.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum() + h.sum(), inputs))


@pytest.mark.parametrize("preset", ["continuous-transformer", "continuous-transformer-nano"])
def test_state_is_as_small_as_stated_and_does_not_grow(preset: str):
    model = LanguageModel.from_preset(preset)
    if preset == "continuous-transformer":
        model = LanguageModel.from_preset(preset, hidden_size=32)
    steps = sum(times for _, times in model.depth.applications())
    conv = model.config.block.conv_width
    width = model.width
    channels = next(m.channels for m in model.modules() if isinstance(m, Spectral))
    expected = 8 + steps * (8 * channels + 8 + 4 * width * max(conv - 1, 0))
    state = model.init_state(1)
    assert state_bytes(state) == expected
    with torch.no_grad():
        _, state = model(torch.randint(0, 256, (1, 70)), state)
    assert state_bytes(state) == expected


def test_mistakes_are_reported():
    with pytest.raises(ConfigError, match="even"):
        Spectral(7, projections=False)
    with pytest.raises(ConfigError, match="tied"):
        LanguageModel.from_config({"representation": "complex"})
    with pytest.raises(ConfigError, match="n_steps"):
        LanguageModel.from_config({"depth": {"kind": "tied", "layers": 2}})
    with pytest.raises(ConfigError, match="n_steps"):
        LanguageModel.from_config({"depth": {"kind": "discrete", "n_steps": 2}})
