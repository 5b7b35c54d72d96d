"""A language model of this library behind the interface of a `transformers` causal language model."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationMixin
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from glissando.errors import ConfigError
from glissando.hf.base import GlissandoPreTrainedModel
from glissando.hf.cache import GlissandoCache
from glissando.hf.config import GlissandoConfig


class GlissandoForCausalLM(GlissandoPreTrainedModel, GenerationMixin):
    """`self.model` is the LanguageModel; all that it computes, it computes.

    Train it with `Trainer`, generate with `generate`: greedy, sampling, beams, rows padded on the left, streamers. Its
    cache is the model's state, of the state's own size; in assisted generation and prompt lookup with a trail, by which
    it goes back (glissando.rewinding). What cannot go with a state raises: the caches of other models, right padding in
    `generate`.
    """

    accepts_loss_kwargs = True  # `Trainer` gives num_items_in_batch

    def __init__(self, config: GlissandoConfig) -> None:
        super().__init__(config)
        self.post_init()

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
        self._require_absent(absent)
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
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=hidden)
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

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
        if generation_config.cache_implementation is not None:
            raise ConfigError(
                f"cache_implementation {generation_config.cache_implementation!r} is for keys and values; this model's "
                "cache is its state: leave it out"
            )
        if generation_config.output_attentions:
            raise ConfigError("no mixer keeps attention weights: leave output_attentions out")
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not mask[:, -1].all():
            raise ConfigError(
                "rows end in padding, and what follows would be guessed from it: pad on the left "
                "(tokenizer.padding_side = 'left')"
            )
        cache = model_kwargs.get("past_key_values")
        width = _width(generation_config, mask)
        if isinstance(cache, GlissandoCache) and width is not None and cache.length >= width:
            raise ConfigError(
                f"the cache has read {cache.length} tokens and input_ids has {width}: generate continues from the "
                "cache's end, so give all that it has read and at least one token more"
            )
        ahead = _read_ahead(generation_config, args)
        if cache is None and generation_config.use_cache is not False:
            cache = model_kwargs["past_key_values"] = GlissandoCache()
        if isinstance(cache, GlissandoCache) and ahead:
            cache.reserve(ahead)

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


def _read_ahead(generation_config: Any, modes: tuple[Any, ...]) -> int:
    """How many columns are read ahead of what is known to be right."""
    if GenerationMode.ASSISTED_GENERATION not in modes and not generation_config.is_assistant:
        return 0
    c = generation_config
    return int(c.prompt_lookup_num_tokens or c.num_assistant_tokens or 1)


def _width(generation_config: Any, mask: Tensor | None) -> int | None:
    """Columns of input_ids, where `generate` lets one know."""
    if mask is not None:
        return mask.shape[1]
    new = generation_config.max_new_tokens
    return None if new is None else generation_config.max_length - new


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
