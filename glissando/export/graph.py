"""A step of a model as a function of tensors alone: inputs and every part of the state in, outputs and the state out.

    ids      (B, T) int64, T >= 1
    control  (B, C) float32, of a model with dials
    state.*  each part of the state -> next.*

T is free: one graph reads a prompt and a token. B is free, or one text: a graph of one is traced in two thirds of the
time. Names follow the tree of the state: `state.depth.0.mixer.h`.

A module whose forward cannot be traced has a method `export_form(capacity)`, which returns a module with its init_state
and forward, whose state has a fixed shape and whose values decide no control flow, or raises Refused. `capacity` is how
many tokens a state which grows is to hold.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from glissando.backbone import Backbone
from glissando.block import Block
from glissando.depth import Depth
from glissando.errors import Refused
from glissando.model import LanguageModel
from glissando.state import State, leaves

_Model = TypeVar("_Model", bound=Backbone)
#: of inputs or outputs by their names; a free axis has a name
Shapes = dict[str, list[str | int]]
#: free axes: rows, tokens, and the times that are asked about
BATCH, TIME, HORIZONS = "batch", "time", "horizons"
#: their sizes in an example: those that no other axis has, and not 1, which PyTorch would take for fixed
_SIZES: dict[str | int, int] = {BATCH: 3, TIME: 5, HORIZONS: 5}
_TYPES = dict.fromkeys(("ids", "codes", "static_codes"), torch.int64) | {"observed": torch.bool}


@dataclass(frozen=True)
class Leaf:
    """A part of the state. start: the number that all of it holds before any token."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of a row
    start: float
    rows: int | str = BATCH

    @property
    def input(self) -> str:
        return f"state.{self.name}"

    @property
    def output(self) -> str:
        return f"next.{self.name}"

    @property
    def described(self) -> dict[str, Any]:
        """For programs that run the graph."""
        kind, shape = str(self.dtype).removeprefix("torch."), [self.rows, *self.shape]
        return {"input": self.input, "output": self.output, "dtype": kind, "shape": shape, "start": self.start}


class Step(nn.Module):
    """A step of `model`, whose parts have their export form, of any number of rows or of one.

    inputs, outputs  their shapes by name, but for the state's
    """

    inputs: Shapes
    outputs: Shapes

    def __init__(self, model: Backbone, rows: int | str = BATCH) -> None:
        super().__init__()
        self.model, self.rows = model, rows
        self.tree = self.model.init_state(1)
        self.leaves = [leaf_of(name, value, rows) for name, value in named(self.tree)]

    def start(self, rows: int) -> list[Tensor]:
        """The state of so many rows before any token."""
        return [torch.full((rows, *leaf.shape), leaf.start, dtype=leaf.dtype) for leaf in self.leaves]

    @property
    def shapes(self) -> tuple[Shapes, Shapes]:
        """The shapes of all inputs, and of all outputs."""
        shapes: list[list[str | int]] = [[self.rows, *leaf.shape] for leaf in self.leaves]
        before = {leaf.input: shape for leaf, shape in zip(self.leaves, shapes, strict=True)}
        after = {leaf.output: shape for leaf, shape in zip(self.leaves, shapes, strict=True)}
        return self.inputs | before, self.outputs | after

    def trace(self) -> torch.export.ExportedProgram:
        """The graph, with its free axes. Raises Refused, with PyTorch's reason, for what cannot be traced."""
        arguments = [
            torch.ones([_SIZES.get(size, size) for size in shape], dtype=_TYPES.get(name, torch.float32))  # type: ignore[arg-type]
            for name, shape in self.inputs.items()
        ]
        arguments += self.start(_SIZES[BATCH] if self.rows == BATCH else 1)
        shapes = self.shapes[0].values()
        free = {name: torch.export.Dim(name, min=1) for shape in shapes for name in shape if isinstance(name, str)}
        axes = [{i: free[name] for i, name in enumerate(shape) if isinstance(name, str)} for shape in shapes]
        try:
            with torch.no_grad():
                program = torch.export.export(
                    self, tuple(arguments), dynamic_shapes=(axes[0], tuple(axes[1:])), strict=False
                )
        except Refused:
            raise
        except Exception as error:
            reason = str(error).strip().split("\n")[0].split(" For more information")[0].rstrip(".")
            blocks = [part for part in self.modules() if isinstance(part, Block)]
            depths = [part for part in self.modules() if isinstance(part, Depth)]
            parts = {type(part).__name__: part for part in (*(block.mixer for block in blocks), *depths)}
            foreign = [name for name, part in parts.items() if not type(part).__module__.startswith("glissando.")]
            fix = "This is a defect of the library"
            if foreign:
                fix = (
                    f"{', '.join(foreign)} is not of this library: a loop over time steps, or a branch that depends on "
                    "values, cannot be traced. Give it a method `export_form`"
                )
            raise Refused(f"the model cannot be traced: {type(error).__name__}: {reason}. {fix}") from error
        _drop_casts_to_the_same_type(program.graph_module)
        return program


class Stepper(Step):
    """model(ids, state) -> (logits, state)."""

    model: LanguageModel

    def __init__(self, model: LanguageModel, capacity: int, *, one_row: bool = False) -> None:
        super().__init__(prepared(model, capacity), 1 if one_row else BATCH)
        self.dials = list(model.config.dials)
        control: Shapes = {"control": [self.rows, len(self.dials)]} if self.dials else {}
        self.inputs = {"ids": [self.rows, TIME], **control}
        self.outputs = {"logits": [self.rows, TIME, model.config.vocab_size]}

    def forward(self, ids: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        control, flat = (rest[0], rest[1:]) if self.dials else (None, rest)
        logits, after = self.model(ids, filled(self.tree, iter(flat), None), control=control)
        return logits, *(value for _, value in named(after))


def prepared(model: _Model, capacity: int) -> _Model:
    """A copy of the model in which every mixer and depth has its export form, without gradients."""

    def replace(parent: nn.Module) -> None:
        for name, child in parent.named_children():
            form = getattr(child, "export_form", None)
            new = child if form is None else form(capacity)
            if new is not child:
                setattr(parent, name, new)
            replace(new)

    traced = copy.deepcopy(model).eval().requires_grad_(False)
    replace(traced)
    return traced


def grows(model: Backbone) -> bool:
    """Whether a part of the state has a slot for each token, so that a capacity decides its size."""
    few, more = ([x.shape for x in leaves(prepared(model, capacity).init_state(1))] for capacity in (2, 3))
    return few != more


def _drop_casts_to_the_same_type(root: torch.fx.GraphModule) -> None:
    """With their assertions a quarter of all nodes, each of which the exporter would trace again."""
    for module in root.modules():
        assert isinstance(module, torch.fx.GraphModule)
        for node in [*module.graph.nodes]:
            if node.target == torch.ops.aten._assert_tensor_metadata.default:
                module.graph.erase_node(node)
            elif node.target == torch.ops.aten.to.dtype and node.args[0].meta["val"].dtype == node.args[1]:
                node.replace_all_uses_with(node.args[0])
                module.graph.erase_node(node)
        module.recompile()


def named(state: State, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state with their names, depth first, but for the tokens seen that our mixers count: without
    padding each counts what the model does, whose own `position` stands for all."""
    if isinstance(state, Tensor):
        yield prefix, state
    elif isinstance(state, tuple):
        names = getattr(state, "_fields", range(len(state)))
        for name, child in zip(names, state, strict=True):
            if not (prefix and _counts(state, name)):
                yield from named(child, f"{prefix}.{name}" if prefix else str(name))


def _counts(state: State, name: object) -> bool:
    """Whether a part of a state is how many tokens it has seen; a `position` that is no integer is a time."""
    if not type(state).__module__.startswith("glissando.") or name not in ("length", "position"):
        return False
    return not getattr(state, str(name)).is_floating_point()


def leaf_of(name: str, value: Tensor, rows: int | str = BATCH) -> Leaf:
    start = float(value.flatten()[0]) if value.numel() else 0.0
    if not bool((value == start).all()):
        raise Refused(f"the state {name} starts from several numbers, and an exported one starts from one")
    return Leaf(name, value.dtype, tuple(value.shape[1:]), start, rows)


def filled(tree: State, flat: Iterator[Tensor], position: Tensor | None) -> State:
    """The tree with the tensors of `flat` in the place of its own, as `named` has them."""
    if isinstance(tree, Tensor):
        return next(flat)
    if not isinstance(tree, tuple):
        return tree
    children: list[State] = []
    for name, child in zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True):
        if _counts(tree, name):
            position = position if position is not None else next(flat)
            children.append(position)
        else:
            children.append(filled(child, flat, position))
    return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)
