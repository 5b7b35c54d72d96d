"""A language model of this library behind the interface of a `transformers` causal language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from glissando.backbone import for_saved_weights
from glissando.errors import ConfigError, InputError, RunError
from glissando.hf.cache import GlissandoCache
from glissando.hf.config import GlissandoConfig
from glissando.loading import load
from glissando.model import LanguageModel


class GlissandoForCausalLM(PreTrainedModel, GenerationMixin):
    """`self.model` is the LanguageModel; all that it computes, it computes.

    Train it with `Trainer`, generate with `generate`: greedy, sampling, beams, rows padded on the left, streamers. Its
    cache is the model's state, of the state's own size; in assisted generation and prompt lookup with a trail, by which
    it goes back (glissando.rewinding). What cannot go with a state raises: the caches of other models, right padding in
    `generate`.
    """

    config_class = GlissandoConfig
    config: GlissandoConfig
    main_input_name = "input_ids"
    accepts_loss_kwargs = True  # `Trainer` gives num_items_in_batch
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
        self.model = LanguageModel.from_config(options)
        self.post_init()

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
        function = gradient_checkpointing_func
        plain = function is None or (
            getattr(function, "func", function) is checkpoint
            and getattr(function, "keywords", {}) in ({}, {"use_reentrant": False})
        )
        if enable and not (every_n_layers == 1 and plain):
            raise ConfigError(
                "glissando recomputes every block, without re-entry and without offloading; leave every_n_layers, "
                "offload and the keywords of torch.utils.checkpoint out"
            )
        super()._set_gradient_checkpointing(enable)

    # ------------------------------------------------------------------ running

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: GlissandoCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        control: Tensor | None = None,
        dt: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **absent: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """input_ids (B, T) -> logits (B, T, V), or of the columns to keep.

        attention_mask   (B, T), or with a cache (B, tokens before + T); 0 at padding, which may stand anywhere
        past_key_values  the cache to go on from, moved on in the call; `use_cache` starts one where there is none
        labels           (B, T): the logits of a column are scored by the label of the next one, -100 by none
        control, dt      as LanguageModel
        inputs_embeds    (B, T, D) in the place of input_ids, as get_input_embeddings()(input_ids) has them
        output_hidden_states  whether the output has `hidden_states`, see LanguageModel.forward
        absent           what wrappers such as peft's pass for every model, as None or False: output_attentions

        Raises TypeError for the cache of another kind of model and for any other argument that is not None or False,
        and what LanguageModel raises.
        """
        if unknown := sorted(name for name, value in absent.items() if value is not None and value is not False):
            raise TypeError(f"{type(self).__name__} has no {', '.join(unknown)}: leave that out, or give None")
        cache = past_key_values
        if cache is None and use_cache:
            cache = GlissandoCache()
        if cache is not None and not isinstance(cache, GlissandoCache):
            raise TypeError(
                f"past_key_values is a {type(cache).__name__}, and this model continues from its own state: give a "
                "GlissandoCache, such as an output with use_cache=True has, or none"
            )
        features, hidden = self._read(
            input_ids, inputs_embeds, attention_mask, cache, output_hidden_states, control=control, dt=dt
        )
        kept = features[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else features[:, logits_to_keep]
        logits = self.model.logits(kept)
        loss = None
        if labels is not None:
            counted = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **counted)
        states = None if hidden is None else tuple(hidden)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=states)
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def _read(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        cache: GlissandoCache | None,
        output_hidden_states: bool | None,
        **signals: Tensor | None,
    ) -> tuple[Tensor, list[Tensor] | None]:
        """What the head reads, (B, T, D), and the hidden states if they are requested; `cache` is moved on."""
        inputs = inputs_embeds if input_ids is None else input_ids
        if inputs is None or (input_ids is not None and inputs_embeds is not None):
            raise InputError("give input_ids or inputs_embeds, and not both")
        wants_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden: list[Tensor] | None = [] if wants_hidden else None
        mask = _mask(attention_mask, inputs, 0 if cache is None else cache.length)
        options: dict[str, Any] = signals | {"mask": mask, "hidden": hidden}
        if cache is None:
            return self.model.features(inputs, **options)[0], hidden
        state = cache.begin(self.model, len(inputs))
        if (rows := len(state.position)) != len(inputs):
            raise InputError(
                f"the cache holds {rows} rows and input_ids has {len(inputs)}; for beams or several sequences of each "
                "row repeat it: cache.batch_repeat_interleave(N)"
            )
        if not torch.is_grad_enabled():
            options |= {"donate": True, "memo": cache.memo}
        features, cache.state = self.model.features(inputs, state, **options)
        cache.length += inputs.shape[1]
        return features, hidden

    # ------------------------------------------------------------------ generating

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: GlissandoCache | None = None,
        inputs_embeds: Tensor | None = None,
        control: Tensor | None = None,
        dt: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The columns that were not read yet, with their own dt and control."""
        inputs = super().prepare_inputs_for_generation(
            input_ids, past_key_values=past_key_values, inputs_embeds=inputs_embeds, **kwargs
        )
        inputs.pop("cache_position", None)  # which transformers 5.0 makes for every model
        first = 0 if past_key_values is None else past_key_values.get_seq_length()
        read = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
        width = read.shape[1]
        inputs["dt"] = _columns("dt", dt, first, width)
        constant = control is None or control.ndim == 2
        inputs["control"] = control if constant else _columns("control", control, first, width)
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """An empty cache for `generate`. Raises ConfigError for what the state cannot do."""
        c = generation_config
        if c.cache_implementation is not None:
            raise ConfigError(
                f"cache_implementation {c.cache_implementation!r} is for keys and values; this model's "
                "cache is its state: leave it out"
            )
        if c.output_attentions:
            raise ConfigError("no mixer keeps attention weights: leave output_attentions out")
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not mask[:, -1].all():
            raise ConfigError(
                "rows end in padding, and what follows would be guessed from it: pad on the left "
                "(tokenizer.padding_side = 'left')"
            )
        cache = model_kwargs.get("past_key_values")
        width = (c.max_new_tokens and c.max_length - c.max_new_tokens) if mask is None else mask.shape[1]
        if isinstance(cache, GlissandoCache) and width is not None and cache.length >= width:
            raise ConfigError(
                f"the cache has read {cache.length} tokens and input_ids has {width}: generate continues from the "
                "cache's end, so give all that it has read and at least one token more"
            )
        if cache is None and c.use_cache is not False:
            cache = model_kwargs["past_key_values"] = GlissandoCache()
        reads_ahead = GenerationMode.ASSISTED_GENERATION in args or c.is_assistant
        if isinstance(cache, GlissandoCache) and reads_ahead:
            cache.reserve(int(c.prompt_lookup_num_tokens or c.num_assistant_tokens or 1))

    def _get_candidate_generator(self, **parts: Any) -> Any:
        """What reads ahead. Raises ConfigError for an assistant that reads further than the cache can go back."""
        if (assistant := parts.get("assistant_model")) is not None:
            c = assistant.generation_config
            if str(c.num_assistant_tokens_schedule).startswith("heuristic"):
                raise ConfigError(
                    f"num_assistant_tokens_schedule {c.num_assistant_tokens_schedule!r} of the assistant's "
                    "generation_config reads ever further ahead, and a state goes back as far as was said at the "
                    "start: use 'constant'"
                )
            if isinstance(cache := parts["model_kwargs"].get("past_key_values"), GlissandoCache):
                cache.reserve(int(c.num_assistant_tokens or 1))
        return super()._get_candidate_generator(**parts)


def _columns(name: str, signal: Tensor | None, first: int, width: int) -> Tensor | None:
    """Columns first to first + width of a signal that has one for every token."""
    if signal is None:
        return None
    if signal.shape[1] < first + width:
        raise ConfigError(
            f"{name} is given for {signal.shape[1]} tokens, and token {first + width} is read: give one for "
            "each of the prompt and each that is generated but the last"
        )
    return signal[:, first : first + width]


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
