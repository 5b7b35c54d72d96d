"""What every model has between its inputs and its outputs: a depth of blocks under the contract.

    inputs -> embedding -> depth -> norm -> head

A model adds its own embedding (a table of ids, a linear map of numbers) and its head; weights, states, the packing of
masks and the checks of what varies by token are here, once.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from glissando.block import Block, BlockConfig, Norm, build_norm
from glissando.config import options, starting, to_dict
from glissando.depth import DEPTHS, Depth, DiscreteConfig, build_depth
from glissando.errors import ConfigError, InputError
from glissando.initialization import Scheme, initialize, own_initialization
from glissando.kernels.compiled import require_backend
from glissando.kernels.plain import plain_operations, underlying
from glissando.mixers import MIXERS, AttentionConfig, Context, Mixer, Signal, build_mixer, require_accepted
from glissando.mixers.base import require_time
from glissando.rewinding import Trail
from glissando.state import Slotted, State, leaf_names, leaves, zeros_position


@options
class BackboneConfig:
    """The options that the models share.

    hidden_size  D, the width
    mixer        {kind: NAME, ...} or a name, see glissando.mixers; a list alternates over the layers
    block        the residual block around each mixer
    depth        {kind: NAME, ...}, see glissando.depth
    norm         `rms` (gain only), `layer` (gain and bias) or `complex` (no parameters)
    final_norm   whether there is a norm before the head
    head_bias    whether the outputs of the head have a bias
    init         initial weights: scaled, torch or xavier, see glissando.initialization
    """

    #: the section's title in --help
    title: ClassVar[str] = "Options of the model"

    hidden_size: int = 128
    mixer: MIXERS.sections() = field(default_factory=AttentionConfig)  # type: ignore[valid-type]
    block: BlockConfig = field(default_factory=BlockConfig)
    depth: DEPTHS.section() = field(default_factory=DiscreteConfig)  # type: ignore[valid-type]
    norm: Norm = "rms"
    final_norm: bool = True
    head_bias: bool = False
    init: Scheme = starting(default="scaled", of="")

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "max_length", "inputs", "outputs"):
            value = getattr(self, name, None)
            if value is not None and value < 1:
                raise ConfigError(f"model.{name} must be at least 1, got {value}")

    @property
    def mixers(self) -> list[Any]:
        """The options of the mixers that alternate over the layers."""
        return self.mixer if isinstance(self.mixer, list) else [self.mixer]

    @property
    def controls(self) -> list[str]:
        """Names of the control's dimensions; none where the depth has no control."""
        return list(getattr(self.depth, "control", []))

    @property
    def dials(self) -> list[str]:
        """The names in `controls` that can be turned: none where training had no labels for them."""
        return [] if getattr(self.depth, "control_trained", None) is False else self.controls


def for_saved_weights(config: BackboneConfig) -> Any:
    """`config` of a model whose weights are loaded next, without the files that only a new model reads, such as a
    Laplacian's, which may be gone: options of a mixer may have a method `without_files` that returns such options."""
    mixers = [o.without_files() if hasattr(o, "without_files") else o for o in config.mixers]
    return replace(config, mixer=mixers if isinstance(config.mixer, list) else mixers[0])


class ModelState(NamedTuple):
    position: Tensor  # (B,) int64, tokens seen
    depth: State
    past: State = None  # what a model keeps of its inputs themselves: a series model's history
    trail: Trail | None = None  # with which the state can go back, see glissando.rewinding


class Backbone(nn.Module):
    """A subclass builds its own parts around `_build`, and calls `_start` at the end.

    backend  how `forward` computes: `auto`, by kernels and gradients in closed form where they are faster; `reference`,
             in plain tensor code alone, which torch.func's transforms and derivatives of higher order need. It is set
             on a model, and not saved with it
    """

    config: BackboneConfig
    depth: Depth
    norm: nn.Module
    backend: Literal["auto", "reference"] = "auto"

    #: how errors call that of the model's input which has the shape (B, T)
    _inputs: str
    #: what a saved model is of, in its config.yaml; none stands for language
    _kind: str | None = None

    def _build(self, config: BackboneConfig, width: int) -> None:
        """Depth and norm, D = width."""

        def make_block(layer: int) -> Block:
            mixer = build_mixer(config.mixers[layer % len(config.mixers)], width)
            return Block(config.block, config.norm, mixer, width)

        self.depth = build_depth(config.depth, make_block)
        self.norm = build_norm(config.norm, width) if config.final_norm else nn.Identity()

    def _start(self) -> None:
        """New weights, where PyTorch's modules have drawn theirs as they were built; none on the device `meta`."""
        if not next(self.parameters()).is_meta:
            initialize(self, self.depth, self.config.init)

    def reset_parameters(self) -> None:
        """New weights by the configuration's init, drawn from PyTorch's global generator.

        Raises ConfigError, and changes nothing, where a part came with weights alone: a loaded Tauformer's Laplacian.
        """
        before = {name: value.detach().clone() for name, value in self.state_dict().items()}
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset) and module is not self and own_initialization(module) is None:
                reset()
        self._start()
        try:
            self.require_started()
        except ConfigError:
            self.load_state_dict(before)
            raise

    def require_started(self) -> None:
        """Raise ConfigError for a buffer that is to come with weights: a new model's has no values."""
        for name, value in self.named_buffers():
            if value.is_floating_point() and not value.is_meta and not bool(value.isfinite().all()):
                raise ConfigError(
                    f"{name} of a new model is nowhere `saved`: it comes with trained weights alone. Give "
                    "mixer.laplacian `chain` or a file of `glissando laplacian build`, or load a run that has one"
                )

    @property
    def accepts(self) -> frozenset[Signal]:
        """The signals that vary by token and that the model uses; others are refused."""
        return self.depth.accepts

    # ------------------------------------------------------------------ running

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> ModelState:
        """The state before any token, on the model's device and dtype by default."""
        like = next(self.parameters())
        device, dtype = device or like.device, dtype or like.dtype
        return ModelState(zeros_position(batch_size, device), self.depth.init_state(batch_size, device, dtype))

    def _operations(self) -> AbstractContextManager:
        """Within it, operations compute as `backend` says."""
        if self.backend == "auto" or torch.compiler.is_compiling():  # a graph has forms of its own
            return nullcontext()
        require_backend("model", self.backend, ("auto", "reference"))
        return plain_operations()

    def _prepared(
        self, inputs: Tensor, state: ModelState | None, ctx: Context
    ) -> tuple[Tensor, Context, Tensor | None]:
        """Checked inputs and context, their real tokens in front, and the order (B, T) that they were brought into."""
        self._check(inputs, state, ctx)
        if ctx.memo is None and not torch.is_grad_enabled():
            ctx = replace(ctx, memo={})
        order = None if ctx.mask is None else packing_order(ctx.mask)
        return (inputs, ctx, None) if order is None else (_in_order(inputs, order), _pack(ctx, order), order)

    def _finished(
        self, x: Tensor, inner: State, state: ModelState | None, inputs: Tensor, ctx: Context, order: Tensor | None
    ) -> tuple[Tensor, ModelState | None]:
        """What the head reads, tokens in their own order, and the state after them."""
        x = self.norm(x)
        back = None if order is None else order.argsort(1)
        if back is not None:
            x = _in_order(x, back)
        if ctx.hidden is not None:
            self._finish_hidden(ctx.hidden, back, x)
        if state is None:
            return x, None
        seen = inputs.shape[1] if ctx.mask is None else ctx.counts(inputs)
        return x, ModelState(state.position + seen, inner, state.past)

    def _finish_hidden(self, hidden: list[Tensor], back: Tensor | None, x: Tensor) -> None:
        """Tokens of every representation in their own order, and the head's input x in the place of the last one.

        Raises ConfigError for a depth that adds none.
        """
        if len(hidden) < 2:
            raise ConfigError(
                f"{type(self.depth).__name__} adds no hidden states: its forward must call ctx.keep(x) after each block"
            )
        hidden[:] = [*(one if back is None else _in_order(one, back) for one in hidden[:-1]), x]

    def _require_own_state(self, state: ModelState | None, error: Exception) -> None:
        """Raise InputError if the state is not this model's: looked at once something failed, as a look costs time at
        every token."""
        if state is None:
            return
        rows = len(state.position)
        got, expected = _shapes(state.depth), _shapes(self.init_state(rows).depth)
        for name in {**expected, **got}:
            if not _fits(got.get(name), expected.get(name)):
                raise InputError(
                    f"the state is of another model: its {name} has {got.get(name, 'no')} numbers a row, and this "
                    f"model's has {expected.get(name, 'no')}; start from model.init_state(batch_size={rows})"
                ) from error

    def _check(self, inputs: Tensor, state: ModelState | None, ctx: Context) -> None:
        name, rows = self._inputs, inputs.shape[0]
        if state is not None and not isinstance(state, ModelState):
            raise InputError(f"state must be what model.init_state or a call returned, got a {type(state).__name__}")
        if state is not None and state.position.shape[0] != rows:
            raise InputError(
                f"the state holds {state.position.shape[0]} rows, {name} have {rows}; "
                f"use model.init_state(batch_size={rows})"
            )
        if ctx.memo is not None and torch.is_grad_enabled():
            raise InputError("memo caches values computed from weights: use it under torch.no_grad()")
        if ctx.donate and torch.is_grad_enabled():
            raise InputError("donate=True changes the state in place, which gradients forbid; use torch.no_grad()")
        if ctx.mask is not None or ctx.dt is not None or ctx.control is not None:
            self._check_signals(inputs, ctx)

    def _check_signals(self, inputs: Tensor, ctx: Context) -> None:
        shape, name = tuple(inputs.shape[:2]), self._inputs
        for signal, tensor in (("mask", ctx.mask), ("dt", ctx.dt)):
            if tensor is not None and not isinstance(tensor, Tensor):
                raise InputError(f"{signal} must be a tensor of the shape {shape}, got a {type(tensor).__name__}")
            if tensor is not None and tensor.shape != inputs.shape[:2]:
                raise InputError(f"{signal} must have the shape of {name} {shape}, got {tuple(tensor.shape)}")
        if ctx.mask is not None and ctx.mask.dtype != torch.bool:
            raise InputError(f"mask must be bool, True at real tokens, got {ctx.mask.dtype}; use mask.bool()")
        control = ctx.control
        if control is not None and not isinstance(control, Tensor):
            raise InputError(
                f"control must be a tensor (B, C) or (B, T, C) for {name} {shape}, got a {type(control).__name__}; use "
                "torch.tensor([[...]]), a row for each row"
            )
        # Numbers, not shapes, are compared: torch.compile takes a length that varies for another in a tuple.
        if control is not None and not (
            control.ndim in (2, 3)
            and control.shape[0] == inputs.shape[0]
            and (control.ndim == 2 or control.shape[1] == inputs.shape[1])
        ):
            raise InputError(f"control must be (B, C) or (B, T, C) for {name} {shape}, got {tuple(control.shape)}")
        if ctx.dt is not None:
            require_time(ctx.dt)
            if not torch.compiler.is_compiling():  # a graph depends on no value
                self._warn_of_no_time(ctx.dt, ctx.mask)
        require_accepted(ctx, self.accepts, "this model")

    def _warn_of_no_time(self, dt: Tensor, mask: Tensor | None) -> None:
        """Warn, once for a kind of mixer, of real tokens with dt = 0 where inputs are held over dt: none keeps them."""
        none = underlying(dt) == 0
        if bool((none if mask is None else none & underlying(mask)).any()):
            holding = {
                type(part).__name__ for part in self.modules() if isinstance(part, Mixer) and part.input == "held"
            }
            for name in sorted(holding):
                _warn_of_held_input(name)

    def require_constant_state(self, option: str) -> None:
        """Raise ConfigError for a model that cannot read for ever, as `option` needs it: whose state grows with every
        token, or which has learned positions."""
        if (limit := getattr(self.config, "max_length", None)) is not None:
            raise ConfigError(
                f"{option} reads on for ever, and model.max_length is {limit}: use a preset without learned positions "
                f"(the -nano ones), or leave {option} out"
            )
        depth = self.get_submodule("depth")
        if getattr(depth, "recomputes", False):
            raise ConfigError(
                f"{option} reads on for ever, and {type(depth).__name__} reads its whole past again at every call: use "
                f"another depth, or leave {option} out"
            )
        for mixer in (part for part in self.modules() if isinstance(part, Mixer)):
            options = getattr(mixer, "config", None)
            if isinstance(mixer.init_state(1), Slotted) and getattr(options, "window", None) is None:
                fix = "use spectral, liquid or delta, as spectral-delta-nano, liquid-ssm-nano and delta-nano do"
                if hasattr(options, "window"):
                    several = isinstance(self.config.mixer, list)
                    how = "window: 256 beside its kind in model.mixer" if several else "--model.mixer.window 256"
                    fix = f"use a mixer with a window ({how} in training)"
                raise ConfigError(
                    f"{option} reads on for ever, and the state of {type(mixer).__name__} grows with every token: "
                    f"{fix}, or leave {option} out"
                )

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a run directory that `load` opens, whole or not at all.

        overwrite  a model that was saved at `path` is replaced

        Raises RunError, before anything is written, where there is something at `path` that may not be replaced.
        """
        from glissando.runs import Run, require_replaceable
        from glissando.storage import publishing

        target, tokenizer = Path(path).expanduser(), getattr(self, "tokenizer", None)
        require_replaceable(target, overwrite)
        with publishing(target) as folder:
            run = Run.create(folder)
            if tokenizer is not None:
                run.write_tokenizer(tokenizer)
            kind = {} if self._kind is None else {"kind": self._kind}
            run.write_model(self.state_dict(), kind | {"model": to_dict(self.config)})

    def num_parameters(self) -> int:
        """Number of parameters, frozen ones too; a tied head counts once, a complex number stored as a pair twice."""
        return sum(p.numel() for p in self.parameters())


@functools.cache
def _warn_of_held_input(mixer: str) -> None:
    warnings.warn(
        f"dt is 0 at some steps, and {mixer} holds its input over dt: such a step changes nothing that follows, as the "
        "first of a row or a second event at one time. For events use --model.mixer.input impulse (of liquid, delta)",
        UserWarning,
        stacklevel=2,
    )


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf's row, by name."""
    return {name: tuple(leaf.shape[1:]) for name, leaf in zip(leaf_names(state), leaves(state), strict=True)}


def _fits(got: tuple[int, ...] | None, expected: tuple[int, ...] | None) -> bool:
    """Whether a leaf can be this model's; an axis that starts at 0 may have grown."""
    if got is None or expected is None or len(got) != len(expected):
        return False
    return all(size in (0, other) for size, other in zip(expected, got, strict=True))


def packing_order(mask: Tensor) -> Tensor | None:
    """(B, T) int64 that moves real tokens to the front, in order; None if they are there already."""
    if bool(underlying(mask[:, 1:] <= mask[:, :-1]).all()):
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
