"""Diagonal liquid dynamics: complex modes whose time constants depend on the input and on their own state.

    dx/dt = (l - 1 / tau) x + b           tau = tau0 (1 + a tanh(z + p Re x + q Im x)),   l = -d + i w

for each mode, with tau taken at the beginning of a token and held, as b is (zero-order hold). With zeta = l - 1 / tau
and k = step * dt, the time that passes in a mode's own units:

    x_t = exp(k zeta) x_{t-1} + expm1(k zeta) / zeta b_t

exact for any k >= 0; k = 0 leaves x alone. An `impulse` ages the state over dt and then adds what b adds at dt = 1,
whatever dt is:

    x_t = exp(k zeta) x_{t-1} + expm1(step zeta) / zeta b_t

If `coupled`, b / tau takes the place of b, as in a liquid time-constant
cell (Hasani et al. 2021, arXiv 2006.04439): where tau is short, a mode forgets and takes what comes; where it is long,
it keeps what it has and takes little. l: Gu et al. 2022 (S4D), arXiv 2206.11893.

Backward, with G the gradient at x_t (dL = Re(conj(G) dx)), lambda = exp(k zeta), c = expm1(k zeta) / zeta:

    G_c = G conj(b),    G_lambda = G conj(x_{t-1}) + G_c / conj(zeta),
    dzeta = conj(k lambda) G_lambda - conj(c / zeta) G_c

(of an impulse, G_c / conj(zeta) belongs to mu = exp(step zeta): it is G_mu, and dzeta gets conj(step mu) G_mu for it)
and from there to tau, tanh and its argument, whose share of dx_{t-1} joins conj(lambda) G: one reversed pass over time.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from glissando.kernels.compiled import (
    HAS_TRITON,
    as_rows,
    over_rows,
    require_backend,
    require_shapes,
    require_triton,
    require_types,
    use_numba,
    warn_of_the_loop,
)
from glissando.kernels.loop import exporting, over_time
from glissando.kernels.plain import resolved, without_derivatives
from glissando.mixers.base import require_time

Backend = Literal["auto", "reference", "numba", "triton"]
Form = Literal["numba", "triton"]


class Modes(NamedTuple):
    """What belongs to a mode, each (N,) real; state (N, 2), or None where tau depends on the input alone."""

    decay: Tensor  # d > 0
    turn: Tensor  # w
    step: Tensor  # > 0
    tau: Tensor  # tau0 > 0
    adaptation: Tensor  # a, 0 <= a < 1
    state: Tensor | None = None  # p, q


def liquid(
    b: Tensor,
    z: Tensor,
    modes: Modes,
    x0: Tensor,
    dt: Tensor | None = None,
    coupled: bool = False,
    backend: Backend = "auto",
    packed: Packed | None = None,
    impulse: bool = False,
) -> Tensor:
    """x_t for t = 1..T, from x0 -> x (B, T, N, 2).

    b   (B, T, N), or (B, T, N, 2) if complex: the input of a mode
    z   (B, T, N): what the input adds to the time constant's pre-activation
    x0  (B, N, 2);  dt  (B, T) >= 0, 1 if None
    packed  `pack(modes)` from before, for `numba` without gradients and dt
    impulse whether b is taken as an impulse, and not held over dt; without dt both are the same

    backend  `auto`       `numba` on a CPU; `triton` on CUDA, where it is installed; elsewhere `reference`, with a
                          warning once
             `numba`      one pass over memory, one token after the other and modes side by side
             `triton`     the same on CUDA: one launch, rows and modes side by side
             `reference`  a loop under autograd

    Raises ValueError for shapes or types that do not fit or a dt that is negative or not finite, ConfigError for a
    backend that cannot run here.
    """
    _check(b, z, modes, x0, dt)
    impulse = impulse and dt is not None
    backend = resolved(backend)
    require_backend("liquid", backend, get_args(Backend))
    if exporting():
        return _loop(b, z, modes, x0, dt, coupled, impulse)
    form = _kernel(backend, b)
    if form is not None and torch.compiler.is_compiling():
        return _operation(b, z, x0, dt, *modes, coupled, impulse, form)
    if form is not None and torch.is_grad_enabled():
        return _Liquid.apply(b, z, x0, pack(modes, dt, form, impulse), coupled, dt, *modes)
    if form is not None:
        reused = packed if form == "numba" and dt is None else None
        return _run(None, b, z, x0, reused or pack(modes, dt, form, impulse), coupled)
    if backend == "auto":
        warn_of_the_loop("liquid", b)
    time = b.new_ones(1, 1).expand(b.shape[:2]) if dt is None else dt.to(b.dtype)
    pairs = b if b.ndim == 4 else torch.stack([b, torch.zeros_like(b)], -1)
    x, steps = x0, []
    for now in zip(pairs.unbind(1), z.unbind(1), time.unbind(1), strict=True):
        x = _step(x, *now, modes, coupled, impulse)
        steps.append(x)
    return torch.stack(steps, 1)


def _kernel(backend: str, b: Tensor) -> Form | None:
    """The kernel that runs, or None where it is tensor code."""
    if backend == "triton":
        require_triton("liquid", b)
    if backend == "triton" or (backend == "auto" and b.is_cuda and HAS_TRITON):
        return "triton"
    if backend not in ("auto", "numba"):
        return None
    if torch.compiler.is_compiling():
        return "numba" if b.device.type == "cpu" else None
    return "numba" if use_numba("liquid", backend, b) else None


def _loop(b: Tensor, z: Tensor, modes: Modes, x0: Tensor, dt: Tensor | None, coupled: bool, impulse: bool) -> Tensor:
    """The definition as one operation of a graph, for any length."""
    weights = tuple(w for w in modes if w is not None)

    def step(
        carry: tuple[Tensor, ...], now: tuple[Tensor, ...], *constants: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        entry = now[0] if b.ndim == 4 else torch.stack([now[0], torch.zeros_like(now[0])], -1)
        pre, time, *vectors = *now[1:], *constants
        x = _step(carry[0], entry, pre, time, Modes(*vectors), coupled, impulse)
        return (x,), x

    if dt is None:
        return over_time(step, (x0,), (b, z), (b.new_ones(1), *weights))[0]
    return over_time(step, (x0,), (b, z, dt.to(b.dtype)), weights)[0]


def time_constants(z: Tensor, past: Tensor, modes: Modes) -> Tensor:
    """tau (B, T, N) for z (B, T, N) and the state before each token, past (B, T, N, 2)."""
    phi = torch.tanh(z if modes.state is None else z + (past * modes.state).sum(-1))
    return modes.tau * (1 + modes.adaptation * phi)


def _check(b: Tensor, z: Tensor, modes: Modes, x0: Tensor, dt: Tensor | None) -> None:
    if z.ndim != 3 or z.shape[1] < 1:
        raise ValueError(f"liquid: z must be (batch, time >= 1, modes), got {tuple(z.shape)}")
    pair = (2,) if b.ndim == 4 else ()
    size = z.shape[2]
    vectors = {name: w for name, w in modes._asdict().items() if w is not None}
    shapes = {name: (w, (size, 2) if name == "state" else (size,)) for name, w in vectors.items()}
    require_shapes("liquid", b=(b, (*z.shape, *pair)), x0=(x0, (z.shape[0], size, 2)), **shapes)
    require_types("liquid", b=b, z=z, x0=x0, **vectors)
    if dt is not None:
        require_shapes("liquid", dt=(dt, tuple(z.shape[:2])))
        if not torch.compiler.is_compiling():  # a graph depends on no value
            require_time(dt)


def _rates(z: Tensor, past: Tensor, modes: Modes, time: Tensor, coupled: bool, impulse: bool) -> tuple[Tensor, ...]:
    """lambda and c of the module's docstring, each as real and imaginary part."""
    rate = 1 / time_constants(z, past, modes)
    k = modes.step * time.unsqueeze(-1)
    real, imag = -(modes.decay + rate), modes.turn
    one_less, sine = grown = _grown(k * real, k * imag)
    one_less_in, sine_in = _grown(modes.step * real, modes.step * imag) if impulse else grown
    scale = (rate if coupled else 1) / (real**2 + imag**2)
    c_real = (one_less_in * real + sine_in * imag) * scale
    c_imag = (sine_in * real - one_less_in * imag) * scale
    return one_less + 1, sine, c_real, c_imag


def _grown(exponent: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """exp(exponent + i angle) - 1 = expm1 cos - (1 - cos) + i exp sin, without a difference of large numbers."""
    growth = torch.expm1(exponent)
    one_less = growth * torch.cos(angle) - 2 * torch.sin(angle / 2) ** 2
    return one_less, (growth + 1) * torch.sin(angle)


def _step(x: Tensor, b: Tensor, z: Tensor, time: Tensor, modes: Modes, coupled: bool, impulse: bool) -> Tensor:
    """x_t (B, N, 2) from x_{t-1}, and from b, z and the time of one token."""
    keep, turn, c_real, c_imag = _rates(z, x, modes, time, coupled, impulse)
    (u, v), (p, q) = x.unbind(-1), b.unbind(-1)
    return torch.stack(
        [keep * u - turn * v + c_real * p - c_imag * q, turn * u + keep * v + c_imag * p + c_real * q], -1
    )


# ---------------------------------------------------------------------- by a kernel


class Packed(NamedTuple):
    """What a kernel reads beside what varies by token: arrays of glissando.mixers.liquid.numba, or tensors of
    glissando.mixers.liquid.triton, which needs no tables."""

    time: Any
    tables: Any
    vectors: Any
    unit: Any = None  # for impulses: Numba's table of dt = 1; of Triton, True


@torch.no_grad()
def pack(modes: Modes, dt: Tensor | None = None, form: str = "numba", impulse: bool = False) -> Packed:
    """The kernels' arrays of `modes` and the time steps, 1 if None."""
    time = None if dt is None else dt.to(modes.step.dtype)
    state = modes.step.new_zeros(len(modes.step), 2) if modes.state is None else modes.state
    vectors = torch.stack([*modes[:5], *state.unbind(-1)])
    if form == "triton":
        return Packed(time, None, vectors, impulse or None)
    time = modes.step.new_ones(1, 1) if time is None else time
    angle = modes.step * modes.turn
    unit = _table(angle) if impulse else None
    return Packed(as_rows(time, 1), _table(time.unsqueeze(-1) * angle), as_rows(vectors, 1), unit)


def _table(angle: Tensor) -> Any:
    """sin and 1 - cos, as an array."""
    return torch.stack([torch.sin(angle), 2 * torch.sin(angle / 2) ** 2]).detach().numpy()


def _inputs(b: Tensor, z: Tensor, x0: Tensor, packed: Packed) -> tuple[Any, ...]:
    return (*_rows(b, z), as_rows(x0, 1), *packed)


def _rows(*tensors: Tensor) -> tuple[Any, ...]:
    return tuple(as_rows(tensor, 2) for tensor in tensors)


def _run(ctx: Any, b: Tensor, z: Tensor, x0: Tensor, packed: Packed, coupled: bool, *made_of: Tensor | None) -> Tensor:
    """x; a context keeps what gradients need, of dt and the modes too, of which `packed` was made."""
    if packed.tables is None:
        from glissando.mixers.liquid import triton as liquid_triton

        x = liquid_triton.forward(b, z, x0, packed.time, packed.vectors, coupled, bool(packed.unit))
    else:
        from glissando.mixers.liquid.numba import forward

        x = b.new_empty(*z.shape, 2)
        over_rows(forward, x, *_inputs(b, z, x0, packed), coupled, *_rows(x), cost=_COST)
    if ctx is not None:
        ctx.coupled, ctx.impulse = coupled, packed.unit is not None
        ctx.form = "triton" if packed.tables is None else "numba"
        ctx.save_for_backward(x, b, z, x0, *made_of)
    return x


class _Liquid(torch.autograd.Function):
    """See the module's docstring for the backward."""

    forward = staticmethod(_run)

    @staticmethod
    @without_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_b, of_z, of_x0, of_dt, *of_modes = _backward(*ctx.saved_tensors, ctx.coupled, ctx.impulse, ctx.form, grad)
        return of_b, of_z, of_x0, None, None, of_dt, *of_modes


def _backward(x: Tensor, b: Tensor, z: Tensor, x0: Tensor, dt: Tensor | None, *rest: Any) -> tuple[Tensor | None, ...]:
    """The gradients of b, z, x0, dt and the modes; `rest`: the modes, `coupled`, `impulse`, the form, x's gradient."""
    *vectors, coupled, impulse, form, grad = rest
    packed = pack(Modes(*vectors), dt, form, impulse)
    if form == "triton":
        from glissando.mixers.liquid import triton as liquid_triton

        arrays = (x, b, z, x0, packed.time, packed.vectors)
        grad_b, grad_z, flow, of_vectors, of_dt = liquid_triton.backward(*arrays, coupled, impulse, grad)
        *singles, p, q = of_vectors.to(z.dtype)
        state = None if vectors[5] is None else torch.stack([p, q], -1)
        return grad_b, grad_z, flow, None if dt is None or of_dt is None else of_dt.to(dt.dtype), *singles, state
    from glissando.mixers.liquid.numba import backward

    inputs = _inputs(b, z, x0, packed)
    grad_b, grad_z, flow = x.new_empty(x.shape), z.new_empty(z.shape), x0.new_empty(x0.shape)
    sums = torch.zeros(z.shape[0], 8 * z.shape[2], dtype=torch.float64)
    of_time = torch.zeros(z.shape[:2], dtype=torch.float64)
    results = (*_rows(grad_b, grad_z), as_rows(flow, 1), sums.numpy(), of_time.numpy())
    over_rows(backward, x, *_rows(x), *inputs, coupled, *_rows(grad), *results, cost=2 * _COST)
    *singles, p, q, _ = sums.sum(0).to(z.dtype).view(-1, 8).unbind(1)
    state = None if vectors[5] is None else torch.stack([p, q], -1)
    grad_b = grad_b if b.ndim == 4 else grad_b[..., 0]
    return grad_b, grad_z, flow, None if dt is None else of_time.to(dt.dtype), *singles, state


# The kernel as one operation of a graph: torch.compile does not look into it. Without a graph _Liquid costs less.


@torch.library.custom_op("glissando::liquid", mutates_args=())
def _operation(
    b: Tensor, z: Tensor, x0: Tensor, dt: Tensor | None, decay: Tensor, turn: Tensor, step: Tensor, tau: Tensor,
    adaptation: Tensor, state: Tensor | None, coupled: bool, impulse: bool, form: str,
) -> Tensor:  # fmt: skip
    return _run(None, b, z, x0, pack(Modes(decay, turn, step, tau, adaptation, state), dt, form, impulse), coupled)


@_operation.register_fake
def _(b: Tensor, z: Tensor, *_: Any) -> Tensor:
    return b.new_empty(*z.shape, 2)


@torch.library.custom_op("glissando::liquid_backward", mutates_args=())
def _operation_backward(
    x: Tensor, b: Tensor, z: Tensor, x0: Tensor, dt: Tensor | None, decay: Tensor, turn: Tensor, step: Tensor,
    tau: Tensor, adaptation: Tensor, state: Tensor | None, coupled: bool, impulse: bool, form: str,
    grad: Tensor,
) -> list[Tensor]:  # fmt: skip
    gradients = _backward(x, b, z, x0, dt, decay, turn, step, tau, adaptation, state, coupled, impulse, form, grad)
    # No two results of an operation may share memory, as columns of one array do.
    return [gradient.clone(memory_format=torch.contiguous_format) for gradient in gradients if gradient is not None]


@_operation_backward.register_fake
def _(x: Tensor, *rest: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in rest[:-4] if tensor is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.coupled, ctx.impulse, ctx.form = inputs
    ctx.save_for_backward(output, *tensors)
    ctx.is_there = [tensor is not None for tensor in tensors]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = iter(_operation_backward(*ctx.saved_tensors, ctx.coupled, ctx.impulse, ctx.form, grad))
    return *(next(gradients) if is_there else None for is_there in ctx.is_there), None, None, None


_operation.register_autograd(_gradients, setup_context=_keep)

#: beside a number that is read, combined and written
_COST = 8
