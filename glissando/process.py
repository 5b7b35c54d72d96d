"""What a program that trains sets for its whole process."""

from __future__ import annotations

from glissando.allocator import keep_freed_memory
from glissando.precision import flush_subnormals


def prepare_to_train() -> None:
    """Keep freed memory in the process, and compute with subnormal numbers as 0.

    It is for whoever owns the process, before its first thread starts: the commands call it. The library by itself
    never keeps freed memory, and it flushes subnormal numbers only within a training. Neither changes what a model
    computes beyond numbers below the smallest normal one.
    """
    keep_freed_memory()
    flush_subnormals()
