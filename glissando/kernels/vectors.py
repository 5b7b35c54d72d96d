"""LLVM's instructions for vectors of 16 numbers, for kernels whose sums stay in the processor's registers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# Kernels are compiled anew where this file changes: see glissando.kernels.compiled.
LANES = 16


class Code:
    """Instructions for vectors of 16 numbers of one kind, float32 or float64; an array stands for the address of its
    first number, and `shapes` has the sizes of each argument that is one."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> None:
        self.context, self.builder, self.kinds = context, builder, signature.args
        arrays = [kind.dtype for kind in self.kinds if isinstance(kind, types.Array)]
        self.number = context.get_data_type(next(kind for kind in arrays if isinstance(kind, types.Float)))
        self.kind, self.bytes = ir.VectorType(self.number, LANES), self.number.get_abi_size(context.target_data)
        self.zero = self.constant(0.0)
        self.arguments, self.shapes = [], []
        for kind, argument in zip(self.kinds, arguments, strict=True):
            array = context.make_array(kind)(context, builder, argument) if isinstance(kind, types.Array) else None
            self.arguments.append(argument if array is None else array.data)
            self.shapes.append(None if array is None else array.shape)
        name = f"llvm.fmuladd.v{LANES}f{8 * self.bytes}"
        self._fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(self.kind, [self.kind] * 3), name)

    def constant(self, number: float) -> Any:
        return ir.Constant(self.kind, [number] * LANES)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.call(self._fma, [a, b, c])

    def times(self, a: Any, b: Any) -> Any:
        return self.builder.fmul(a, b)

    def place(self, array: Any, *offsets: Any) -> Any:
        total = offsets[0]
        for offset in offsets[1:]:
            total = self.builder.add(total, total.type(offset) if isinstance(offset, int) else offset)
        return self.builder.gep(array, [total])

    def row(self, first: Any, distance: Any, number: int) -> Any:
        """Where a row begins: so many times the distance behind the first one."""
        return self.builder.add(first, self.builder.mul(distance, distance.type(number)))

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
            low, high = halves(far)
            half = len(vectors) // 2
            vectors = [
                self.builder.fadd(self.shuffled(a, b, low), self.shuffled(a, b, high))
                for a, b in zip(vectors[:half], vectors[half:], strict=True)
            ]
        return vectors[0]


def halves(far: int) -> tuple[list[int], list[int]]:
    """Which numbers of two vectors a shuffle takes so that they exchange those that are in each other's half: the new
    first vector's, and the new second one's."""
    first = [c if c & far == 0 else LANES + c - far for c in range(LANES)]
    return first, [c + far if c & far == 0 else LANES + c for c in range(LANES)]


def instructions(code: Callable[..., Any]) -> Any:
    """code(instructions, *arguments), to call in kernels with arrays, whole numbers and numbers; it returns nothing."""

    def typed(typing: Any, *kinds: Any) -> Any:
        def generated(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            instructions = Code(context, builder, signature, arguments)
            code(instructions, *instructions.arguments)
            return context.get_dummy_value()

        return types.void(*(types.int64 if isinstance(kind, types.Integer) else kind for kind in kinds)), generated

    names = ["typing", *list(inspect.signature(code).parameters)[1:]]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    typed.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return intrinsic(typed)
