"""The liquid recurrence on a GPU: one launch, one pass over time, a thread for each row and mode.

A step of the complete nonlinear dynamics fits in registers: two exponentials, three divisions, some forty products. So
nothing is solved by iteration: each program takes one row and a block of modes through all of time, reads b and z
once and writes x once. The backward is one such pass in reverse, with the derivatives that scan.py states.

Every step waits for the one before: time is T times the latency of a step, whatever the number of rows and modes, until
these fill the card. What a step reads does not depend on the state, and is loaded two steps before it is needed. The
gradients of what belongs to a mode are sums over time, kept exact by compensation (Kahan). No atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

#: Modes in a block, one a thread: one warp, so that few rows still reach many multiprocessors. Not measured.
_BLOCK = 32

#: terms of the series of (exp(f) - 1) / f, |f| <= ln(2) / 2, below the rounding of the type
_TERMS = {torch.float32: 8, torch.float64: 15}


@triton.jit
def _expm1(x, TERMS: tl.constexpr):
    """exp(x) - 1 for x <= 0: 2^n (exp(f) - 1) + (2^n - 1), x = n ln 2 + f."""
    y = tl.where(x <= -60.0, -60.0, x)  # compared this way, a NaN stays NaN
    n = tl.floor(y * 1.4426950408889634 + 0.5)
    whole = tl.where(n < 0, n, 0.0)  # a NaN is no whole number
    if TERMS < 10:
        f = y - n * 0.693359375 + n * 2.12194440e-4
        scale = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    else:
        f = y - n * 0.693147180369123816490 - n * 1.90821492927058770002e-10
        scale = ((whole.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    p = f * 0.0 + 1.0
    for i in tl.static_range(TERMS - 1):
        p = p * (f * (1.0 / (TERMS - i))) + 1.0
    return f * p * scale + (scale - 1.0)


@triton.jit
def _adapted(s, TERMS: tl.constexpr):
    """tanh s."""
    e = _expm1(-2.0 * tl.abs(s), TERMS)
    phi = -e / (e + 2.0)
    return tl.where(s < 0, -phi, phi)


@triton.jit
def _turn(angle):
    """sin and 1 - cos."""
    half = tl.sin(angle * 0.5)
    return tl.sin(angle), 2.0 * half * half


@triton.jit
def _vectors(vectors, lane, size, seen):
    """d, w, step, tau0, a, p, q: rows of vectors (7, N). Lanes that are not there compute with ones."""
    at = vectors + lane
    return (
        tl.load(at, mask=seen, other=1.0),
        tl.load(at + size, mask=seen, other=1.0),
        tl.load(at + 2 * size, mask=seen, other=1.0),
        tl.load(at + 3 * size, mask=seen, other=1.0),
        tl.load(at + 4 * size, mask=seen, other=0.0),
        tl.load(at + 5 * size, mask=seen, other=0.0),
        tl.load(at + 6 * size, mask=seen, other=0.0),
    )


@triton.jit
def _pair(x, at, seen):
    return tl.load(x + 2 * at, mask=seen, other=0.0), tl.load(x + 2 * at + 1, mask=seen, other=0.0)


@triton.jit
def _put(x, at, u, v, seen):
    tl.store(x + 2 * at, u, mask=seen)
    tl.store(x + 2 * at + 1, v, mask=seen)


@triton.jit
def _given(b, z, time, row, t, lane, steps, size, dt, seen, COMPLEX: tl.constexpr, EVEN: tl.constexpr):
    """What a step reads, b as a pair, z and dt (that of all steps if EVEN): nothing beyond either end of time."""
    when = t + lane * 0  # of each lane, as a mask is
    there = seen & (when >= 0) & (when < steps)
    at = (row * steps + t) * size + lane
    if COMPLEX:
        drive, across = _pair(b, at, there)
    else:
        drive = tl.load(b + at, mask=there, other=0.0)
        across = drive * 0.0
    if not EVEN:
        dt = tl.load(time + row * steps + when, mask=there, other=1.0)
    return drive, across, tl.load(z + at, mask=there, other=0.0), dt


@triton.jit
def _forward(
    b, z, x0, time, vectors, x, steps, size, COMPLEX: tl.constexpr, EVEN: tl.constexpr,
    COUPLED: tl.constexpr, IMPULSE: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x (B, T, N, 2) from x0 (B, N, 2)."""
    row = tl.program_id(0).to(tl.int64)  # 64 bits, as B T N may exceed 2^31
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = lane < size
    decay, imag, step, tau, adapt, p, q = _vectors(vectors, lane, size, seen)
    u, v = _pair(x0, row * size + lane, seen)
    dt = decay * 0.0 + 1.0
    k = step
    sine, versine = _turn(k * imag)
    sine_in, versine_in = sine, versine
    drive, across, pre, dt = _given(b, z, time, row, 0, lane, steps, size, dt, seen, COMPLEX, EVEN)
    drive_1, across_1, pre_1, dt_1 = _given(b, z, time, row, 1, lane, steps, size, dt, seen, COMPLEX, EVEN)
    for t in range(0, steps):
        drive_2, across_2, pre_2, dt_2 = _given(b, z, time, row, t + 2, lane, steps, size, dt, seen, COMPLEX, EVEN)
        if not EVEN:
            k = step * dt
            sine, versine = _turn(k * imag)
        phi = _adapted(pre + p * u + q * v, TERMS)
        rate = 1.0 / (tau * (1.0 + adapt * phi))
        real = -(decay + rate)
        growth = _expm1(k * real, TERMS)
        # lambda - 1 = expm1(k real) cos - (1 - cos) + i exp(k real) sin, without a difference of large numbers
        less = growth - versine - growth * versine
        turned = (growth + 1.0) * sine
        keep = less + 1.0
        kept_turn = turned
        if IMPULSE:
            growth = _expm1(step * real, TERMS)
            less = growth - versine_in - growth * versine_in
            turned = (growth + 1.0) * sine_in
        scale = 1.0 / (real * real + imag * imag)
        if COUPLED:
            scale = scale * rate
        c_real = (less * real + turned * imag) * scale
        c_imag = (turned * real - less * imag) * scale
        new_u = keep * u - kept_turn * v + c_real * drive - c_imag * across
        v = kept_turn * u + keep * v + c_imag * drive + c_real * across
        u = new_u
        _put(x, (row * steps + t) * size + lane, u, v, seen)
        drive, across, pre, dt = drive_1, across_1, pre_1, dt_1
        drive_1, across_1, pre_1, dt_1 = drive_2, across_2, pre_2, dt_2


@triton.jit
def _add(total, lost, part):
    """total + part, compensated for what earlier additions lost (Kahan)."""
    part -= lost
    new = total + part
    return new, (new - total) - part


@triton.jit
def _past(x, x0, row, t, lane, steps, size, seen):
    """The state before step t."""
    when = t + lane * 0
    u, v = _pair(x, (row * steps + t - 1) * size + lane, seen & (when > 0))
    u_0, v_0 = _pair(x0, row * size + lane, seen & (when == 0))
    return u + u_0, v + v_0


@triton.jit
def _backward(
    x, b, z, x0, time, vectors, grad, grad_b, grad_z, flow, sums, of_time, steps, size, blocks,
    COMPLEX: tl.constexpr, EVEN: tl.constexpr, COUPLED: tl.constexpr, IMPULSE: tl.constexpr, TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """grad_b as b, grad_z (B, T, N), flow (B, N, 2) of x0, sums (B, 7, N) of the vectors, of_time (B, blocks, T)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    lane = block * BLOCK + tl.arange(0, BLOCK)
    seen = lane < size
    decay, imag, step, tau, adapt, p, q = _vectors(vectors, lane, size, seen)
    zero = decay * 0.0
    carry, carry_i = zero, zero
    s_0, s_1, s_2, s_3, s_4, s_5, s_6 = zero, zero, zero, zero, zero, zero, zero
    l_0, l_1, l_2, l_3, l_4, l_5, l_6 = zero, zero, zero, zero, zero, zero, zero
    last = steps - 1
    dt = zero + 1.0
    k = step
    sine, versine = _turn(k * imag)
    sine_in, versine_in = sine, versine
    drive, across, pre, dt = _given(b, z, time, row, last, lane, steps, size, dt, seen, COMPLEX, EVEN)
    u, v = _past(x, x0, row, last, lane, steps, size, seen)
    g_in, h_in = _pair(grad, (row * steps + last) * size + lane, seen)
    for i in range(0, steps):
        t = last - i
        drive_1, across_1, pre_1, dt_1 = _given(b, z, time, row, t - 1, lane, steps, size, dt, seen, COMPLEX, EVEN)
        u_1, v_1 = _past(x, x0, row, t - 1, lane, steps, size, seen)
        g_1, h_1 = _pair(grad, (row * steps + t - 1) * size + lane, seen & (t + lane * 0 > 0))
        if not EVEN:
            k = step * dt
            sine, versine = _turn(k * imag)
        phi = _adapted(pre + p * u + q * v, TERMS)
        rate = 1.0 / (tau * (1.0 + adapt * phi))
        real = -(decay + rate)
        growth = _expm1(k * real, TERMS)
        less = growth - versine - growth * versine
        turned = (growth + 1.0) * sine
        keep = less + 1.0
        less_in, turned_in = less, turned
        if IMPULSE:
            growth_in = _expm1(step * real, TERMS)
            less_in = growth_in - versine_in - growth_in * versine_in
            turned_in = (growth_in + 1.0) * sine_in
        square = 1.0 / (real * real + imag * imag)
        # 1 / zeta, and c without the rate that couples it
        i_real, i_imag = real * square, -imag * square
        c_real = less_in * i_real - turned_in * i_imag
        c_imag = less_in * i_imag + turned_in * i_real
        g, h = g_in + carry, h_in + carry_i
        gain = zero + 1.0
        if COUPLED:
            gain = rate
        # of b: conj(c) G
        back, aside = c_real * g + c_imag * h, c_real * h - c_imag * g
        at = (row * steps + t) * size + lane
        if COMPLEX:
            _put(grad_b, at, gain * back, gain * aside, seen)
        else:
            tl.store(grad_b + at, gain * back, mask=seen)
        # G_c = G conj(b), then G_lambda = G conj(x) + G_c conj(1 / zeta), or each by itself: G_mu is the latter
        gc_real, gc_imag = gain * (g * drive + h * across), gain * (h * drive - g * across)
        if IMPULSE:
            gl_real, gl_imag = g * u + h * v, h * u - g * v
            gm_real, gm_imag = gc_real * i_real + gc_imag * i_imag, gc_imag * i_real - gc_real * i_imag
        else:
            gl_real = g * u + h * v + gc_real * i_real + gc_imag * i_imag
            gl_imag = h * u - g * v + gc_imag * i_real - gc_real * i_imag
        # conj(lambda) G_lambda serves dzeta = k conj(lambda) G_lambda - conj(c / zeta) G_c and dk
        ml_real, ml_imag = keep * gl_real + turned * gl_imag, keep * gl_imag - turned * gl_real
        d_real, d_imag = c_real * i_real - c_imag * i_imag, c_real * i_imag + c_imag * i_real
        z_real = k * ml_real - (d_real * gc_real + d_imag * gc_imag)
        z_imag = k * ml_imag - (d_real * gc_imag - d_imag * gc_real)
        slope_k = real * ml_real + imag * ml_imag
        of_step = slope_k * dt
        if IMPULSE:
            keep_in = less_in + 1.0
            mm_real, mm_imag = keep_in * gm_real + turned_in * gm_imag, keep_in * gm_imag - turned_in * gm_real
            z_real += step * mm_real
            z_imag += step * mm_imag
            of_step += real * mm_real + imag * mm_imag
        of_rate = -z_real
        if COUPLED:
            of_rate = drive * back + across * aside - z_real
        of_tau = -rate * rate * of_rate
        of_s = of_tau * tau * adapt * (1.0 - phi * phi)
        tl.store(grad_z + at, of_s, mask=seen)
        s_0, l_0 = _add(s_0, l_0, -z_real)
        s_1, l_1 = _add(s_1, l_1, z_imag)
        s_2, l_2 = _add(s_2, l_2, of_step)
        s_3, l_3 = _add(s_3, l_3, of_tau * (1.0 + adapt * phi))
        s_4, l_4 = _add(s_4, l_4, of_tau * tau * phi)
        s_5, l_5 = _add(s_5, l_5, of_s * u)
        s_6, l_6 = _add(s_6, l_6, of_s * v)
        if not EVEN:
            tl.store(of_time + (row * blocks + block) * steps + t, tl.sum(tl.where(seen, slope_k * step, 0.0), 0))
        carry = keep * g + turned * h + of_s * p
        carry_i = keep * h - turned * g + of_s * q
        drive, across, pre, dt = drive_1, across_1, pre_1, dt_1
        u, v, g_in, h_in = u_1, v_1, g_1, h_1
    _put(flow, row * size + lane, carry, carry_i, seen)
    base = sums + row * 7 * size + lane
    tl.store(base, s_0, mask=seen)
    tl.store(base + size, s_1, mask=seen)
    tl.store(base + 2 * size, s_2, mask=seen)
    tl.store(base + 3 * size, s_3, mask=seen)
    tl.store(base + 4 * size, s_4, mask=seen)
    tl.store(base + 5 * size, s_5, mask=seen)
    tl.store(base + 6 * size, s_6, mask=seen)


def forward(
    b: Tensor, z: Tensor, x0: Tensor, time: Tensor | None, vectors: Tensor, coupled: bool, impulse: bool = False
) -> Tensor:
    """x (B, T, N, 2) for b (B, T, N) or (B, T, N, 2), z (B, T, N), x0 (B, N, 2), time (B, T), 1 if None, and vectors
    (7, N): d, w, step, tau0, a, p, q; all float32 or all float64.

    """
    x = z.new_empty(*z.shape, 2)
    _launch(_forward, time, b, z, (b, z, x0, time, vectors), (x,), COUPLED=coupled, IMPULSE=impulse)
    return x


def backward(
    x: Tensor, b: Tensor, z: Tensor, x0: Tensor, time: Tensor | None, vectors: Tensor, coupled: bool, impulse: bool,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of b, z, x0, in float64 of the vectors (7, N), and of time."""
    batch, steps, size = z.shape
    blocks = triton.cdiv(size, _BLOCK)
    of_b, of_z, of_x0 = (y.new_empty(y.shape) for y in (b, z, x0))
    sums, of_time = z.new_empty(batch, 7, size), z.new_empty((1,) if time is None else (batch, blocks, steps))
    tensors = (x, b, z, x0, time, vectors, grad)
    results = (of_b, of_z, of_x0, sums, of_time)
    _launch(_backward, time, b, z, tensors, results, COUPLED=coupled, IMPULSE=impulse, blocks=blocks)
    return of_b, of_z, of_x0, sums.sum(0, dtype=torch.float64), None if time is None else of_time.sum(1)


def _launch(
    kernel: Any, time: Tensor | None, b: Tensor, z: Tensor, tensors: tuple[Tensor | None, ...],
    results: tuple[Tensor, ...], **options: Any,
) -> None:  # fmt: skip
    batch, steps, size = z.shape
    arrays = (z if y is None else y.contiguous() for y in tensors)  # a time that is None is not read
    if not z.numel():
        return
    with torch.cuda.device_of(z):
        # Fused multiply-add is called by name, as Triton 3.9 warns that it will stop being the default.
        kernel[(batch, triton.cdiv(size, _BLOCK))](
            *arrays, *results, steps=steps, size=size, **options, COMPLEX=b.ndim == 4, EVEN=time is None,
            TERMS=_TERMS[z.dtype], BLOCK=_BLOCK, num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip
