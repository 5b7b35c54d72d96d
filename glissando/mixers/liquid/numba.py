"""The recurrence of glissando.mixers.liquid.scan on a CPU: one pass over time, modes side by side in vector registers.

What bounds it is arithmetic: two exponentials and three divisions a mode and token, which a compiler vectorises only if
expm1 is a polynomial that it can see, and if few arrays meet in a loop: it must show that none overlap. So vectors are
rows of one array, and so is what is carried along. Sines of the turns depend on dt alone and come as tables. x and its
gradient are kept as separate real and imaginary parts while time runs, and as pairs in memory.

vectors (7, N)              d, w, step, tau0, a, p, q
tables (2, B or 1, T or 1, N)   sin(k w), 1 - cos(k w)
unit (2, N) or None             of impulses the same with dt = 1; None: held inputs. Numba compiles a form for each
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from glissando.kernels.compiled import kernel
from glissando.kernels.exponentials import expm1

#: steps summed in the working precision before they are added to a float64 total
_RUN = 64


@register_jitable(inline="always")
def _coefficients(s, decay, turn, k, tau, adapt, sine, versine, coupled, one, two):
    """lambda and c of a mode, (real, imaginary) each, for the time constant's pre-activation s and the time k."""
    e = expm1(-two * abs(s))
    phi = -e / (two + e)
    phi = -phi if s < 0 else phi
    rate = one / (tau * (one + adapt * phi))
    real = -(decay + rate)
    growth = expm1(k * real)
    less = growth - versine - growth * versine
    turned = (growth + one) * sine
    scale = (rate if coupled else one) / (real * real + turn * turn)
    return less + one, turned, (less * real + turned * turn) * scale, (turned * real - less * turn) * scale


@register_jitable
def _strength(s, decay, turn, step, tau, adapt, sine, versine, coupled, one, two):
    """c of an impulse. The compiler sees that its time constant was computed already."""
    _, _, c_real, c_imag = _coefficients(s, decay, turn, step, tau, adapt, sine, versine, coupled, one, two)
    return c_real, c_imag


@kernel
def step(b, z, vectors, coupled, x, y):
    """One decoded token: x (2 N) pairs, moved on over dt = 1, and copied to y.

    vectors (10, N) flat: decay, turn, step, tau0, a, p, q, sin(k w), 1 - cos(k w), the bias of z
    """
    n = len(z)
    decay, turn, k = vectors[:n], vectors[n : 2 * n], vectors[2 * n : 3 * n]
    tau, adapt = vectors[3 * n : 4 * n], vectors[4 * n : 5 * n]
    p, q = vectors[5 * n : 6 * n], vectors[6 * n : 7 * n]
    sines, versines, bias = vectors[7 * n : 8 * n], vectors[8 * n : 9 * n], vectors[9 * n :]
    for i in range(n):
        u, v = x[2 * i], x[2 * i + 1]
        s = z[i] + bias[i] + p[i] * u + q[i] * v
        keep, turned, c_real, c_imag = _coefficients(
            s, decay[i], turn[i], k[i], tau[i], adapt[i], sines[i], versines[i], coupled, np.float32(1), np.float32(2)
        )
        new = keep * u - turned * v + c_real * b[i]
        new_imag = turned * u + keep * v + c_imag * b[i]
        x[2 * i], x[2 * i + 1], y[2 * i], y[2 * i + 1] = new, new_imag, new, new_imag


@kernel
def forward(b, z, x0, time, tables, vectors, unit, coupled, x, first, last):
    """b (B, T, N or 2 N), z (B, T, N), x0 (B, 2 N), time (B or 1, T or 1) -> x (B, T, 2 N)."""
    steps, size = z.shape[1], z.shape[2]
    is_complex = b.shape[2] > size
    by_row, by_step = time.shape[0] > 1, time.shape[1] > 1
    decay, turn, step, tau, adapt = vectors[0], vectors[1], vectors[2], vectors[3], vectors[4]
    p, q = vectors[5], vectors[6]
    state = np.empty((2, size), z.dtype)
    u, v = state[0], state[1]
    one, two, zero = z.dtype.type(1), z.dtype.type(2), z.dtype.type(0)
    for row in range(first, last):
        for n in range(size):
            u[n], v[n] = x0[row, 2 * n], x0[row, 2 * n + 1]
        for t in range(steps):
            i, j = row if by_row else 0, t if by_step else 0
            dt, sines, versines = time[i, j], tables[0, i, j], tables[1, i, j]
            entry, pre, out = b[row, t], z[row, t], x[row, t]
            for n in range(size):
                s = pre[n] + p[n] * u[n] + q[n] * v[n]
                keep, turned, c_real, c_imag = _coefficients(
                    s, decay[n], turn[n], step[n] * dt, tau[n], adapt[n], sines[n], versines[n], coupled, one, two
                )
                if unit is not None:
                    c_real, c_imag = _strength(
                        s, decay[n], turn[n], step[n], tau[n], adapt[n], unit[0, n], unit[1, n], coupled, one, two
                    )
                drive, across = (entry[2 * n], entry[2 * n + 1]) if is_complex else (entry[n], zero)
                new_u = keep * u[n] - turned * v[n] + c_real * drive - c_imag * across
                new_v = turned * u[n] + keep * v[n] + c_imag * drive + c_real * across
                u[n] = new_u
                v[n] = new_v
                out[2 * n] = new_u
                out[2 * n + 1] = new_v


@kernel
def backward(x, b, z, x0, time, tables, vectors, unit, coupled, grad, grad_b, grad_z, flow, sums, of_time, first, last):
    """flow (B, 2 N) leaves as the gradient of x0, whatever it held; sums (B, 8 N) is that of the vectors, 8 a mode."""
    steps, size = z.shape[1], z.shape[2]
    is_complex = b.shape[2] > size
    by_row, by_step = time.shape[0] > 1, time.shape[1] > 1
    decay, turn, step, tau, adapt = vectors[0], vectors[1], vectors[2], vectors[3], vectors[4]
    p, q = vectors[5], vectors[6]
    one, two, zero = z.dtype.type(1), z.dtype.type(2), z.dtype.type(0)
    # A loop that added to its sums would not be vectorised: what a token contributes is added after it.
    run, now, carry = np.zeros(8 * size, z.dtype), np.empty(8 * size, z.dtype), np.empty(2 * size, z.dtype)
    for row in range(first, last):
        carry[:] = 0
        for t in range(steps - 1, -1, -1):
            i, j = row if by_row else 0, t if by_step else 0
            dt, sines, versines = time[i, j], tables[0, i, j], tables[1, i, j]
            entry, pre, arrived = b[row, t], z[row, t], grad[row, t]
            past = x[row, t - 1] if t > 0 else x0[row]
            out_b, out_z = grad_b[row, t], grad_z[row, t]
            for n in range(size):
                u, v = past[2 * n], past[2 * n + 1]
                s = pre[n] + p[n] * u + q[n] * v
                e = expm1(-two * abs(s))
                phi = -e / (two + e)
                phi = -phi if s < 0 else phi
                rate = one / (tau[n] * (one + adapt[n] * phi))
                real, imag = -(decay[n] + rate), turn[n]
                k = step[n] * dt
                growth = expm1(k * real)
                less = growth - versines[n] - growth * versines[n]
                turned = (growth + one) * sines[n]
                keep = less + one
                less_in, turned_in = less, turned
                if unit is not None:
                    growth_in = expm1(step[n] * real)
                    less_in = growth_in - unit[1, n] - growth_in * unit[1, n]
                    turned_in = (growth_in + one) * unit[0, n]
                square = one / (real * real + imag * imag)
                # 1 / zeta, and c without the rate that couples it
                i_real, i_imag = real * square, -imag * square
                c_real = less_in * i_real - turned_in * i_imag
                c_imag = less_in * i_imag + turned_in * i_real
                drive, across = (entry[2 * n], entry[2 * n + 1]) if is_complex else (entry[n], zero)
                g, h = arrived[2 * n] + carry[2 * n], arrived[2 * n + 1] + carry[2 * n + 1]
                gain = rate if coupled else one
                # of b: conj(c) G
                back, aside = c_real * g + c_imag * h, c_real * h - c_imag * g
                out_b[2 * n] = gain * back
                out_b[2 * n + 1] = gain * aside
                # G_c = G conj(b), then G_lambda = G conj(x) + G_c conj(1 / zeta), or each by itself: G_mu is the latter
                gc_real, gc_imag = gain * (g * drive + h * across), gain * (h * drive - g * across)
                if unit is None:
                    gl_real = g * u + h * v + gc_real * i_real + gc_imag * i_imag
                    gl_imag = h * u - g * v + gc_imag * i_real - gc_real * i_imag
                else:
                    gl_real, gl_imag = g * u + h * v, h * u - g * v
                    gm_real, gm_imag = gc_real * i_real + gc_imag * i_imag, gc_imag * i_real - gc_real * i_imag
                # conj(lambda) G_lambda serves dzeta = k conj(lambda) G_lambda - conj(c / zeta) G_c and dk
                ml_real, ml_imag = keep * gl_real + turned * gl_imag, keep * gl_imag - turned * gl_real
                d_real, d_imag = c_real * i_real - c_imag * i_imag, c_real * i_imag + c_imag * i_real
                z_real = k * ml_real - (d_real * gc_real + d_imag * gc_imag)
                z_imag = k * ml_imag - (d_real * gc_imag - d_imag * gc_real)
                slope_k = real * ml_real + imag * ml_imag
                of_step = slope_k * dt
                if unit is not None:
                    keep_in = less_in + one
                    mm_real, mm_imag = keep_in * gm_real + turned_in * gm_imag, keep_in * gm_imag - turned_in * gm_real
                    z_real += step[n] * mm_real
                    z_imag += step[n] * mm_imag
                    of_step += real * mm_real + imag * mm_imag
                of_rate = (drive * back + across * aside if coupled else zero) - z_real
                of_tau = -rate * rate * of_rate
                of_s = of_tau * tau[n] * adapt[n] * (one - phi * phi)
                out_z[n] = of_s
                now[8 * n + 0] = -z_real
                now[8 * n + 1] = z_imag
                now[8 * n + 2] = of_step
                now[8 * n + 3] = of_tau * (one + adapt[n] * phi)
                now[8 * n + 4] = of_tau * tau[n] * phi
                now[8 * n + 5] = of_s * u
                now[8 * n + 6] = of_s * v
                now[8 * n + 7] = slope_k * step[n]
                carry[2 * n] = keep * g + turned * h + of_s * p[n]
                carry[2 * n + 1] = keep * h - turned * g + of_s * q[n]
            for n in range(8 * size):
                run[n] += now[n]
            total = zero
            for n in range(size):
                total += now[8 * n + 7]
            of_time[row, t] = total
            if t % _RUN == 0:
                for n in range(8 * size):
                    sums[row, n] += run[n]
                    run[n] = 0
        for n in range(2 * size):
            flow[row, n] = carry[n]
