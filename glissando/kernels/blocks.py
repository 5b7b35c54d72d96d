"""Sums of products of blocks, held in registers, for processors with AVX-512.

    out_rc = end(start_rc + sum_i x_ri w_ic)   for r < rows, c < 16 vectors, i < count

All numbers are float32 in one array `m`, and a matrix is the place of its first number and the distance of its rows.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, Literal

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from glissando.kernels.products import LANES

# Kernels are compiled anew where this file changes: see glissando.kernels.compiled.
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
#: logarithm to the base 2 of the least power that counts: products of subnormal numbers would take many times as long
LEAST = -101.0
#: 2^f for f from -1/2 to 1/2, from the highest power of f on (Cephes, exp2f)
_SERIES = (1.5353362e-4, 1.3398874e-3, 9.6184373e-3, 5.5503325e-2, 0.24022648, 0.69314720, 1.0)
#: a float32 added to it is rounded to a whole number, which the last bits of the sum hold
_ROUND = 1.5 * 2**23

End = Literal["", "scaled", "highest", "powers", "summed powers", "times"]


def block(rows: int, vectors: int, end: End = "") -> Any:
    """The function (m, w, w_row, x, x_row, x_step, count, start, start_row, out, out_row, side), to call in kernels.

    `side` is the place of a number for each column, side_c, or of a matrix with out's distance of rows, side_rc. What
    `end` stores of the sums s_rc, and what it does with `side`:

        ""               s_rc
        scaled           s_rc, whose sums begin with start_rc side_c
        highest          s_rc; side_c becomes the highest of itself and all s_rc
        powers           2^s_rc, or 0 below 2^-101
        summed powers    the same, and adds them to side_c
        times            s_rc side_rc
    """

    def typed(typing, m, w, w_row, x, x_row, x_step, count, start, start_row, out, out_row, side):
        return types.void(m, *[types.int64] * 11), partial(_code, rows, vectors, end)

    return intrinsic(typed)


def _turn(typing, m, at, row, to, to_row):
    return types.void(m, *[types.int64] * 4), _turn_code


#: turn(m, at, row, to, to_row) writes the transpose of the 16 x 16 numbers at `at` to `to`
turn: Any = intrinsic(_turn)


def _turn_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    m, at, row, to, to_row = arguments
    data = context.make_array(signature.args[0])(context, builder, m).data

    def place(first: Any, distance: Any, r: int) -> Any:
        number = builder.gep(data, [builder.add(first, builder.mul(distance, distance.type(r)))])
        return builder.bitcast(number, _FLOATS.as_pointer())

    lines = [builder.load(place(at, row, r), align=4) for r in range(LANES)]
    for far in (8, 4, 2, 1):  # two lines exchange the numbers that are in each other's half
        kept = [c if c & far == 0 else LANES + c - far for c in range(LANES)]
        other = [c + far if c & far == 0 else LANES + c for c in range(LANES)]
        for r in range(LANES):
            if r & far == 0:
                pair = lines[r], lines[r + far]
                lines[r], lines[r + far] = (builder.shuffle_vector(*pair, ir.Constant(_INTS, n)) for n in (kept, other))
    for r, line in enumerate(lines):
        builder.store(line, place(to, to_row, r), align=4)
    return context.get_dummy_value()


def _code(rows: int, vectors: int, end: End, context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    m, w, w_row, x, x_row, x_step, count, start, start_row, out, out_row, side = arguments
    data = context.make_array(signature.args[0])(context, builder, m).data
    operation = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    add_product = cgutils.get_or_insert_function(builder.module, operation, f"llvm.fmuladd.v{LANES}f32")

    def at(first: Any, distance: Any, number: int) -> Any:
        return builder.add(first, builder.mul(distance, distance.type(number)))

    def vector(place: Any, v: int) -> Any:
        return builder.bitcast(builder.gep(data, [builder.add(place, place.type(v * LANES))]), _FLOATS.as_pointer())

    def load(place: Any, v: int) -> Any:
        return builder.load(vector(place, v), align=4)

    places = list(product(range(rows), range(vectors)))
    totals = {place: cgutils.alloca_once(builder, _FLOATS) for place in places}
    for r, v in places:
        total = load(at(start, start_row, r), v)
        builder.store(builder.fmul(total, load(side, v)) if end == "scaled" else total, totals[r, v])
    inputs = [builder.gep(data, [at(x, x_row, r)]) for r in range(rows)]
    with cgutils.for_range(builder, count) as loop:
        begin, index = builder.add(w, builder.mul(loop.index, w_row)), builder.mul(loop.index, x_step)
        columns = [load(begin, v) for v in range(vectors)]
        for r, numbers in enumerate(inputs):
            entry = _filled(builder, builder.load(builder.gep(numbers, [index])))
            for v, column in enumerate(columns):
                total = builder.load(totals[r, v])
                builder.store(builder.call(add_product, [column, entry, total]), totals[r, v])
    sums = {place: builder.load(total) for place, total in totals.items()}
    if "powers" in end:
        sums = {place: _power(builder, add_product, s) for place, s in sums.items()}
    for (r, v), s in sums.items():
        s = builder.fmul(s, load(at(side, out_row, r), v)) if end == "times" else s
        builder.store(s, vector(at(out, out_row, r), v), align=4)
    for v in range(vectors if end in ("highest", "summed powers") else 0):
        total = load(side, v)
        for s in (sums[r, v] for r in range(rows)):
            more = builder.fcmp_ordered(">", s, total)
            total = builder.select(more, s, total) if end == "highest" else builder.fadd(total, s)
        builder.store(total, vector(side, v), align=4)
    return context.get_dummy_value()


def _filled(builder: Any, number: Any) -> Any:
    first = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.Constant(_INTS, [0] * LANES))


def _power(builder: Any, add_product: Any, s: Any) -> Any:
    """2^s for s up to 127, by the whole number nearest to s and a series for the rest."""

    def constant(number: float) -> Any:
        return ir.Constant(_FLOATS, [number] * LANES)

    # With a flag of their own, the two sums are not reordered by the kernel's: their rounding is what is wanted.
    rounded = builder.fadd(s, constant(_ROUND), flags=("nsz",))
    rest = builder.fsub(s, builder.fsub(rounded, constant(_ROUND), flags=("nsz",)), flags=("nsz",))
    total = constant(_SERIES[0])
    for factor in _SERIES[1:]:
        total = builder.call(add_product, [total, rest, constant(factor)])
    exponent = builder.shl(builder.bitcast(rounded, _INTS), ir.Constant(_INTS, [23] * LANES))
    power = builder.bitcast(builder.add(builder.bitcast(total, _INTS), exponent), _FLOATS)
    # A NaN stays NaN.
    return builder.select(builder.fcmp_unordered("<=", constant(LEAST), s), power, constant(0.0))
