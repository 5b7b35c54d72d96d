"""Where a model's bits go in the stories: names, words and what lies between them, new or named before.

python examples/where_bits_go.py RUN [RUN ...]     one column a run, in bits per byte of the whole text: they add up

The floor is exact (docs/stories.md): what a byte costs whoever knows the grammar and remembers the story. What a model
pays above it at a name's first byte, where the name has been told before, is a failure to look back.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from pathlib import Path

import torch

import glissando
from glissando.data.stories.stories import byte_costs, generate

KINDS = ("a new name", "a name again", "a new word", "a word again", "between words")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="trained on stories; without any, a model that was not trained")
    parser.add_argument("--stories", type=int, default=64, help="held-out stories to read")
    parser.add_argument("--quick", action="store_true", help="two stories")
    options = parser.parse_args()
    models = {Path(run).name: glissando.load(run).eval() for run in options.runs}
    if not models:
        torch.manual_seed(0)
        models["untrained"] = glissando.LanguageModel.from_preset("transformer-nano").eval()
    spent = measure(models, 2 if options.quick else options.stories)
    print(f"{'':30}{'bytes':>8}{'floor':>9}" + "".join(f"{name[-14:]:>15}" for name in models))
    rows = [f"{kind}, {part}" for kind in KINDS[:-1] for part in ("first byte", "rest")] + [KINDS[-1]]
    for row in rows:
        print(f"{row:30}{spent['bytes'][row]:8,}" + line(spent, row))
    print(f"{'all':30}{spent['bytes'].total():8,}" + line(spent, None))


def line(spent: dict[str, Counter[str]], row: str | None) -> str:
    """Bits per byte of the whole text: the floor's and each model's."""
    total = spent["bytes"].total()
    found = {name: bits.total() if row is None else bits[row] for name, bits in spent.items() if name != "bytes"}
    return "".join(f"{bits / total:{9 if name == 'floor' else 15}.4f}" for name, bits in found.items())


def measure(models: dict[str, glissando.LanguageModel], stories: int) -> dict[str, Counter[str]]:
    """Bytes, and bits of the floor and of each model, by kind of byte."""
    spent: dict[str, Counter[str]] = {name: Counter() for name in ("bytes", "floor", *models)}
    for index in range(stories):
        text = generate(0, "valid", index).text
        kinds, costs, data = kinds_of(text), byte_costs(text), torch.tensor(list(text.encode()))
        add(spent["floor"], kinds, costs)
        spent["bytes"].update(kinds)
        ids = torch.cat([torch.tensor([10]), data[:-1]]).unsqueeze(0)  # a row begins behind the end of another story
        for name, model in models.items():
            with torch.no_grad():
                found = model(ids)[0][0].log_softmax(-1)
            add(spent[name], kinds, (-found.gather(1, data.unsqueeze(1)).squeeze(1) / math.log(2)).tolist())
    return spent


def add(sums: Counter[str], kinds: list[str], values: list[float]) -> None:
    for kind, value in zip(kinds, values, strict=True):
        sums[kind] += value  # type: ignore[assignment]  # a Counter adds what it is given


def kinds_of(text: str) -> list[str]:
    """The kind of each byte. A name is a capitalised word that the story does not also write small."""
    kinds, seen = [KINDS[-1]] * len(text.encode()), set()
    small = {word.lower() for word in re.findall(r"\b[a-z']+", text)}
    for match in re.finditer(rb"[A-Za-z']+", text.encode()):
        word = match.group().decode()
        name = word[0].isupper() and word.lower() not in small
        key = word if name else word.lower()
        kind = KINDS[(0 if name else 2) + (key in seen)]
        seen.add(key)
        for at in range(match.start(), match.end()):
            kinds[at] = f"{kind}, {'first byte' if at == match.start() else 'rest'}"
    return kinds


if __name__ == "__main__":
    main()
