"""A trained model where there is no glissando: ONNX, a page, and smaller weights.

A step of the contract, (ids, state) -> (logits, state), becomes a graph whose state is named inputs and outputs. It is
traced from the model's own forward; what a graph cannot hold, a cache that grows or complex numbers, has another form
of the same mixer for it by its method `export_form`.
"""

from __future__ import annotations

from glissando.errors import Refused
from glissando.export.kinds import KINDS, PHASES, export

__all__ = ["KINDS", "PHASES", "Refused", "export"]
