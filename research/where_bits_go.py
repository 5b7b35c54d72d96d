"""Where a model's bits go: at names and other facts, at their first mention or again.

python -m research.where_bits_go RUN [RUN ...]     one column a run, in bits per byte of the whole text: they add up

Facts are what a story draws once and mentions again: who it is about, things, places, colours. The floor is exact
(docs/stories.md): what a byte costs whoever knows the grammar and remembers the story. What a model pays above it at
the first byte of a name that was mentioned before is a failure of retrieval.

The bits of a token of several bytes count at the first of them that belongs to a name, fact or pronoun, if any
does, and otherwise at its first byte.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from tqdm import tqdm

import glissando
from glissando.data.stories.stories import END, generate
from glissando.data.tokenizers import ByteTokenizer, Tokenizer
from glissando.evaluation.scoring import token_losses
from glissando.generation import tokenizer_of
from research.runs import at_least, opened, options_of
from research.stories.costs import byte_costs, mentions

KINDS = ("a name", "a name again", "a fact", "a fact again", "a pronoun")
PARTS, OTHER = ("first byte", "rest"), "all else"


class Piece(NamedTuple):
    """What is read at once: the byte before it, its bytes, the kind of each, and what each costs at best."""

    before: int
    data: bytes
    kinds: list[str]
    floor: list[float]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("runs", nargs="*", help="trained runs; without any, a model that was not trained")
    parser.add_argument("--stories", type=at_least(1), default=64, help="held-out stories to read (default: 64)")
    parser.add_argument("--quick", action="store_true", help="two stories")
    options = parser.parse_args()
    models = [opened(run) for run in options.runs or [None]]
    pieces = stories(2 if options.quick else options.stories)
    for number, (run, model) in enumerate(zip(options.runs or ["transformer-nano, untrained"], models, strict=True), 1):
        dials = ", ".join(model.config.controls)
        print(f"{number}: {run}" + (f" (dials {dials} at 0: labels it learned with are missed)" if dials else ""))
    show(*measure(models, pieces))


def show(kinds: Counter[str], floor: Counter[str], spent: list[Counter[str]]) -> None:
    print(f"{'':26}{'bytes':>8}" + "".join(f"{head:>9}" for head in ["floor", *range(1, len(spent) + 1)]))
    for row in [f"{name}, {part}" for name in KINDS for part in PARTS] + [OTHER]:
        print(f"{row:26}{kinds[row]:8,}" + "".join(f"{bits[row] / kinds.total():9.4f}" for bits in (floor, *spent)))
    print(f"{'all':26}{kinds.total():8,}" + "".join(f"{bits.total() / kinds.total():9.4f}" for bits in (floor, *spent)))


def stories(count: int) -> Iterator[Piece]:
    """Held-out stories, each behind the end of another one."""
    for index in range(count):
        text = generate(0, "valid", index).text
        yield Piece(ord("\n"), text.encode(), kinds_of(text), byte_costs(text))


def measure(
    models: list[glissando.LanguageModel], pieces: Iterator[Piece]
) -> tuple[Counter[str], Counter[str], list[Counter[str]]]:
    """By kind of byte: how many there are, the bits of the floor, and of each model."""
    count, floor = Counter[str](), Counter[str]()
    spent: list[Counter[str]] = [Counter() for _ in models]
    for before, data, kinds, costs in tqdm(pieces, desc="read", leave=False, disable=None):
        count.update(kinds)
        add(floor, kinds, costs)
        for model, bits in zip(models, spent, strict=True):
            ids, sizes = tokens(tokenizer_of(model), before, data)
            with torch.no_grad():
                found = token_losses(model(torch.tensor([ids[:-1]]))[0], torch.tensor([ids[1:]]))[0] / math.log(2)
            add(bits, kinds_of_tokens(kinds, sizes), found.tolist())
    return count, floor, spent


def tokens(tokenizer: Tokenizer, before: int, data: bytes) -> tuple[list[int], list[int]]:
    """The ids, behind the one that they follow, and the number of bytes that each of the others stands for."""
    if isinstance(tokenizer, ByteTokenizer):
        return [before, *data], [1] * len(data)
    if (lengths := tokenizer.byte_lengths) is None:
        sys.exit("a run's tokens do not stand for bytes of a text, which are what is counted here")
    ids = tokenizer.encode(data.decode().removesuffix(END))
    return [tokenizer.eos_id, *ids, tokenizer.eos_id], [*lengths[ids].tolist(), len(END)]


def kinds_of_tokens(kinds: list[str], sizes: list[int]) -> list[str]:
    """For each token, the kind of the first of its bytes that has one, or else OTHER."""
    ends = list(accumulate(sizes))
    assert ends[-1] == len(kinds)
    return [
        next((kind for kind in kinds[end - size : end] if kind != OTHER), OTHER)
        for size, end in zip(sizes, ends, strict=True)
    ]


def add(sums: Counter[str], kinds: list[str], values: list[float]) -> None:
    for kind, value in zip(kinds, values, strict=True):
        sums[kind] += value  # type: ignore[assignment]  # a Counter adds what it is given


def kinds_of(text: str) -> list[str]:
    """The kind of each byte, by the grammar that wrote it."""
    kinds, known = [OTHER] * len(text), set()
    for mention in mentions(text):
        said, name = mention.item.forms[mention.form], mention.item.forms[""]
        kind = "a fact" if not name[0].isupper() else "a name" if said == name else "a pronoun"
        if kind != "a pronoun":
            again = mention.slot in known
            known.add(mention.slot)
            kind += " again" if again else ""
        for offset in range(len(said)):
            kinds[mention.position + offset] = f"{kind}, {PARTS[offset > 0]}"
    return kinds


if __name__ == "__main__":
    main()
