"""What families of mixers share: the scan, norms, RoPE, the short convolution, more digits, and how kernels
are compiled."""

from glissando.kernels.scan import scan

__all__ = ["scan"]
