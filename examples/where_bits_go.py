"""Where a model's bits go in the stories: at names, at other facts, at pronouns, told for the first time or again.

python examples/where_bits_go.py RUN [RUN ...]     one column a run, in bits per byte of the whole text: they add up

Facts are what a story draws once and tells again: who it is about, things, places, colours. The floor is exact
(docs/stories.md): what a byte costs whoever knows the grammar and remembers the story. What a model pays above it at a
name's first byte, where the name has been told before, is a failure to look back.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter

import torch
from tqdm import tqdm

import glissando
from glissando.data.stories.stories import byte_costs, generate, parse
from glissando.data.tokenizers import ByteTokenizer
from glissando.errors import RunError

FACTS, PARTS = ("a name", "a name again", "a fact", "a fact again", "a pronoun"), ("first byte", "rest")
REST = "all else"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="trained on stories; without any, a model that was not trained")
    parser.add_argument("--stories", type=int, default=64, help="held-out stories to read")
    parser.add_argument("--quick", action="store_true", help="two stories")
    options = parser.parse_args()
    if options.stories < 1:
        parser.error(f"--stories must be at least 1, got {options.stories}")
    models = [opened(run) for run in options.runs]
    if not models:
        torch.manual_seed(0)
        models.append(glissando.LanguageModel.from_preset("transformer-nano").eval())
    kinds, floor, spent = measure(models, 2 if options.quick else options.stories)
    for number, (run, model) in enumerate(zip(options.runs or ["transformer-nano, untrained"], models, strict=True), 1):
        dials = ", ".join(model.config.depth.control)
        print(f"{number}: {run}" + (f" (dials {dials} at 0: labels it learned with are missed)" if dials else ""))
    print(f"{'':26}{'bytes':>8}{'floor':>9}" + "".join(f"{number:9}" for number in range(1, len(models) + 1)))
    for row in [f"{fact}, {part}" for fact in FACTS for part in PARTS] + [REST]:
        print(f"{row:26}{kinds[row]:8,}" + "".join(f"{bits[row] / kinds.total():9.4f}" for bits in (floor, *spent)))
    print(f"{'all':26}{kinds.total():8,}" + "".join(f"{b.total() / kinds.total():9.4f}" for b in (floor, *spent)))


def opened(run: str) -> glissando.LanguageModel:
    try:
        model = glissando.load(run).eval()
    except RunError as error:
        sys.exit(str(error))
    if not isinstance(model.tokenizer, ByteTokenizer):
        sys.exit(
            f"{run} does not read bytes, which are what is counted here; train one with --data.tokenizer.kind bytes"
        )
    return model


def measure(
    models: list[glissando.LanguageModel], stories: int
) -> tuple[Counter[str], Counter[str], list[Counter[str]]]:
    """By kind of byte: how many there are, the bits of the floor, and those of each model."""
    count: Counter[str] = Counter()
    floor: Counter[str] = Counter()
    spent: list[Counter[str]] = [Counter() for _ in models]
    for index in tqdm(range(stories), desc="stories", leave=False, disable=None):
        text = generate(0, "valid", index).text
        kinds, data = kinds_of(text), torch.tensor(list(text.encode()))
        count.update(kinds)
        add(floor, kinds, byte_costs(text))
        ids = torch.cat([torch.tensor([10]), data[:-1]]).unsqueeze(0)  # a row begins behind the end of another story
        for model, bits in zip(models, spent, strict=True):
            with torch.no_grad():
                found = model(ids)[0][0].log_softmax(-1)
            add(bits, kinds, (-found.gather(1, data.unsqueeze(1)).squeeze(1) / math.log(2)).tolist())
    return count, floor, spent


def add(sums: Counter[str], kinds: list[str], values: list[float]) -> None:
    for kind, value in zip(kinds, values, strict=True):
        sums[kind] += value  # type: ignore[assignment]  # a Counter adds what it is given


def kinds_of(text: str) -> list[str]:
    """The kind of each byte, by the grammar that wrote it."""
    kinds, told = [REST] * len(text), set()
    for mention in parse(text).mentions:
        said, name = mention.item.forms[mention.form], mention.item.forms[""]
        kind = "a fact" if not name[0].isupper() else "a name" if said == name else "a pronoun"
        if kind != "a pronoun":
            again = mention.slot in told
            told.add(mention.slot)
            kind += " again" if again else ""
        for offset in range(len(said)):
            kinds[mention.position + offset] = f"{kind}, {PARTS[offset > 0]}"
    return kinds


if __name__ == "__main__":
    main()
