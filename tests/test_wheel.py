"""The wheel alone, outside the checkout: its models write, and it trains, evaluates and exports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The wheel of this tree, unpacked as pip does it."""
    place = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "glissando", place / "tree" / "glissando", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, place / "tree" / name)
    command = [sys.executable, "-c", BUILD, str(place)]
    done = subprocess.run(command, cwd=place / "tree", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(place.glob("*.whl"))) as archive:
        archive.extractall(place / "site")
    return place / "site"


def test_it_holds_every_file_of_the_package(site):
    own = {path.relative_to(ROOT) for path in (ROOT / "glissando").rglob("*") if path.is_file()}
    own = {path for path in own if "__pycache__" not in path.parts}
    assert sorted(path for path in own if not (site / path).is_file()) == []


def test_it_is_all_that_is_needed(site, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(site)}

    def glissando(*arguments: str) -> str:
        command = [sys.executable, "-m", "glissando", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert "stories" in glissando("models")
    assert len(glissando("generate", "stories", "--prompt", "Once upon a time", "--max_tokens", "20")) > 40
    glissando("train", "--from", "stories", "--training.steps", "2", "--data.valid_stories", "4", "--out", "run")
    assert "bits_per_byte" in glissando("evaluate", "run", "--json")
    glissando("export", "run", "--to", "safetensors-int8", "--out", "small")
    assert (tmp_path / "small" / "README.md").is_file()
