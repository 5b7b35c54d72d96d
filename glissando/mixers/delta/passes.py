"""Passes over a state of the delta rule, row by row, whose sums stay in the processor's registers.

A matrix lies in an array, its rows one behind the other, and a pass takes `BLOCK` columns of it. An argument x is an
array, or a place in `m`, and x_at the place in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from glissando.kernels.products import LANES, is_wide

# Kernels are compiled anew where this file changes: see glissando.kernels.compiled.
#: columns of a pass; a processor without AVX-512 has half the registers, of half the size
BLOCK = 2 * LANES if is_wide() else LANES
_LANES = range(0, BLOCK, LANES)


class _Code:
    """Instructions for vectors of 16 numbers of one kind; an array stands for the address of its first number."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> None:
        self.builder, self.nothing = builder, context.get_dummy_value()
        arrays = [isinstance(kind, types.Array) for kind in signature.args]
        self.number = context.get_data_type(next(k.dtype for k in signature.args if isinstance(k, types.Array)))
        self.kind, self.bytes = ir.VectorType(self.number, LANES), self.number.get_abi_size(context.target_data)
        self.zero = ir.Constant(self.kind, [0.0] * LANES)
        self.arguments = [
            context.make_array(kind)(context, builder, argument).data if is_array else argument
            for kind, argument, is_array in zip(signature.args, arguments, arrays, strict=True)
        ]
        name = f"llvm.fmuladd.v{LANES}f{8 * self.bytes}"
        self._fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(self.kind, [self.kind] * 3), name)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.call(self._fma, [a, b, c])

    def times(self, a: Any, b: Any) -> Any:
        return self.builder.fmul(a, b)

    def place(self, array: Any, *offsets: Any) -> Any:
        total = offsets[0]
        for offset in offsets[1:]:
            total = self.builder.add(total, total.type(offset) if isinstance(offset, int) else offset)
        return self.builder.gep(array, [total])

    def load(self, place: Any) -> Any:
        return self.builder.load(self.builder.bitcast(place, self.kind.as_pointer()), align=self.bytes)

    def store(self, vector: Any, place: Any) -> None:
        self.builder.store(vector, self.builder.bitcast(place, self.kind.as_pointer()), align=self.bytes)

    def filled(self, number: Any) -> Any:
        first = self.builder.insert_element(ir.Constant(self.kind, ir.Undefined), number, ir.IntType(32)(0))
        return self.shuffled(first, first, [0] * LANES)

    def entry(self, place: Any) -> Any:
        """A vector filled with one number."""
        return self.filled(self.builder.load(place))

    def shuffled(self, a: Any, b: Any, order: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), LANES), order))

    def sums(self, count: int) -> list[Any]:
        """Vectors that begin at 0, to be changed in loops."""
        places = [cgutils.alloca_once(self.builder, self.kind) for _ in range(count)]
        for place in places:
            self.builder.store(self.zero, place)
        return places

    def total(self, place: Any) -> Any:
        """The sum of the numbers of a vector."""
        kind, name = ir.FunctionType(self.number, [self.number, self.kind]), f"v{LANES}f{8 * self.bytes}"
        add = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.vector.reduce.fadd.{name}")
        return self.builder.call(add, [self.number(0.0), self.builder.load(place)], fastmath=("reassoc",))

    def add_product(self, a: Any, b: Any, total: Any) -> None:
        self.builder.store(self.fma(a, b, self.builder.load(total)), total)

    def rows(self, count: Any) -> Any:
        return cgutils.for_range(self.builder, count)

    @contextmanager
    def blocks(self, count: Any) -> Any:
        """A loop over blocks of 16 of `count` numbers: where each begins."""
        with cgutils.for_range(self.builder, self.builder.udiv(count, count.type(LANES))) as loop:
            yield self.builder.mul(loop.index, count.type(LANES))

    def sums_within(self, vectors: list[Any]) -> Any:
        """The sum of each of 16 vectors, as a vector."""
        for far in (8, 4, 2, 1):
            low = [c if c & far == 0 else LANES + c - far for c in range(LANES)]
            high = [c + far if c & far == 0 else LANES + c for c in range(LANES)]
            half = len(vectors) // 2
            vectors = [
                self.builder.fadd(self.shuffled(a, b, low), self.shuffled(a, b, high))
                for a, b in zip(vectors[:half], vectors[half:], strict=True)
            ]
        return vectors[0]


def _pass(code: Callable[..., Any]) -> Any:
    """code(instructions, *arguments), to call in kernels; it returns nothing."""

    def typed(typing: Any, *kinds: Any) -> Any:
        def generated(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            instructions = _Code(context, builder, signature, arguments)
            code(instructions, *instructions.arguments)
            return instructions.nothing

        return types.void(*kinds), generated

    names = ["typing", *list(inspect.signature(code).parameters)[1:]]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    typed.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return intrinsic(typed)


@_pass
def forward(c: _Code, m, at, size, width, a, e, b, k, k_at, q, q_at, v, v_at, w, w_at, o, o_at, l, l_at, f, f_at):  # noqa: E741
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


@_pass
def changes(c: _Code, width, e, b, v, v_at, w, w_at, m, u):
    """u = b v - e w, in m."""
    erase, write = c.filled(e), c.filled(b)
    with c.blocks(width) as lane:
        value = c.times(write, c.load(c.place(v, v_at, lane)))
        c.store(c.builder.fsub(value, c.times(erase, c.load(c.place(w, w_at, lane)))), c.place(m, u, lane))


@_pass
def writes(c: _Code, width, e, b, v, v_at, w, w_at, g, g_at, m, u, du, dw, read, dv, dv_at, db, db_at, de, de_at):
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


@_pass
def decayed(c: _Code, m, at, to, size, width, a, u, u_at, k, k_at):
    """a (P + u k^T) of P (size, width), for `BLOCK` columns, from `at` on to `to` on in m."""
    keys, decay = [c.load(c.place(k, k_at, lane)) for lane in _LANES], c.filled(a)
    with c.rows(size) as loop:
        change, row = c.entry(c.place(u, u_at, loop.index)), c.builder.mul(loop.index, width)
        for key, lane in zip(keys, _LANES, strict=True):
            line = c.fma(change, key, c.load(c.place(m, at, row, lane)))
            c.store(c.times(decay, line), c.place(m, to, row, lane))


@_pass
def backward(c: _Code, m, at, width, a, w, l, l_at, g, g_at, q, q_at, k, k_at, du):  # noqa: E741
    """D <- a (D + w l^T) + g q^T, and du += D k, for 16 rows and `BLOCK` columns of D (size, width). In m: D, w, du."""
    later, query, key = (
        [c.load(c.place(x, x_at, lane)) for lane in _LANES] for x, x_at in ((l, l_at), (q, q_at), (k, k_at))
    )
    decay, totals = c.filled(a), []
    for r in range(LANES):
        first = c.builder.add(at, c.builder.mul(width, width.type(r)))
        write, grad, total = c.entry(c.place(m, w, r)), c.entry(c.place(g, g_at, r)), None
        for v, lane in enumerate(_LANES):
            place = c.place(m, first, lane)
            line = c.fma(grad, query[v], c.times(decay, c.fma(write, later[v], c.load(place))))
            c.store(line, place)
            total = c.times(line, key[v]) if total is None else c.fma(line, key[v], total)
        totals.append(total)
    place = c.place(m, du)
    c.store(c.builder.fadd(c.load(place), c.sums_within(totals)), place)


@_pass
def gradients(c: _Code, m, d, p, size, width, u, w, g, g_at, read, k, k_at, dk, dk_at, dq, dq_at, dp):
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
