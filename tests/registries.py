"""The registries of mixers, depths, corpora, probes and imported files, which tests add to."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glissando import imports
from glissando.compare.probes import PROBES
from glissando.data.corpora import CORPORA
from glissando.depth import DEPTHS
from glissando.mixers import MIXERS


@contextlib.contextmanager
def registries_as_they_were() -> Iterator[None]:
    """What is registered inside, also by a file or a page that is executed, is forgotten at the end."""
    probes = dict(PROBES)
    with pytest.MonkeyPatch.context() as patched:
        for registry in (MIXERS, DEPTHS, CORPORA):
            patched.setattr(registry, "_classes", dict(registry._classes))
            patched.setattr(registry, "options", dict(registry.options))
        patched.setattr(imports, "_imported", dict(imports._imported))
        yield
        for name in imports._imported:
            sys.modules.pop(f"imported_{Path(name).stem}", None)
    PROBES.clear()
    PROBES.update(probes)
