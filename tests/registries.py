"""What tests register is forgotten after them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest

from glissando import imports
from glissando.compare.probes import PROBES
from glissando.data.corpora import CORPORA
from glissando.depth import DEPTHS
from glissando.mixers import MIXERS


@contextlib.contextmanager
def as_they_were() -> Iterator[None]:
    """The context's registrations, its own or through a file or a page that it executes, end with it."""
    probes = dict(PROBES)
    with pytest.MonkeyPatch.context() as patch:
        for registry in (MIXERS, DEPTHS, CORPORA):
            patch.setattr(registry, "_classes", dict(registry._classes))
            patch.setattr(registry, "options", dict(registry.options))
        patch.setattr(imports, "_imported", dict(imports._imported))
        yield
    for name in [name for name in sys.modules if name.startswith("imported_")]:
        del sys.modules[name]
    PROBES.clear()
    PROBES.update(probes)
