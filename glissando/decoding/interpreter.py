"""One compiled function that runs any program: a table of instructions over registers, weights and states.

So nothing is compiled for a model: the function is compiled once on a machine and kept on disk.
"""

from __future__ import annotations

import numpy as np

from glissando.decoding.kernels import (
    activate,
    bounded_energy,
    complex_norm,
    embed,
    layer_norm,
    mean_update,
    nearness,
    rms_norm,
    rope_table,
    rotate,
    short_conv,
    silu_product,
)
from glissando.decoding.program import Op
from glissando.kernels.cached import GROUP
from glissando.kernels.compiled import kernel
from glissando.kernels.drawing import all_ended, draw_next, has_ended
from glissando.kernels.products import SUMS, linear
from glissando.kernels.scan_numba import forward_pairs as scan_pairs
from glissando.mixers.attention.numba import step as attention
from glissando.mixers.delta.numba import step as delta
from glissando.mixers.liquid.numba import step as liquid
from glissando.mixers.spectral.numba import step as spectral


@kernel
def run(  # noqa: C901 - one branch for each instruction
    code, numbers, w, halves, bytes_, regs, fixed, exact, pages, filled, ids, control, length,
    known, drawn_by, top_k, counts, biases, uniforms, ending, limits, kept, written, first, last,
):  # fmt: skip
    """The program for the texts from `first` to `last`, `length` tokens of each: an instruction is computed for all
    tokens before the next one, so that a weight is read once for them.

    code (n, 24) int64, its operands as glissando.decoding.program documents; numbers (m,) float64
    w float32, halves uint16 (bfloat16) and bytes_ int8: weights, flat
    regs (B length, R) float32: registers of each token
    fixed (B, F) float32 and exact (B, E) float64: states of constant size
    pages (B, G): addresses of the pages of the caches, each with 64 slots
    filled (B,): tokens that each text has read; ids (B length,); control (B, C) float32

    A program with DRAW at its end runs once for each column of written (B, N): a token is read, the next one is drawn
    into `written` and `ids`, as glissando.kernels.drawing has it. A text that has ended reads nothing more: its state
    is the one before its last token. kept (B, N, V) gets the logits, or is empty.
    """
    shifted, chances, order = np.empty(known), np.empty(known), np.empty(known, np.int64)
    most_heads = 0
    for c in code:
        if c[0] == Op.ATTENTION or c[0] == Op.NEARNESS:
            most_heads = max(most_heads, c[12])
    scores, sums = np.empty((most_heads, pages.shape[1] * GROUP), np.float32), np.empty(SUMS, np.float32)
    begin, end = first * length, last * length
    for step in range(len(code) * max(written.shape[1], 1)):
        c, n = code[step % len(code)], step // len(code)
        op = c[0]
        if op == Op.LINEAR:
            src, dst, inputs, outputs, matrix, bias, kind, scales = c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8]
            if kind == 0:
                linear(w, w, regs, matrix, -1, inputs, outputs, src, dst, bias, begin, end, sums)
            elif kind == 1:
                linear(halves, w, regs, matrix, -1, inputs, outputs, src, dst, bias, begin, end, sums)
            else:
                linear(bytes_, w, regs, matrix, scales, inputs, outputs, src, dst, bias, begin, end, sums)
            continue
        for token in range(begin, end):
            r, row = regs[token], token // length
            if n and op != Op.DRAW and has_ended(ending, limits, written, row, n):
                continue
            position = filled[row] + token % length
            if op == Op.RMS_NORM:
                src, dst, size, gain, eps = c[1], c[2], c[3], c[4], c[5]
                rms_norm(r[src : src + size], w[gain : gain + size], numbers[eps], r[dst : dst + size])
            elif op == Op.SILU_PRODUCT:
                gate, src, dst, size = c[1], c[2], c[3], c[4]
                silu_product(r[gate : gate + size], r[src : src + size], r[dst : dst + size])
            elif op == Op.ADD_SCALED:
                src, other, dst, size, scale = c[1], c[2], c[3], c[4], c[5]
                a, b, out, factor = r[src:], r[other:], r[dst : dst + size], np.float32(numbers[scale])
                for i in range(size):
                    out[i] = a[i] + factor * b[i]
            elif op == Op.SCALED:
                src, dst, size, scale = c[1], c[2], c[3], c[4]
                a, out, factor = r[src:], r[dst : dst + size], np.float32(numbers[scale])
                for i in range(size):
                    out[i] = factor * a[i]
            elif op == Op.ADD_WEIGHTS:
                src, weights, dst, size = c[1], c[2], c[3], c[4]
                a, b, out = r[src:], w[weights:], r[dst : dst + size]
                for i in range(size):
                    out[i] = a[i] + b[i]
            elif op == Op.GATE:
                src, other, dst, size, share = c[1], c[2], c[3], c[4], c[5]
                a, b, out, factor = r[src:], r[other:], r[dst : dst + size], r[share]
                for i in range(size):
                    out[i] = a[i] + factor * b[i]
            elif op == Op.CONV:
                src, dst, size, taps, weight, past = c[1], c[2], c[3], c[4], c[5], c[6]
                cache = fixed[row, past : past + size * (taps - 1)]
                short_conv(r[src : src + size], w[weight : weight + size * taps], cache, r[dst : dst + size])
            elif op == Op.SPECTRAL:
                src, rate, dst, size, vectors, h = c[1], c[2], c[3], c[4], c[5], c[6]
                parts, state = w[vectors : vectors + 4 * size], fixed[row, h : h + 2 * size]
                spectral(r[src : src + size], r[rate:], parts, state, r[dst : dst + 2 * size])
            elif op == Op.SCAN_PAIRS:
                factors, src, dst, size, h = c[1], c[2], c[3], c[4], c[5]
                state, out = fixed[row, h : h + size], r[dst : dst + size]
                a, b = w[factors : factors + size].reshape(1, 1, size), r[src : src + size].reshape(1, 1, size)
                scan_pairs(a, b, state.reshape(1, size), out.reshape(1, 1, size), 0, 1)
                state[:] = out
            elif op == Op.LIQUID:
                src, z, dst, size, vectors, h, coupled = c[1], c[2], c[3], c[4], c[5], c[6], c[7] != 0
                parts, state = w[vectors : vectors + 10 * size], fixed[row, h : h + 2 * size]
                liquid(r[src : src + size], r[z : z + size], parts, coupled, state, r[dst : dst + 2 * size])
            elif op == Op.DELTA:
                src, dst, vectors, s, latest, work, sizes = c[1], c[2], c[3], c[4], max(c[5], 0), c[6], c[8:15]
                delta(r[src:], sizes, w[vectors:], fixed[row, s:], fixed[row, latest:], r[work:], sums, r[dst:])
            elif op == Op.ATTENTION or op == Op.NEARNESS:
                q, k, v, dst, key_biases, places, total, latest = c[1], c[2], c[3], c[4], c[5], c[6:9], c[9], c[10]
                attended = r[q:], r[k:], r[v:], r[key_biases:], c[12:19]
                caches = pages[row], places, exact[row, total:], fixed[row, latest:], position, scores, sums, r[dst:]
                if op == Op.ATTENTION:
                    attention(*attended, np.float32(numbers[c[11]]), *caches)
                else:
                    nearness(*attended, w[c[11] :], *caches)
            elif op == Op.BOUNDED_ENERGY:
                src, dst, count, size, matrix, diagonal, eps = c[1], c[2], c[3], c[4], c[5], c[6] != 0, c[7]
                out = r[dst : dst + count]
                bounded_energy(r[src:], w[matrix:], diagonal, numbers[eps], numbers[eps + 1], size, out)
            elif op == Op.ROPE:
                dst, frequencies, pairs = c[1], c[2], c[3]
                rope_table(position, numbers[frequencies : frequencies + pairs], r[dst : dst + 2 * pairs])
            elif op == Op.ROTATE:
                src, table, heads, size, sign = c[1], c[2], c[3], c[4], c[5]
                rotate(r[src:], r[table:], heads, size, np.float32(sign))
            elif op == Op.EMBED:
                dst, size, table, kind, scales, rows = c[1], c[2], c[3], c[4], c[5], c[6]
                embed(w, halves, bytes_, kind, table, scales, rows, size, ids[token], r[dst : dst + size])
            elif op == Op.POSITION:
                dst, size, table = c[1], c[2], c[3]
                a, out = w[table + position * size :], r[dst : dst + size]
                for i in range(size):
                    out[i] += a[i]
            elif op == Op.LAYER_NORM:
                src, dst, size, gain, bias, eps = c[1], c[2], c[3], c[4], c[5], c[6]
                a, b, out = w[gain : gain + size], w[bias : bias + size], r[dst : dst + size]
                layer_norm(r[src : src + size], a, b, numbers[eps], out)
            elif op == Op.COMPLEX_NORM:
                src, dst, size, eps = c[1], c[2], c[3], c[4]
                complex_norm(r[src : src + size], numbers[eps], r[dst : dst + size])
            elif op == Op.ACTIVATE:
                src, dst, size, kind = c[1], c[2], c[3], c[4]
                activate(kind, r[src : src + size], r[dst : dst + size])
            elif op == Op.MEAN:
                src, dst, size, mean, passed = c[1], c[2], c[3], c[4], c[5]
                state, out = fixed[row, mean : mean + size], r[dst : dst + size]
                mean_update(r[src : src + size], state, exact[row, passed : passed + 1])
                for i in range(size):
                    out[i] = state[i]
            elif op == Op.COPY_CONTROL:
                dst, size = c[1], c[2]
                for i in range(size):
                    r[dst + i] = control[row, i]
            elif op == Op.DRAW:
                src, size = c[1], c[2]
                draw_next(
                    r[src : src + size], known, drawn_by, top_k, counts, biases, uniforms, ending, limits, kept,
                    written, row, n, ids, filled, shifted, chances, order,
                )  # fmt: skip
        if op == Op.DRAW and all_ended(ending, limits, written, n, first, last):
            return
