"""A program: what one decoded token of a model computes, as a table of instructions.

Operands are places: of registers (R, numbers of one row), weights (W), numbers (N, float64), states of constant size
(F float32, E float64), and caches: units of a page (S float32, or bfloat16 where the builder keeps caches so, and D
float64, each of 64 numbers).

    LINEAR         src R, dst R, in, out, matrix, bias W or -1, kind (0 float32, 1 bfloat16, 2 int8), scales W
    RMS_NORM       src, dst, size, gain W, eps N          LAYER_NORM  src, dst, size, gain W, bias W, eps N
    COMPLEX_NORM   src, dst, size, eps N                  ACTIVATE    src, dst, size, kind
    SILU_PRODUCT   gate, x, dst, size                     ADD_SCALED  a, b, dst, size, scale N: a + scale b
    SCALED         x, dst, size, scale N
    ADD_WEIGHTS    a, b W, dst, size                      GATE        a, b, dst, size, share R: a + share b
    EMBED          dst, size, table, kind, scales W, rows POSITION    dst, size, table W: added
    CONV           src, dst, size, taps, weight W, past F
    ROPE           dst (cos, sin), frequencies N, pairs   ROTATE      x, table R, heads, size, sign
    SPECTRAL       v, rate, dst, N, vectors W, h F        SCAN_PAIRS  factor W, x, dst, size, h F
    LIQUID         b, z, dst, N, vectors W, x F, coupled
    DELTA          parts, dst, vectors W, s F, latest F or -1, work R, -, seven sizes
    ATTENTION      q, k, v, dst, biases, keys S, values S, C D, total E, latest F, scale N, six sizes
    NEARNESS       q, k, v, dst, biases, keys S, values S, e D, total E, latest F, temperatures W, seven sizes
    BOUNDED_ENERGY x, dst, vectors, size, matrix W, is diagonal, eps and tau N
    MEAN           y, dst, size, mean F, passed E         COPY_CONTROL  dst, size
    DRAW           logits, size: the next token, at the end of a program that runs several times in a call

A mixer's or depth's method `lower` writes what its `forward` computes for one token behind a state, and returns where
its output is and that state with a `Slot` for each leaf. What has none raises NotCompiled, which names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from glissando.block import MLP, Block, BlockState, ComplexNorm, RMSNorm
from glissando.depth.base import EPS
from glissando.errors import NotCompiled, unknown_name
from glissando.kernels.products import GROUP, aligned, grouped
from glissando.model import ComplexHead, LanguageModel, ModelState
from glissando.quantisation import quantised

#: instructions; the interpreter has a branch for each
Op = IntEnum(
    "Op",
    "LINEAR RMS_NORM LAYER_NORM COMPLEX_NORM ACTIVATE SILU_PRODUCT ADD_SCALED SCALED ADD_WEIGHTS GATE EMBED POSITION "
    "CONV ROPE ROTATE SPECTRAL SCAN_PAIRS LIQUID DELTA ATTENTION NEARNESS BOUNDED_ENERGY MEAN COPY_CONTROL DRAW",
    start=0,
)

# Kernels are compiled anew where this file changes: see glissando.kernels.compiled.
#: operands of an instruction, and its code
_WIDTH = 24
ACTIVATIONS = {"relu": 0, "relu2": 1, "gelu": 2, "tanh": 3, "sigmoid": 4}

Precision = Literal["float32", "bf16", "int8"]
Caches = Literal["float32", "bf16"]
PRECISIONS: dict[str, int] = {"float32": 0, "bf16": 1, "int8": 2}
_STORED: tuple[Any, ...] = (np.float32, np.uint16, np.int8)
#: a matrix begins at a multiple of so many numbers, and a vector's place is a multiple of so many: a cache line's
_LINE, _CACHE_LINE = 64, 16


class Slot(NamedTuple):
    """Where a leaf of a state lies: in which array, from where on, its shape without the batch."""

    array: Literal["fixed", "exact", "slots", "half_slots", "exact_slots", "filled"]
    at: int = 0
    shape: tuple[int, ...] = ()  # of a cache: (G, K) of (G, slots, K), or (H,) of (H, slots)
    transposed: bool = False  # in a page a cache lies as (G, 64, K), or as (G, K, 64)


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
    fixed: int  # with as many at the end as a vector may reach beyond the last state
    exact: int
    slots: int  # units of a page
    half_slots: int
    exact_slots: int
    logits: int  # the register that they begin at
    state: Any  # a state of the model with a Slot for each leaf


def own_lowering(part: nn.Module, kind: str) -> Any:
    """The method `lower` of a part's very class: a subclass may compute something else. Raises NotCompiled."""
    if "lower" not in vars(type(part)):
        raise NotCompiled(f"{kind} `{type(part).__name__}`")
    return part.lower


class Register(int):
    """A place in a vector, counted from the vector's beginning: `register + n` is n numbers further in the same one."""

    vector: int

    def __new__(cls, place: int, vector: int) -> Register:
        register = super().__new__(cls, place)
        register.vector = vector
        return register

    def __add__(self, offset: int) -> Register:
        return Register(int(self) + offset, self.vector)


class Builder:
    """Collects the instructions of a program.

    precision  of matrices: `float32`, `bf16`, or `int8` with a scale for each output
    caches     of the vectors of caches: `float32` or `bf16`
    """

    #: the slot of a leaf that counts the tokens read
    filled = FILLED

    def __init__(self, precision: Precision = "float32", caches: Caches = "float32") -> None:
        if precision not in PRECISIONS:
            raise unknown_name("precision of weights", precision, PRECISIONS)
        self.kind = PRECISIONS[precision]
        if caches not in get_args(Caches):
            raise unknown_name("precision of caches", caches, get_args(Caches))
        self.is_half = caches == "bf16"
        self.fixed = self.exact = self.slots = self.half_slots = self.exact_slots = 0
        self._code: list[list[int]] = []
        self._sizes: list[int] = []  # of each vector in registers
        self._numbers: list[float] = []
        self._weights: list[Any] = []
        self._matrices: tuple[list[Any], list[Any]] = ([], [])
        self._at = [0, 0, 0]
        self._placed: dict[int, tuple[Tensor, Matrix]] = {}
        self._tables: dict[tuple[Any, ...], int] = {}

    # ------------------------------------------------------------------ places

    def register(self, size: int) -> Register:
        """A vector's place while the program is written: `finish` lays those one over the other that are not needed at
        the same time. What an instruction reads, one before it has written."""
        self._sizes.append(size)
        return Register(0, len(self._sizes) - 1)

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
        if kind == 0:
            self._aligned(0, self._weights)
            begin = self.weights(torch.from_numpy(grouped(values.numpy())))
        else:
            begin = self._aligned(kind, self._matrices[kind - 1])
            if kind == 1:
                stored = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
            else:
                numbers, scale = quantised(values)
                scales, stored = self.weights(scale), numbers.numpy()
            self._matrices[kind - 1].append(grouped(stored))
            self._at[kind] += len(self._matrices[kind - 1][-1])
        rows, columns = values.shape
        matrix = Matrix(begin, rows, columns, kind, scales)
        self._placed[id(weight)] = weight, matrix  # kept, so that no other tensor gets its id
        return matrix

    def _aligned(self, kind: int, parts: list[Any]) -> int:
        """Where the next matrix of a kind begins."""
        spare = -self._at[kind] % _LINE
        parts.append(np.zeros(spare, _STORED[kind]))
        self._at[kind] += spare
        return self._at[kind]

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

    def keep_vectors(self, *shape: int, transposed: bool = False) -> Slot:
        """The same for (G, K), in the type that was chosen for caches."""
        if not self.is_half:
            return self.keep_slots(*shape)._replace(transposed=transposed)
        self.half_slots += int(np.prod(shape))
        return Slot("half_slots", self.half_slots - int(np.prod(shape)), shape, transposed)

    def keep_exact_slots(self, heads: int) -> Slot:
        self.exact_slots += heads
        return Slot("exact_slots", self.exact_slots - heads, (heads,))

    # ------------------------------------------------------------------ instructions

    def emit(self, op: str, *operands: int) -> None:
        """An instruction by its name, with the operands that the module documents."""
        self._code.append([Op[op], *operands, *[0] * (_WIDTH - 1 - len(operands))])

    def linear(self, weight: Tensor, bias: Tensor | None, src: int, dst: int | None = None, whole: bool = False) -> int:
        """W x + bias, in registers of its own where `dst` is None."""
        m = self.matrix(weight, whole)
        dst = self.register(m.rows) if dst is None else dst
        at = -1 if bias is None else self.weights(bias)
        self.emit("LINEAR", src, dst, m.columns, m.rows, m.at, at, m.kind, m.scales)
        return dst

    def add(self, a: int, b: int, size: int, scale: float = 1.0) -> int:
        """a + scale b."""
        dst = self.register(size)
        self.emit("ADD_SCALED", a, b, dst, size, self.number(scale))
        return dst

    def scaled(self, x: int, size: int, scale: float) -> int:
        dst = self.register(size)
        self.emit("SCALED", x, dst, size, self.number(scale))
        return dst

    def activate(self, kind: str, src: int, size: int) -> int:
        dst = self.register(size)
        self.emit("ACTIVATE", src, dst, size, ACTIVATIONS[kind])
        return dst

    def silu_product(self, gate: int, x: int, size: int) -> int:
        """silu(gate) x."""
        dst = self.register(size)
        self.emit("SILU_PRODUCT", gate, x, dst, size)
        return dst

    def rope(self, size: int, base: float, width: int) -> int:
        """The table of angles of the token's position; one for all layers that turn alike."""
        key = (size, base, width)
        if key not in self._tables:
            frequencies = self.number(*(base ** (-2 * i / width) for i in range(size // 2)))
            self._tables[key] = self.register(size)
            self.emit("ROPE", self._tables[key], frequencies, size // 2)
        return self._tables[key]

    def rotate(self, x: int, table: int, heads: int, size: int, sign: int = 1) -> None:
        self.emit("ROTATE", x, table, heads, size, sign)

    # ------------------------------------------------------------------ parts that mixers and depths share

    def key_biases(self, forget: Any, importance: Any, x: int, heads: int) -> tuple[int, Slot | None, Slot | None]:
        """A register with the forget gates' arguments and then the importances (2 H); and the slots of C - g of each
        key and of C at the latest token, None where they are not kept."""
        dst = self.register(2 * heads)
        for layer, at in ((forget, dst), (importance, dst + heads)):
            if layer is not None:
                self.linear(layer.weight, layer.bias, x, at)
        lowered = None if forget is None and importance is None else self.keep_exact_slots(heads)
        return dst, lowered, None if forget is None else self.keep_exact(heads)

    @staticmethod
    def places(*slots: Slot | None) -> list[int]:
        """Where they begin; 0 for None, which is not read."""
        return [0 if slot is None else slot.at for slot in slots]

    def block(self, block: nn.Module, x: int, residual: bool = True) -> tuple[int, Any]:
        """Block.forward for one token."""
        if type(block) is not Block:
            raise NotCompiled(f"block `{type(block).__name__}`")
        size, past = block.hidden_size, None
        y = x if block.order == "post" else self.norm(block.mixer_norm, x, size)
        if block.conv is not None:
            weight = block.conv.weight
            past = self.keep_fixed(weight.shape[1] - 1, size)
            taps, src, y = self.weights(weight.t().contiguous()), y, self.register(size)
            self.emit("CONV", src, y, size, weight.shape[1], taps, past.at)
        y, inner = own_lowering(block.mixer, "mixer")(self, y)
        if block.mixer_scale is not None:
            y = self.scaled(y, size, float(block.mixer_scale))
        state = BlockState(past, inner)  # type: ignore[arg-type]
        if residual:
            y = self.add(x, y, size)
            y = x = y if block.order == "pre" else self.norm(block.mixer_norm, y, size)
        if block.mlp is None or block.mlp_norm is None:
            return y, state
        if block.order != "pre":
            return self.norm(block.mlp_norm, self.add(y, self.mlp(block.mlp, y), size), size), state
        return self.add(y, self.mlp(block.mlp, self.norm(block.mlp_norm, x, size)), size), state

    def norm(self, norm: nn.Module, x: int, size: int) -> int:
        if isinstance(norm, nn.Identity):
            return x
        dst = self.register(size)
        if isinstance(norm, RMSNorm):
            self.emit("RMS_NORM", x, dst, size, self.weights(norm.weight), self.number(norm.eps))
        elif isinstance(norm, nn.LayerNorm):
            gain, bias = self.weights(norm.weight), self.weights(norm.bias)
            self.emit("LAYER_NORM", x, dst, size, gain, bias, self.number(norm.eps))
        elif isinstance(norm, ComplexNorm):
            self.emit("COMPLEX_NORM", x, dst, size, self.number(norm.eps))
        else:
            raise NotCompiled(f"norm `{type(norm).__name__}`")
        return dst

    def mlp(self, mlp: MLP, x: int) -> int:
        h = self.linear(mlp.up.weight, mlp.up.bias, x)
        hidden = mlp.down.in_features
        swiglu = mlp.kind == "swiglu"
        h = self.silu_product(h, h + hidden, hidden) if swiglu else self.activate(mlp.kind, h, hidden)
        return self.linear(mlp.down.weight, mlp.down.bias, h)

    def shortcut(self, row: Tensor, source: int) -> int:
        """c_s x_0 / rms(x_0)."""
        dst, size = self.register(row.numel()), row.numel()
        self.emit("RMS_NORM", source, dst, size, self.weights(row), self.number(EPS))
        return dst

    def with_shortcut(self, x: int, shortcuts: Tensor | None, application: int, source: int) -> int:
        """x + c_s x_0 / rms(x_0); x without shortcuts."""
        if shortcuts is None:
            return x
        return self.add(x, self.shortcut(shortcuts[application], source), shortcuts.shape[1])

    def blocks(
        self, blocks: Iterable[nn.Module], x: int, shortcuts: Tensor | None, source: int, first: int = 0
    ) -> tuple[int, tuple[Any, ...]]:
        """Blocks one after the other, that of number `first` at first; and their states."""
        states = []
        for number, block in enumerate(blocks, first):
            x, state = self.block(block, self.with_shortcut(x, shortcuts, number, source))
            states.append(state)
        return x, tuple(states)

    def gated(self, gates: Tensor | None, index: int | None, x: int, y: int, size: int) -> int:
        """x + a (y - x) for one of the gates; y without."""
        if gates is None or index is None:
            return y
        return self.add(x, self.add(y, x, size, -1.0), size, float(gates[index]))

    def shifted(self, x: int, bias: Tensor) -> int:
        """x + bias."""
        dst = self.register(bias.numel())
        self.emit("ADD_WEIGHTS", x, self.weights(bias), dst, bias.numel())
        return dst

    def finish(self, logits: int, state: Any) -> Program:
        def concatenated(kind: int, parts: Sequence[Any]) -> Any:
            whole = aligned(sum(map(len, parts)) + 1, _STORED[kind])
            return np.concatenate([*parts, np.zeros(1, _STORED[kind])], out=whole)

        assert isinstance(logits, Register)
        code, result, registers = _allocated(self._code, self._sizes, logits)
        table = np.array(code, np.int64)
        attention, nearness = table[:, 0] == Op.ATTENTION, table[:, 0] == Op.NEARNESS
        keys, values, exact = 6, 7, 8  # operands of both
        halves_at, bytes_ = 4 * GROUP * self.slots, 4 * GROUP  # from units to bytes; bfloat16 lies behind float32
        vectors_at, vector_bytes = (halves_at, bytes_ // 2) if self.is_half else (0, bytes_)
        table[attention | nearness, values] = vectors_at + vector_bytes * table[attention | nearness, values]
        table[attention, keys] = vectors_at + vector_bytes * table[attention, keys]
        table[nearness, keys] *= bytes_
        exact_at = halves_at + bytes_ // 2 * self.half_slots
        table[attention | nearness, exact] = exact_at + 2 * bytes_ * table[attention | nearness, exact]
        return Program(
            table,
            np.array([*self._numbers, 0.0]),
            concatenated(0, self._weights),
            concatenated(1, self._matrices[0]),
            concatenated(2, self._matrices[1]),
            registers, self.fixed + GROUP, self.exact, self.slots, self.half_slots, self.exact_slots,
            int(result), state,
        )  # fmt: skip


def _allocated(
    code: Sequence[Sequence[int]], sizes: Sequence[int], result: Register
) -> tuple[list[list[int]], Register, int]:
    """The instructions with places in memory for registers, the place of the result, and how many numbers all take.

    A vector keeps its place from the first instruction that names it to the last, the result's to the end; only then
    may another one take it. An odd number of cache lines in all, so that those of several rows are in different sets
    of a cache.
    """
    last = {x.vector: n for n, line in enumerate(code) for x in line if isinstance(x, Register)}
    last[result.vector] = len(code)
    places: dict[int, int] = {}
    alive: list[int] = []
    end = _CACHE_LINE
    for n, line in enumerate(code):
        alive = [vector for vector in alive if last[vector] >= n]
        for vector in dict.fromkeys(x.vector for x in line if isinstance(x, Register)):
            if vector not in places:
                places[vector] = _gap(sizes[vector], [(places[other], sizes[other]) for other in alive])
                alive.append(vector)
                end = max(end, places[vector] + sizes[vector])
    whole = [[int(x) + places[x.vector] if isinstance(x, Register) else int(x) for x in line] for line in code]
    return (
        whole,
        Register(int(result) + places[result.vector], result.vector),
        (-(-end // _CACHE_LINE) | 1) * _CACHE_LINE,
    )


def _gap(size: int, taken: list[tuple[int, int]]) -> int:
    """The first place with room between those that are taken."""
    place = 0
    for begin, length in sorted(taken):
        if place + size <= begin:
            break
        place = max(place, -(-(begin + length) // _CACHE_LINE) * _CACHE_LINE)
    return place


def lower(
    model: LanguageModel, precision: Precision = "float32", with_control: bool = False, caches: Caches = "float32"
) -> Program:
    """The program of one token of `model`; with_control: a control is given to each.

    Raises NotCompiled for what has no compiled form.
    """
    if type(model) is not LanguageModel:
        raise NotCompiled(f"a {type(model).__name__}, which may compute something else than a LanguageModel")
    builder, config = Builder(precision, caches), model.config
    size = config.hidden_size
    x: int = builder.register(size)
    table = builder.matrix(model.embedding.weight)
    builder.emit("EMBED", x, size, table.at, table.kind, table.scales, table.rows)
    if model.position_embedding is not None:
        builder.emit("POSITION", x, size, builder.weights(model.position_embedding.weight))
    if model.lift is not None:
        x = builder.linear(model.lift.weight, model.lift.bias, x)
    control = None
    if with_control:
        control = builder.register(len(config.controls))
        builder.emit("COPY_CONTROL", control, len(config.controls))
    x, state = own_lowering(model.depth, "depth")(builder, x, control)
    x = builder.norm(model.norm, x, model.width)
    if config.logit_scale != 1.0:
        x = builder.scaled(x, model.width, config.logit_scale)
    if model.head is None:
        logits = builder.linear(model.embedding.weight, model.head_bias, x)
    elif isinstance(model.head, ComplexHead):
        bias = None if model.head.bias is None else model.head.bias.sum(-1)
        logits = builder.linear(model.head.weight.flatten(1), bias, x, whole=True)
    else:
        assert isinstance(model.head, nn.Linear)
        logits = builder.linear(model.head.weight, model.head.bias, x)
    return builder.finish(logits, ModelState(FILLED, state))  # type: ignore[arg-type]
