"""Any causal model of transformers as a depth of one's own: for comparisons with models that are not ours.

    glissando compare transformer-plus-nano examples/models/mamba2.yaml --import examples/outside_models.py ...

Its blocks, its norms and its initialisation are its own; embedding, head, loss, data and optimizer are those of every
model here. Its cache is not used, as each model has another: the state is the inputs so far, which are read again at
every call. So it obeys the split law and decodes at the cost of a whole pass a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glissando.config import options
from glissando.depth.base import BlockFactory, Depth, register_depth
from glissando.errors import ConfigError
from glissando.mixers import EMPTY, Context, Signal
from glissando.mixers.base import placement
from glissando.mixers.slots import append


@options
class TransformersConfig:
    """Options of the `transformers` depth.

    config  what the model's config.json holds: model_type and its options; its hidden_size is the model's
    """

    config: dict[str, Any]


class TransformersState(NamedTuple):
    inputs: Tensor  # (B, slots, D): those of the tokens so far; what lies behind `length` is never read
    length: Tensor  # (B,) int64


@register_depth("transformers", TransformersConfig)
class TransformersDepth(Depth):
    """See the module's docstring. Raises ConfigError for a model that is unknown, or not causal."""

    #: decoding reads the whole past again, so that its time says nothing of the model
    recomputes = True

    def __init__(self, config: TransformersConfig, make_block: BlockFactory) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModel

        self.gradient_checkpointing = False
        values = dict(config.config)
        kind = str(values.pop("model_type", None))
        # Tokens are embedded outside: a table of one entry stands in the place of its own until it is taken away.
        values |= {"vocab_size": 1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        try:
            self.body = AutoModel.from_config(AutoConfig.for_model(kind, **values))
        except (ValueError, TypeError, ImportError, AttributeError) as error:
            raise ConfigError(f"model.depth.config: transformers cannot build a {kind!r}: {error}") from error
        self.hidden_size = self.body.config.hidden_size
        self.body.set_input_embeddings(nn.Identity())
        self._require_causal()

    @property
    def accepts(self) -> frozenset[Signal]:
        return frozenset({"mask"})

    def reset_parameters(self) -> None:
        for parameter in self.body.parameters():
            parameter._is_hf_initialized = False
        self.body.apply(self.body._init_weights)

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> TransformersState:
        place = placement(self, device, dtype)
        inputs = torch.zeros(batch_size, 0, self.hidden_size, **place)
        return TransformersState(inputs, torch.zeros(batch_size, dtype=torch.int64, device=place["device"]))

    def forward(
        self, x: Tensor, state: TransformersState | None = None, ctx: Context | None = None
    ) -> tuple[Tensor, TransformersState | None]:
        ctx = ctx or EMPTY
        if x.shape[-1] != self.hidden_size:
            raise ConfigError(
                f"model.hidden_size is {x.shape[-1]}, and the model of transformers has {self.hidden_size}: give both "
                "the same"
            )
        # Real tokens come first in every row, and nothing looks ahead: padding needs no mask.
        if state is None:
            return self.run(self._read)(x), None
        steps, lengths = x.shape[1], state.length.tolist()
        uniform, end = len(set(lengths)) <= 1, max(lengths, default=0) + steps
        inputs = append(state.inputs.unsqueeze(1), x.unsqueeze(1), state.length, end, uniform, donate=False).squeeze(1)
        y = self.run(self._read)(inputs.to(x.dtype))
        index = state.length.unsqueeze(1) + torch.arange(steps, device=x.device)
        y = y.gather(1, index.unsqueeze(-1).expand(-1, -1, y.shape[-1]))
        return y, TransformersState(inputs, state.length + ctx.counts(x))

    def _read(self, x: Tensor) -> Tensor:
        return self.body(inputs_embeds=x, use_cache=False, return_dict=True).last_hidden_state

    def _require_causal(self) -> None:
        like = next(self.body.parameters())
        if like.is_meta:
            return
        training = self.body.training
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            x = torch.randn(1, 3, self.hidden_size, dtype=like.dtype)
            changed = torch.cat([x[:, :2], -x[:, 2:]], 1)
            self.body.eval()
            gap = (self._read(x) - self._read(changed))[:, :2].abs().max()
            self.body.train(training)
        if float(gap) > 1e-4:
            raise ConfigError(
                f"the model of transformers ({self.body.config.model_type}) reads tokens that come later (an output "
                f"changed by {float(gap):.2g}): give a causal one, such as with is_decoder true"
            )
