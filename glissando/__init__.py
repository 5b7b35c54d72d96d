"""Language models that flow instead of jump: continuous time, continuous depth, one contract.

Shape letters, the same everywhere: B batch, T time, D model, H heads, K head size, N state, V vocabulary,
S depth steps, C control dimensions, W convolution width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "LanguageModel": "glissando.model",
    "ModelConfig": "glissando.model",
    "load": "glissando.loading",
    "generate": "glissando.generation",
    "grow": "glissando.growth",
    "stream": "glissando.generation",
}
__all__ = ["LanguageModel", "ModelConfig", "__version__", "generate", "grow", "load", "stream"]

if TYPE_CHECKING:
    from glissando.generation import generate, stream
    from glissando.growth import grow
    from glissando.loading import load
    from glissando.model import LanguageModel, ModelConfig


def __getattr__(name: str) -> Any:
    # PyTorch takes a second to import; `glissando --help` must not wait for it.
    if name not in _HOMES:
        raise AttributeError(f"module 'glissando' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
