"""A language model of this library behind the interface of a `transformers` causal language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from glissando.backbone import for_saved_weights
from glissando.checkpoints import CHECKPOINTS, checkpoint_step
from glissando.errors import ConfigError, InputError, RunError
from glissando.hf.cache import GlissandoCache
from glissando.hf.config import GlissandoConfig
from glissando.loading import load
from glissando.model import LanguageModel
from glissando.runs import CONFIG

#: arguments of from_pretrained that mean nothing where nothing is fetched
_OF_FETCHING = {
    "cache_dir", "force_download", "local_files_only", "low_cpu_mem_usage", "proxies", "resume_download", "revision",
    "token", "trust_remote_code", "use_auth_token", "use_safetensors", "weights_only",
}  # fmt: skip


class GlissandoForCausalLM(PreTrainedModel, GenerationMixin):
    """`self.model` is the LanguageModel; all that it computes, it computes.

    Train it with `Trainer`, generate with `generate`: greedy, sampling, beams, rows padded on the left, streamers. Its
    cache is the model's state, of the state's own size. What cannot go with a state raises: assisted generation, the
    caches of other models, continuous batching, right padding in `generate`.
    """

    config_class = GlissandoConfig
    config: GlissandoConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # `Trainer` gives num_items_in_batch
    #: no assisted generation, which takes tokens back
    _is_stateful = True
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
    def of(cls, model: LanguageModel) -> GlissandoForCausalLM:
        """The same model, not a copy of it."""
        eos = None if model.tokenizer is None else model.tokenizer.eos_id
        with torch.device("meta"):
            wrapped = cls(GlissandoConfig(model.config, eos_token_id=eos))
        wrapped.model = model
        return wrapped.train(model.training)

    @classmethod
    def from_preset(cls, name: str, /, **overrides: Any) -> GlissandoForCausalLM:
        """The preset with options changed and new weights, as LanguageModel.from_preset."""
        return cls.of(LanguageModel.from_preset(name, **overrides))

    @classmethod
    def from_run(
        cls, path: str | Path, overrides: Mapping[str, Any] | None = None, dtype: torch.dtype | None = None
    ) -> GlissandoForCausalLM:
        """The model of a run directory or of one of its checkpoints, as glissando.load; its files are checked."""
        return cls.of(load(path, overrides).to(dtype=dtype))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """What `save_pretrained` wrote, as PreTrainedModel.from_pretrained; a run directory, as `from_run`, with the
        arguments dtype (or torch_dtype), device_map, output_loading_info and those for fetching from the Hub.

        Raises ConfigError for arguments that a run directory cannot follow, RunError for weights that do not fit: none
        is made up, and none is left out.
        """
        if isinstance(pretrained_model_name_or_path, str | Path) and _is_run(Path(pretrained_model_name_or_path)):
            return cls._of_run(pretrained_model_name_or_path, *args, **kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        wrong = {kind: sorted(info[kind]) for kind in ("missing_keys", "unexpected_keys") if info[kind]}
        if wrong:
            raise RunError(
                f"the weights in {pretrained_model_name_or_path} do not fit its config.json: {wrong}. Save the model "
                "again with save_pretrained, or put the config.json that belongs to them back."
            )
        return (model, info) if wants_info else model

    @classmethod
    def _of_run(cls, path: str | Path, overrides: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        info = kwargs.pop("output_loading_info", False)
        dtype = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None)
        device = _device(kwargs.pop("device_map", None))
        if unknown := sorted(set(kwargs) - _OF_FETCHING):
            raise ConfigError(
                f"a run directory does not know from_pretrained's {', '.join(unknown)}: leave that out, or change the "
                'model\'s own options with overrides={"depth.n_steps": 8}'
            )
        model = cls.from_run(path, overrides, _dtype(dtype)).to(device)
        return (model, {"missing_keys": set(), "unexpected_keys": set(), "error_msgs": []}) if info else model

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: LanguageModel has drawn its weights, and from_pretrained takes no checkpoint that lacks some."""

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The head; None where it is the embedding, which then needs no tying."""
        return self.model.head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(
            f"the vocabulary of {self.config.vocab_size} cannot be resized: it is the tokenizer's. Make a model of "
            "that size: from_preset(name, vocab_size=...)"
        )

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] | None = None,
        every_n_layers: int = 1,
    ) -> None:
        """Each block of a discrete or tied depth is recomputed. Raises ConfigError for other ways of it."""
        able = [module for module in self.model.modules() if hasattr(module, "gradient_checkpointing")]
        if enable and not able:
            raise ConfigError(
                f"a {type(self.model.depth).__name__} cannot recompute its blocks; leave gradient checkpointing off (a "
                "flow has depth.backward `checkpoint` for it)"
            )
        if enable and not (every_n_layers == 1 and _is_plain(gradient_checkpointing_func)):
            raise ConfigError(
                "glissando recomputes every block, without re-entry and without offloading; leave every_n_layers, "
                "offload and the keywords of torch.utils.checkpoint out"
            )
        for module in able:
            setattr(module, "gradient_checkpointing", enable)  # noqa: B010 (nn.Module declares no such attribute)

    # ------------------------------------------------------------------ running

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: GlissandoCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        control: Tensor | None = None,
        dt: Tensor | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **absent: None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """input_ids (B, T) -> logits (B, T, V), or of the columns to keep.

        attention_mask   (B, T), or with a cache (B, tokens before + T); 0 at padding, which may stand anywhere
        past_key_values  the cache to go on from, moved on in the call; `use_cache` starts one where there is none
        labels           (B, T): the logits of a column are scored by the label of the next one, -100 by none
        control, dt      as LanguageModel
        absent           what wrappers such as peft's pass for every model, as None: inputs_embeds, output_attentions

        Raises TypeError for the cache of another kind of model and for any other argument that is not None, and what
        LanguageModel raises.
        """
        if unknown := sorted(name for name, value in absent.items() if value is not None):
            raise TypeError(f"this model reads input_ids and has no {', '.join(unknown)}: leave that out, or give None")
        cache = past_key_values
        if cache is None and use_cache:
            cache = GlissandoCache()
        features = self._read(input_ids, attention_mask, cache, control, dt)
        kept = features[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else features[:, logits_to_keep]
        logits = self.model.logits(kept)
        loss = None
        if labels is not None:
            counted = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **counted)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def _read(
        self,
        ids: Tensor,
        attention_mask: Tensor | None,
        cache: GlissandoCache | None,
        control: Tensor | None,
        dt: Tensor | None,
    ) -> Tensor:
        """What the head reads, (B, T, D); `cache` is moved on."""
        if cache is None:
            return self.model.features(ids, mask=_mask(attention_mask, ids, 0), control=control, dt=dt)[0]
        if not isinstance(cache, GlissandoCache):
            raise TypeError(
                f"past_key_values is a {type(cache).__name__}, and this model continues from its own state: give a "
                "GlissandoCache, such as an output with use_cache=True has, or none"
            )
        if cache.state is not None and len(cache.state.position) != len(ids):
            rows = len(cache.state.position)
            raise InputError(
                f"the cache holds {rows} rows and input_ids has {len(ids)}; for beams or several sequences of each row "
                "repeat it: cache.batch_repeat_interleave(N)"
            )
        mask = _mask(attention_mask, ids, cache.length)
        state = self.model.init_state(len(ids)) if cache.state is None else cache.state
        donate = not torch.is_grad_enabled()
        features, after = self.model.features(
            ids, state, mask=mask, control=control, dt=dt, donate=donate, memo=cache.memo if donate else None
        )
        cache.state, cache.length = after, cache.length + ids.shape[1]
        return features

    # ------------------------------------------------------------------ generating

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: GlissandoCache | None = None,
        control: Tensor | None = None,
        dt: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The columns that were not read yet, with their own dt and control."""
        inputs = super().prepare_inputs_for_generation(input_ids, past_key_values=past_key_values, **kwargs)
        for absent in ("cache_position", "inputs_embeds"):  # which transformers 5.0 makes for every model
            inputs.pop(absent, None)
        first = 0 if past_key_values is None else past_key_values.get_seq_length()
        width = inputs["input_ids"].shape[1]
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
        if generation_config.output_attentions or generation_config.output_hidden_states:
            raise ConfigError(
                "this model gives no attentions or hidden states: leave output_attentions and output_hidden_states out"
            )
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
        if generation_config.use_cache is not False and cache is None:
            model_kwargs["past_key_values"] = GlissandoCache()

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ConfigError: continuous batching pages keys and values, of which a state has none."""
        raise ConfigError(
            "continuous batching works on paged keys and values, and this model continues from its state; use generate"
        )

    generate_batch = init_continuous_batching
    continuous_batching_context_manager = init_continuous_batching


def _width(generation_config: Any, mask: Tensor | None) -> int | None:
    """Columns of input_ids, where `generate` lets one know."""
    if mask is not None:
        return mask.shape[1]
    new = generation_config.max_new_tokens
    return None if new is None else generation_config.max_length - new


def _is_run(path: Path) -> bool:
    """A run directory or a checkpoint in it, and not what `save_pretrained` wrote."""
    if (path / "config.json").is_file():
        return False
    return (path / CONFIG).is_file() or (checkpoint_step(path) >= 0 and path.resolve().parent.name == CHECKPOINTS)


def _dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    """`given` by its name; `auto` is that of the weights. Raises ConfigError for what is no type of floating point."""
    if given is None or given == "auto":
        return None
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype is a type of floating point, such as torch.bfloat16 or 'bfloat16', got {given!r}")
    return found


def _device(given: Any) -> torch.device | None:
    """The device of a device_map, which holds the whole model. Raises ConfigError for one of several devices."""
    one = given[""] if isinstance(given, Mapping) and set(given) == {""} else given
    if one == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return None if one is None else torch.device(one)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device_map is one device for the whole model, such as 'cpu' or 'cuda:0', got {given!r}"
        ) from error


def _is_plain(function: Callable[..., Any] | None) -> bool:
    """Whether `function` recomputes as this library does: torch's own checkpoint, without re-entry."""
    if function is None:
        return True
    inner = getattr(function, "func", function)
    return inner is checkpoint and getattr(function, "keywords", {}) in ({}, {"use_reentrant": False})


def _mask(attention_mask: Tensor | None, ids: Tensor, before: int) -> Tensor | None:
    """(B, T) bool for the columns of `ids`; None where all are real.

    Raises ValueError for a mask that covers neither these columns nor these and the `before` ones in the cache.
    """
    if attention_mask is None:
        return None
    rows, width = ids.shape
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
