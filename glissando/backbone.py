"""What every model has between what it reads and what it says: a depth of blocks under the contract.

    inputs -> enter -> depth -> norm -> head

A model says how it enters (an embedding of ids, a linear map of numbers) and what its head is; weights, states, the
packing of masks and the checks of what varies by token are here, once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from glissando.block import Block, BlockConfig, NormConfig, build_norm
from glissando.depth import Depth, DepthConfig, build_depth
from glissando.errors import ConfigError, InputError
from glissando.mixers import Context, ContextError, MixerConfigs, build_mixer, refuse_unhonoured
from glissando.ops.liquid import require_time
from glissando.state import State, zeros_position


class BackboneConfig(Protocol):
    """The options that the models share; see ModelConfig."""

    mixer: str | list[str]
    mixers: MixerConfigs
    block: BlockConfig
    depth: DepthConfig
    norm: NormConfig
    final_norm: bool
    init: Literal["scaled", "torch", "xavier"]


class ModelState(NamedTuple):
    position: Tensor  # (B,) int64, tokens seen
    depth: State


class Backbone(nn.Module, ABC):
    """A subclass builds its own parts around `_build`, and calls `_start` at the end."""

    config: BackboneConfig
    depth: Depth
    norm: nn.Module

    #: how errors call that of the model's input which has the shape (B, T)
    _inputs: str

    # ------------------------------------------------------------------ building

    def _build(self, config: BackboneConfig, width: int) -> None:
        """Depth and norm, D = width."""

        def make_block(layer: int) -> Block:
            names = [config.mixer] if isinstance(config.mixer, str) else config.mixer
            if not names:
                raise ConfigError("model.mixer is an empty list; name at least one mixer")
            mixer = build_mixer(names[layer % len(names)], config.mixers, width)
            return Block(config.block, config.norm, mixer, width)

        self.depth = build_depth(config.depth, make_block)
        self.norm = build_norm(config.norm, width) if config.final_norm else nn.Identity()

    def reset_parameters(self) -> None:
        """New weights by the configuration's init, drawn from PyTorch's global generator.

        Raises ConfigError, and changes nothing, where a part came with weights alone: a loaded Tauformer's Laplacian.
        """
        for block, _ in self.depth.calls():
            block.mixer.require_start()
        for module in self.modules():
            own = getattr(module, "reset_parameters", None)
            if callable(own) and not _is_ours(module):
                own()
        self._start()

    def _start(self) -> None:
        """What the configuration has otherwise than PyTorch's modules, which drew their weights as they were built."""
        if self.config.init == "scaled":
            self._init_scaled()
        elif self.config.init == "xavier":
            self._init_xavier()
        for module in self.modules():
            own = getattr(module, "reset_parameters", None)
            if callable(own) and _is_ours(module) and module is not self:
                own()

    def _init_scaled(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        blocks = [module for module in self.modules() if isinstance(module, Block)]
        for matrix in (ending for block in blocks for ending in block.damped()):
            nn.init.normal_(matrix, std=0.02 / math.sqrt(self.depth.n_residuals))

    def _init_xavier(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    # ------------------------------------------------------------------ running

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> ModelState:
        """The state before any token, on the model's device and dtype by default."""
        like = next(self.parameters())
        device, dtype = device or like.device, dtype or like.dtype
        return ModelState(zeros_position(batch_size, device), self.depth.init_state(batch_size, device, dtype))

    def _refuse(self, ctx: Context) -> None:
        """Raise ContextError for a signal that some part of the model would ignore."""
        if ctx.dt is not None and "dt" not in self.depth.honours:
            blocks = [module for module in self.modules() if isinstance(module, Block)]
            if all("dt" in block.mixer.honours for block in blocks):
                raise ContextError(
                    "this model was given 'dt' but cannot honour it: its mixers do, but not the convolution before "
                    "them, whose taps are steps whatever the time between them. Set model.block.conv_width to 0, or "
                    "leave dt out."
                )
        refuse_unhonoured(ctx, self.depth.honours, "this model")

    @abstractmethod
    def _enter(self, inputs: Tensor, position: Tensor | None, ctx: Context) -> Tensor:
        """(B, T, D) of packed inputs (B, T, ...); position (B,) of each row's first, None without a state."""

    def _run(self, inputs: Tensor, state: ModelState | None, **signals: Any) -> tuple[Tensor, ModelState | None]:
        """What the head reads (B, T, D), and the state after it; `signals` are those of Context."""
        ctx = Context(**signals)
        self._check(inputs, state, ctx)
        if ctx.memo is None and not torch.is_grad_enabled():
            ctx = replace(ctx, memo={})
        self._refuse(ctx)
        order = None if ctx.mask is None else packing_order(ctx.mask)
        if order is not None:
            inputs, ctx = _in_order(inputs, order), _pack(ctx, order)
        x = self._enter(inputs, None if state is None else state.position, ctx)
        try:
            x, inner = self.depth(x, None if state is None else state.depth, ctx)
        except Exception as error:
            if state is not None:
                self._refuse_another(state, error)
            raise
        x = self.norm(x)
        if order is not None:
            x = _in_order(x, order.argsort(1))
        if state is None:
            return x, None
        seen = inputs.shape[1] if ctx.mask is None else ctx.counts(inputs)
        return x, ModelState(state.position + seen, inner)

    def _refuse_another(self, state: ModelState, error: Exception) -> None:
        """Raise InputError if the state is not this model's: found out where it fails, as a look costs every token."""
        rows = len(state.position)
        own = self.init_state(rows).depth
        if not _alike(state.depth, own):
            found, expected = _parts(state.depth), _parts(own)
            expected = "the same of other sizes" if found == expected else expected
            raise InputError(
                f"the state is of another model: it holds {found}, and this model's holds {expected}; start from "
                f"model.init_state(batch_size={rows}) of this one"
            ) from error

    def _check(self, inputs: Tensor, state: ModelState | None, ctx: Context) -> None:
        shape, name = tuple(inputs.shape[:2]), self._inputs
        for signal, given in (("mask", ctx.mask), ("dt", ctx.dt)):
            if given is not None and not isinstance(given, Tensor):
                raise InputError(f"{signal} must be a tensor of the shape {shape}, got a {type(given).__name__}")
            if given is not None and given.shape != inputs.shape[:2]:
                raise InputError(f"{signal} must have the shape of {name} {shape}, got {tuple(given.shape)}")
        if ctx.dt is not None:
            require_time(ctx.dt)
        if ctx.mask is not None and ctx.mask.dtype != torch.bool:
            raise InputError(f"mask must be bool, True at real tokens, got {ctx.mask.dtype}; use mask.bool()")
        # Numbers, not shapes, are compared: torch.compile takes a length that varies for another in a tuple.
        control = ctx.control
        if control is not None and not isinstance(control, Tensor):
            raise InputError(
                f"control must be a tensor (B, C) or (B, T, C) for {name} {shape}, got a {type(control).__name__}; use "
                "torch.tensor([[...]]), a row for each row"
            )
        if control is not None and not (
            control.ndim in (2, 3)
            and control.shape[0] == inputs.shape[0]
            and (control.ndim == 2 or control.shape[1] == inputs.shape[1])
        ):
            raise InputError(f"control must be (B, C) or (B, T, C) for {name} {shape}, got {tuple(control.shape)}")
        if state is not None and not isinstance(state, ModelState):
            raise InputError(f"state must be what model.init_state or a call returned, got a {type(state).__name__}")
        if state is not None and state.position.shape[0] != inputs.shape[0]:
            raise InputError(
                f"the state holds {state.position.shape[0]} rows, {name} have {inputs.shape[0]}; "
                f"use model.init_state(batch_size={inputs.shape[0]})"
            )
        if ctx.memo is not None and torch.is_grad_enabled():
            raise InputError("memo keeps what follows from the weights, which gradients forbid; use torch.no_grad()")
        if ctx.donate and torch.is_grad_enabled():
            raise InputError("donate=True changes the state in place, which gradients forbid; use torch.no_grad()")

    def num_parameters(self) -> int:
        """Of its parameters, frozen ones too; a tied head counts once, a complex number stored as a pair twice."""
        return sum(p.numel() for p in self.parameters())


def _alike(found: State, own: State) -> bool:
    """Whether two states are of one form; an axis that starts at 0 may have grown."""
    if isinstance(own, Tensor):
        return (
            isinstance(found, Tensor)
            and found.ndim == own.ndim
            and all(size in (0, other) for size, other in zip(own.shape[1:], found.shape[1:], strict=True))
        )
    if own is None or type(found) is not type(own) or len(found) != len(own):
        return found is own
    return all(_alike(*pair) for pair in zip(found, own, strict=True))


def _parts(state: State) -> str:
    """The named parts of a state, each with how often it is there."""
    counts = Counter(_names(state))
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing"


def _names(state: State) -> Iterator[str]:
    if isinstance(state, tuple):
        if hasattr(state, "_fields"):
            yield type(state).__name__
        for child in state:
            yield from _names(child)


def _is_ours(module: nn.Module) -> bool:
    return isinstance(module, Backbone) or type(module).__module__.startswith("glissando.")


def require_positive(config: object, *names: str) -> None:
    """Raise ConfigError for an option among `names` that is set and below 1."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"model.{name} must be at least 1, got {value}")


def packing_order(mask: Tensor) -> Tensor | None:
    """(B, T) int64 that moves real tokens to the front, in order; None if they are there already."""
    if bool((mask[:, 1:] <= mask[:, :-1]).all()):
        return None
    return mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)


def _in_order(signal: Tensor, order: Tensor) -> Tensor:
    """signal (B, T) or (B, T, C), each row in the given order (B, T)."""
    return signal.gather(1, order if signal.ndim == 2 else order.unsqueeze(-1).expand_as(signal))


def _pack(ctx: Context, order: Tensor) -> Context:
    """ctx with its per-token signals in the given order."""

    def move(signal: Tensor | None) -> Tensor | None:
        return None if signal is None else _in_order(signal, order)

    control = ctx.control if ctx.control is None or ctx.control.ndim == 2 else move(ctx.control)
    return replace(ctx, mask=move(ctx.mask), dt=move(ctx.dt), control=control)
