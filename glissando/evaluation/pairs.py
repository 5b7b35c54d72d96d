"""Whole answers: how often greedy decoding writes exactly the output of a held-out pair."""

from __future__ import annotations

from collections.abc import Sequence

from glissando.data.pairs import Pair
from glissando.evaluation.scoring import wilson
from glissando.generation import generate, tokenizer_of
from glissando.model import LanguageModel


def exact_match_rate(model: LanguageModel, pairs: Sequence[Pair]) -> dict[str, object]:
    """exact_match, its 95 % Wilson interval, and the share of characters right where the answer has them (None where
    all answers are empty)."""
    tokenizer = tokenizer_of(model)
    longest = max(len(tokenizer.encode(p.output)) for p in pairs) + 1  # and the end
    answers = generate(model, [p.input + "\t" for p in pairs], max_tokens=longest, temperature=0)
    right = sum(answer == pair.output for answer, pair in zip(answers, pairs, strict=True))
    characters = sum(len(p.output) for p in pairs)
    same = sum(
        a == b for answer, pair in zip(answers, pairs, strict=True) for a, b in zip(answer, pair.output, strict=False)
    )
    return {
        "exact_match": right / len(pairs),
        "exact_match_95": list(wilson(right, len(pairs))),
        "characters_right": same / characters if characters else None,
        "pairs": len(pairs),
    }
