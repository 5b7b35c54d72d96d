"""What one export is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from glissando.model import LanguageModel
from glissando.runs import Run


@dataclass(frozen=True)
class Request:
    """What is exported.

    stream    held-out tokens for the check
    capacity  None where no part of the state grows
    runtime   the npm package of onnxruntime-web, if one was named
    """

    model: LanguageModel
    run: Run
    kind: str
    stream: list[int]
    capacity: int | None
    runtime: Path | None = None
