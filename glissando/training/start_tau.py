"""What a tau mixer requires of the run that its training starts from."""

from __future__ import annotations

from glissando.errors import ConfigError
from glissando.mixers import TauConfig


def require_same_laplacian(ours: TauConfig, theirs: TauConfig, source: str) -> None:
    """Raise ConfigError for another Laplacian than the weights of `source` come with."""
    if ours.laplacian not in (theirs.laplacian, "saved"):
        raise ConfigError(
            f"model.mixer.laplacian is {ours.laplacian!r}, but the weights of {source} come with their own, "
            f"{theirs.laplacian!r}: leave the option out, or train a new model"
        )
