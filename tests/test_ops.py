"""Every fast path equals its plain reference: values and all gradients, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close
from torch import Tensor

from glissando.errors import UnknownNameError
from glissando.kernels.rms_norm import rms_norm
from glissando.kernels.rope import rotate, rotation, rotation_from_zero
from glissando.kernels.short_conv import next_past, short_conv
from glissando.kernels.swiglu import swiglu
from glissando.mixers.attention import tiles
from glissando.mixers.attention.attend import attention, within
from glissando.model import LanguageModel

EXACT = 1e-12


def draw(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def same(fast, reference, *inputs: Tensor) -> None:
    """fast(*inputs) and reference(*inputs): values, and the gradient of a random weighting for every input."""
    outcomes = []
    for run in (fast, reference):
        for tensor in inputs:
            tensor.grad = None
        y = run(*inputs)
        (y * draw(*y.shape, seed=9, grad=False)).sum().backward()
        outcomes.append([y.detach(), *[t.grad.clone() for t in inputs if t.requires_grad]])
    for got, expected in zip(*outcomes, strict=True):
        assert_close(got, expected, tolerance=EXACT)
    with torch.no_grad():
        assert_close(fast(*inputs), outcomes[1][0], "without gradients", EXACT)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 8), (1, 1, 1), (300, 6), (3, 2, 290, 4)])
def test_rms_norm(shape):
    x, weight = draw(*shape), draw(shape[-1], seed=1)
    same(lambda *a: rms_norm(*a, backend="numba"), lambda *a: rms_norm(*a, backend="reference"), x, weight)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (0, 4)])
def test_rms_norm_of_nothing(shape):
    x, weight = draw(*shape), draw(shape[-1], seed=1)
    rms_norm(x, weight, backend="numba").sum().backward()
    assert x.grad.shape == shape
    assert not weight.grad.any()


def test_rms_norm_of_what_is_not_contiguous():
    x, weight = draw(4, 6, 5).transpose(0, 1), draw(5, seed=1)
    expected = rms_norm(x.contiguous(), weight, backend="reference")
    assert_close(rms_norm(x, weight, backend="numba"), expected, tolerance=EXACT)


def test_rms_norm_closed_form():
    y = rms_norm(torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64), eps=0.0)
    assert_close(y, torch.tensor([3.0, 8.0], dtype=torch.float64) / 12.5**0.5, tolerance=EXACT)


def test_rms_norm_keeps_its_statistics_in_float32():
    x = (1e3 * torch.randn(4, 64)).to(torch.bfloat16)
    expected = rms_norm(x.float(), torch.ones(64)).to(torch.bfloat16)
    assert torch.equal(rms_norm(x, torch.ones(64, dtype=torch.bfloat16)), expected)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("grad", [False, True])
def test_rms_norm_keeps_the_type(grad, backend):
    x, weight = torch.randn(3, 8).bfloat16(), torch.rand(8).requires_grad_(grad)
    y = rms_norm(x, weight, backend=backend)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, rms_norm(x.float(), weight).bfloat16())


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own doings
@pytest.mark.slow
def test_a_kernel_asked_for_is_what_torch_compile_runs():
    compiled = torch.compile(lambda x, weight: rms_norm(x, weight, backend="numba"), backend="eager")
    x, weight = draw(3, 8, grad=False), draw(8, seed=1, grad=False)
    assert torch.equal(compiled(x, weight), rms_norm(x, weight, backend="numba"))
    with pytest.raises(ValueError, match="all float32 or all float64"):
        compiled(x.half(), weight.half())


@pytest.mark.parametrize("shape", [(10,), (2, 3, 10), (0, 4), (3, 0, 4), (5, 2000), (2, 3, 40, 100)])
def test_swiglu(shape):
    same(swiglu, lambda h: swiglu(h, backend="reference"), draw(*shape))


def test_swiglu_of_what_is_not_contiguous():
    """Both the numbers and the gradient that arrives."""
    run, reference = (lambda h, b=b: swiglu(h.transpose(0, 1), b).transpose(0, 1) for b in ("auto", "reference"))
    same(run, reference, draw(40, 30, 10))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2**-19), (torch.bfloat16, 2**-8)])
def test_swiglu_rounds_once(dtype, tolerance):
    """Large numbers too, whose exponential no type holds; each number for itself."""
    h = torch.cat([8 * draw(40, 100, grad=False), torch.linspace(-300, 300, 100).repeat(2, 1)]).to(dtype)
    weighting = draw(42, 50, seed=1, grad=False).to(dtype)
    outcomes = []
    for numbers, backend in ((h, "auto"), (h.double(), "reference")):
        numbers.requires_grad_()
        y = swiglu(numbers, backend)
        (grad,) = torch.autograd.grad(y, numbers, weighting.to(y.dtype))
        outcomes.append((y.detach().double(), grad.double()))
    for got, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_swiglu_keeps_what_is_not_a_number():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        h = torch.full((2, 6), torch.nan, dtype=dtype, requires_grad=True)
        y = swiglu(h)
        y.sum().backward()
        assert y.isnan().all()
        assert h.grad.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_swiglu_of_the_most_negative_numbers(dtype):
    """A sigmoid that ends above 0 would leave a trace of -1e38."""
    gates, outcomes = torch.tensor([-100.0, -1e36, -1e38, -torch.inf], dtype=dtype), []
    for backend in ("auto", "reference"):
        h = torch.stack([gates, torch.ones_like(gates)], 1).requires_grad_()
        y = swiglu(h, backend)
        outcomes.append((y.detach(), *torch.autograd.grad(y.sum(), h)))
    for got, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(got[:3], expected[:3])
    assert outcomes[0][0][3].isnan(), "-inf times 0"


def test_a_graph_of_swiglu_takes_any_length():
    """Whether the kernel pays is not asked of a length that a graph leaves open."""

    class Layer(torch.nn.Module):
        def forward(self, h):
            return swiglu(h)

    lengths = ({1: torch.export.Dim("time")},)
    with torch.no_grad():
        graph = torch.export.export(Layer(), (draw(2, 5, 8, grad=False),), dynamic_shapes=lengths)
    h = draw(2, 3000, 8, grad=False)
    torch.testing.assert_close(graph.module()(h), swiglu(h, backend="reference"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_on_several_threads(dtype, monkeypatch):
    """Rows are for themselves, so that threads change no bit."""
    outcomes = []
    for threads in (1, 3):
        monkeypatch.setattr("glissando.kernels.compiled._WORK_A_THREAD", 1)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        h = draw(5, 7, 40, grad=False).to(dtype).requires_grad_()
        y = swiglu(h)
        y.square().sum().backward()
        outcomes.append((y.detach(), h.grad))
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))


@pytest.mark.parametrize("operation", [swiglu, lambda h: rms_norm(h, h.new_ones(10))], ids=["swiglu", "rms_norm"])
def test_a_second_derivative_of_a_kernel_is_refused(operation):
    """Where what arrives depends on nothing too: PyTorch would take a gradient without a graph for a constant."""
    h = draw(2, 10)
    with pytest.raises(RuntimeError, match="reference"):
        torch.autograd.grad(operation(h).sum(), h, create_graph=True)


@pytest.mark.parametrize("rows", [1, 3])
def test_rotate_in_one_pass(rows):
    """Long enough for the kernel, from a view, each row from its own place."""
    positions = torch.arange(100) + 7 * torch.arange(rows).unsqueeze(1)
    table = rotation(positions, 6, 100.0, 6, torch.float64).unsqueeze(-2)
    x = draw(3, 8, 100, 6)
    same(lambda x: rotate(x.transpose(1, 2), table), lambda x: rotate(x.transpose(1, 2), table, backend="reference"), x)
    half = x.detach().transpose(1, 2).bfloat16()
    expected = rotate(half.double(), table, backend="reference")
    assert_close(rotate(half, table.float()).double(), expected, "rounded once", 2**-8)


def test_rotate():
    table = rotation(torch.arange(4), 6, 100.0, 6, torch.float64)
    same(lambda x: rotate(x, table), lambda x: rotate(x, table, backend="reference"), draw(2, 4, 6))


@pytest.mark.parametrize("length", [4, 300])
def test_rotate_has_second_derivatives(length: int):
    """The tensor code and the kernel have the same."""
    table = rotation(torch.arange(length), 6, 100.0, 6, torch.float64).view(2, 1, length, 1, 3)
    seconds = []
    for backend in ("auto", "reference"):
        x = draw(1, length, 5, 6)
        (grad,) = torch.autograd.grad(rotate(x, table, backend).pow(3).sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(grad.square().sum(), x)[0])
    assert_close(seconds[0], seconds[1], tolerance=EXACT)


@pytest.mark.parametrize("shape", [(1, 4, 2, 6), (1, 400, 4, 6)])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_rotate_keeps_the_type(shape, backend):
    table = rotation(torch.arange(shape[1]), 6, 100.0, 6, torch.float32).view(2, 1, shape[1], 1, 3)
    assert rotate(torch.randn(shape).bfloat16(), table, backend).dtype == torch.bfloat16


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**7), st.integers(-1000, 1000))
def test_rotation_depends_on_relative_position_alone(position: int, offset: int):
    q, k = draw(8, grad=False), draw(8, seed=1, grad=False)
    position = max(position, -offset)

    def at(x: Tensor, p: int) -> Tensor:
        return rotate(x, rotation(torch.tensor(p), 8, 10000.0, 8, torch.float64))

    moved = at(q, position + offset) @ at(k, position)
    start = at(q, max(offset, 0)) @ at(k, max(-offset, 0))
    assert abs(float(moved - start)) < 1e-6


def test_rotation_table_is_the_rotation():
    table = rotation_from_zero(50, 8, 10000.0, 4, torch.float32, torch.device("cpu"))
    assert torch.equal(table[:, 17], rotation(torch.tensor(17), 8, 10000.0, 4, torch.float32))


def test_odd_head_size_cannot_rotate():
    with pytest.raises(ValueError, match="even, got 3"):
        rotation(torch.arange(2), 3, 10000.0, 3, torch.float32)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("visible", ["causal", "all", "mask"])
def test_attention(groups: int, biased: bool, visible: str):
    q, k, v = draw(2, 4, 7, 6), draw(2, groups, 7, 6, seed=1), draw(2, groups, 7, 6, seed=2)
    bias = draw(2, 4, 7, seed=3)
    seen = (torch.rand(2, 1, 7, 7) > 0.4) | torch.eye(7, dtype=torch.bool) if visible == "mask" else visible

    def run(backend: str):
        return lambda q, k, v, b: attention(
            q, k, v, visible=seen, key_bias=b if biased else b * 0, scale=0.3, backend=backend
        )

    same(run("auto"), run("reference"), q, k, v, bias)


#: queries, keys and the window
WINDOWS = [
    (300, 300, 1),
    (300, 400, 1),
    (300, 300, 65),
    (513, 513, 130),
    (200, 900, 150),
    (200, 420, 64),
    (70, 71, 70),
    (5, 300, 40),
]


@pytest.mark.parametrize(
    ("queries", "keys", "window", "biased"),
    [
        pytest.param(*sizes, biased, marks=() if biased == i % 2 else pytest.mark.slow)
        for i, sizes in enumerate(WINDOWS)
        for biased in (False, True)
    ],
)
def test_attention_within_a_window(queries: int, keys: int, window: int, biased: bool):
    """The last one has too few queries for blocks to pay, the one before too few keys."""
    q, k, v = draw(2, 4, queries, 6), draw(2, 2, keys, 6, seed=1), draw(2, 2, keys, 6, seed=2)
    bias = draw(2, 4, keys, seed=3)
    age = torch.arange(keys - queries, keys).unsqueeze(1) - torch.arange(keys)
    hidden = (age < 0) | (age >= window)

    def by_hand(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        logits = 0.3 * q @ k.transpose(-1, -2) + (b if biased else b * 0).unsqueeze(-2)
        return logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    def run(backend: str):
        return lambda q, k, v, b: attention(
            q, k, v, window=window, key_bias=b if biased else b * 0, scale=0.3, backend=backend
        )

    same(run("auto"), by_hand, q, k, v, bias)
    assert_close(run("reference")(q, k, v, bias), by_hand(q, k, v, bias), tolerance=EXACT)


def test_a_window_costs_as_many_pairs_as_it_has(monkeypatch: pytest.MonkeyPatch):
    """Eight times the text, eight times the pairs; a mask of all T x T would have 64 times as many."""
    pairs = []

    def count(q: Tensor, k: Tensor, *rest: Tensor, **options: object) -> Tensor:
        pairs.append(q.shape[:3].numel() * k.shape[2])
        return fused(q, k, *rest, **options)

    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", count)
    for length in (512, 4096):
        x = draw(1, 2, length, 4, grad=False)
        attention(x, x, x, window=64)
    assert pairs == [2 * length * 127 for length in (512, 4096)]


def test_a_window_keeps_no_more_than_its_keys():
    """For the backward pass, batches too: rows that overlap are not copied, where a mask of all pairs is kept whole."""

    def kept(**visible: Any) -> int:
        storages = {}

        def keep(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            alive = attention(q, q, q, **visible)
            return sum(storages.values()) if alive.requires_grad else 0

    q = draw(8, 2, 1024, 8).float()
    assert kept(window=128) < 1.2 * kept(visible=within(128, 1024, 1024, q.device))


def test_a_window_drops_by_its_dropout():
    x, ones = draw(1, 1, 512, 4, grad=False), torch.ones(1, 1, 512, 4, dtype=torch.float64)
    torch.manual_seed(0)
    assert_close(attention(x, x, ones, window=64), ones, tolerance=EXACT)
    dropped = attention(x, x, ones, window=64, dropout=0.5)
    assert float(dropped.std()) > 0.1
    assert float(dropped.mean()) == pytest.approx(1, abs=0.1)


def test_a_window_of_no_queries():
    x = draw(1, 2, 10, 4)
    for backend in ("auto", "reference"):
        assert attention(x[:, :, :0], x, x, window=3, backend=backend).shape == (1, 2, 0, 4)


def test_a_window_wants_keys_in_order():
    x = draw(1, 1, 5, 2)
    with pytest.raises(ValueError, match='at least 1 key and for visible "causal", got 0'):
        attention(x, x, x, window=0)
    with pytest.raises(ValueError, match="got 3 with 'all'"):
        attention(x, x, x, visible="all", window=3)
    with pytest.raises(ValueError, match="at least as many keys as queries, got 4 and 5"):
        attention(x, x[:, :, :4], x[:, :, :4], window=3)


def test_attention_bias_by_key_is_a_forget_gate():
    """softmax(q.k + C_i - C_j) does not depend on C_i: the fused form leaves it out."""
    q, k, v = (draw(1, 1, 6, 4, seed=s, grad=False) for s in range(3))
    decay = F.logsigmoid(draw(1, 1, 6, seed=4, grad=False)).cumsum(-1)
    logits = q @ k.transpose(-1, -2) / 2 + decay.unsqueeze(-1) - decay.unsqueeze(-2)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    assert_close(attention(q, k, v, key_bias=-decay), expected, tolerance=EXACT)


def test_a_steep_bias_keeps_its_slope_in_bfloat16():
    """A head that forgets within 8 tokens, 512 tokens long: in one bfloat16 coordinate its slope would be steps."""
    q, k = (0.1 * draw(1, 1, 512, 16, seed=s, grad=False) for s in range(2))
    v, bias = draw(1, 1, 512, 16, seed=2, grad=False), torch.arange(512.0).double().view(1, 1, 512) / 8
    exact = attention(q, k, v, key_bias=bias, backend="reference")
    half = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), key_bias=bias)
    assert half.dtype == torch.bfloat16
    assert (half.double() - exact).abs().max() < 0.03


def test_bias_gets_its_gradient_in_bfloat16():
    q, k, v = (draw(1, 1, 20, 8, seed=s, grad=False).bfloat16() for s in range(3))
    grads = []
    for inputs in ((q, k, v), (q.double(), k.double(), v.double())):
        bias = draw(1, 1, 20, seed=5)
        attention(*inputs, key_bias=bias).double().square().sum().backward()
        grads.append(bias.grad)
    assert (grads[0] - grads[1]).abs().max() < 0.05 * grads[1].abs().max()


def test_causal_attention_refuses_other_lengths():
    with pytest.raises(ValueError, match="as many keys as queries, got 4 and 3"):
        attention(draw(1, 1, 3, 2), draw(1, 1, 4, 2), draw(1, 1, 4, 2))


def test_heads_that_cannot_share():
    with pytest.raises(ValueError, match="4 heads cannot share 3 heads of keys"):
        attention(draw(1, 4, 5, 2), draw(1, 3, 5, 2), draw(1, 3, 5, 2))


def test_a_bias_beyond_float16():
    """A gate that forgets fast: over the scale its bias is more than 65504."""
    q, k, v = (draw(1, 2, 64, 16, seed=s, grad=False) for s in range(3))
    bias = torch.linspace(0, 3e4, 64).double().expand(1, 2, 64)
    half = attention(q.half(), k.half(), v.half(), key_bias=bias)
    assert half.dtype == torch.float16
    assert_close(half.double(), attention(q, k, v, key_bias=bias, backend="reference"), tolerance=1e-2)


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("length", [1, 2, 9, 300])
def test_short_conv_is_a_causal_convolution(width: int, length: int, backend: str):
    x, weight, past = draw(2, length, 3), draw(3, width, seed=1), draw(2, width - 1, 3, seed=2)

    def reference(x: Tensor, weight: Tensor, past: Tensor) -> Tensor:
        joined = torch.cat([past, x], 1).transpose(1, 2)
        return F.conv1d(joined, weight.unsqueeze(1), groups=3).transpose(1, 2)

    def ours(*inputs: Tensor) -> Tensor:
        return short_conv(*inputs, backend=backend)

    same(ours, reference, x, weight, past)
    assert_close(ours(x, weight), ours(x, weight, torch.zeros_like(past)), tolerance=EXACT)


def test_next_past_holds_the_last_real_inputs():
    x = torch.arange(1.0, 5.0).view(1, 4, 1).expand(3, -1, -1)
    past = torch.tensor([-2.0, -1.0, 0.0]).view(1, 3, 1).expand(3, -1, -1)
    got = next_past(x, past, torch.tensor([0, 2, 4])).squeeze(-1)
    assert got.tolist() == [[-2, -1, 0], [0, 1, 2], [2, 3, 4]]
    expected = [[-2, -1, 0], [-1, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    for length in range(5):
        assert next_past(x[:, :length], past, None).squeeze(-1).tolist() == [expected[length]] * 3


def test_next_past_lets_go_of_the_prompt():
    past = next_past(torch.randn(1, 1000, 8), torch.zeros(1, 3, 8), None)
    assert past.untyped_storage().nbytes() == past.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_rotate_long_texts(dtype):
    """Long enough for the kernel, which has no such numbers."""
    for preset in ("transformer-nano", "tauformer-nano"):
        model = LanguageModel.from_preset(preset).to(dtype)
        with torch.no_grad():
            logits, _ = model(torch.zeros(1, 128, dtype=torch.int64))
        assert logits.dtype == dtype


def test_a_coarse_table_does_not_round_what_is_exact():
    x, positions = draw(1, 2, 3000, 6).transpose(1, 2), torch.arange(3000).unsqueeze(0)
    table = rotation(positions, 6, 100.0, 6, torch.float32).unsqueeze(-2)
    assert_close(rotate(x, table), rotate(x, table, backend="reference"), tolerance=EXACT)


@pytest.mark.parametrize("backend", ["auto", "numba", "reference"])
def test_shapes_that_do_not_fit_are_refused(backend):
    with pytest.raises(ValueError, match="rms_norm: weight must be"):
        rms_norm(torch.randn(2, 3, 5), torch.ones(7), backend=backend)
    with pytest.raises(ValueError, match="short_conv: weight must be"):
        short_conv(torch.randn(2, 3, 5), torch.ones(3, 3), backend=backend)


def test_an_odd_width_has_no_halves():
    for backend in ("auto", "reference"):
        with pytest.raises(ValueError, match=r"even last dimension, got \(2, 7\)"):
            swiglu(torch.randn(2, 7), backend)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
@pytest.mark.parametrize(("length", "size"), [(1, 32), (64, 32), (150, 96)])
def test_gradients_of_attention_by_tiles(length, size, dtype, tolerance):
    """Heads that lie between others, large logits among them; a tile, a part of one, more than two."""
    projected = draw(2, length, 9, size, grad=False).to(dtype)
    q, k, v = (x.transpose(1, 2).detach() for x in (2 * projected).split(3, 2))
    if not tiles.takes(q, k, v):
        pytest.skip("the processor has no AVX-512")
    weighting, outcomes = draw(2, length, 3, size, seed=1, grad=False).to(dtype).transpose(1, 2), []
    for run, kind in ((tiles.causal, dtype), (_plain_attention, torch.float64)):
        inputs = [x.to(kind).requires_grad_() for x in (q, k, v)]
        y = run(*inputs, 0.3)
        outcomes.append([x.double() for x in (y.detach(), *torch.autograd.grad(y, inputs, weighting.to(kind)))])
    for got, expected in zip(*outcomes, strict=True):
        assert_close(got, expected, tolerance=tolerance)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return attention(q, k, v, scale=scale, backend="reference")


def test_gradients_of_attention_by_tiles_on_several_threads(monkeypatch):
    """Heads are for themselves, so that threads change no bit."""
    outcomes = []
    inputs = [draw(2, 3, 70, 32, seed=n, grad=False).float().requires_grad_() for n in range(3)]
    if not tiles.takes(*inputs):
        pytest.skip("the processor has no AVX-512")
    monkeypatch.setattr("glissando.kernels.compiled._WORK_A_THREAD", 1)
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        outcomes.append(torch.autograd.grad(tiles.causal(*inputs, 0.3).square().sum(), inputs))
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))


def test_tiles_leave_out_weights_that_would_be_subnormal_in_products():
    """A key with exp(-80) of a query's weight gets no gradient from it; one with exp(-60) does."""
    q = torch.ones(1, 1, 2, 32)
    v = torch.zeros(1, 1, 2, 32, requires_grad=True)
    if not tiles.takes(q, q, v):
        pytest.skip("the processor has no AVX-512")
    for below, counts in ((80, False), (60, True)):
        k = torch.ones(1, 1, 2, 32) * torch.tensor([-below / 32, 0.0]).view(1, 1, 2, 1)
        arrived = torch.zeros(1, 1, 2, 32)
        arrived[:, :, 1] = 1e30
        (grad,) = torch.autograd.grad(tiles.causal(q, k, v, 1.0), v, arrived)
        assert bool((grad[:, :, 0] > 0).all()) == counts


@pytest.mark.parametrize("step", [-8.0, 8.0])
def test_tiles_whose_highest_logit_is_far_from_that_of_the_tile_before(step):
    """512 from tile to tile, up and down: no weight overflows, and what was summed does not outweigh what comes."""
    q, v = torch.ones(1, 1, 300, 32), draw(1, 1, 300, 32, grad=False).float()
    k = torch.arange(300.0).view(1, 1, -1, 1).expand(1, 1, 300, 32).contiguous()
    if not tiles.takes(q, k, v):
        pytest.skip("the processor has no AVX-512")
    with torch.no_grad():
        y = tiles.causal(q, k, v, step / 32)
        assert_close(y, _plain_attention(q.double(), k.double(), v.double(), step / 32).float(), tolerance=1e-6)
        k[:, :, 200] = torch.nan
        lost = tiles.causal(q, k, v, step / 32).isnan().all(-1)[0, 0]
    assert lost[200:].all()
    assert not lost[:192].any()


def test_attention_takes_tiles_where_they_pay():
    """Long rows, one width, no autocast to another type; and attention's gradients are those of tiles."""
    x = torch.zeros(1, 2, 600, 32, requires_grad=True)
    wide = tiles.takes(x, x, x)
    assert tiles.fit(x, x, x) == wide
    assert not tiles.fit(x[:, :, :100], x[:, :, :100], x[:, :, :100])
    assert not tiles.fit(x[..., :31], x[..., :31], x[..., :31])
    assert not tiles.fit(*[x.reshape(1, 1, 150, 256)] * 3)
    large = torch.zeros(1, 1, 600, 128, requires_grad=True).bfloat16()
    assert not tiles.fit(large, large, large), "PyTorch's gradients of larger heads are faster in bfloat16"
    assert not tiles.fit(x, x[..., :16], x)
    assert not tiles.fit(x.double(), x.double(), x.double())
    with torch.no_grad():
        assert tiles.fit(x, x, x) == wide
        assert torch.equal(attention(x, x, x), tiles.causal(x, x, x, 32**-0.5)) or not wide
        assert not tiles.fit(x.bfloat16(), x.bfloat16(), x.bfloat16()), "PyTorch's products are faster"
    with torch.autocast("cpu", torch.bfloat16):
        assert not tiles.fit(x, x, x)
        assert tiles.fit(x.bfloat16(), x.bfloat16(), x.bfloat16()) == wide
    q, k, v = (draw(1, 2, 600, 32, seed=n).float().detach().requires_grad_() for n in range(3))
    assert (type(attention(q, k, v).grad_fn.next_functions[0][0]).__name__ == "_CausalBackward") == wide
    gradients = [
        torch.autograd.grad(run().sum(), [q, k, v])
        for run in (lambda: attention(q, k, v), lambda: attention(q, k, v, backend="reference"))
    ]
    for got, expected in zip(*gradients, strict=True):
        assert_close(got, expected, tolerance=1e-5)


def test_a_backend_that_there_is_not():
    x, table = draw(1, 1, 4, 6), rotation(torch.arange(4), 6, 100.0, 6, torch.float64)
    for run in (swiglu, lambda x, backend: rotate(x, table, backend), lambda x, b: attention(x, x, x, backend=b)):
        with pytest.raises(UnknownNameError, match=r"backend 'autp'\. Did you mean 'auto'\? Known: auto, reference"):
            run(x, "autp")
    with pytest.raises(UnknownNameError, match=r"Did you mean 'numba'.*auto, numba, reference"):
        rms_norm(x, x[0, 0, 0], backend="nunba")


def test_a_kernel_asked_for_names_the_types_it_takes():
    with pytest.raises(ValueError, match="all float32 or all float64"):
        rms_norm(torch.randn(2, 5).bfloat16(), torch.ones(5).bfloat16(), backend="numba")
    with pytest.raises(ValueError, match="all float32 or all float64"):
        short_conv(torch.randn(2, 3, 5), torch.ones(5, 3, dtype=torch.float64), backend="numba")


def test_a_misspelt_visibility_is_no_leak():
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(UnknownNameError, match=r"casual.*causal"):
        attention(q, q, q, visible="casual")
