"""What growth needs to know of each class of module, registered from outside the class.

A mixer without a rule trains, streams and is compared all the same; growing a model that has one names it in the error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict
from torch import nn

from glissando.errors import ConfigError, unknown_name
from glissando.growth.lifts import Lift, Table
from glissando.mixers import Mixer


@dataclass(frozen=True)
class Growth:
    """By how much a model grows: factors, numbers of what is added, and new sizes.

    width      factor of the width
    heads      factor of the heads; None: that of the width
    ffn        factor of the MLPs' hidden units; None: that of the width
    state      factor of the channels of `spectral` or the state of `liquid`; None: that of the width
    layers     number of new blocks
    steps      number of new applications of a tied depth
    head_size  new size of a head
    vocab      new size of the vocabulary
    noise      standard deviation of the noise between copies, relative to that of the weights; with 0, copies stay
               equal
    seed       seed of the noise and of new parameters
    dropout    `kept`, or `published`: min(0.1, 0.5 D / 256) at the new width D before each residual sum; the logits in
               evaluation mode are the same
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # for from_dict, which reads it from a stage

    width: int = 1
    heads: int | None = None
    ffn: int | None = None
    state: int | None = None
    layers: int = 0
    steps: int = 0
    head_size: int | None = None
    vocab: int | None = None
    noise: float = 0.2
    seed: int = 0
    dropout: Literal["kept", "published"] = "kept"

    def check(self) -> None:
        """Raise ConfigError for a number out of its range."""
        what = {
            **dict.fromkeys(("width", "heads", "ffn", "state"), ("a factor", 1)),
            **dict.fromkeys(("layers", "steps"), ("a number of new ones", 0)),
            **dict.fromkeys(("head_size", "vocab"), ("a new size", 1)),
        }
        optional = ("heads", "ffn", "state", "head_size", "vocab")
        for name, (meaning, least) in what.items():
            value = getattr(self, name)
            if not (value is None and name in optional) and not (_is_whole(value) and value >= least):
                raise ConfigError(f"grow: {name} is {meaning}, a whole number of at least {least}; got {value!r}")
        if self.dropout not in ("kept", "published"):
            raise unknown_name("grow: dropout", str(self.dropout), ["kept", "published"])
        if not _is_whole(self.seed):
            raise ConfigError(f"grow: seed must be a whole number, got {self.seed!r}")
        if isinstance(self.noise, bool) or not isinstance(self.noise, int | float) or not 0 <= self.noise < 1:
            raise ConfigError(f"grow: noise must be at least 0 and below 1, got {self.noise!r}; 0.2 works well")

    def factor(self, name: str) -> int:
        """That of `heads`, `ffn` or `state`, which follow the width unless they are given."""
        given = getattr(self, name)
        return self.width if given is None else given


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class MixerRule(NamedTuple):
    """How a class of mixers grows.

    axes     which of `heads`, `head_size` and `state` it has
    options  (options, width, by) -> its options once it has grown, with all that would follow from the width pinned;
             raises ConfigError for what cannot be grown exactly
    table    (mixer, grown, width) -> how its parameters and buffers go into those of `grown`, built from `options`;
             `width` lifts x
    silence  (mixer) -> the parameters that its output is linear in, so that zeros there silence it
    begin    (new, like): copy from the same mixer of another layer what a new layer cannot know by itself
    """

    axes: frozenset[str]
    options: Callable[[Any, int, Growth], Any]
    table: Callable[[Any, Any, Lift], Table]
    silence: Callable[[Any], list[nn.Parameter]]
    begin: Callable[[Any, Any], None] | None = None


MIXER_RULES: dict[type[Mixer], MixerRule] = {}


def output_projection(mixer: Any) -> list[nn.Parameter]:
    """The parameters of `mixer.out`, where it is a linear map."""
    out = getattr(mixer, "out", None)
    return list(out.parameters()) if isinstance(out, nn.Linear) else []


def mixer_rule(mixer: Mixer | type[Mixer]) -> MixerRule:
    """The rule of a mixer's class. Raises ConfigError where there is none."""
    cls = mixer if isinstance(mixer, type) else type(mixer)
    for base in cls.__mro__:
        if base in MIXER_RULES:
            return MIXER_RULES[base]
    raise ConfigError(
        f"grow: no rule is registered for how the mixer {cls.__name__} grows; add it to glissando.growth.MIXER_RULES"
    )
