"""The sdist holds what its tests need, and they run from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
#: the folders and files of a checkout that tests read
NEEDED = ("LICENSES", "benchmarks", "docs", "examples", "glissando", "log", "models", "research", "tests")
FILES = (
    *(
        "CHANGELOG.md",
        "CITATION.cff",
        "CODE_OF_CONDUCT.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "NOTICE",
        "README.md",
    ),
    *("SECURITY.md", "constraints.txt", "mkdocs.yml", "pyproject.toml"),
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    """The sdist of this tree, which is only read."""
    place = tmp_path_factory.mktemp("sdist")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in NEEDED:
        shutil.copytree(ROOT / name, place / "tree" / name, ignore=ignored)
    for name in (*FILES, "MANIFEST.in"):
        shutil.copy(ROOT / name, place / "tree" / name)
    command = [sys.executable, "-c", BUILD, str(place)]
    done = subprocess.run(command, cwd=place / "tree", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(place.glob("*.tar.gz"))


def test_it_holds_what_the_tests_need(archive):
    with tarfile.open(archive) as packed:
        names = {member.name.partition("/")[2] for member in packed if member.isfile()}
    for name in NEEDED:
        own = {path.relative_to(ROOT) for path in (ROOT / name).rglob("*") if path.is_file()}
        own = {path for path in own if "__pycache__" not in path.parts and path.suffix != ".pyc"}
        missing = sorted(path for path in own if path.as_posix() not in names)
        assert not missing, missing[:5]
    assert not set(FILES) - names


@pytest.mark.slow
def test_its_tests_run(archive, tmp_path):
    """Without the checkout, and without git."""
    with tarfile.open(archive) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2, Debian's, has none
        packed.extractall(tmp_path)
    sdist = next(tmp_path.iterdir())
    tests = [
        "test_cli.py",
        "test_runs.py",
        "test_layers.py",
        "test_figures.py",
        "test_public_names.py",
        "test_docs.py",
        "test_pretrained.py",
        "test_presets.py",
    ]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(sdist)}
    environment["GIT_CEILING_DIRECTORIES"] = str(sdist.parent)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *(f"tests/{name}" for name in tests),
    ]
    done = subprocess.run(command, cwd=sdist, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "fatal" not in done.stderr
