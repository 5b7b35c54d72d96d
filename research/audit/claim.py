"""What a published claim is, and what measuring it finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Plan:
    """How much to measure, and on what.

    quick      toy widths and a few steps: that it runs is all it shows
    steps      of training; None: the published number
    seeds      how many models of each kind are trained where learning is compared; None: 3, and 1 if quick
    text       file to train on; None: the built-in stories
    tokenizer  a tokenizer.json; None: one trained on the text
    run        a run of ours that a corrected form measures
    """

    quick: bool = False
    steps: int | None = None
    seeds: int | None = None
    text: str | None = None
    tokenizer: str | None = None
    run: str | None = None

    @property
    def each_seed(self) -> range:
        return range(self.seeds or (1 if self.quick else 3))


@dataclass(frozen=True)
class Finding:
    """What one form of a claim was measured to be.

    said     the figures in a line or a few
    figures  all of them, plain values for JSON
    checks   what the claim says -> whether the figures show it, None where they cannot tell; the verdict is read off
             these
    needs    what is not here without which a figure cannot be compared, or nothing measured
    draw     draws a picture into a file
    """

    said: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    checks: Mapping[str, bool | None] = field(default_factory=dict)
    needs: str = ""
    draw: Callable[[Path], Path] | None = None

    @property
    def outcome(self) -> str:
        """holds; holds in part; does not hold; not decided, by figures whose intervals are too wide; or not reproduced
        here."""
        held = list(self.checks.values())
        if not held:
            return "not reproduced here"
        if True in held:
            return "holds" if all(held) else "holds in part"
        return "does not hold" if False in held else "not decided"

    @property
    def verdict(self) -> str:
        """The outcome, with what holds, what does not and what is open, and with what it needs."""
        if not self.checks:
            return f"{self.outcome}: needs {self.needs}"
        words = {False: "Not", None: "Not decided", True: "It does"}
        parts = {
            word: "; ".join(name for name, held in self.checks.items() if held is value)
            for value, word in words.items()
        }
        listed = ". ".join(f"{word}: {names}" for word, names in parts.items() if names)
        verdict = self.outcome if all(self.checks.values()) else f"{self.outcome} ({listed[0].lower()}{listed[1:]})"
        return f"{verdict}. The published figure itself needs {self.needs}" if self.needs else verdict

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which knows neither NaN nor infinity: what is none is null."""
        summary = {"outcome": self.outcome, "verdict": self.verdict, "said": self.said, "checks": dict(self.checks)}
        return summary | {"figures": _known(self.figures)} | ({"needs": self.needs} if self.needs else {})


def _known(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _known(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_known(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Claim:
    """A claim of a publication, the figure it gave, and how it is measured: as its authors did, and as it should be."""

    name: str
    system: str
    claim: str
    published: str
    as_published: Callable[[Plan], Finding]
    corrected: Callable[[Plan], Finding]
    notes: str = ""


def claims(system: str, table: Mapping[str, tuple[Any, ...]]) -> list[Claim]:
    """A system's claims by name: the module of their functions and how the names of these begin (`_as_published` and
    `_corrected` follow), the claim, its published figure and, where there are any, notes."""

    def forms(module: Any, stem: str) -> list[Any]:
        return [getattr(module, f"{stem}_{form}".removeprefix("_")) for form in ("as_published", "corrected")]

    return [
        Claim(name, system, claim, published, *forms(module, stem), *notes)
        for name, (module, stem, claim, published, *notes) in table.items()
    ]
