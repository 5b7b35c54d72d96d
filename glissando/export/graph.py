"""The model as a function of tensors alone: ids, the dials and every part of the state in, logits and the state out.

    ids      (B, T) int64, T >= 1
    control  (B, C) float32, of a model with dials
    state.*  each part of the state -> next.*

T is free: one graph reads a prompt and a token. B is free, or one text: a graph of one is traced in two thirds of the
time. Names follow the tree of the state: `state.depth.0.mixer.h`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from glissando.block import Block
from glissando.depth import Depth
from glissando.errors import Refused
from glissando.export.forms import prepared
from glissando.model import LanguageModel
from glissando.state import State

#: names of axes whose size is free
BATCH, TIME = "batch", "time"


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


class Stepper(nn.Module):
    """model(ids, state) -> (logits, state) as a function of a flat list of tensors, of any number of rows or of one."""

    def __init__(self, model: LanguageModel, capacity: int, *, one_row: bool = False) -> None:
        super().__init__()
        self.rows: int | str = 1 if one_row else BATCH
        self.model = prepared(model, capacity)
        self.dials = list(model.config.dials)
        self._tree = self.model.init_state(1)
        self.leaves = [leaf_of(name, value, self.rows) for name, value in named(self._tree)]

    def init_state(self, batch_size: int) -> list[Tensor]:
        # Each a tensor of its own: a graph takes two inputs that are one tensor for one input.
        return [value.clone() for _, value in named(self.model.init_state(batch_size))]

    def forward(self, ids: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        control, flat = (rest[0], rest[1:]) if self.dials else (None, rest)
        state = filled(self._tree, iter(flat), None)
        logits, after = self.model(ids, state, control=control)
        return logits, *(value for _, value in named(after))

    @property
    def input_names(self) -> list[str]:
        return ["ids", *(["control"] if self.dials else []), *(leaf.input for leaf in self.leaves)]

    def arguments(self, batch: int, time: int) -> tuple[Tensor, ...]:
        """Any inputs of these sizes."""
        control = [torch.zeros(batch, len(self.dials))] if self.dials else []
        return torch.zeros(batch, time, dtype=torch.int64), *control, *self.init_state(batch)

    def trace(self) -> torch.export.ExportedProgram:
        """Raises Refused, with PyTorch's reason, for a model whose forward cannot be traced."""
        free = {} if self.rows == 1 else {0: torch.export.Dim(BATCH, min=1)}
        # Sizes of an example are those that no other axis has, and not 1, which PyTorch would take for fixed.
        arguments = self.arguments(3 if free else 1, 5)
        axes: list[dict[int, Any]] = [dict(free) for _ in arguments]
        axes[0][1] = torch.export.Dim(TIME, min=1)
        return traced(self, arguments, axes)


def traced(
    module: nn.Module, arguments: tuple[Tensor, ...], axes: Sequence[dict[int, Any]]
) -> torch.export.ExportedProgram:
    """The graph of module(first, *rest), with the free axes of each argument.

    Raises Refused, with PyTorch's reason, for what cannot be traced.
    """
    try:
        with torch.no_grad():
            program = torch.export.export(module, arguments, dynamic_shapes=(axes[0], tuple(axes[1:])), strict=False)
    except Refused:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0].split(" For more information")[0].rstrip(".")
        blocks = [part for part in module.modules() if isinstance(part, Block)]
        depths = [part for part in module.modules() if isinstance(part, Depth)]
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
