"""A program: what one decoded token of a model computes, as a table of instructions.

Operands are places: of registers (R, numbers of one row), weights (W), numbers (N, float64), states of constant size
(F float32, E float64), and caches (S float32 and D float64 units, each of as many numbers as there are slots).

    LINEAR         src R, dst R, in, out, matrix, bias W or -1, kind (0 float32, 1 bfloat16, 2 int8), scales W
    RMS_NORM       src, dst, size, gain W, eps N          LAYER_NORM  src, dst, size, gain W, bias W, eps N
    COMPLEX_NORM   src, dst, size, eps N                  ACTIVATE    src, dst, size, kind
    SILU_PRODUCT   gate, x, dst, size                     ADD_SCALED  a, b, dst, size, scale N: a + scale b
    ADD_WEIGHTS    a, b W, dst, size                      GATE        a, b, dst, size, share R: a + share b
    EMBED          dst, size, table, kind, scales W       POSITION    dst, size, table W: added
    CONV           src, dst, size, taps, weight W, past F
    ROPE           dst (cos, sin), frequencies N, pairs   ROTATE      x, table R, heads, size, sign
    SPECTRAL       v, rate or -1, dst, N, vectors W, h F  SPECTRAL_PAIRS  x, dst, size, vectors W, h F
    LIQUID         b, z, dst, N, vectors W, x F, coupled
    DELTA          parts, dst, vectors W, s F, latest F or -1, work R, -, eight sizes
    ATTENTION      q, k, v, dst, biases, keys S, values S, lowered D, total E, latest F, scale N, six sizes
    TAU            q, k, v, dst, biases, keys S, values S, e D, total E, latest F, temperatures W, six sizes
    TAU_LAMBDAS    x, dst, vectors, size, matrix W, is diagonal, eps and tau N
    MEAN           y, dst, size, mean F, passed E         COPY_CONTROL  dst, size
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glissando.errors import GlissandoError, unknown_name
from glissando.quantisation import quantised

(LINEAR, RMS_NORM, LAYER_NORM, COMPLEX_NORM, ACTIVATE, SILU_PRODUCT, ADD_SCALED, ADD_WEIGHTS, GATE, EMBED, POSITION,
 CONV, ROPE, ROTATE, SPECTRAL, SPECTRAL_PAIRS, LIQUID, DELTA, ATTENTION, TAU, TAU_LAMBDAS, MEAN, COPY_CONTROL) = range(
    23
)  # fmt: skip

# Kernels are compiled anew where this file changes: see glissando.ops.compiled.
#: operands of an instruction, and its code
_WIDTH = 24
ACTIVATIONS = {"relu": 0, "relu2": 1, "gelu": 2, "tanh": 3, "sigmoid": 4}

Precision = Literal["float32", "bf16", "int8"]
PRECISIONS: dict[str, int] = {"float32": 0, "bf16": 1, "int8": 2}


class NotCompiled(GlissandoError):
    """A model, or an option of it, that has no compiled decoding step; the plain forward computes it."""


class Slot(NamedTuple):
    """Where a leaf of a state lies: in which array, from where on, its shape without the batch."""

    array: Literal["fixed", "exact", "slots", "exact_slots", "filled"]
    at: int = 0
    shape: tuple[int, ...] = ()  # of a cache: (G, K) of (G, slots, K), or (H,) of (H, slots)


#: a leaf that counts the tokens read
FILLED = Slot("filled")


class Matrix(NamedTuple):
    """A matrix among the weights: where it begins in the array of its precision, and where its scales are."""

    at: int
    rows: int
    columns: int
    kind: int
    scales: int


class Program(NamedTuple):
    """What `glissando.decoding.interpreter.run` takes, and where states lie in its arrays."""

    code: Any
    numbers: Any
    weights: Any
    halves: Any
    bytes: Any
    registers: int
    fixed: int
    exact: int
    slots: int  # caches: numbers a slot
    exact_slots: int
    logits: int  # the register that they begin at
    state: Any  # a state of the model with a Slot for each leaf


class Builder:
    """Collects the instructions of a program.

    precision  of matrices: `float32`, `bf16`, or `int8` with a scale for each output
    """

    def __init__(self, precision: Precision = "float32") -> None:
        if precision not in PRECISIONS:
            raise unknown_name("precision of weights", precision, PRECISIONS)
        self.kind = PRECISIONS[precision]
        self.registers = self.fixed = self.exact = self.slots = self.exact_slots = 0
        self._code: list[list[int]] = []
        self._numbers: list[float] = []
        self._weights: list[Any] = []
        self._matrices: tuple[list[Any], list[Any]] = ([], [])
        self._at = [0, 0, 0]
        self._placed: dict[int, tuple[Tensor, Matrix]] = {}
        self._tables: dict[tuple[Any, ...], int] = {}

    # ------------------------------------------------------------------ places

    def register(self, size: int) -> int:
        self.registers += size
        return self.registers - size

    def number(self, *values: float) -> int:
        self._numbers += [float(value) for value in values]
        return len(self._numbers) - len(values)

    def weights(self, *vectors: Tensor) -> int:
        """Vectors one behind the other, in float32 whatever the precision of matrices is."""
        begin = self._at[0]
        for vector in vectors:
            values = vector.detach().to(torch.float32).cpu().flatten().numpy()
            self._weights.append(values)
            self._at[0] += len(values)
        return begin

    def matrix(self, weight: Tensor, whole: bool = False) -> Matrix:
        """(out, in); the same tensor is stored once. whole: in float32 whatever the precision is."""
        kind = 0 if whole else self.kind
        if id(weight) in self._placed:
            return self._placed[id(weight)][1]
        values, scales = weight.detach().to(torch.float32).cpu(), -1
        begin = self._at[kind]
        if kind == 0:
            begin = self.weights(values)
        else:
            if kind == 1:
                stored = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
            else:
                numbers, scale = quantised(values)
                scales, stored = self.weights(scale), numbers.numpy()
            self._matrices[kind - 1].append(stored.reshape(-1))
            self._at[kind] += stored.size
        rows, columns = values.shape
        found = Matrix(begin, rows, columns, kind, scales)
        self._placed[id(weight)] = weight, found  # kept, so that no other tensor gets its id
        return found

    def keep_fixed(self, *shape: int) -> Slot:
        self.fixed += int(np.prod(shape))
        return Slot("fixed", self.fixed - int(np.prod(shape)), shape)

    def keep_exact(self, *shape: int) -> Slot:
        self.exact += int(np.prod(shape))
        return Slot("exact", self.exact - int(np.prod(shape)), shape)

    def keep_slots(self, *shape: int) -> Slot:
        """A cache (G, slots, K) for the shape (G, K), or (H, slots) for (H,)."""
        self.slots += int(np.prod(shape))
        return Slot("slots", self.slots - int(np.prod(shape)), shape)

    def keep_exact_slots(self, heads: int) -> Slot:
        self.exact_slots += heads
        return Slot("exact_slots", self.exact_slots - heads, (heads,))

    # ------------------------------------------------------------------ instructions

    def emit(self, op: int, *operands: int) -> None:
        self._code.append([op, *(int(x) for x in operands), *[0] * (_WIDTH - 1 - len(operands))])

    def linear(self, weight: Tensor, bias: Tensor | None, src: int, dst: int | None = None, whole: bool = False) -> int:
        """W x + bias, in registers of its own where `dst` is None."""
        m = self.matrix(weight, whole)
        dst = self.register(m.rows) if dst is None else dst
        at = -1 if bias is None else self.weights(bias)
        self.emit(LINEAR, src, dst, m.columns, m.rows, m.at, at, m.kind, m.scales)
        return dst

    def add(self, a: int, b: int, size: int, scale: float = 1.0) -> int:
        """a + scale b."""
        dst = self.register(size)
        self.emit(ADD_SCALED, a, b, dst, size, self.number(scale))
        return dst

    def scaled(self, x: int, size: int, scale: float) -> int:
        zeros = self.register(size)  # nothing is ever written there
        return self.add(zeros, x, size, scale)

    def activate(self, kind: str, src: int, size: int) -> int:
        dst = self.register(size)
        self.emit(ACTIVATE, src, dst, size, ACTIVATIONS[kind])
        return dst

    def silu_product(self, gate: int, x: int, size: int) -> int:
        """silu(gate) x."""
        dst = self.register(size)
        self.emit(SILU_PRODUCT, gate, x, dst, size)
        return dst

    def rope(self, size: int, base: float, width: int) -> int:
        """The table of angles of the token's position; one for all layers that turn alike."""
        key = (size, base, width)
        if key not in self._tables:
            frequencies = self.number(*(base ** (-2 * i / width) for i in range(size // 2)))
            self._tables[key] = self.register(size)
            self.emit(ROPE, self._tables[key], frequencies, size // 2)
        return self._tables[key]

    def rotate(self, x: int, table: int, heads: int, size: int, sign: int = 1) -> None:
        self.emit(ROTATE, x, table, heads, size, sign)

    def finish(self, logits: int, state: Any) -> Program:
        def joined(parts: Sequence[Any], dtype: Any) -> Any:
            return np.concatenate([*parts, np.zeros(1, dtype)]).astype(dtype, copy=False)

        return Program(
            np.array(self._code, np.int64),
            np.array([*self._numbers, 0.0]),
            joined(self._weights, np.float32),
            joined(self._matrices[0], np.uint16),
            joined(self._matrices[1], np.int8),
            self.registers, self.fixed, self.exact, self.slots, self.exact_slots, logits, state,
        )  # fmt: skip
