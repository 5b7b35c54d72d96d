"""Whole answers: how often greedy decoding says exactly the output of a held-out pair."""

from __future__ import annotations

import math
from collections.abc import Sequence

from glissando.data.pairs import Pair
from glissando.generation import generate
from glissando.model import LanguageModel


def exact_match_rate(model: LanguageModel, pairs: Sequence[Pair]) -> dict[str, object]:
    """exact_match, its 95 % Wilson interval, and the share of characters right where the answer has them."""
    longest = max(len(p.output) for p in pairs) + 1
    answers = generate(model, [p.input + "\t" for p in pairs], max_tokens=longest, temperature=0)
    right = sum(answer == pair.output for answer, pair in zip(answers, pairs, strict=True))
    characters = sum(len(p.output) for p in pairs)
    same = sum(
        a == b for answer, pair in zip(answers, pairs, strict=True) for a, b in zip(answer, pair.output, strict=False)
    )
    return {
        "exact_match": right / len(pairs),
        "exact_match_95": list(wilson(right, len(pairs))),
        "characters_right": same / characters,
        "pairs": len(pairs),
    }


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a proportion: honest at 0 and at 1, unlike p +- z sqrt(p (1 - p) / n)."""
    p = successes / n
    centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
