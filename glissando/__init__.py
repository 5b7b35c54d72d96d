"""Language models that flow instead of jump: continuous time, continuous depth, one contract.

Shape letters, the same everywhere: B batch, T time, D model, H heads, K head size, N state, V vocabulary,
S depth steps, C control dimensions, W convolution width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from glissando.lazy import attributes
from glissando.version import __version__

_HOMES = {
    "LanguageModel": "model",
    "LiquidRNN": "rnn",
    "ModelConfig": "model",
    "RNN": "rnn",
    "SeriesModel": "series",
    "generate": "generation",
    "grow": "growth",
    "load": "loading",
    "load_state": "state_files",
    "register_corpus": "data.corpora",
    "register_depth": "depth",
    "register_mixer": "mixers",
    "register_probe": "compare.probes",
    "require_new": "runs",
    "save_state": "state_files",
    "stream": "generation",
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

__getattr__, __dir__ = attributes(__name__, _HOMES, __all__)
