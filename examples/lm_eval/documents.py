"""The documents of the bundled tasks, as lm-eval reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def stories(**_: Any) -> dict[str, Any]:
    """Whole stories. The keywords are the task's metadata, which lm-eval gives to every reader."""
    return _read("glissando_stories")


def endings(**_: Any) -> dict[str, Any]:
    """Stories without their last sentence, and four last sentences of which one belongs to it."""
    return _read("glissando_endings")


def _read(name: str) -> dict[str, Any]:
    from datasets import Dataset

    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}
