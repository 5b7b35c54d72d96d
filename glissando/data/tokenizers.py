"""Text to ids and back: bytes by default, Hugging Face `tokenizers` for everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np


class Tokenizer(ABC):
    """A reversible map between text and ids in [0, vocab_size)."""

    vocab_size: int
    eos_id: int  # ends a document; also what the model reads before a document's first token

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str: ...

    @abstractmethod
    def save(self, path: Path) -> None: ...

    @property
    @abstractmethod
    def byte_lengths(self) -> np.ndarray | None:
        """(V,) bytes of text each id stands for, or None where that is not a property of the id alone."""
