"""How a mixer or a depth goes into a graph, where its own forward cannot: one file for each."""

from __future__ import annotations

from glissando.export.forms import attention, depths, liquid, spectral, tau  # noqa: F401
from glissando.export.forms.base import FORMS, Refused, prepared, register_form

__all__ = ["FORMS", "Refused", "prepared", "register_form"]
