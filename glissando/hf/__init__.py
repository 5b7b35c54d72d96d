"""Hugging Face's interface: the models of this library as `transformers` models, without a second implementation.

Importing this module registers the configuration and the models with the Auto classes.
"""

from __future__ import annotations

from glissando.errors import MissingExtraError

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as error:
    raise MissingExtraError("glissando.hf needs transformers 5: pip install -e '.[hf]' in a checkout") from error

from glissando.hf.cache import GlissandoCache
from glissando.hf.config import GlissandoConfig
from glissando.hf.model import GlissandoForCausalLM
from glissando.hf.tokenizer import fast_tokenizer

AutoConfig.register(GlissandoConfig.model_type, GlissandoConfig, exist_ok=True)
AutoModelForCausalLM.register(GlissandoConfig, GlissandoForCausalLM, exist_ok=True)

__all__ = [
    "GlissandoCache",
    "GlissandoConfig",
    "GlissandoForCausalLM",
    "fast_tokenizer",
]
