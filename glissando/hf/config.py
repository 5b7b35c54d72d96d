"""The configuration of a model as `transformers` keeps it: config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from transformers import PretrainedConfig

from glissando.config import from_dict, to_dict
from glissando.errors import ConfigError
from glissando.model import ModelConfig

#: saved beside config.json; nothing but an import, so that the library that is installed computes
MODULE = "modeling_glissando"
_AUTO_CLASSES = {"AutoConfig": "GlissandoConfig", "AutoModelForCausalLM": "GlissandoForCausalLM"}
_SOURCE = f"from glissando.hf import {', '.join(_AUTO_CLASSES.values())}  # noqa: F401\n"


class GlissandoConfig(PretrainedConfig):
    """`model` holds every option of glissando.ModelConfig, nested and resolved; the rest is Hugging Face's own.

    model         options of ModelConfig that differ from its defaults
    eos_token_id  ends a document and stands before its first token, so it begins (bos) and pads rows as well

    Raises ConfigError for an unknown option, naming the nearest, and for an option of the model outside `model`.
    """

    model_type = "glissando"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def __init__(
        self, model: Mapping[str, Any] | ModelConfig | None = None, eos_token_id: int | None = None, **kwargs: Any
    ) -> None:
        for name in (field.name for field in fields(ModelConfig)):
            if name in kwargs:
                raise ConfigError(f"{name} is an option of the model: GlissandoConfig(model={{{name!r}: ...}})")
        config = model if isinstance(model, ModelConfig) else from_dict(ModelConfig, model or {}, "model")
        self.model = to_dict(config)
        # Every name of one token: what a tool that knows only one of them reads must not differ.
        ids = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), eos_token_id)
        super().__init__(**kwargs | ids | {"tie_word_embeddings": config.tied_head})

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """config.json, and beside it the module by which the Auto classes find this library where nothing has imported
        it: `trust_remote_code=True` runs that module."""
        self.auto_map = {auto: f"{MODULE}.{name}" for auto, name in _AUTO_CLASSES.items()}
        super().save_pretrained(save_directory, *args, **kwargs)
        (Path(save_directory) / f"{MODULE}.py").write_text(_SOURCE, encoding="utf-8")

    def model_config(self) -> ModelConfig:
        """`model` as the library's own dataclass."""
        return from_dict(ModelConfig, self.model, "model")

    @property
    def vocab_size(self) -> int:
        return self.model["vocab_size"]

    @property
    def hidden_size(self) -> int:
        return self.model["hidden_size"]

    @property
    def num_hidden_layers(self) -> int:
        """Hidden states after the first: one a block; one an application of a tied depth; a flow is one more."""
        depth = self.model["depth"]
        return depth["n_steps"] if depth["kind"] == "tied" else depth["layers"] + (depth["kind"] == "flow")

    @property
    def max_position_embeddings(self) -> int:
        """Raises AttributeError where positions are not learned: such a model has no longest input."""
        if self.model["max_length"] is None:
            raise AttributeError("max_position_embeddings")
        return self.model["max_length"]
