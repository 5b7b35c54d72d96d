"""A trained model where there is no glissando: ONNX, PyTorch's exported program, and smaller weights.

A step of the contract, (ids, state) -> (logits, state), becomes a graph whose state is named inputs and outputs. It is
traced from the model's own forward; what a graph cannot hold, a cache that grows or complex numbers, has another form
of the same mixer for it (glissando/export/forms), to which `register_form` adds one from any file.
"""

from __future__ import annotations

from glissando.export.forms.base import FORMS, Refused, register_form
from glissando.export.kinds import KINDS, export

__all__ = ["FORMS", "KINDS", "Refused", "export", "register_form"]
