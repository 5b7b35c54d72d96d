"""`stories`: children's stories of exactly known information, the corpus that needs no download."""

from glissando.data.stories.corpus import StoriesCorpus
from glissando.data.stories.oracle import judge
from glissando.data.stories.stories import entropy_floor, generate, sample_text

__all__ = ["StoriesCorpus", "entropy_floor", "generate", "judge", "sample_text"]
