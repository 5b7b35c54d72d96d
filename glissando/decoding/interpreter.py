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
    heads = 0
    for c in code:
        if c[0] == Op.ATTENTION or c[0] == Op.NEARNESS:
            heads = max(heads, c[12])
    scores, sums = np.empty((heads, pages.shape[1] * GROUP), np.float32), np.empty(SUMS, np.float32)
    begin, end = first * length, last * length
    for step in range(len(code) * max(written.shape[1], 1)):
        c, n = code[step % len(code)], step // len(code)
        op = c[0]
        if op == Op.LINEAR:
            if c[7] == 0:
                linear(w, w, regs, c[5], -1, c[3], c[4], c[1], c[2], c[6], begin, end, sums)
            elif c[7] == 1:
                linear(halves, w, regs, c[5], -1, c[3], c[4], c[1], c[2], c[6], begin, end, sums)
            else:
                linear(bytes_, w, regs, c[5], c[8], c[3], c[4], c[1], c[2], c[6], begin, end, sums)
            continue
        for token in range(begin, end):
            r, row = regs[token], token // length
            if n and op != Op.DRAW and has_ended(ending, limits, written, row, n):
                continue
            now = filled[row] + token % length
            if op == Op.RMS_NORM:
                rms_norm(r[c[1] : c[1] + c[3]], w[c[4] : c[4] + c[3]], numbers[c[5]], r[c[2] : c[2] + c[3]])
            elif op == Op.SILU_PRODUCT:
                silu_product(r[c[1] : c[1] + c[4]], r[c[2] : c[2] + c[4]], r[c[3] : c[3] + c[4]])
            elif op == Op.ADD_SCALED:
                a, b, out, scale = r[c[1] :], r[c[2] :], r[c[3] : c[3] + c[4]], np.float32(numbers[c[5]])
                for i in range(c[4]):
                    out[i] = a[i] + scale * b[i]
            elif op == Op.SCALED:
                x, out, scale = r[c[1] :], r[c[2] : c[2] + c[3]], np.float32(numbers[c[4]])
                for i in range(c[3]):
                    out[i] = scale * x[i]
            elif op == Op.ADD_WEIGHTS:
                a, b, out = r[c[1] :], w[c[2] :], r[c[3] : c[3] + c[4]]
                for i in range(c[4]):
                    out[i] = a[i] + b[i]
            elif op == Op.GATE:
                a, b, out, share = r[c[1] :], r[c[2] :], r[c[3] : c[3] + c[4]], r[c[5]]
                for i in range(c[4]):
                    out[i] = a[i] + share * b[i]
            elif op == Op.CONV:
                weight, past = w[c[5] : c[5] + c[3] * c[4]], fixed[row, c[6] : c[6] + c[3] * (c[4] - 1)]
                short_conv(r[c[1] : c[1] + c[3]], weight, past, r[c[2] : c[2] + c[3]])
            elif op == Op.SPECTRAL:
                vectors, h = w[c[5] : c[5] + 4 * c[4]], fixed[row, c[6] : c[6] + 2 * c[4]]
                spectral(r[c[1] : c[1] + c[4]], r[c[2] :], vectors, h, r[c[3] : c[3] + 2 * c[4]])
            elif op == Op.SCAN_PAIRS:
                size, h, y = c[4], fixed[row, c[5] : c[5] + c[4]], r[c[3] : c[3] + c[4]]
                factor, x = w[c[1] : c[1] + size].reshape(1, 1, size), r[c[2] : c[2] + size].reshape(1, 1, size)
                scan_pairs(factor, x, h.reshape(1, size), y.reshape(1, 1, size), 0, 1)
                h[:] = y
            elif op == Op.LIQUID:
                x, vectors = fixed[row, c[6] : c[6] + 2 * c[4]], w[c[5] : c[5] + 10 * c[4]]
                z, y = r[c[2] : c[2] + c[4]], r[c[3] : c[3] + 2 * c[4]]
                liquid(r[c[1] : c[1] + c[4]], z, vectors, c[7] != 0, x, y)
            elif op == Op.DELTA:
                s, latest, work = fixed[row, c[4] :], fixed[row, max(c[5], 0) :], r[c[6] :]
                delta(r[c[1] :], c[8:15], w[c[3] :], s, latest, work, sums, r[c[2] :])
            elif op == Op.ATTENTION or op == Op.NEARNESS:
                total, latest = exact[row, c[9] :], fixed[row, c[10] :]
                inputs = r[c[1] :], r[c[2] :], r[c[3] :], r[c[5] :], c[12:19]
                y = r[c[4] :]
                if op == Op.ATTENTION:
                    scale = np.float32(numbers[c[11]])
                    attention(*inputs, scale, pages[row], c[6:9], total, latest, now, scores, sums, y)
                else:
                    nearness(*inputs, w[c[11] :], pages[row], c[6:9], total, latest, now, scores, sums, y)
            elif op == Op.BOUNDED_ENERGY:
                x, out = r[c[1] :], r[c[2] : c[2] + c[3]]
                bounded_energy(x, w[c[5] :], c[6] != 0, numbers[c[7]], numbers[c[7] + 1], c[4], out)
            elif op == Op.ROPE:
                rope_table(now, numbers[c[2] : c[2] + c[3]], r[c[1] : c[1] + 2 * c[3]])
            elif op == Op.ROTATE:
                rotate(r[c[1] :], r[c[2] :], c[3], c[4], np.float32(c[5]))
            elif op == Op.EMBED:
                embed(w, halves, bytes_, c[4], c[3], c[5], c[6], c[2], ids[token], r[c[1] : c[1] + c[2]])
            elif op == Op.POSITION:
                out, table = r[c[1] : c[1] + c[2]], w[c[3] + now * c[2] :]
                for i in range(c[2]):
                    out[i] += table[i]
            elif op == Op.LAYER_NORM:
                gain, bias = w[c[4] : c[4] + c[3]], w[c[5] : c[5] + c[3]]
                layer_norm(r[c[1] : c[1] + c[3]], gain, bias, numbers[c[6]], r[c[2] : c[2] + c[3]])
            elif op == Op.COMPLEX_NORM:
                complex_norm(r[c[1] : c[1] + c[3]], numbers[c[4]], r[c[2] : c[2] + c[3]])
            elif op == Op.ACTIVATE:
                activate(c[4], r[c[1] : c[1] + c[3]], r[c[2] : c[2] + c[3]])
            elif op == Op.MEAN:
                mean, passed = fixed[row, c[4] : c[4] + c[3]], exact[row, c[5] : c[5] + 1]
                mean_update(r[c[1] : c[1] + c[3]], mean, passed)
                out = r[c[2] : c[2] + c[3]]
                for i in range(c[3]):
                    out[i] = mean[i]
            elif op == Op.COPY_CONTROL:
                for i in range(c[2]):
                    r[c[1] + i] = control[row, i]
            elif op == Op.DRAW:
                draw_next(
                    r[c[1] : c[1] + c[2]], known, drawn_by, top_k, counts, biases, uniforms, ending, limits, kept,
                    written, row, n, ids, filled, shifted, chances, order,
                )  # fmt: skip
        if op == Op.DRAW and all_ended(ending, limits, written, n, first, last):
            return
