"""`stories`: children's stories of exactly known information, the corpus that needs no download."""

from glissando.data.stories.corpus import StoriesCorpus
from glissando.data.stories.oracle import Judgement, judge, labels_so_far, oracle
from glissando.data.stories.parser import ParseError
from glissando.data.stories.stories import (
    Derivation,
    Story,
    byte_costs,
    entropy_floor,
    expected_bits,
    expected_bytes,
    generate,
    parse,
    sample_text,
    story_bits,
)

__all__ = [
    "Derivation",
    "Judgement",
    "ParseError",
    "StoriesCorpus",
    "Story",
    "byte_costs",
    "entropy_floor",
    "expected_bits",
    "expected_bytes",
    "generate",
    "judge",
    "labels_so_far",
    "oracle",
    "parse",
    "sample_text",
    "story_bits",
]
