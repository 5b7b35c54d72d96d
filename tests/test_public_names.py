"""What `import glissando` offers: each name is there, says what it is, and is in the documents."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import glissando

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = "".join(path.read_text() for path in (ROOT / "README.md", *PAGES))
NAMES = [name for name in glissando.__all__ if name != "__version__"]


def test_dir_has_the_public_names_and_no_others():
    assert dir(glissando) == sorted(glissando.__all__)


def test_they_are_listed_without_pytorch():
    code = "import sys, glissando; dir(glissando); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_importable_and_documented(name):
    assert inspect.getdoc(getattr(glissando, name))
    table = DOCUMENTS[DOCUMENTS.index("`import glissando` offers") :].split("\n\n")[1]
    assert f"`{name}`" in table, "the table of names in docs/tour.md"


def test_what_the_documents_call_is_there():
    """`glissando.name` in a document: a public name, or a module."""
    for path in sorted({*re.findall(r"\bglissando((?:\.[A-Za-z_]+)+)", DOCUMENTS)}):
        first = path.split(".")[1]
        if first not in glissando.__all__ and first not in ("py", "commands"):  # an entry point's group
            importlib.import_module(f"glissando.{first}")


def test_a_wrong_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = glissando.lod
