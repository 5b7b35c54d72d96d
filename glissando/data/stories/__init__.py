"""`stories`: children's stories of exactly known information, the corpus that needs no download."""

from glissando.data.stories.corpus import StoriesCorpus
from glissando.data.stories.oracle import judge, oracle
from glissando.data.stories.parser import ParseError
from glissando.data.stories.stories import (
    Derivation,
    Story,
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
    "ParseError",
    "StoriesCorpus",
    "Story",
    "entropy_floor",
    "expected_bits",
    "expected_bytes",
    "generate",
    "judge",
    "oracle",
    "parse",
    "sample_text",
    "story_bits",
]
