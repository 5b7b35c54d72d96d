"""Every backend of the scan against its definition: values, gradients and laws."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import TOLERANCE, assert_close
from torch import Tensor

from glissando.errors import ConfigError, UnknownNameError
from glissando.kernels import compiled
from glissando.kernels.scan import scan, scan_pairs
from glissando.kernels.scan_numba import NumbaScan
from glissando.mixers.spectral import Spectral

EXACT = 1e-11
KINDS = ["constant", "one step", "one row", "varying"]

# Triton reads TRITON_INTERPRET when it is imported: test_triton_interpreted runs this file again with it set.
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["numba"]
if INTERPRETED or (HAS_TRITON and torch.cuda.is_available()):
    BACKENDS.append("triton")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    """Several chunks, a short one and two levels of them, in a few steps."""
    if "triton" in BACKENDS:
        monkeypatch.setattr("glissando.kernels.scan_triton._CHUNK", 2)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def problem(kind: str, dtype: torch.dtype, batch=2, time=11, features=(3,), size=0.9) -> list[Tensor]:
    """a, x and h0; |a| is about `size`, so that what a chunk hands on matters to the end."""
    leading = {"constant": (), "one step": (batch, 1), "one row": (1, time), "varying": (batch, time)}[kind]
    a = draw(*leading, *features, seed=1, dtype=dtype)
    a = size * a / a.abs().clamp(min=0.1)
    return [a, draw(batch, time, *features, seed=2, dtype=dtype), draw(batch, *features, seed=3, dtype=dtype)]


def near(got: Tensor, expected: Tensor, what: str = "", tolerance: float = EXACT) -> None:
    if expected.is_complex():
        assert got.is_complex(), what
        got, expected = torch.view_as_real(got.resolve_conj()), torch.view_as_real(expected.resolve_conj())
    assert_close(got, expected, what, tolerance)


def loss(h: Tensor, last: Tensor) -> Tensor:
    """A weighting of both outputs."""
    weighted = (h * draw(*h.shape, seed=4, dtype=h.dtype)).sum() + (
        last * draw(*last.shape, seed=5, dtype=h.dtype)
    ).sum()
    return weighted.real + weighted.imag if weighted.is_complex() else weighted


def outcome(backend: str, *inputs: Tensor, run=scan) -> dict[str, Tensor]:
    device = "cuda" if backend == "triton" and not INTERPRETED else "cpu"
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    h, last = (y.cpu() for y in run(*(leaf.to(device) for leaf in leaves), backend=backend))
    grads = torch.autograd.grad(loss(h, last), leaves)
    return {"h": h.detach(), "h_last": last.detach(), **dict(zip(("a", "x", "h0"), grads, strict=False))}


def agree(backend: str, *inputs: Tensor, run=scan, tolerance: float = EXACT) -> None:
    got, expected = outcome(backend, *inputs, run=run), outcome("reference", *inputs)
    for name, tensor in expected.items():
        near(got[name], tensor, f"{backend} {name}", tolerance)


@every_backend
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_backend_is_the_definition(backend: str, kind: str, dtype: torch.dtype):
    agree(backend, *problem(kind, dtype))


@every_backend
@settings(deadline=None, max_examples=6 if INTERPRETED else 15)
@given(
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([torch.float64, torch.complex128]),
    batch=st.integers(1, 3),
    time=st.integers(1, 20),
    features=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
)
def test_any_shape(backend: str, kind: str, dtype: torch.dtype, batch: int, time: int, features: tuple[int, ...]):
    agree(backend, *problem(kind, dtype, batch, time, features))


@every_backend
@pytest.mark.parametrize("kind", KINDS)
def test_one_step(backend: str, kind: str):
    agree(backend, *problem(kind, torch.complex128, time=1))


@every_backend
def test_features_beyond_a_block(backend: str):
    agree(backend, *problem("varying", torch.complex128, batch=1, time=5, features=(70,)))


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_single_precision(backend: str, dtype: torch.dtype):
    agree(backend, *problem("varying", dtype), tolerance=TOLERANCE[torch.float32])


@every_backend
def test_closed_form(backend: str):
    a, x, _ = problem("constant", torch.float64, time=9)
    lag = torch.arange(9).unsqueeze(1) - torch.arange(9)
    powers = torch.where(lag.unsqueeze(-1) >= 0, a ** lag.clamp(min=0).unsqueeze(-1), 0)
    near(outcome(backend, a, x)["h"], torch.einsum("tsf,bsf->btf", powers, x))


@every_backend
def test_unstable(backend: str):
    agree(backend, *problem("varying", torch.float64, time=20, size=3.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("kind", ["constant", "one step", "varying"])
def test_sums_over_long_texts(kind: str, dtype: torch.dtype):
    """Longer than a run of the sums that the kernel keeps in the working precision."""
    agree("numba", *problem(kind, dtype, time=700))


@every_backend
def test_no_state_is_zeros(backend: str):
    a, x, h0 = problem("varying", torch.float64)
    got, expected = outcome(backend, a, x), outcome(backend, a, x, torch.zeros_like(h0))
    assert all(torch.equal(got[name], expected[name]) for name in got)


@every_backend
@pytest.mark.parametrize("kind", ["constant", "varying"])
@pytest.mark.parametrize("cut", [1, 6, 10])
def test_split(backend: str, kind: str, cut: int):
    def in_two(a: Tensor, x: Tensor, h0: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        before, after = (a[:, :cut], a[:, cut:]) if a.ndim == x.ndim else (a, a)
        first, state = scan(before, x[:, :cut], h0, backend)
        second, last = scan(after, x[:, cut:], state, backend)
        return torch.cat([first, second], 1), last

    agree(backend, *problem(kind, torch.complex128), run=in_two)


@every_backend
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, within Triton's interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["constant", "varying"])
def test_what_is_not_finite_shows_from_its_step_on(backend: str, value: float, kind: str):
    a, x, h0 = problem(kind, torch.float64)
    clean = outcome(backend, a, x, h0)["h"]
    x[0, 5, 1] = value
    h = outcome(backend, a, x, h0)["h"]
    assert not h[0, 5:, 1].isfinite().any()
    clean[0, 5:, 1] = h[0, 5:, 1] = 0
    near(h, clean)


@every_backend
def test_layouts(backend: str):
    """Transposed, expanded and conjugate views, and gradients that arrive expanded."""

    def run(a: Tensor, x: Tensor, h0: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        h, last = scan(a.conj().expand(2, 11, 3), x.transpose(0, 1).conj(), h0.conj().expand(2, 3), backend)
        return h.conj(), last.conj()

    a, x, h0 = draw(3, dtype=torch.complex128), draw(11, 2, 3, dtype=torch.complex128), draw(3, dtype=torch.complex128)
    got, expected = outcome(backend, a, x, h0, run=run), outcome("reference", a, x, h0, run=run)
    for name in expected:
        near(got[name], expected[name], name)
    sums = []
    for name in (backend, "reference"):
        leaf = x.real.transpose(0, 1).clone().requires_grad_()
        device = "cuda" if name == "triton" and not INTERPRETED else "cpu"
        scan(a.real.to(device), leaf.to(device), backend=name)[0].sum().backward()
        sums.append(leaf.grad)
    near(*sums)


@every_backend
@pytest.mark.parametrize("complex_one", [0, 1, 2])
def test_mixed_types(backend: str, complex_one: int):
    inputs = problem("varying", torch.float64)
    inputs[complex_one] = problem("varying", torch.complex128)[complex_one]
    agree(backend, *inputs)


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_bfloat16_keeps_its_state_in_float32(backend: str):
    a, x, h0 = (tensor.bfloat16() for tensor in problem("varying", torch.float32))
    h, last = scan(a, x, h0, backend)
    expected, expected_last = scan(a.float(), x.float(), h0.float(), "reference")
    assert (h.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    near(last, expected_last, tolerance=TOLERANCE[torch.float32])
    near(h.float(), expected, tolerance=TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_threads(kind: str, dtype: torch.dtype, monkeypatch):
    inputs = problem(kind, dtype, batch=7)
    expected = outcome("numba", *inputs)
    monkeypatch.setattr(compiled, "_WORK_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    got = outcome("numba", *inputs)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own doings
def test_torch_compile_never_looks_into_the_kernel(monkeypatch):
    """In a process that has not used it, Numba would compile it under torch's eyes, and torch would fail."""
    seen = []

    def forward(*inputs: Tensor, plain=NumbaScan.forward) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return plain(*inputs)

    monkeypatch.setattr(NumbaScan, "forward", staticmethod(forward))
    inputs = problem("varying", torch.complex128)
    torch._dynamo.reset()
    h, _ = torch.compile(scan, backend="eager")(*inputs)
    near(h, scan(*inputs, backend="reference")[0])
    assert seen == [False]


def as_pairs(a: Tensor, x: Tensor, h0: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    h, last = scan(a, x, h0, backend)
    return torch.view_as_real(h), torch.view_as_real(last)


def conjugated(a: Tensor, x: Tensor, h0: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return as_pairs(a.conj(), x.conj(), h0.conj(), backend)


def in_pairs(a: Tensor, x: Tensor, h0: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return scan_pairs(torch.view_as_real(a), x, torch.view_as_real(h0))


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own doings
@pytest.mark.parametrize(
    ("kind", "entry", "time"),
    [
        ("constant", "complex", 11),
        ("one row", "real", 1),
        pytest.param("one step", "real", 11, marks=pytest.mark.slow),
        pytest.param("varying", "complex", 11, marks=pytest.mark.slow),
    ],
)
def test_pairs_of_reals_are_the_complex_numbers(kind: str, entry: str, time: int):
    """scan_pairs, as it is and compiled, and the compiled scan of complex numbers, against the definition."""
    a, x, h0 = problem(kind, torch.complex128, time=time)
    x = x if entry == "complex" else x.real.contiguous()
    expected = outcome("reference", a, x, h0, run=as_pairs)
    for run in (in_pairs, torch.compile(in_pairs, backend="aot_eager"), torch.compile(as_pairs, backend="aot_eager")):
        torch._dynamo.reset()
        for name, got in outcome("auto", a, x, h0, run=run).items():
            near(got, expected[name], name)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_scan_takes_conjugated_views():
    inputs = problem("varying", torch.complex128)
    torch._dynamo.reset()
    compiled_run = torch.compile(conjugated, backend="aot_eager")
    expected = outcome("reference", *inputs, run=conjugated)
    for name, got in outcome("auto", *inputs, run=compiled_run).items():
        near(got, expected[name], name)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_mixer_holds_no_complex_results_of_the_scan():
    """Inductor before PyTorch 2.13 writes over those that are viewed as reals, and the gradients are wrong."""
    types = []

    def look(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        result = (node for node in graph.graph.nodes if "glissando.scan" in str(node.target))
        types.extend(node.meta["example_value"].dtype for node in result)
        return graph

    torch._dynamo.reset()
    mixer = Spectral(16)
    torch.compile(lambda x: mixer(x)[0], backend=look)(draw(2, 20, 16, dtype=torch.float32))
    assert types == [torch.float32]


def test_the_state_after_one_step_is_apart_from_the_output():
    h, last = scan(*problem("varying", torch.float64, time=1))
    assert torch.equal(h[:, 0], last)
    assert h.data_ptr() != last.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("kind", ["constant", "varying"])
def test_gradcheck(kind: str, dtype: torch.dtype):
    inputs = [tensor.requires_grad_() for tensor in problem(kind, dtype, time=4, features=(2,))]
    assert torch.autograd.gradcheck(lambda *given: scan(*given, backend="numba"), inputs)


def test_a_second_derivative_is_refused():
    inputs = [tensor.requires_grad_() for tensor in problem("varying", torch.float64)]
    with pytest.raises(RuntimeError, match="reference"):
        torch.autograd.grad((scan(*inputs, backend="numba")[0] ** 2).sum(), inputs[0], create_graph=True)


@pytest.mark.parametrize(
    ("a", "x", "h0", "text"),
    [
        ((3,), (2, 3), None, r"x must be .* got \(2, 3\)"),
        ((3,), (2, 0, 3), None, r"got \(2, 0, 3\)"),
        ((4,), (2, 5, 3), None, r"a must be \(3,\) .* x \(2, 5, 3\).* got \(4,\)"),
        ((2, 4, 3), (2, 5, 3), None, r"got \(2, 4, 3\)"),
        ((3, 5, 3), (2, 5, 3), None, r"got \(3, 5, 3\)"),
        ((3,), (2, 5, 3), (1, 3), r"h0 must be \(2, 3\) .* got \(1, 3\)"),
    ],
)
def test_shapes_that_do_not_fit(a, x, h0, text: str):
    with pytest.raises(ValueError, match=text):
        scan(torch.zeros(a), torch.zeros(x), None if h0 is None else torch.zeros(h0))


def test_backends_that_cannot_run():
    a, x, _ = problem("constant", torch.float32)
    with pytest.raises(UnknownNameError, match=r"'nunba'.* Did you mean 'numba'"):
        scan(a, x, backend="nunba")
    with pytest.raises(ConfigError, match="runs on a CPU, the tensors are on meta"):
        scan(a.to("meta"), x.to("meta"), backend="numba")
    if not INTERPRETED:
        with pytest.raises(ConfigError, match="needs CUDA" if HAS_TRITON else "pip install triton"):
            scan(a, x, backend="triton")


@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="triton is not installed (or runs here already)")
@pytest.mark.slow
def test_triton_interpreted():
    command = [sys.executable, "-m", "pytest", __file__, "-k", "triton", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
