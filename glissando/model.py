"""The model: ids -> embedding -> depth -> norm -> head -> logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.backbone import Backbone, BackboneConfig, ModelState
from glissando.config import from_dict, merge, options, recorded
from glissando.errors import ConfigError, InputError, LengthError
from glissando.kernels.loop import exporting
from glissando.mixers import Context, Memo, Signal
from glissando.rewinding import Trail, new_trail, read_with_trail, rewound

if TYPE_CHECKING:
    from glissando.data.tokenizers import Tokenizer


@options
class ModelConfig(BackboneConfig):
    """Configuration of a language model.

    Attributes:
        vocab_size: V; in training at least the size of the tokenizer, and equal to it by default
        hidden_size: D, the width
        mixer: {kind: NAME, ...} or a name, see glissando.mixers; a list alternates over the layers
        block: the residual block around each mixer
        depth: {kind: NAME, ...}, see glissando.depth
        norm: `rms` (gain only), `layer` (gain and bias) or `complex` (no parameters)
        final_norm: whether there is a norm before the head
        head_bias: whether the logits have a bias
        init: initial weights: scaled, torch or xavier, see glissando.initialization
        representation: `real`: D numbers a token; `complex`: D complex numbers, stored as 2 D real ones, with a linear
            map from the embedding and two to the logits
        max_length: number of learned positions, a table that is added to the embedding; None: no table
        tied_head: whether the head is the transposed embedding
        logit_scale: factor of the head's input; set by growth
    """

    vocab_size: int = 256
    representation: Literal["real", "complex"] = "real"
    max_length: int | None = None
    tied_head: bool = True
    logit_scale: float = recorded(default=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.logit_scale == 0 or not math.isfinite(self.logit_scale):
            raise ConfigError(f"logit_scale must be finite and not 0, got {self.logit_scale}")
        if self.representation == "complex" and self.tied_head:
            raise ConfigError("model.representation is `complex`, whose head cannot be tied; set tied_head: false")


class ComplexHead(nn.Module):
    """logits = W_re Re z + b_re + W_im Im z + b_im for z given as pairs; weight (V, D, 2), bias (V, 2)."""

    def __init__(self, size: int, vocab_size: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size, 2))
        self.bias = nn.Parameter(torch.empty(vocab_size, 2)) if bias else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As PyTorch starts two linear maps from D numbers each."""
        bound = self.weight.shape[1] ** -0.5
        for parameter in self.parameters():
            parameter.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.flatten(1), None if self.bias is None else self.bias.sum(-1))


class LanguageModel(Backbone):
    """A language model: ids -> embedding -> depth of blocks -> norm -> head -> logits for the next token.

    `model(ids)` returns `(logits, None)` and starts from an empty past. `model(ids, state)` returns the logits and the
    new state, and continues from `state`. Decoding is the same call with T = 1.

    Args:
        config: The options of the model.
        tokenizer: Converts between text and ids; needed to generate text.
    """

    config: ModelConfig
    _inputs = "ids"
    #: of the matrices, which `glissando.quantisation.round_weights` rounds
    weights_precision: Literal["float32", "bf16", "int8"] = "float32"
    #: of keys and values that attention keeps while the compiled step writes a text
    caches_precision: Literal["float32", "bf16"] = "float32"

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None = None) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = tokenizer
        size, is_complex = config.hidden_size, config.representation == "complex"
        self.width = 2 * size if is_complex else size
        self.embedding = nn.Embedding(config.vocab_size, size)
        length = config.max_length
        self.position_embedding = None if length is None else nn.Embedding(length, size)
        self.lift = nn.Linear(size, self.width) if is_complex else None
        self._build(config, self.width)
        if is_complex:
            self.head: nn.Module | None = ComplexHead(size, config.vocab_size, config.head_bias)
        else:
            self.head = None if config.tied_head else nn.Linear(size, config.vocab_size, bias=config.head_bias)
        tied_bias = config.tied_head and config.head_bias
        self.head_bias = nn.Parameter(torch.zeros(config.vocab_size)) if tied_bias else None
        self._start()

    # ------------------------------------------------------------------ building

    @classmethod
    def from_preset(cls, name: str, /, **overrides: Any) -> LanguageModel:
        """A model with new weights by a preset: `from_preset("transformer-nano", depth={"layers": 2})`.

        Args:
            name: Name of the preset, see `glissando presets`.
            **overrides: Options of the model that differ from the preset.

        Raises:
            UnknownNameError: The preset does not exist; the message contains the most similar name.
            ConfigError: An option does not exist; the message contains the most similar name.
        """
        from glissando.presets import load_preset

        model = cls.from_config(merge(ModelConfig, load_preset(name)["model"], overrides))
        model.require_started()
        return model

    @classmethod
    def from_config(cls, config: ModelConfig | Mapping[str, Any]) -> LanguageModel:
        """A model with new weights.

        Args:
            config: A ModelConfig, or a mapping of its options. With a vocabulary of 256, the model reads bytes.

        Raises:
            ConfigError: An option does not exist or has an impossible value.
        """
        if not isinstance(config, ModelConfig):
            config = from_dict(ModelConfig, config, "model")
        from glissando.data.tokenizers import ByteTokenizer

        return cls(config, ByteTokenizer() if config.vocab_size == 256 else None)

    def _start(self) -> None:
        super()._start()
        if self.head_bias is not None:
            nn.init.zeros_(self.head_bias)

    # ------------------------------------------------------------------ running

    def forward(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        *,
        control: Tensor | None = None,
        dt: Tensor | None = None,
        mask: Tensor | None = None,
        donate: bool = False,
        memo: Memo | None = None,
        head: bool = True,
        hidden: list[Tensor] | None = None,
    ) -> tuple[Tensor, ModelState | None]:
        """The logits for the token after each position.

        Args:
            ids: Tokens (B, T), int64; or (B, T, D) numbers that stand in the place of their embeddings.
            state: State to continue from, of `init_state` or an earlier call; None: an empty past.
            control: Control (B, C), or (B, T, C) if it varies by token.
            dt: Time steps (B, T).
            mask: (B, T) bool, True at real tokens. Masked positions may be anywhere; their logits have no meaning.
            donate: Whether the given state may be changed in place; only without gradients.
            memo: A dictionary that calls may share while the weights do not change; it caches values that depend on the
                weights alone. Only without gradients.
            head: False returns the input of the head, (B, T, D), instead of the logits.
            hidden: An empty list; the call adds the input of the depth, the representation after each block (for a tied
                depth each application, for a flow H(1) as one more), and in the place of the last one the input of the
                head, each (B, T, D).

        Returns:
            Logits (B, T, V), and the state after the last token, or None if no state was given.

        Raises:
            InputError: A shape does not fit, an id is outside the vocabulary (on a CPU), or the state belongs to
                another model.
            ContextError: The model does not accept one of the signals control, dt and mask.
        """
        if not isinstance(ids, Tensor):
            raise InputError(
                f"ids must be a tensor (batch, time) int64, got a {type(ids).__name__}; use torch.tensor(ids)"
            )
        if ids.is_floating_point():
            self._check_embeddings(ids)
        elif ids.ndim != 2 or ids.shape[1] == 0 or ids.dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"ids must be (batch, time >= 1) int64, got {tuple(ids.shape)} {ids.dtype}; "
                "a single text needs ids.unsqueeze(0)"
            )
        ctx = Context(mask, dt, control, donate, memo, hidden)
        if (trail := getattr(state, "trail", None)) is not None:
            return self._read_with_trail(ids, state, trail, ctx, head)
        ids, ctx, order = self._prepared(ids, state, ctx)
        x = self._embed(ids, None if state is None else state.position, ctx)
        ctx.keep(x)
        with self._operations():
            try:
                before = None if state is None else state.depth
                x, inner = self.depth(x, before, ctx)
            except Exception as error:
                self._require_own_state(state, error)
                raise
            x, after = self._finished(x, inner, state, ids, ctx, order)
        return (self.logits(x) if head else x), after

    if TYPE_CHECKING:  # nn.Module's is typed as Callable[..., Any]
        __call__ = forward

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None, rewind: int = 0
    ) -> ModelState:
        """The state before any token, on the model's device and dtype by default.

        rewind  N: the state and those after it can go back by up to N columns of tokens, with `rewind`; they hold three
                states and 4 N columns of inputs. 0: they cannot, and hold one
        """
        state = super().init_state(batch_size, device, dtype)
        if not rewind:
            return state
        return state._replace(trail=new_trail(state, rewind, len(self.config.controls), next(self.parameters()).dtype))

    def rewind(self, state: ModelState, count: int) -> ModelState:
        """The state before the last `count` columns of ids: rewind(state(ab), len(b)) = state(a), up to rounding.

        Columns count in every row, padding too. From a mark before them, the columns that stay are read again: 2 N at
        most.

        Raises InputError for a state without a trail, for more columns than it can go back, and in training mode for
        a model with dropout, which would read the columns as other values.
        """
        return rewound(self, state, count)

    def _read_with_trail(
        self, ids: Tensor, state: Any, trail: Trail, ctx: Context, head: bool
    ) -> tuple[Tensor, ModelState]:
        self._check(ids, state, ctx)

        def read(columns: slice, before: ModelState) -> tuple[list[Tensor], Any]:
            def part(signal: Tensor | None) -> Tensor | None:
                return None if signal is None else signal[:, columns]

            layers: list[Tensor] = []
            control = ctx.control if ctx.control is None or ctx.control.ndim == 2 else part(ctx.control)
            output, after = self.forward(
                ids[:, columns], before, control=control, dt=part(ctx.dt), mask=part(ctx.mask), donate=ctx.donate,
                memo=ctx.memo, head=head, hidden=None if ctx.hidden is None else layers,
            )  # fmt: skip
            return [output, *layers], after

        (output, *layers), after = read_with_trail(read, ids, trail, state, ctx.mask, ctx.dt, ctx.control)
        if ctx.hidden is not None:
            ctx.hidden[:] = layers
        return output, after

    @property
    def accepts(self) -> frozenset[Signal]:
        """Learned positions count tokens and are absolute, so that dt is refused with them."""
        accepted = self.depth.accepts  # torch.compile cannot follow a property of super()
        return accepted - {"dt"} if self.position_embedding is not None else accepted

    def logits(self, features: Tensor) -> Tensor:
        """The head: features (..., D) -> logits (..., V)."""
        if self.config.logit_scale != 1.0:
            features = features * self.config.logit_scale
        return F.linear(features, self.embedding.weight, self.head_bias) if self.head is None else self.head(features)

    def features(
        self, ids: Tensor, state: ModelState | None = None, **signals: Any
    ) -> tuple[Tensor, ModelState | None]:
        """The input of the head, (B, T, D), and the state: `forward(..., head=False)`."""
        return self(ids, state, **signals, head=False)

    def _check_embeddings(self, embeddings: Tensor) -> None:
        size, dtype = self.embedding.embedding_dim, self.embedding.weight.dtype
        shape = tuple(embeddings.shape)
        fits = embeddings.dtype == dtype or torch.is_autocast_enabled(embeddings.device.type)
        if embeddings.ndim != 3 or shape[1] == 0 or shape[2] != size or not fits:
            raise InputError(
                f"ids must be int64, or embeddings (batch, time >= 1, {size}) {dtype} as model.embedding(ids) has "
                f"them; got {shape} {embeddings.dtype}"
            )

    def _embed(self, ids: Tensor, position: Tensor | None, ctx: Context) -> Tensor:
        """(B, T, D) of packed ids or embeddings; position (B,) of each row's first, None without a state."""
        try:
            x = ids if ids.is_floating_point() else self.embedding(ids)
        except IndexError as error:
            raise InputError(
                f"ids must be from 0 to {self.config.vocab_size - 1}, got {int(ids.min())} to {int(ids.max())}; encode "
                "the text with this model's own tokenizer"
            ) from error
        if self.position_embedding is not None:
            x = x + self.position_embedding(self._positions(self.position_embedding.num_embeddings, ids, position, ctx))
        return x if self.lift is None else self.lift(x)

    def _positions(self, limit: int, ids: Tensor, position: Tensor | None, ctx: Context) -> Tensor:
        """(B, T) positions of tokens, each below `limit`."""
        if exporting():  # the runtime's look-up refuses a position behind the last
            start = ids.new_zeros(ids.shape[0], dtype=torch.int64) if position is None else position
            return start.unsqueeze(1) + torch.arange(ids.shape[1], device=ids.device)
        if position is None and ctx.mask is None:  # known without a look at any tensor, as torch.compile needs it
            furthest, start = ids.shape[1], ids.new_zeros(ids.shape[0], dtype=torch.int64)
        else:
            counts = ctx.counts(ids)  # padding needs no position
            start = torch.zeros_like(counts) if position is None else position
            furthest = int((start + counts).max()) if len(counts) else 0
        if furthest > limit:
            raise LengthError(
                f"this model has learned positions for {limit} tokens, but was given {furthest}. Shorten the input, "
                "or use a preset with RoPE or without positions (the -nano ones), which takes any length."
            )
        where = start.unsqueeze(1) + torch.arange(ids.shape[1], device=ids.device)
        return where.clamp_max(limit - 1)
