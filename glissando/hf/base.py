"""What the models of `transformers` made from this library share: how they are built, loaded and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from glissando.backbone import for_saved_weights
from glissando.errors import ConfigError, InputError, RunError
from glissando.hf.cache import GlissandoCache
from glissando.hf.config import GlissandoConfig
from glissando.loading import load
from glissando.model import LanguageModel


class GlissandoPreTrainedModel(PreTrainedModel):
    """`self.model` is the LanguageModel; all that it computes, it computes."""

    config_class = GlissandoConfig
    config: GlissandoConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    #: signals ride in a context object that hooks between devices do not see: the model stays in one piece
    _no_split_modules = ("LanguageModel",)
    _skip_keys_device_placement = ("past_key_values",)

    def __init__(self, config: GlissandoConfig) -> None:
        super().__init__(config)
        options = config.model_config()
        if torch.empty(0).is_meta:  # from_pretrained builds without memory: its weights follow
            options = for_saved_weights(options)
        self.model = LanguageModel.from_config(options)  # a subclass calls post_init

    # ------------------------------------------------------------------ building

    @classmethod
    def of(cls, model: LanguageModel) -> Self:
        """The same model, not a copy of it."""
        eos = None if model.tokenizer is None else model.tokenizer.eos_id
        with torch.device("meta"):
            wrapped = cls(GlissandoConfig(model.config, eos_token_id=eos))
        wrapped.model = model
        return wrapped.train(model.training)

    @classmethod
    def from_run(
        cls, path: str | Path, overrides: Mapping[str, Any] | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """The model of a run directory or of one of its checkpoints, as glissando.load; its files are checked."""
        return cls.of(load(path, overrides).to(dtype=dtype))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """What `save_pretrained` wrote, as PreTrainedModel.from_pretrained; a run directory opens by `from_run`.

        Raises RunError for weights that do not fit: none is new, and none is left out.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        if wrong := {kind: sorted(info[kind]) for kind in ("missing_keys", "unexpected_keys") if info[kind]}:
            raise RunError(
                f"the weights in {pretrained_model_name_or_path} do not fit its config.json: {wrong}. Save the model "
                "again with save_pretrained, or put the config.json that belongs to them back."
            )
        return (model, info) if wants_info else model

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: LanguageModel has drawn its weights, and from_pretrained takes no checkpoint that lacks some."""

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The head; None where it is the embedding, which then needs no tying."""
        return self.model.head

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """The embedding, where the size stays as it is. Raises ConfigError for another size."""
        old = self.config.vocab_size
        new = old if new_num_tokens is None else new_num_tokens
        new += -new % (pad_to_multiple_of or 1)
        if new != old:
            raise ConfigError(
                f"the vocabulary of {old} cannot be resized to {new}: it is the tokenizer's. Make "
                "another, of(LanguageModel.from_preset(name, vocab_size=...)), or "
                "of(glissando.grow(model.model, vocab=...))"
            )
        return self.get_input_embeddings()

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] | None = None,
        every_n_layers: int = 1,
    ) -> None:
        """Each block, and each step of a flow, is recomputed. Raises ConfigError for other ways of it."""
        able = [module for module in self.model.modules() if hasattr(module, "gradient_checkpointing")]
        if enable and not able:
            raise ConfigError(
                f"a {type(self.model.depth).__name__} cannot recompute its blocks; leave gradient checkpointing off"
            )
        if enable and not (every_n_layers == 1 and _is_plain(gradient_checkpointing_func)):
            raise ConfigError(
                "glissando recomputes every block, without re-entry and without offloading; leave every_n_layers, "
                "offload and the keywords of torch.utils.checkpoint out"
            )
        for module in able:
            setattr(module, "gradient_checkpointing", enable)  # noqa: B010 (nn.Module declares no such attribute)

    # ------------------------------------------------------------------ running

    def _require_absent(self, absent: Mapping[str, Any]) -> None:
        """Raise TypeError for an argument that is neither None nor False."""
        if unknown := sorted(name for name, value in absent.items() if value is not None and value is not False):
            raise TypeError(f"{type(self).__name__} has no {', '.join(unknown)}: leave that out, or give None")

    def _read(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        cache: GlissandoCache | None,
        output_hidden_states: bool | None,
        **signals: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """What the head reads, (B, T, D), and the hidden states if they are requested; `cache` is moved on."""
        inputs = inputs_embeds if input_ids is None else input_ids
        if inputs is None or (input_ids is not None and inputs_embeds is not None):
            raise InputError("give input_ids or inputs_embeds, and not both")
        wants_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden: list[Tensor] | None = [] if wants_hidden else None
        mask = _mask(attention_mask, inputs, 0 if cache is None else cache.length)
        options: dict[str, Any] = signals | {"mask": mask, "hidden": hidden}
        features = self.model.features(inputs, **options)[0] if cache is None else self._go_on(inputs, cache, options)
        return features, None if hidden is None else tuple(hidden)

    def _go_on(self, inputs: Tensor, cache: GlissandoCache, options: dict[str, Any]) -> Tensor:
        if cache.state is not None and len(cache.state.position) != len(inputs):
            rows = len(cache.state.position)
            raise InputError(
                f"the cache holds {rows} rows and input_ids has {len(inputs)}; for beams or several sequences of each "
                "row repeat it: cache.batch_repeat_interleave(N)"
            )
        state = cache.begin(self.model, len(inputs))
        donate = not torch.is_grad_enabled()
        memo = cache.memo if donate else None
        features, after = self.model.features(inputs, state, donate=donate, memo=memo, **options)
        cache.state, cache.length = after, cache.length + inputs.shape[1]
        return features


def _is_plain(function: Callable[..., Any] | None) -> bool:
    """Whether `function` recomputes as this library does: torch's own checkpoint, without re-entry."""
    if function is None:
        return True
    inner = getattr(function, "func", function)
    return inner is checkpoint and getattr(function, "keywords", {}) in ({}, {"use_reentrant": False})


def _mask(attention_mask: Tensor | None, inputs: Tensor, before: int) -> Tensor | None:
    """(B, T) bool for the columns of `inputs`; None where all are real.

    Raises ValueError for a mask that covers neither these columns nor these and the `before` ones in the cache.
    """
    if attention_mask is None:
        return None
    rows, width = inputs.shape[:2]
    if (
        attention_mask.ndim != 2
        or attention_mask.shape[0] != rows
        or attention_mask.shape[1] not in (width, before + width)
    ):
        raise ValueError(
            f"attention_mask must be ({rows}, {width}), as input_ids, or ({rows}, {before + width}), with the "
            f"{before} tokens in the cache; got {tuple(attention_mask.shape)}"
        )
    mask = attention_mask[:, -width:].bool()
    return None if mask.all() else mask
