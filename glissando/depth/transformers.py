"""Options of the depth `transformers`: a model of the library transformers between our embedding and our head."""

from __future__ import annotations

from typing import Any

from glissando.config import options
from glissando.depth.base import DEPTHS


@options
class TransformersConfig:
    """Options of the `transformers` depth.

    config  what the model's config.json holds: model_type and its options; its hidden_size is the model's
    """

    config: dict[str, Any]


DEPTHS.add("transformers", TransformersConfig, "glissando.hf.transformers_depth:TransformersDepth")
