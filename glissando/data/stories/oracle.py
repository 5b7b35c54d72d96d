"""The labels of a text: exactly where the grammar reads it, by its words where it does not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from glissando.data.stories.grammar import Bind, Choice, Item, Seq, Switch, Text, every_node
from glissando.data.stories.parser import ParseError
from glissando.data.stories.stories import END, SIGNS, grammar, parse

_WORD = re.compile(r"[a-z]+")
_SENTENCE_END = re.compile(r"[.!?]")


def oracle(text: str) -> dict[str, int] | None:
    """The labels of a story the grammar derives, None for any other text."""
    try:
        return parse(text if text.endswith(END) else text + END).labels
    except ParseError:
        return None


def judge(text: str) -> dict[str, float | None]:
    """The labels of any text in [-1, 1], None where it gives no evidence.

    A whole story is parsed. Anything else, a model's sample above all, is judged by evidence spread over the text:
    mood is the mean sign of the words that the grammar writes in one mood only, and speech is -1, 0 or 1 for
    no, one or more quoted lines.
    """
    return {"mood": word_mood(text), "speech": quoted_speech(text), **(oracle(text) or {})}


def word_mood(text: str) -> float | None:
    """Mean of the signs of the mood words and mood word pairs in `text`, None if there are none."""
    cues = mood_words()
    signs = [cues[cue] for cue in _cues(text) if cue in cues]
    return sum(signs) / len(signs) if signs else None


def _cues(text: str) -> list[str]:
    """The words of three letters and more, and the pairs of neighbors of which one is longer still."""
    words = _WORD.findall(text.lower())
    return [word for word in words if len(word) > 2] + [
        f"{a} {b}" for a, b in pairwise(words) if max(len(a), len(b)) > 3
    ]


def quoted_speech(text: str) -> float | None:
    """-1, 0 or 1 for no, one or more quoted lines; None for text of fewer than three sentences."""
    if len(_SENTENCE_END.findall(text)) < 3:
        return None
    return float(min(text.count('"') // 2, 2) - 1)


@cache
def mood_words() -> dict[str, int]:
    """Word or pair -> sign, for each that the grammar can write in one mood and in no other."""
    moods_of: dict[str, set[str]] = {}
    for text, mood in _literals(grammar(), "any"):
        for cue in _cues(text):
            moods_of.setdefault(cue, set()).add(mood)
    for cue in _slot_words():
        moods_of.setdefault(cue, set()).add("any")
    return {cue: SIGNS[mood] for cue, moods in moods_of.items() if len(moods) == 1 for mood in moods if mood != "any"}


def _literals(seq: Seq, mood: str) -> Iterator[tuple[str, str]]:
    """Every literal text below `seq`, with the mood in which alone it is written, or "any"."""
    for node in seq:
        if isinstance(node, Text):
            yield node.text, mood
        elif isinstance(node, Choice):
            for alternative in node.alternatives:
                yield from _literals(alternative, mood)
        elif isinstance(node, Switch):
            for key, branch in node.branches.items():
                yield from _literals(branch, key if node.slot == "mood" else mood)
        elif isinstance(node, Bind) and node.slot == "mood":
            yield node.item.forms[""], node.item.key


def _slot_words() -> Iterator[str]:
    """Words of the slots other than the mood, in whatever mood."""
    items: set[Item] = set()
    mood_items: set[Item] = set()
    for node in every_node(grammar()):
        if isinstance(node, Bind):
            (mood_items if node.slot == "mood" else items).add(node.item)
    for item in items - mood_items:
        for form in item.forms.values():
            yield from _cues(form)
