"""The model: ids -> embedding -> depth -> norm -> head -> logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.backbone import Backbone, ModelState, require_positive
from glissando.block import BlockConfig, NormConfig
from glissando.config import check_choices, from_dict, merge, starting, to_dict, used_with
from glissando.depth import DepthConfig
from glissando.errors import ConfigError, InputError, LengthError
from glissando.lifts import Grows, Reads, Table, append, grow_norm, linear, tables, tile, under
from glissando.mixers import Context, Memo, MixerConfigs

if TYPE_CHECKING:
    from glissando.data.tokenizers import Tokenizer


@dataclass
class ModelConfig:
    """A point of the design space.

    vocab_size    V; when training, at least the tokenizer's, and theirs where it is left out
    hidden_size   D
    representation  `real`: D numbers a token; `complex`: D complex ones, kept as 2 D reals in pairs, which a linear
                  map lifts from the embedding and two linear maps bring to the logits
    mixer         name of the mixer, or several that alternate over the layers
    positions     `learned` adds a table of max_length positions to the embedding
    max_length    longest input where positions are learned; unused otherwise
    final_norm    a norm before the head
    tied_head     the head is the embedding transposed
    head_bias     a bias on the logits
    logit_scale   multiplies what the head reads; growth pins it
    init          `scaled`: N(0, 0.02), branches that end in a residual divided by the root of their number;
                  `torch`: PyTorch's defaults; `xavier`: Glorot's uniform for matrices, N(0, 0.02) for tables
    """

    vocab_size: int = 256
    hidden_size: int = 128
    representation: Literal["real", "complex"] = "real"
    mixer: str | list[str] = "attention"
    mixers: MixerConfigs = field(default_factory=MixerConfigs)
    block: BlockConfig = field(default_factory=BlockConfig)
    depth: DepthConfig = field(default_factory=DepthConfig)
    norm: NormConfig = field(default_factory=NormConfig)
    positions: Literal["none", "learned"] = "none"
    max_length: int | None = used_with(None, positions="learned")
    final_norm: bool = True
    tied_head: bool = True
    head_bias: bool = False
    logit_scale: float = 1.0
    init: Literal["scaled", "torch", "xavier"] = starting("scaled", of="")


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
    """Logits for the next token at every position, from any point of the design space.

    model(ids) -> (logits, None) starts from nothing; model(ids, state) -> (logits, state) goes on. Decoding is
    the same call with T = 1.
    """

    config: ModelConfig
    _inputs = "ids"

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None = None) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = tokenizer
        check_choices(config, "model")
        require_positive(config, "vocab_size", "hidden_size", "max_length")
        if config.logit_scale == 0 or not math.isfinite(config.logit_scale):
            raise ConfigError(f"logit_scale must be finite and not 0, got {config.logit_scale}")
        size, is_complex = config.hidden_size, config.representation == "complex"
        self.width = 2 * size if is_complex else size
        self.embedding = nn.Embedding(config.vocab_size, size)
        self.position_embedding = self._position_table()
        self.lift = nn.Linear(size, self.width) if is_complex else None
        self._build(config, self.width)
        self.head = self._head()
        tied_bias = config.tied_head and config.head_bias
        self.head_bias = nn.Parameter(torch.zeros(config.vocab_size)) if tied_bias else None
        self._start()

    # ------------------------------------------------------------------ building

    @classmethod
    def from_preset(cls, name: str, /, **overrides: Any) -> LanguageModel:
        """The preset `name` with options changed: from_preset("transformer-nano", depth={"layers": 2}).

        Raises UnknownNameError for an unknown preset, ConfigError for an unknown option; both name the nearest.
        """
        from glissando.presets import load_preset

        model = cls.from_config(merge(load_preset(name)["model"], overrides))
        model._require_laplacians()
        return model

    @classmethod
    def from_config(cls, config: ModelConfig | Mapping[str, Any]) -> LanguageModel:
        """A model with new weights; a vocabulary of 256 reads bytes."""
        if not isinstance(config, ModelConfig):
            config = from_dict(ModelConfig, config, "model")
        from glissando.data.tokenizers import ByteTokenizer

        return cls(config, ByteTokenizer() if config.vocab_size == 256 else None)

    def _require_laplacians(self) -> None:
        """Raise ConfigError where a Laplacian is to come with weights that a new model does not have; one made from the
        configuration of another (`from_config`) may be given its weights next."""
        for name, buffer in self.named_buffers():
            if name.endswith("laplacian") and not buffer.is_meta and not bool(buffer.isfinite().all()):
                raise ConfigError(
                    f"{name} of a new model is nowhere `saved`: give mixers.tau.laplacian `chain` or a file of "
                    "`glissando laplacian build`, or load a run that has one"
                )

    def _start(self) -> None:
        super()._start()
        if self.head_bias is not None:
            nn.init.zeros_(self.head_bias)

    def _head(self) -> nn.Module | None:
        c = self.config
        if c.representation == "complex":
            if c.tied_head:
                raise ConfigError("model.representation is `complex`, whose head cannot be tied; set tied_head: false")
            return ComplexHead(c.hidden_size, c.vocab_size, c.head_bias)
        return None if c.tied_head else nn.Linear(c.hidden_size, c.vocab_size, bias=c.head_bias)

    def _position_table(self) -> nn.Embedding | None:
        c = self.config
        if c.positions == "none":
            return None
        if c.max_length is None:
            raise ConfigError("model.positions is `learned`, which needs model.max_length")
        return nn.Embedding(c.max_length, c.hidden_size)

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
    ) -> tuple[Tensor, ModelState | None]:
        """ids (B, T) int64 -> logits (B, T, V) and the state after them.

        control  (B, C) or (B, T, C);  dt  (B, T) time steps;  mask  (B, T) bool, True at real tokens, holes anywhere.
        donate   lets the given state be changed in place; only without gradients.
        memo     a dictionary, empty at first, that calls share while the weights stand still: what follows from these
                 alone is kept in it and not computed at every token; only without gradients.
        Logits at masked positions have no meaning.

        Raises InputError for shapes that do not fit, ids outside the vocabulary (on a CPU) and a state of another
        model, ContextError for a signal the model cannot honour.
        """
        x, state = self.features(ids, state, control=control, dt=dt, mask=mask, donate=donate, memo=memo)
        return self.logits(x), state

    def logits(self, features: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        if self.config.logit_scale != 1.0:
            features = features * self.config.logit_scale
        return F.linear(features, self.embedding.weight, self.head_bias) if self.head is None else self.head(features)

    def features(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        *,
        control: Tensor | None = None,
        dt: Tensor | None = None,
        mask: Tensor | None = None,
        donate: bool = False,
        memo: Memo | None = None,
    ) -> tuple[Tensor, ModelState | None]:
        """What the head reads: `forward` without the head. (B, T, D)."""
        if not isinstance(ids, Tensor):
            raise InputError(
                f"ids must be a tensor (batch, time) int64, got a {type(ids).__name__}; use torch.tensor(ids)"
            )
        if ids.ndim != 2 or ids.shape[1] == 0 or ids.dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"ids must be (batch, time >= 1) int64, got {tuple(ids.shape)} {ids.dtype}; "
                "a single text needs ids.unsqueeze(0)"
            )
        return self._run(ids, state, mask=mask, dt=dt, control=control, donate=donate, memo=memo)

    def _enter(self, ids: Tensor, position: Tensor | None, ctx: Context) -> Tensor:
        x = self._embed(ids)
        if self.position_embedding is not None:
            x = x + self.position_embedding(self._where(self.position_embedding.num_embeddings, ids, position, ctx))
        return x if self.lift is None else self.lift(x)

    def _embed(self, ids: Tensor) -> Tensor:
        try:
            return self.embedding(ids)
        except IndexError as error:
            raise InputError(
                f"ids must be from 0 to {self.config.vocab_size - 1}, got {int(ids.min())} to {int(ids.max())}; encode "
                "the text with this model's own tokenizer"
            ) from error

    def _where(self, limit: int, ids: Tensor, position: Tensor | None, ctx: Context) -> Tensor:
        """(B, T) positions of tokens, each below `limit`."""
        if position is None and ctx.mask is None:  # known without a look at any tensor, as torch.compile needs it
            furthest, start = ids.shape[1], ids.new_zeros(ids.shape[0])
        else:
            counts = ctx.counts(ids)  # padding needs no position
            start = torch.zeros_like(counts) if position is None else position
            furthest = int((start + counts).max()) if len(counts) else 0
        if furthest > limit:
            raise LengthError(
                f"this model has learned positions for {limit} tokens, and was given {furthest}. Shorten the input, "
                "or use a preset with RoPE or without positions (the -nano ones), which takes any length."
            )
        where = start.unsqueeze(1) + torch.arange(ids.shape[1], device=ids.device)
        return where.clamp_max(limit - 1)

    # ------------------------------------------------------------------ growing

    def growth(self, grown: LanguageModel) -> Table:
        """How every parameter and buffer goes into those of `grown`, see glissando.growth."""
        size = tile(self.config.hidden_size, grown.config.hidden_size)
        pair = self.width // self.config.hidden_size
        width = size * tile(pair, pair)
        words = append(self.config.vocab_size, grown.config.vocab_size)
        table = under("embedding", {"weight": Grows(words, size)}) | under(
            "depth", self.depth.growth(grown.depth, width)
        )
        if self.position_embedding is not None:
            places = self.position_embedding.num_embeddings
            table |= under("position_embedding", {"weight": Grows(tile(places, places), size)})
        table |= tables({"lift": linear(self.lift, width, size), "norm": grow_norm(self.norm, width)})
        if isinstance(self.head, ComplexHead):
            bias = {} if self.head.bias is None else {"bias": Grows(words, tile(2, 2))}
            table |= under("head", {"weight": Grows(words, Reads(size), tile(2, 2)), **bias})
        elif isinstance(self.head, nn.Linear):
            table |= under("head", linear(self.head, words, width))
        return table if self.head_bias is None else table | {"head_bias": Grows(words)}

    # ------------------------------------------------------------------ keeping

    def save(self, path: str | Path) -> None:
        """Write a run directory that `glissando.load` opens.

        Raises RunError if `path` exists and is not empty: nothing is overwritten.
        """
        from glissando.runs import Run

        run = Run.create(path)
        if self.tokenizer is not None:
            self.tokenizer.save(run.path / "tokenizer.json")
        run.write_model(self.state_dict(), {"model": to_dict(self.config)})
