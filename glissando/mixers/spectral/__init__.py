"""Complex channels that decay and turn."""

from glissando.mixers.spectral.layer import Spectral, SpectralConfig, SpectralState

__all__ = ["Spectral", "SpectralConfig", "SpectralState"]
