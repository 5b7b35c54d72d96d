"""Products of a matrix with the vectors of many rows: each output is one sum, in the order of its inputs, whatever else
is computed beside it, so that a row's numbers do not depend on the rows or the tokens of the same call.

A matrix (out, in) is stored by groups of 64 outputs, (in, 64) each, one behind the other; the outputs that are left, by
groups of 16, the last one filled up with zeros. The sums of a group and of several rows are in registers of the
processor at once: an input is read once for the group, a weight once for the rows.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import overload, register_jitable

from glissando.kernels.compiled import kernel
from glissando.kernels.vectors import LANES, Code, instructions

GROUP = 64
#: the number of inputs of `parts_of_...` is a multiple of it
PARTS = 8


@cache
def is_wide() -> bool:
    """Whether the processor has AVX-512."""
    try:
        return bool(binding.get_host_cpu_features().get("avx512f"))
    except RuntimeError:  # LLVM cannot ask every processor
        return False


#: rows whose sums are computed at once, and vectors of 16 outputs of each; a processor without AVX-512 has half the
#: registers, of half the size
_ROWS, _VECTORS = (4, 4) if is_wide() else (4, 1)
#: numbers that the sums of such a block take
SUMS = LANES * max(GROUP // LANES, _ROWS * _VECTORS)

_INT, _BYTE = ir.IntType(32), ir.IntType(8).as_pointer()


def grouped(matrix: Any) -> Any:
    """A matrix (out, in) by groups, flat."""
    count, size = matrix.shape
    whole = count - count % GROUP
    rest = np.zeros((-(-(count - whole) // LANES) * LANES, size), matrix.dtype)
    rest[: count - whole] = matrix[whole:]
    parts = [part.reshape(-1, n, size).swapaxes(1, 2) for part, n in ((matrix[:whole], GROUP), (rest, LANES))]
    return np.concatenate([part.reshape(-1) for part in parts])


def aligned(shape: int | tuple[int, ...], dtype: Any) -> Any:
    """Zeros that begin where a cache line does."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(count + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:count].view(dtype).reshape(shape)


@register_jitable
def first_of(output, n_in, n_out):
    """Where the weights of an output begin, and how far apart those of its inputs are."""
    width = GROUP if output < n_out - n_out % GROUP else LANES
    return (output - output % width) * n_in + output % width, width


@register_jitable
def from_bfloat16(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@register_jitable
def to_bfloat16(x: Any) -> Any:
    """The bits of the bfloat16 nearest to a float32, of two the even one; a NaN stays NaN."""
    bits = np.float32(x).view(np.uint32)
    if x != x:
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


def as_computed(number: Any) -> Any:
    """A stored number in the type that it is computed in: float32 for the bits of bfloat16."""
    return from_bfloat16(number) if number.dtype == np.uint16 else number


@overload(as_computed)
def _as_computed(number):
    return (lambda number: from_bfloat16(number)) if number == types.uint16 else lambda number: number


def as_stored(number: Any, like: Any) -> Any:
    """A computed number in the type of `like`, a stored one."""
    return to_bfloat16(number) if like.dtype == np.uint16 else number


@overload(as_stored)
def _as_stored(number, like):
    if like == types.uint16:
        return lambda number, like: to_bfloat16(number)
    return lambda number, like: number


def _widened(c: Code, place: Any, kind: types.Type) -> Any:
    """16 numbers of a stored kind as float32: float32, bfloat16 as uint16, int8."""
    if kind == types.float32:
        return c.load(place)
    builder, number = c.builder, c.context.get_data_type(kind)
    place = builder.bitcast(place, ir.VectorType(number, LANES).as_pointer())
    stored = builder.load(place, align=number.get_abi_size(c.context.target_data))
    if kind == types.int8:
        return builder.sitofp(stored, c.kind)
    bits = builder.zext(stored, ir.VectorType(_INT, LANES))
    return builder.bitcast(builder.shl(bits, ir.Constant(bits.type, [16] * LANES)), c.kind)


def _sums(
    rows: int, vectors: int, parts: int, c: Code, weights, at, width, n_in, regs, src, row, last, out,
    ahead=None, step=None,
):  # fmt: skip
    """LLVM's instructions for `sums` of `sums_of_block`: a product and a sum of all outputs of an input at a time. With
    `ahead` and `step`, the processor is asked to have a number at hand with each input: the one at `ahead`, and then
    each `step` numbers further.
    """
    builder, length = c.builder, c.builder.extract_value(c.shapes[4], 1)
    inputs, end = [], builder.sub(last, last.type(1))
    for r in range(rows):
        index = builder.add(row, row.type(r))
        index = builder.select(builder.icmp_signed("<", index, end), index, end)
        inputs.append(c.place(regs, builder.mul(index, length), src))
    totals = dict(zip(product(range(rows), range(vectors), range(parts)), c.sums(rows * vectors * parts), strict=True))
    with c.rows(builder.udiv(n_in, n_in.type(parts))) as loop:
        for p in range(parts):
            index = builder.add(builder.mul(loop.index, n_in.type(parts)), n_in.type(p))
            begin = builder.add(at, builder.mul(index, width))
            if ahead is not None:
                place = c.place(weights, ahead, builder.mul(index, step))
                builder.call(_fetch(builder.module), [builder.bitcast(place, _BYTE), *(_INT(n) for n in (0, 2, 1))])
            columns = [_widened(c, c.place(weights, begin, v * LANES), c.kinds[0].dtype) for v in range(vectors)]
            for r, x in enumerate(inputs):
                entries = c.entry(builder.gep(x, [index]))
                for v, column in enumerate(columns):
                    c.add_product(column, entries, totals[r, v, p])
    for n, (r, v) in enumerate(product(range(rows), range(vectors))):
        total = builder.load(totals[r, v, 0])
        for p in range(1, parts):
            total = builder.fadd(total, builder.load(totals[r, v, p]))
        c.store(total, c.place(out, at.type(n * LANES)))


def _fetch(module: Any) -> Any:
    kind = ir.FunctionType(ir.VoidType(), [_BYTE, *[_INT] * 3])
    return cgutils.get_or_insert_function(module, kind, "llvm.prefetch.p0")


def sums_of_block(rows: int, vectors: int, parts: int = 1) -> Any:
    """The function that computes the sums of so many rows and vectors of 16 outputs, in so many parts, which divide the
    number of inputs: sums of every second one, say, that are added at the end, as each waits for the one before."""

    def sums(weights: Any, at: int, width: int, n_in: int, regs: Any, src: int, row: int, last: int, out: Any) -> None:
        """out (rows, vectors, 16), flat, of the rows from `row` on, where the last one stands for those behind it;
        an input's weights begin at `at`, the next one's `width` further."""
        w = np.stack([weights[at + i * width :][: vectors * LANES] for i in range(n_in)])
        w = (w.astype(np.uint32) << 16).view(np.float32) if w.dtype == np.uint16 else w.astype(np.float32)
        x = regs[np.minimum(np.arange(row, row + rows), last - 1), src : src + n_in]
        out[: rows * vectors * LANES] = (x @ w).reshape(-1)

    def code(c, weights, at, width, n_in, regs, src, row, last, out):
        _sums(rows, vectors, parts, c, weights, at, width, n_in, regs, src, row, last, out)

    compiled = instructions(code)

    @overload(sums)
    def _(weights, at, width, n_in, regs, src, row, last, out):
        return lambda weights, at, width, n_in, regs, src, row, last, out: compiled(
            weights, at, width, n_in, regs, src, row, last, out
        )

    return sums


sums_of_one, sums_of_four = sums_of_block(1, 1), sums_of_block(1, GROUP // LANES)
parts_of_one, parts_of_two, parts_of_four = (sums_of_block(1, vectors, PARTS // vectors) for vectors in (1, 2, 4))
_sums_of_rows, _rest_of_rows = sums_of_block(_ROWS, _VECTORS), sums_of_block(_ROWS, 1)


def _sums_ahead(*arguments: Any) -> None:
    """`_sums_of_rows`, which asks for the numbers from `ahead` on, `step` of them with each input; these come last."""
    _sums_of_rows(*arguments[:-2])


@instructions
def _ahead_compiled(c, weights, at, width, n_in, regs, src, row, last, out, ahead, step):
    _sums(_ROWS, _VECTORS, 1, c, weights, at, width, n_in, regs, src, row, last, out, ahead, step)


@overload(_sums_ahead)
def _(weights, at, width, n_in, regs, src, row, last, out, ahead, step):
    return lambda weights, at, width, n_in, regs, src, row, last, out, ahead, step: _ahead_compiled(
        weights, at, width, n_in, regs, src, row, last, out, ahead, step
    )


@kernel
def add_weighted_rows(x, row, src, count, matrix, at, size, sums, out):
    """out += sum_i x_i m_i, m_i (size) the `count` rows of a matrix from `at` on, and x_i from `src` on in a row of x.

    What is read of the last m_i may reach `GROUP` numbers beyond it.
    """
    for d in range(0, size, GROUP):
        place, rest = at + d, min(size - d, GROUP)
        y = out[d : d + rest]
        if count % PARTS != 0:
            for lane in range(0, rest, LANES):
                sums_of_one(matrix, place + lane, size, count, x, src, row, row + 1, sums[lane:])
        elif rest > 2 * LANES:
            parts_of_four(matrix, place, size, count, x, src, row, row + 1, sums)
        elif rest > LANES:
            parts_of_two(matrix, place, size, count, x, src, row, row + 1, sums)
        else:
            parts_of_one(matrix, place, size, count, x, src, row, row + 1, sums)
        for i in range(rest):
            y[i] += sums[i]


@kernel
def linear(stored, weights, regs, at, scales, n_in, n_out, src, dst, bias, first, last, out):
    """regs[:, dst:] = W regs[:, src:] for the rows from `first` to `last`, W (n_out, n_in) by groups from `at` on in
    `stored`: float32, bfloat16 as uint16, or int8.

    scales, bias  where scales of the outputs, and what is added to them, are in `weights`; -1 for none
    out           (SUMS,) float32

    While several rows are computed with a group of outputs, the weights behind it, mostly those of the next group or of
    the next matrix, come from memory.
    """
    alone, begin = last - first == 1, 0
    most, at_once = (GROUP // LANES, 1) if alone else (_VECTORS, _ROWS)
    while begin < n_out:
        place, width = first_of(begin, n_in, n_out)
        place, vectors = at + place, most if width == GROUP else 1
        size = min(n_out - begin, vectors * LANES)
        ahead, step = place + n_in * width, width * at_once // max(last - first, 1)
        for row in range(first, last, at_once):
            if alone and width == GROUP:
                sums_of_four(stored, place, width, n_in, regs, src, row, last, out)
            elif alone:
                sums_of_one(stored, place, width, n_in, regs, src, row, last, out)
            elif width == GROUP:
                _sums_ahead(stored, place, width, n_in, regs, src, row, last, out, ahead, step)
                ahead += n_in * step
            else:
                _rest_of_rows(stored, place, width, n_in, regs, src, row, last, out)
            for r in range(row, min(row + at_once, last)):
                sums, y = out[(r - row) * vectors * LANES :], regs[r, dst + begin : dst + begin + size]
                for o in range(size):
                    y[o] = sums[o]
                if scales >= 0:
                    factors = weights[scales + begin : scales + begin + size]
                    for o in range(size):
                        y[o] *= factors[o]
                if bias >= 0:
                    added = weights[bias + begin : bias + begin + size]
                    for o in range(size):
                        y[o] += added[o]
        begin += vectors * LANES
