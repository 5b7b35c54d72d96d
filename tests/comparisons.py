"""Comparisons at toy size, and model files, for the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glissando.compare.plan import Amount, Comparison


def comparison(tmp_path: Path, **changes: Any) -> Comparison:
    values: dict[str, Any] = {"model": {"hidden_size": 16, "depth.layers": 1}, "allow_unequal": True}
    return Comparison(
        ["transformer-nano", "tauformer-nano"], tmp_path / "out", Amount("steps", 4), **(values | changes)
    )


def model_file(tmp_path: Path, text: str, name: str = "mine.yaml") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)
