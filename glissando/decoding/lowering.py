"""Models as programs: the forward pass of one token, module by module, as instructions.

Each function here writes what a module's `forward` computes for one token behind a state, and returns where its output
is and, for modules with a state, that state with a `Slot` for each leaf. A mixer of one's own gets a compiled step by

    @lower_mixer.register
    def _(mixer: MyMixer, builder: Builder, x: int) -> tuple[int, State]: ...

What has none raises NotCompiled, which names it.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from torch import Tensor, nn

from glissando.block import MLP, Block, BlockState, ComplexNorm, RMSNorm
from glissando.decoding.program import (
    ADD_WEIGHTS,
    COMPLEX_NORM,
    CONV,
    COPY_CONTROL,
    EMBED,
    FILLED,
    GATE,
    LAYER_NORM,
    MEAN,
    POSITION,
    RMS_NORM,
    Builder,
    NotCompiled,
    Precision,
    Program,
)
from glissando.depth import Depth, DiscreteDepth, FlowDepth, TiedDepth
from glissando.depth.flow import FlowState
from glissando.depth.mean_gate import MeanGate, MeanState
from glissando.depth.shortcuts import EPS
from glissando.depth.solvers import TABLEAUS
from glissando.mixers import Mixer
from glissando.model import ComplexHead, LanguageModel, ModelState


def lower(model: LanguageModel, precision: Precision = "float32", with_control: bool = False) -> Program:
    """The program of one token of `model`; with_control: a control is given to each.

    Raises NotCompiled for what has no compiled form.
    """
    if type(model) is not LanguageModel:
        raise NotCompiled(f"a {type(model).__name__}, which may compute something else than a LanguageModel")
    builder, config = Builder(precision), model.config
    size = config.hidden_size
    x = builder.register(size)
    table = builder.matrix(model.embedding.weight)
    builder.emit(EMBED, x, size, table.at, table.kind, table.scales)
    if model.position_embedding is not None:
        builder.emit(POSITION, x, size, builder.weights(model.position_embedding.weight))
    if model.lift is not None:
        x = builder.linear(model.lift.weight, model.lift.bias, x)
    control = None
    if with_control:
        control = builder.register(len(config.controls))
        builder.emit(COPY_CONTROL, control, len(config.controls))
    x, state = _own(lower_depth, model.depth)(model.depth, builder, x, control)
    x = lower_norm(model.norm, builder, x, model.width)
    if config.logit_scale != 1.0:
        x = builder.scaled(x, model.width, config.logit_scale)
    if model.head is None:
        logits = builder.linear(model.embedding.weight, model.head_bias, x)
    elif isinstance(model.head, ComplexHead):
        bias = None if model.head.bias is None else model.head.bias.sum(-1)
        logits = builder.linear(model.head.weight.flatten(1), bias, x, whole=True)
    else:
        logits = builder.linear(model.head.weight, model.head.bias, x)
    return builder.finish(logits, ModelState(FILLED, state))


def _own(function: Any, module: nn.Module) -> Any:
    """What is registered for the module's very type: a subclass may compute something else."""
    return function.registry.get(type(module), function.registry[object])


# States here hold Slots where a model's own hold tensors.
# mypy: disable-error-code="arg-type"


# ---------------------------------------------------------------------- depths


@singledispatch
def lower_depth(depth: Depth, builder: Builder, x: int, control: int | None) -> tuple[int, Any]:
    """All blocks; control: the register of the control's values, None where none is given."""
    raise NotCompiled(f"depth `{type(depth).__name__}`")


@lower_depth.register
def _(depth: DiscreteDepth, builder: Builder, x: int, control: int | None) -> tuple[int, Any]:
    states: list[Any] = []
    source = x
    for number, block in enumerate(depth.blocks):
        x = _with_shortcut(builder, x, depth.shortcuts, number, source)
        y, state = lower_block(block, builder, x)
        after: Any = state
        size: int = block.hidden_size  # type: ignore[assignment]
        if depth.gate is not None:
            change = builder.add(y, x, size, -1.0)
            gate, mean = _mean_gate(depth.gate, builder, change)
            y = builder.register(size)
            builder.emit(GATE, x, change, y, size, gate)
            after = (state, mean)
        x = _gated(builder, depth.gates, depth.gated.get(number), x, y, size)
        states.append(after)
    return x, tuple(states)


@lower_depth.register
def _(depth: TiedDepth, builder: Builder, x: int, control: int | None) -> tuple[int, Any]:
    states, source = [], x
    for step, i in enumerate(depth.order):
        x = _with_shortcut(builder, x, depth.shortcuts, step, source)
        block = depth.blocks[i]
        size: int = block.hidden_size  # type: ignore[assignment]
        y, state = lower_block(block, builder, _shifted(builder, x, depth.step_bias[step]))
        x = _gated(builder, depth.gates, depth.gated.get(step), x, y, size)
        states.append(state)
    return x, tuple(states)


@lower_depth.register
def _(depth: FlowDepth, builder: Builder, x: int, control: int | None) -> tuple[int, Any]:
    if depth.config.tolerance is not None:
        raise NotCompiled("depth.tolerance, by which tokens halt")
    if depth.config.backward == "reversible":
        raise NotCompiled("depth.backward `reversible`, which computes two coupled halves")
    size, tableau, step_size = depth.field.hidden_size, TABLEAUS[depth.config.method], 1 / depth.n_steps
    term = None
    if control is not None and depth.control is not None:
        term = builder.linear(depth.control.weight, depth.control.bias, control)
    before, flow, after, source, half = [], [], [], x, len(depth.before)
    for number, block in enumerate(depth.before):
        x = _with_shortcut(builder, x, depth.shortcuts, number, source)
        x, state = lower_block(block, builder, x)
        before.append(state)
    alpha = float(depth.alpha)
    shortcut = None if depth.shortcuts is None else _shortcut(builder, depth.shortcuts[half], source)

    def combined(start: int, weights: Any, slopes: list[int]) -> int:
        for weight, slope in zip(weights, slopes, strict=True):
            start = start if weight == 0 else builder.add(start, slope, size, step_size * weight * alpha)
        return start

    for step in range(depth.n_steps):
        slopes: list[int] = []
        for row, share in zip(tableau.a, tableau.c, strict=True):
            time = depth.time(depth.alpha.new_full((1,), (step + share) * step_size))
            at = _shifted(builder, combined(x, row, slopes), time)
            at = at if term is None else builder.add(at, term, size)
            at = at if shortcut is None else builder.add(at, shortcut, size)
            slope, state = lower_block(depth.field, builder, at, residual=False)
            slopes.append(slope)
            flow.append(state)
        x = combined(x, tableau.b, slopes)
    for number, block in enumerate(depth.after, half + 1):
        x = _with_shortcut(builder, x, depth.shortcuts, number, source)
        x, state = lower_block(block, builder, x)
        after.append(state)
    return x, FlowState(tuple(before), tuple(flow), tuple(after))


def _shortcut(builder: Builder, row: Tensor, source: int) -> int:
    """c_s x_0 / rms(x_0)."""
    dst, size = builder.register(row.numel()), row.numel()
    builder.emit(RMS_NORM, source, dst, size, builder.weights(row), builder.number(EPS))
    return dst


def _with_shortcut(builder: Builder, x: int, shortcuts: Tensor | None, application: int, source: int) -> int:
    """x + c_s x_0 / rms(x_0); x without shortcuts."""
    if shortcuts is None:
        return x
    return builder.add(x, _shortcut(builder, shortcuts[application], source), shortcuts.shape[1])


def _gated(builder: Builder, gates: Tensor | None, index: int | None, x: int, y: int, size: int) -> int:
    """x + a (y - x) for one of the gates; y without."""
    if gates is None or index is None:
        return y
    return builder.add(x, builder.add(y, x, size, -1.0), size, float(gates[index]))


def _shifted(builder: Builder, x: int, bias: Tensor) -> int:
    dst = builder.register(bias.numel())
    builder.emit(ADD_WEIGHTS, x, builder.weights(bias), dst, bias.numel())
    return dst


def _mean_gate(gate: MeanGate, builder: Builder, y: int) -> tuple[int, MeanState]:
    size, hidden = gate.up.in_features, gate.up.out_features
    mean, passed, read = builder.keep_fixed(size), builder.keep_exact(), builder.register(size)
    builder.emit(MEAN, y, read, size, mean.at, passed.at)
    h = builder.activate("gelu", builder.linear(gate.up.weight, gate.up.bias, read), hidden)
    share = builder.activate("sigmoid", builder.linear(gate.down.weight, gate.down.bias, h), 1)
    return share, MeanState(mean, passed)


# ---------------------------------------------------------------------- blocks


def lower_block(block: Block, builder: Builder, x: int, residual: bool = True) -> tuple[int, BlockState]:
    """Block.forward for one token."""
    if type(block) is not Block:
        raise NotCompiled(f"block `{type(block).__name__}`")
    size, past = block.hidden_size, None
    y = x if block.order == "post" else lower_norm(block.mixer_norm, builder, x, size)
    if block.conv is not None:
        weight = block.conv.weight
        past = builder.keep_fixed(weight.shape[1] - 1, size)
        taps, src, y = builder.weights(weight.t().contiguous()), y, builder.register(size)
        builder.emit(CONV, src, y, size, weight.shape[1], taps, past.at)
    y, inner = _own(lower_mixer, block.mixer)(block.mixer, builder, y)
    if block.mixer_scale is not None:
        y = builder.scaled(y, size, float(block.mixer_scale))
    state = BlockState(past, inner)
    if residual:
        y = builder.add(x, y, size)
        y = x = y if block.order == "pre" else lower_norm(block.mixer_norm, builder, y, size)
    if block.mlp is None or block.mlp_norm is None:
        return y, state
    if block.order != "pre":
        return lower_norm(block.mlp_norm, builder, builder.add(y, _mlp(block.mlp, builder, y), size), size), state
    h = _mlp(block.mlp, builder, lower_norm(block.mlp_norm, builder, x, size))
    return builder.add(y, h, size), state


def lower_norm(norm: nn.Module, builder: Builder, x: int, size: int) -> int:
    if isinstance(norm, nn.Identity):
        return x
    dst = builder.register(size)
    if isinstance(norm, RMSNorm):
        builder.emit(RMS_NORM, x, dst, size, builder.weights(norm.weight), builder.number(norm.eps))
    elif isinstance(norm, nn.LayerNorm):
        gain, bias = builder.weights(norm.weight), builder.weights(norm.bias)
        builder.emit(LAYER_NORM, x, dst, size, gain, bias, builder.number(norm.eps))
    elif isinstance(norm, ComplexNorm):
        builder.emit(COMPLEX_NORM, x, dst, size, builder.number(norm.eps))
    else:
        raise NotCompiled(f"norm `{type(norm).__name__}`")
    return dst


def _mlp(mlp: MLP, builder: Builder, x: int) -> int:
    h = builder.linear(mlp.up.weight, mlp.up.bias, x)
    hidden = mlp.down.in_features
    swiglu = mlp.kind == "swiglu"
    h = builder.silu_product(h, h + hidden, hidden) if swiglu else builder.activate(mlp.kind, h, hidden)
    return builder.linear(mlp.down.weight, mlp.down.bias, h)


# ---------------------------------------------------------------------- mixers


@singledispatch
def lower_mixer(mixer: Mixer, builder: Builder, x: int) -> tuple[int, Any]:
    """Mixer.forward for one token; the state has a Slot for each leaf."""
    raise NotCompiled(f"mixer `{type(mixer).__name__}`")
