"""The documents of the tasks for lm-eval in examples/lm_eval: `python -m research.stories.documents` writes them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from glissando.data.stories import generate

#: where they lie
FOLDER = Path(__file__).parents[2] / "examples" / "lm_eval"
N_STORIES, N_ENDINGS, CHOICES = 24, 40, 4
#: "By evening, Wara cycled home ...": the hero of a story is named in its last sentence
_HERO = re.compile(r", ([A-Z]\w+) ")


def make() -> dict[str, str]:
    """File name -> text of each file of documents."""
    texts = [generate(0, "valid", index).text.strip() for index in range(N_STORIES + 2 * N_ENDINGS)]
    whole = [{"story": text} for text in texts[:N_STORIES]]
    chosen = _endings([text for text in texts[N_STORIES:] if _hero(text)], random.Random(0))
    return {
        f"{name}.jsonl": _lines(rows) for name, rows in [("glissando_stories", whole), ("glissando_endings", chosen)]
    }


def _endings(texts: list[str], rng: random.Random) -> list[dict[str, Any]]:
    """The wrong last sentences are other stories' with this hero's name: home, meal and mood tell which is right."""
    rows = []
    for number, text in enumerate(texts[:N_ENDINGS]):
        hero, (story, right) = _hero(text), _split(text)
        others = rng.sample([other for other in texts if other != text], CHOICES - 1)
        choices = [_split(other)[1].replace(_hero(other), hero) for other in others]
        answer = number % CHOICES
        choices.insert(answer, right)
        rows.append({"story": story, "endings": [f" {choice}" for choice in choices], "answer": answer})
    return rows


def _split(text: str) -> tuple[str, str]:
    """All but the last sentence, and that."""
    story, _, last = text.rpartition(". ")
    return f"{story}.", last


def _hero(text: str) -> str:
    """The name in the last sentence; empty where it has none."""
    found = _HERO.search(_split(text)[1])
    return found[1] if found else ""


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    for file_name, written in make().items():
        (FOLDER / file_name).write_text(written, encoding="utf-8")
