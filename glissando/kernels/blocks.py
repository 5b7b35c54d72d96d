"""Sums of products of blocks, held in registers, for processors with AVX-512.

    out_rc = end(start_rc + sum_i x_ri w_ic)   for r < rows, c < 16 vectors, i < count

All numbers are float32 in one array `m`, and a matrix is the place of its first number and the distance of its rows.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, Literal

from llvmlite import ir

from glissando.kernels.vectors import LANES, Code, halves, instructions

# Kernels are compiled anew where this file changes: see glissando.kernels.compiled.
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
    return instructions(partial(_code, rows, vectors, end))


@instructions
def turn(c: Code, m, at, row, to, to_row):
    """Writes the transpose of the 16 x 16 numbers at `at` to `to`."""
    lines = [c.load(c.place(m, c.row(at, row, r))) for r in range(LANES)]
    for far in (8, 4, 2, 1):
        first, second = halves(far)
        for r in range(LANES):
            if r & far == 0:
                pair = lines[r], lines[r + far]
                lines[r], lines[r + far] = c.shuffled(*pair, first), c.shuffled(*pair, second)
    for r, line in enumerate(lines):
        c.store(line, c.place(m, c.row(to, to_row, r)))


def _code(
    rows: int, vectors: int, end: End, c: Code, m, w, w_row, x, x_row, x_step, count, start, start_row, out, out_row,
    side,
):  # fmt: skip
    builder = c.builder

    def vector(place: Any, v: int) -> Any:
        return c.place(m, place, v * LANES)

    places = list(product(range(rows), range(vectors)))
    totals = dict(zip(places, c.sums(len(places)), strict=True))
    for r, v in places:
        total = c.load(vector(c.row(start, start_row, r), v))
        builder.store(c.times(total, c.load(vector(side, v))) if end == "scaled" else total, totals[r, v])
    inputs = [builder.gep(m, [c.row(x, x_row, r)]) for r in range(rows)]
    with c.rows(count) as loop:
        begin, index = builder.add(w, builder.mul(loop.index, w_row)), builder.mul(loop.index, x_step)
        columns = [c.load(vector(begin, v)) for v in range(vectors)]
        for r, numbers in enumerate(inputs):
            entry = c.entry(builder.gep(numbers, [index]))
            for v, column in enumerate(columns):
                c.add_product(column, entry, totals[r, v])
    sums = {place: builder.load(total) for place, total in totals.items()}
    if "powers" in end:
        sums = {place: _power(c, s) for place, s in sums.items()}
    for (r, v), s in sums.items():
        s = c.times(s, c.load(vector(c.row(side, out_row, r), v))) if end == "times" else s
        c.store(s, vector(c.row(out, out_row, r), v))
    for v in range(vectors if end in ("highest", "summed powers") else 0):
        total = c.load(vector(side, v))
        for s in (sums[r, v] for r in range(rows)):
            more = builder.fcmp_ordered(">", s, total)
            total = builder.select(more, s, total) if end == "highest" else builder.fadd(total, s)
        c.store(total, vector(side, v))


def _power(c: Code, s: Any) -> Any:
    """2^s for s up to 127, by the whole number nearest to s and a series for the rest."""
    builder, whole = c.builder, ir.VectorType(ir.IntType(32), LANES)
    # With a flag of their own, the two sums are not reordered by the kernel's: their rounding is what is wanted.
    rounded = builder.fadd(s, c.constant(_ROUND), flags=("nsz",))
    rest = builder.fsub(s, builder.fsub(rounded, c.constant(_ROUND), flags=("nsz",)), flags=("nsz",))
    total = c.constant(_SERIES[0])
    for factor in _SERIES[1:]:
        total = c.fma(total, rest, c.constant(factor))
    exponent = builder.shl(builder.bitcast(rounded, whole), ir.Constant(whole, [23] * LANES))
    power = builder.bitcast(builder.add(builder.bitcast(total, whole), exponent), c.kind)
    # A NaN stays NaN.
    return builder.select(builder.fcmp_unordered("<=", c.constant(LEAST), s), power, c.zero)
