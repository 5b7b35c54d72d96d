"""Models as programs: the forward pass of one token, module by module, as instructions.

A mixer's or depth's method `lower` writes what its `forward` computes for one token behind a state, and returns where
its output is and that state with a `Slot` for each leaf. What has none raises NotCompiled, which names it.
"""

from __future__ import annotations

from torch import nn

from glissando.decoding.program import FILLED, Builder, Caches, Precision, Program, own_lowering
from glissando.errors import NotCompiled
from glissando.model import ComplexHead, LanguageModel, ModelState


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
