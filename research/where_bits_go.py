"""Where a model's bits go: at names, at other facts or words, at their first mention or again.

python -m research.where_bits_go RUN [RUN ...]     one column a run, in bits per byte of the whole text: they add up
python -m research.where_bits_go --text FILE RUN [RUN ...]     the same of rows of a text instead of the stories

Facts are what a story draws once and mentions again: who it is about, things, places, colours. The floor is exact
(docs/stories.md): what a byte costs whoever knows the grammar and remembers the story. What a model pays above it at
the first byte of a name that was mentioned before is a failure of retrieval.

The bits of a token of several bytes count at the first of them that belongs to a name, fact, word or pronoun, if any
does, and otherwise at its first byte.

A text has no grammar to ask and no floor; it is read by models of bytes alone. Its kinds are words of four letters or
more, and names, which are words that within sentences stand with a capital more often than without; "again" is what
occurred earlier in its row.
"""

from __future__ import annotations

import math
import re
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

import glissando
from glissando.data.stories.stories import END, generate
from glissando.data.tokenizers import ByteTokenizer, Tokenizer
from glissando.evaluation.scoring import token_losses
from glissando.generation import tokenizer_of
from research.runs import opened, options_of
from research.stories.costs import byte_costs, mentions

STORY_KINDS = ("a name", "a name again", "a fact", "a fact again", "a pronoun")
TEXT_KINDS = ("a name", "a name again", "a word", "a word again")
PARTS, OTHER = ("first byte", "rest"), "all else"
LONG = 4  # letters of a word that is counted as one; shorter ones are mostly grammar


class Piece(NamedTuple):
    """What is read at once: the byte before it, its bytes, the kind of each, and what each costs at best if known."""

    before: int
    data: bytes
    kinds: list[str]
    floor: list[float] | None


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument(
        "runs",
        nargs="*",
        help="trained runs, with --text of models of bytes; without any, a model that was not trained",
    )
    parser.add_argument("--stories", type=int, help="held-out stories to read (default: 64)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8, held out, to read in the stories' place")
    parser.add_argument("--rows", type=int, help="rows of the text to read (default: 256)")
    parser.add_argument("--length", type=int, help="bytes of a row (default: 512)")
    parser.add_argument("--quick", action="store_true", help="two stories, or two rows")
    options = parser.parse_args()
    for name, belongs in (("stories", options.text is None), ("rows", options.text), ("length", options.text)):
        value = getattr(options, name)
        if value is not None and not belongs:
            parser.error(f"--{name} is of {'a text, which --text names' if name != 'stories' else 'the stories'}")
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    models = [checked(run, options.text is not None) for run in options.runs or [None]]
    if options.text is None:
        pieces = stories(2 if options.quick else options.stories or 64)
    else:
        pieces = rows(read(options.text), 2 if options.quick else options.rows or 256, options.length or 512)
    for number, (run, model) in enumerate(zip(options.runs or ["transformer-nano, untrained"], models, strict=True), 1):
        dials = ", ".join(model.config.controls)
        print(f"{number}: {run}" + (f" (dials {dials} at 0: labels it learned with are missed)" if dials else ""))
    show(STORY_KINDS if options.text is None else TEXT_KINDS, *measure(models, pieces))


def show(names: tuple[str, ...], kinds: Counter[str], floor: Counter[str] | None, spent: list[Counter[str]]) -> None:
    columns = spent if floor is None else [floor, *spent]
    heads = [] if floor is None else ["floor"]
    print(f"{'':26}{'bytes':>8}" + "".join(f"{head:>9}" for head in [*heads, *range(1, len(spent) + 1)]))
    for row in [f"{name}, {part}" for name in names for part in PARTS] + [OTHER]:
        print(f"{row:26}{kinds[row]:8,}" + "".join(f"{bits[row] / kinds.total():9.4f}" for bits in columns))
    print(f"{'all':26}{kinds.total():8,}" + "".join(f"{bits.total() / kinds.total():9.4f}" for bits in columns))


def checked(run: str | None, reads_text: bool) -> glissando.LanguageModel:
    tokenizer = tokenizer_of(model := opened(run))
    if reads_text and not isinstance(tokenizer, ByteTokenizer):
        sys.exit(
            f"{run} does not read bytes, of which the rows of a text are made; train one with "
            "--data.tokenizer.kind bytes, or leave out --text"
        )
    if tokenizer.byte_lengths is None:
        sys.exit(f"{run}: its tokens do not stand for bytes of a text, which are what is counted here")
    return model


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"--text {path} cannot be read as UTF-8: {error}")


def stories(count: int) -> Iterator[Piece]:
    """Held-out stories, each behind the end of another one."""
    for index in range(count):
        text = generate(0, "valid", index).text
        yield Piece(ord("\n"), text.encode(), kinds_of(text), byte_costs(text))


def rows(text: str, count: int, length: int) -> Iterator[Piece]:
    """The first rows of a text, behind the byte before them."""
    data = text.encode()
    if len(data) < count * length + 1:
        fit = (len(data) - 1) // length
        sys.exit(
            f"{count:,} rows of {length:,} bytes need {count * length + 1:,} bytes, the text has {len(data):,}: "
            + (f"try --rows {fit}" if fit > 0 else "try a smaller --length")
        )
    found = words(text)
    return (
        Piece(data[start - 1], data[start : start + length], kinds_of_row(found, start, length), None)
        for start in range(1, count * length + 1, length)
    )


def measure(
    models: list[glissando.LanguageModel], pieces: Iterator[Piece]
) -> tuple[Counter[str], Counter[str] | None, list[Counter[str]]]:
    """By kind of byte: how many there are, the bits of the floor (None where it is not known), and of each model."""
    count: Counter[str] = Counter()
    floor: Counter[str] | None = None
    spent: list[Counter[str]] = [Counter() for _ in models]
    for before, data, kinds, costs in tqdm(pieces, desc="read", leave=False, disable=None):
        count.update(kinds)
        if costs is not None:
            floor = Counter() if floor is None else floor
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
    ids, lengths = tokenizer.encode(data.decode().removesuffix(END)), tokenizer.byte_lengths
    assert lengths is not None
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


def words(text: str) -> list[tuple[int, str, bool]]:
    """Each counted word of a text: the byte at which it begins, the word, and whether it is a name."""
    found = [(match.start(), match.group()) for match in re.finditer(r"[^\W\d_]+", text)]
    plain = Counter(word for _, word in found if word[0].islower())
    # Behind a letter or a comma nothing begins a sentence: a capital there is the word's own.
    capital = Counter(
        word for at, word in found if word[0].isupper() and re.search(r"[\w,] $", text[max(at - 2, 0) : at])
    )
    counted, character, byte = [], 0, 0
    for at, word in found:
        byte += len(text[character:at].encode())
        character = at
        name = len(word) > 1 and capital[word] > plain[word.lower()]
        if name or len(word) >= LONG:
            counted.append((byte, word, name))
    return counted


def kinds_of_row(found: list[tuple[int, str, bool]], start: int, length: int) -> list[str]:
    """The kind of each of a row's bytes. A word that the row cuts off at its beginning has no kind."""
    kinds, known = [OTHER] * length, set()
    begin = bisect_left(found, start, key=lambda word: word[0])
    for at, word, name in found[begin : bisect_left(found, start + length, key=lambda word: word[0])]:
        kind = ("a name" if name else "a word") + (" again" if word.lower() in known else "")
        known.add(word.lower())
        for offset in range(min(len(word.encode()), start + length - at)):
            kinds[at - start + offset] = f"{kind}, {PARTS[offset > 0]}"
    return kinds


if __name__ == "__main__":
    main()
