"""Passes over a state of the delta rule, row by row, whose sums stay in the processor's registers.

A matrix lies in an array, its rows one behind the other, and a pass takes `BLOCK` columns of it. An argument x is an
array, or a place in `m`, and x_at the place in it.
"""

from __future__ import annotations

from glissando.kernels.products import is_wide
from glissando.kernels.vectors import LANES, Code, instructions

# Kernels are compiled anew where this file changes: see glissando.kernels.compiled.
#: columns of a pass; a processor without AVX-512 has half the registers, of half the size
BLOCK = 2 * LANES if is_wide() else LANES
_LANES = range(0, BLOCK, LANES)


@instructions
def forward(c: Code, m, at, size, width, a, e, b, k, k_at, q, q_at, v, v_at, w, w_at, o, o_at, l, l_at, f, f_at):  # noqa: E741
    """One token, for `BLOCK` columns of S (size, width), from what l_t of the token before has found, S^T k:

        w = a S^T k,   u = b v - e w,   S <- a S + k u^T,   o = S^T q,   f <- S^T l

    S lies in m from `at` on; f is what was found.
    """
    decay, erase, write = c.filled(a), c.filled(e), c.filled(b)
    changes, read, recalled = [], c.sums(len(_LANES)), c.sums(len(_LANES))
    for lane in _LANES:
        old = c.times(decay, c.load(c.place(f, f_at, lane)))
        c.store(old, c.place(w, w_at, lane))
        changes.append(c.builder.fsub(c.times(write, c.load(c.place(v, v_at, lane))), c.times(erase, old)))
    with c.rows(size) as loop:
        key, query, later = (c.entry(c.place(x, x_at, loop.index)) for x, x_at in ((k, k_at), (q, q_at), (l, l_at)))
        first = c.builder.add(at, c.builder.mul(loop.index, width))
        for n, lane in enumerate(_LANES):
            place = c.place(m, first, lane)
            line = c.fma(key, changes[n], c.times(decay, c.load(place)))
            c.store(line, place)
            c.add_product(query, line, read[n])
            c.add_product(later, line, recalled[n])
    for n, lane in enumerate(_LANES):
        c.store(c.builder.load(read[n]), c.place(o, o_at, lane))
        c.store(c.builder.load(recalled[n]), c.place(f, f_at, lane))


@instructions
def changes(c: Code, width, e, b, v, v_at, w, w_at, m, u):
    """u = b v - e w, in m."""
    erase, write = c.filled(e), c.filled(b)
    with c.blocks(width) as lane:
        value = c.times(write, c.load(c.place(v, v_at, lane)))
        c.store(c.builder.fsub(value, c.times(erase, c.load(c.place(w, w_at, lane)))), c.place(m, u, lane))


@instructions
def writes(c: Code, width, e, b, v, v_at, w, w_at, g, g_at, m, u, du, dw, read, dv, dv_at, db, db_at, de, de_at):
    """dw = -e du,  dv = b du,  db = v . du,  de = -w . du,  read = u . g;  du becomes 0. In m: u, du, dw, read."""
    erase, write = c.filled(c.builder.fneg(e)), c.filled(b)
    by_read, by_write, by_erase = c.sums(3)
    with c.blocks(width) as lane:
        place = c.place(m, du, lane)
        grad = c.load(place)
        c.store(c.zero, place)
        c.store(c.times(erase, grad), c.place(m, dw, lane))
        c.store(c.times(write, grad), c.place(dv, dv_at, lane))
        c.add_product(c.load(c.place(v, v_at, lane)), grad, by_write)
        c.add_product(c.load(c.place(w, w_at, lane)), grad, by_erase)
        c.add_product(c.load(c.place(m, u, lane)), c.load(c.place(g, g_at, lane)), by_read)
    c.builder.store(c.total(by_read), c.place(m, read))
    c.builder.store(c.total(by_write), c.place(db, db_at))
    c.builder.store(c.builder.fneg(c.total(by_erase)), c.place(de, de_at))


@instructions
def decayed(c: Code, m, at, to, size, width, a, u, u_at, k, k_at):
    """a (P + u k^T) of P (size, width), for `BLOCK` columns, from `at` on to `to` on in m."""
    keys, decay = [c.load(c.place(k, k_at, lane)) for lane in _LANES], c.filled(a)
    with c.rows(size) as loop:
        change, row = c.entry(c.place(u, u_at, loop.index)), c.builder.mul(loop.index, width)
        for key, lane in zip(keys, _LANES, strict=True):
            line = c.fma(change, key, c.load(c.place(m, at, row, lane)))
            c.store(c.times(decay, line), c.place(m, to, row, lane))


@instructions
def backward(c: Code, m, at, width, a, w, l, l_at, g, g_at, q, q_at, k, k_at, du):  # noqa: E741
    """D <- a (D + w l^T) + g q^T, and du += D k, for 16 rows and `BLOCK` columns of D (size, width). In m: D, w, du."""
    later, query, key = (
        [c.load(c.place(x, x_at, lane)) for lane in _LANES] for x, x_at in ((l, l_at), (q, q_at), (k, k_at))
    )
    decay, totals = c.filled(a), []
    for r in range(LANES):
        first = c.row(at, width, r)
        write, grad, total = c.entry(c.place(m, w, r)), c.entry(c.place(g, g_at, r)), None
        for v, lane in enumerate(_LANES):
            place = c.place(m, first, lane)
            line = c.fma(grad, query[v], c.times(decay, c.fma(write, later[v], c.load(place))))
            c.store(line, place)
            total = c.times(line, key[v]) if total is None else c.fma(line, key[v], total)
        totals.append(total)
    place = c.place(m, du)
    c.store(c.builder.fadd(c.load(place), c.sums_within(totals)), place)


@instructions
def gradients(c: Code, m, d, p, size, width, u, w, g, g_at, read, k, k_at, dk, dk_at, dq, dq_at, dp):
    """dk = D^T u + P^T w,   dq = P^T g + read k,   dp += the sums of D * P, in 16 parts: for `BLOCK` columns of D and P
    (size, width). In m: D, P, u, w, dp."""
    by_d, by_p, by_grad, products = (c.sums(len(_LANES)) for _ in range(4))
    with c.rows(size) as loop:
        row = c.builder.mul(loop.index, width)
        change, write, grad = (c.entry(c.place(x, x_at, loop.index)) for x, x_at in ((m, u), (m, w), (g, g_at)))
        for v, lane in enumerate(_LANES):
            line, before = c.load(c.place(m, d, row, lane)), c.load(c.place(m, p, row, lane))
            c.add_product(change, line, by_d[v])
            c.add_product(write, before, by_p[v])
            c.add_product(grad, before, by_grad[v])
            c.add_product(line, before, products[v])
    total, factor = c.load(c.place(m, dp)), c.filled(read)
    for v, lane in enumerate(_LANES):
        of_d, of_p, of_grad, product = (c.builder.load(x[v]) for x in (by_d, by_p, by_grad, products))
        c.store(c.builder.fadd(of_d, of_p), c.place(dk, dk_at, lane))
        c.store(c.fma(factor, c.load(c.place(k, k_at, lane)), of_grad), c.place(dq, dq_at, lane))
        total = c.builder.fadd(total, product)
    c.store(total, c.place(m, dp))
