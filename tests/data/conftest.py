"""What the tests of corpora share: sample data where there is some, a cache each, and the order laws."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from glissando.data.base import Corpus
from glissando.testing import check_corpus

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def sample_data() -> Path:
    """The directory of sample corpora: $GLISSANDO_DATA, or shared/data beside the repository."""
    path = Path(os.environ.get("GLISSANDO_DATA") or ROOT.parent / "shared" / "data")
    if not path.is_dir():
        pytest.skip(f"no sample corpora at {path}; name their directory in GLISSANDO_DATA")
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a cache directory of its own."""
    monkeypatch.setenv("GLISSANDO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def order_laws() -> Callable[[Corpus], None]:
    """Resuming is skipping; shards make up the global batch, and score each held-out target once."""
    return check_corpus
