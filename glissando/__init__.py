"""Language models that flow instead of jump: continuous time, continuous depth, one contract.

Shape letters, the same everywhere: B batch, T time, D model, H heads, K head size, N state, V vocabulary,
S depth steps, C control dimensions, W convolution width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from glissando.version import __version__

_HOMES = {
    "LanguageModel": "glissando.model",
    "LiquidRNN": "glissando.rnn",
    "ModelConfig": "glissando.model",
    "RNN": "glissando.rnn",
    "SeriesModel": "glissando.series",
    "generate": "glissando.generation",
    "grow": "glissando.growth",
    "load": "glissando.loading",
    "load_state": "glissando.state_files",
    "register_corpus": "glissando.data.corpora",
    "register_depth": "glissando.depth",
    "register_mixer": "glissando.mixers",
    "register_probe": "glissando.compare.probes",
    "require_new": "glissando.runs",
    "save_state": "glissando.state_files",
    "stream": "glissando.generation",
}
__all__ = ["__version__", *sorted(_HOMES)]

if TYPE_CHECKING:
    from glissando.compare.probes import register_probe as register_probe
    from glissando.data.corpora import register_corpus as register_corpus
    from glissando.depth import register_depth as register_depth
    from glissando.generation import generate as generate
    from glissando.generation import stream as stream
    from glissando.growth.grow import grow as grow
    from glissando.loading import load as load
    from glissando.mixers import register_mixer as register_mixer
    from glissando.model import LanguageModel as LanguageModel
    from glissando.model import ModelConfig as ModelConfig
    from glissando.rnn import RNN as RNN
    from glissando.rnn import LiquidRNN as LiquidRNN
    from glissando.runs import require_new as require_new
    from glissando.series import SeriesModel as SeriesModel
    from glissando.state_files import load_state as load_state
    from glissando.state_files import save_state as save_state


def __getattr__(name: str) -> Any:
    # PyTorch takes a second to import; `glissando --help` must not wait for it.
    if name not in _HOMES:
        raise AttributeError(f"module 'glissando' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
