"""How the words of the stories become pools: fillers with their forms, most frequent first."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import yaml

from glissando.data.stories.grammar import Item, Pool, with_capitals, zipf_weights

ZIPF_EXPONENT = 0.4
_WORDS = yaml.safe_load((Path(__file__).parent / "words.yaml").read_text("ascii"))
_PRONOUNS = {
    "she": {"he": "she", "him": "her", "his": "her", "self": "herself"},
    "he": {"he": "he", "him": "him", "his": "his", "self": "himself"},
}
_OPTIONS = re.compile(r"\(([^)]*)\)")
_Entry = tuple[str, float]


def entries(line: str) -> list[_Entry]:
    """The phrases of a line with their weights; `(old/dark) wood` stands for two of them.

    weight = factor rank^-s, where `9*` before a phrase gives the factor, shared out among its variants in
    proportion to rank^-s of each option taken in brackets.
    """
    phrases = [phrase.strip() for phrase in line.split(";" if ";" in line else ",")]
    made: list[_Entry] = []
    for phrase, weight in zip(phrases, zipf_weights(len(phrases), ZIPF_EXPONENT), strict=True):
        factor, times, rest = phrase.rpartition("*")
        weight *= float(factor) if times else 1.0
        variants = _expanded(rest)
        total = sum(w for _, w in variants)
        made.extend((text, weight * w / total) for text, w in variants)
    return made


def _expanded(phrase: str) -> list[_Entry]:
    pieces = _OPTIONS.split(phrase)
    options = [piece.split("/") if k % 2 else [piece] for k, piece in enumerate(pieces)]
    weighted = [list(zip(each, zipf_weights(len(each), ZIPF_EXPONENT), strict=True)) for each in options]
    variants = []
    for combination in product(*weighted):
        weight = 1.0
        for _, w in combination:
            weight *= w
        variants.append(("".join(text for text, _ in combination), weight))
    return variants


def _article(noun: str) -> str:
    """`noun` after a or an; "one-eyed", "useful" and "unique" begin with a consonant's sound."""
    vowel = noun[0] in "aeiou" and not noun.startswith(("one", "use", "uni"))
    return f"{'an' if vowel else 'a'} {noun}"


def _item(key: str, **forms: str) -> Item:
    return Item(key, with_capitals(forms))


def _noun(word: str) -> Item:
    return _item(word, **{"": word, "a": _article(word), "the": f"the {word}"})


def _phrase(word: str) -> Item:
    return _item(word, **{"": word})


def _name(entry: str) -> Item:
    name, pronoun = entry.rsplit(" ", 1)
    return _item(name, **{"": name}, **_PRONOUNS[pronoun])


def _place(entry: str) -> Item:
    """`in old mill`: the preposition, then the noun."""
    preposition, noun = entry.split(" ", 1)
    the = f"the {noun}"
    return _item(noun, **{"": the, "in": f"{preposition} {the}", "at": f"{preposition} {_article(noun)}"})


def _skill(entry: str) -> Item:
    """`swim swimming swimmer`: the verb, its -ing form, and who has it."""
    verb, ing, doer = entry.split(" ")
    return _item(verb, **{"": verb, "ing": ing, "er": doer, "a": _article(doer)})


def _pool(name: str, line: str, made: Callable[[str], Item]) -> Pool:
    listed = entries(line)
    return Pool(name, tuple(made(text) for text, _ in listed), tuple(weight for _, weight in listed))


def _tempers() -> Pool:
    """Mood words; the keys are moods, and each mood has the same total weight."""
    items: list[Item] = []
    weights: list[float] = []
    for mood, line in _WORDS["tempers"].items():
        listed = entries(line)
        total = sum(weight for _, weight in listed)
        items.extend(_item(mood, **{"": word, "a": _article(word)}) for word, _ in listed)
        weights.extend(weight / total for _, weight in listed)
    return Pool("tempers", tuple(items), tuple(weights))


def number_items() -> dict[str, Item]:
    """Number words by the key that sums read: `number_items()["1"]` is "one"."""
    return {str(n): _item(str(n), **{"": word}) for n, word in enumerate(_WORDS["numbers"].split(), start=1)}


def pools(numbers: dict[str, Item]) -> dict[str, Pool]:
    """Every pool by name; `numbers` are the items that sums give."""
    kinds: list[tuple[dict[str, str], Callable[[str], Item]]] = [
        (_WORDS["nouns"], _noun),
        (_WORDS["phrases"], _phrase),
        (_WORDS["places"], _place),
        (_WORDS["people"], _name),
        ({"skills": _WORDS["skills"]}, _skill),
        ({"few": "2, 3, 4", "many": "6, 8, 7, 10, 9"}, numbers.__getitem__),
    ]
    made = [_pool(name, line, of) for lines, of in kinds for name, line in lines.items()]
    return {pool.name: pool for pool in (*made, _tempers())}
