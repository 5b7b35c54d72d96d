"""How the dimensions of a parameter grow, as data: which old entry each new one is a copy of.

An activation x of size n becomes x' = U x, where U repeats x (`tile`) or writes something new behind it (`append`). A
parameter's dimension either *writes* an activation, W' = U W, or *reads* one, W' = W U^+ with U^+ U = 1:

    tile    U = [1; 1; ...; 1],  U^+ = [1 1 ... 1] / k      append    U = [1; anything],  U^+ = [1 0]

so that W' U_in = U_out W: the new layer maps the lifted input to the lifted output. Everything that acts on each number
alone, norms included, commutes with a tile. Noise that sums to zero over the copies that are read changes nothing:
[[W/2 + N1, W/2 - N1], [W/2 + N2, W/2 - N2]] [x; x] = [W x; W x].

A module's method `growth` returns a table from the names of its parameters to their dimensions.

Function-preserving widening: Chen, Goodfellow and Shlens 2016, arXiv 1511.05641; symmetry breaking in pairs: Wang et
al. 2023 (LEMON), arXiv 2310.07999.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from glissando.config import options

#: entries of a `source` that copy nothing
NEW = -1


@dataclass(frozen=True)
class Lift:
    """One dimension: new entry j is old entry source[j], or NEW. Each old entry has `copies` of it.

    zero   new entries are 0 and not what a new model starts with
    lean   in [-1, 1], with a sum of 0 over the copies of an entry: they may have the sizes sqrt(1 + noise lean), as
           where only the sum of their squares counts; 0 where they may not
    """

    source: Tensor  # (new,) int64
    old: int
    copies: int = 1
    zero: bool | Tensor = False  # of all, or (new,) bool
    lean: float | Tensor = 0.0  # of all, or (new,)

    def __mul__(self, inner: Lift) -> Lift:
        """The lift of a dimension whose entries are self's, each made of inner's, such as heads of a size."""
        outer = self.source.unsqueeze(1)
        source = torch.where((outer == NEW) | (inner.source == NEW), NEW, outer * inner.old + inner.source)
        zero = self.zeros().unsqueeze(1) | inner.zeros()
        lean = self.leans().unsqueeze(1) + inner.leans()
        return Lift(source.flatten(), self.old * inner.old, self.copies * inner.copies, zero.flatten(), lean.flatten())

    def zeros(self) -> Tensor:
        """(new,) bool."""
        return self.zero if isinstance(self.zero, Tensor) else torch.full(self.source.shape, self.zero)

    def leans(self) -> Tensor:
        """(new,)"""
        return self.lean if isinstance(self.lean, Tensor) else torch.full(self.source.shape, self.lean)

    def silent(self) -> Lift:
        """The same with new entries of 0."""
        return replace(self, zero=True)


def tile(old: int, new: int) -> Lift:
    """All entries, again and again. Raises ValueError if `new` is no multiple."""
    if new % old:
        raise ValueError(f"a tile of {old} entries cannot have {new}; give a multiple")
    return Lift(torch.arange(new) % old, old, new // old)


def leaning_tile(old: int, new: int) -> Lift:
    """A tile whose copies may have other sizes, evenly from the smallest to the largest."""
    lift = tile(old, new)
    if lift.copies == 1:
        return lift
    return replace(lift, lean=torch.linspace(-1, 1, lift.copies).repeat_interleave(old))


def append(old: int, new: int) -> Lift:
    """The old entries, and new ones behind them. Raises ValueError if `new` is smaller."""
    if new < old:
        raise ValueError(f"{old} entries cannot become {new}: growth cannot make it smaller")
    index = torch.arange(new)
    return Lift(torch.where(index < old, index, NEW), old)


def fill(old: int, new: int) -> Lift:
    """All entries as often as they fit, and new ones behind them. Raises ValueError if `new` is smaller."""
    if new < old:
        raise ValueError(f"{old} entries cannot become {new}: growth cannot make it smaller")
    index = torch.arange(new)
    return Lift(torch.where(index < new - new % old, index % old, NEW), old, new // old)


def append_pairs(old: int, new: int) -> Lift:
    """`append` to both halves, whose entries RoPE turns in pairs; both sizes are even."""
    half = append(old // 2, new // 2)
    return join(half, half)


def spread(old: int, new: int) -> Lift:
    """Old entry m at m new / old and new ones between: the Fourier coefficients of a tile."""
    if new % old:
        raise ValueError(f"{old} entries cannot be spread over {new}; give a multiple")
    step, index = new // old, torch.arange(new)
    return Lift(torch.where(index % step == 0, index // step, NEW), old)


def join(*parts: Lift) -> Lift:
    """One behind the other: the parts of a fused projection. Raises ValueError unless all have as many copies."""
    if len({part.copies for part in parts}) > 1:
        raise ValueError(f"parts of one parameter must grow alike, got {[part.copies for part in parts]} copies")

    def after(before: Lift, part: Lift) -> Lift:
        moved = torch.where(part.source == NEW, NEW, part.source + before.old)
        zero, lean = torch.cat([before.zeros(), part.zeros()]), torch.cat([before.leans(), part.leans()])
        return Lift(torch.cat([before.source, moved]), before.old + part.old, before.copies, zero, lean)

    return reduce(after, parts)


@dataclass(frozen=True)
class Reads:
    """A dimension that reads an activation lifted so: weights are shared by the copies, new entries are not read.

    equal  the shares get no noise: in a recurrence it would drive the difference of two copies, which is rounding
    """

    lift: Lift
    equal: bool = False


class Grows:
    """The growth of one parameter: its dimensions in order, each a Lift (it writes) or Reads; times `scale`.

    share    s: the size of each copy of an entry, relative to it
    copies   M: how many there are

    With no noise the loss is L(W) = L'(W'), and by symmetry all copies have one gradient: g = M s g'. For Adam to move
    every copy as it would have moved the small model's, W' = s W: moments m' = m / (M s), v' = v / (M s)^2, eps' = eps
    / (M s), learning rate s lr and weight decay wd / s. The norm of W's gradient is sqrt(M) s that of the copies'.
    """

    def __init__(self, *dims: Lift | Reads, scale: float = 1.0) -> None:
        self.lifts = [d.lift if isinstance(d, Reads) else d for d in dims]
        self.reads = [isinstance(d, Reads) for d in dims]
        self.noisy = [isinstance(d, Reads) and not d.equal and d.lift.copies > 1 for d in dims]
        self.scale = scale

    @property
    def copies(self) -> int:
        return math.prod(lift.copies for lift in self.lifts)

    @property
    def share(self) -> float:
        pairs = zip(self.lifts, self.reads, strict=True)
        return self.scale / math.prod(lift.copies for lift, reads in pairs if reads)

    @property
    def shape(self) -> tuple[list[int], list[int]]:
        """Old and new sizes."""
        return [lift.old for lift in self.lifts], [len(lift.source) for lift in self.lifts]

    def place(self, old: Tensor, new: Tensor, share: float) -> Tensor:
        """`new` with the entries that have an origin replaced by share times that, and those that must be 0 by 0."""
        known = torch.ones(new.shape, dtype=torch.bool)
        zero = torch.zeros(new.shape, dtype=torch.bool)
        for dim, (lift, reads) in enumerate(zip(self.lifts, self.reads, strict=True)):
            old = old.index_select(dim, lift.source.clamp_min(0).to(old.device))
            view = [-1 if d == dim else 1 for d in range(new.ndim)]
            absent = lift.source == NEW
            known &= ~absent.view(view)
            zero |= (absent & (lift.zeros() | reads)).view(view)
        placed = torch.where(known.to(old.device), share * old, new)
        return placed.masked_fill(zero.to(old.device), 0)

    def value(self, old: Tensor, new: Tensor, noise: float, generator: torch.Generator) -> Tensor:
        """The grown parameter; `new` is what a new model starts with, `noise` relative to the deviation of `old`."""
        grown = self.place(old, new, self.share)
        for dim, (lift, reads, noisy) in enumerate(zip(self.lifts, self.reads, self.noisy, strict=True)):
            if noise and noisy:
                grown = grown + self._opposite(dim, grown, noise * _deviation(old), generator)
            if noise and not reads:
                sizes = (1 + noise * lift.leans().double()).sqrt()
                grown = grown * sizes.view([-1 if d == dim else 1 for d in range(new.ndim)]).to(grown)
        return grown

    def _opposite(self, dim: int, like: Tensor, size: float, generator: torch.Generator) -> Tensor:
        """Normal noise along `dim` whose sum over the copies of an entry is 0; of 2 size / copies, as W / copies is."""
        lift = self.lifts[dim]
        noise = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        known = (lift.source != NEW).view([-1 if d == dim else 1 for d in range(like.ndim)])
        source, noise = lift.source.clamp_min(0), noise * known
        sizes = [lift.old if d == dim else n for d, n in enumerate(like.shape)]
        mean = noise.new_zeros(sizes).index_add(dim, source, noise) / lift.copies
        free = (noise - mean.index_select(dim, source)) * known
        scale = 2 * size / lift.copies * math.sqrt(lift.copies / (lift.copies - 1))
        return (scale * free).to(like)


def _deviation(values: Tensor) -> float:
    return float(values.double().std(correction=0))


#: the growth of the parameters of a module, by name; a tensor is the value of a buffer that no lift describes
Table = dict[str, Grows | Tensor]


def under(name: str, table: Mapping[str, Grows | Tensor]) -> Table:
    """The table of the submodule `name`."""
    return {f"{name}.{inner}": grows for inner, grows in table.items()}


def tables(named: Mapping[str, Mapping[str, Grows | Tensor]]) -> Table:
    """The tables of several submodules as one."""
    return {key: grows for name, table in named.items() for key, grows in under(name, table).items()}


def linear(module: nn.Module | None, writes: Lift, reads: Lift) -> Table:
    """The table of an nn.Linear; nothing for None."""
    if module is None:
        return {}
    bias = {} if module.bias is None else {"bias": Grows(writes)}
    return {"weight": Grows(writes, Reads(reads)), **bias}


def grow_norm(norm: nn.Module, width: Lift) -> Table:
    """A tile's mean and variance are those of its parts; gains and biases are tiled."""
    return {name: Grows(width) for name, _ in norm.named_parameters()}


Factor = Annotated[int, Field(ge=1, strict=True)]
More = Annotated[int, Field(ge=0, strict=True)]


@options
class Growth:
    """By how much a model grows: factors, numbers of what is added, and new sizes.

    width      factor of the width
    heads      factor of the heads; None: that of the width
    ffn        factor of the MLPs' hidden units; None: that of the width
    state      factor of the channels of `spectral` or the state of `liquid`; None: that of the width
    layers     number of new blocks
    steps      number of new applications of a tied depth
    head_size  new size of a head
    vocab      new size of the vocabulary
    noise      standard deviation of the noise between copies, relative to that of the weights; with 0, copies stay
               equal
    seed       seed of the noise and of new parameters
    """

    width: Factor = 1
    heads: Factor | None = None
    ffn: Factor | None = None
    state: Factor | None = None
    layers: More = 0
    steps: More = 0
    head_size: Factor | None = None
    vocab: Factor | None = None
    noise: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.2
    seed: Annotated[int, Field(strict=True)] = 0

    def factor(self, name: str) -> int:
        """The factor of `heads`, `ffn` or `state`: the width's where it is None."""
        factor = getattr(self, name)
        return self.width if factor is None else factor
