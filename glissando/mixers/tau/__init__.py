"""Attention by one number a head and token, its energy on a graph: the mixer of the Tauformer."""

from __future__ import annotations

from .layer import Tau, TauConfig

__all__ = ["Tau", "TauConfig"]
