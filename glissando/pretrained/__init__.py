"""Trained models that are part of the package. Each folder is a run with int8 matrices and a model card, README.md.

A name stands wherever a run directory is expected: `glissando.load("dial")`, `glissando generate stories`. A directory
of that name in the working directory comes first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glissando.errors import RunError

ROOT = Path(__file__).parent
CARD, _CONFIG = "README.md", "config.yaml"


def names() -> list[str]:
    """Of all packaged models, in alphabetical order."""
    return sorted(folder.parent.name for folder in ROOT.glob(f"*/{_CONFIG}"))


def resolve(path: str | Path) -> Path:
    """The folder of a packaged model if `path` is its name and nothing of that name is here, else `path` itself."""
    path = Path(path).expanduser()
    packaged = len(path.parts) == 1 and not path.exists() and (ROOT / path / _CONFIG).is_file()
    return ROOT / path if packaged else path


def card(name: str) -> tuple[dict[str, Any], str]:
    """A card's front matter and its text. Raises RunError for a card that has none."""
    import yaml

    text = (ROOT / name / CARD).read_text(encoding="utf-8")
    parts = text.split("---\n", 2)
    if len(parts) != 3 or parts[0]:
        raise RunError(f"{ROOT / name / CARD} has no front matter between two lines `---`: the installation is damaged")
    return yaml.safe_load(parts[1]), parts[2].lstrip()
