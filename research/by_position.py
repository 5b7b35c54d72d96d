"""Bits per byte of one text after more and more context: does a model use what it read thousands of bytes before?

    python -m research.by_position --text FILE RUN [RUN ...]     pieces of 1,024 bytes, up to 3,072 bytes before them

The text is cut into pieces of P bytes (`--piece`). Rows of n pieces (`--pieces`) begin at every piece and are read from
an empty state, so that each piece is read n times: as the first of a row, after 0 bytes, as the second, after P bytes,
and so on. A cell of the first table is the mean bits per byte of the pieces that were read at all n places: its columns
have the same bytes, and differ in the context alone.

The second table has paired differences with 95 % intervals by Student's t over blocks of n neighbouring pieces: each
place minus the one before; the second half of the places minus the first half; and this run minus the first run, over
all places. A negative difference is a gain. The bits of a token count at its first byte. The first token of a row is
not scored: nothing precedes it.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import glissando
from glissando.errors import RunError
from glissando.evaluation.scoring import token_losses
from glissando.generation import tokenizer_of
from research.intervals import Gap, mean_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="trained runs; without any, a model that was not trained")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8, held out; by default the built-in stories")
    parser.add_argument("--piece", type=int, default=1024, help="P, bytes of a piece (default: 1024)")
    parser.add_argument("--pieces", type=int, default=4, help="n, pieces of a row, an even number (default: 4)")
    parser.add_argument("--limit", type=int, metavar="BYTES", help="read only so much of the text (default: all)")
    parser.add_argument("--quick", action="store_true", help="eight rows of four pieces of 128 bytes")
    options = parser.parse_args()
    piece, pieces, limit = (128, 4, 11 * 128) if options.quick else (options.piece, options.pieces, options.limit)
    if piece < 2 or pieces < 2 or pieces % 2 or (limit is not None and limit < 0):
        parser.error(
            f"--piece must be at least 2, --pieces even and --limit not negative; got {piece}, {pieces} and {limit}"
        )
    text, names = read(options.text)[:limit], options.runs or [None]
    found = [by_place(opened(name), text, piece, pieces) for name in names]
    titles = [name or "transformer-nano, untrained" for name in names]
    after = [f"after {place:,}" for place in range(0, piece * pieces, piece)]
    print(f"{len(found[0])} pieces of {piece:,} bytes, each read at {pieces} places of a row. Bits per byte:")
    show(
        ["", *after],
        [[title, *(f"{cell:.4f}" for cell in bits.mean(0))] for title, bits in zip(titles, found, strict=True)],
    )
    print("\nDifferences of the same bytes: a place minus the one before, and as named")
    gaps = [[title, *map(written, differences(bits, found[0]))] for title, bits in zip(titles, found, strict=True)]
    show(["", *after[1:], "second half - first", "run - first run"], gaps)


def show(head: list[str], rows: list[list[str]]) -> None:
    """A table with its first column to the left and the others to the right."""
    columns = []
    for at, column in enumerate(zip(head, *rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if at else cell.ljust(width) for cell in column])
    print(*("  ".join(row) for row in zip(*columns, strict=True)), sep="\n")


def differences(found: Tensor, first: Tensor) -> list[Gap]:
    """Of bits per byte (pieces, places): each place minus the one before, the second half of the places minus the first
    half, and the mean of all minus that of `first`, another run's of the same pieces."""
    half = found.shape[1] // 2
    steps = found[:, 1:] - found[:, :-1]
    columns = [*steps.unbind(1), found[:, half:].mean(1) - found[:, :half].mean(1), (found - first).mean(1)]
    # Neighbouring pieces share their context, so that blocks of them count as one observation.
    return [mean_of(torch.stack([block.mean() for block in column.split(found.shape[1])])) for column in columns]


def by_place(model: glissando.LanguageModel, text: bytes, piece: int, pieces: int) -> Tensor:
    """Bits per byte (pieces, places) of the pieces of the text that are read at every place.

    A row that would begin or end within a character is left out, and with it the pieces that it has.
    """
    rows = {}
    starts = range(0, len(text) - piece * pieces + 1, piece)
    for start in tqdm(starts, desc="read", leave=False, disable=None):
        try:
            row = text[start : start + piece * pieces].decode()
        except UnicodeDecodeError:
            continue
        rows[start // piece] = bits_by_byte(model, row).view(pieces, piece).mean(1)
    read = [
        torch.stack([rows[number - place][place] for place in range(pieces)])
        for number in range(pieces - 1, len(starts))
        if all(number - place in rows for place in range(pieces))
    ]
    if len(read) <= pieces:
        sys.exit(
            f"{len(read)} pieces of {piece:,} bytes of the text can be read at all {pieces} places; more than {pieces} "
            "are needed: lower --piece or --pieces, or give a longer text"
        )
    return torch.stack(read)


def bits_by_byte(model: glissando.LanguageModel, row: str) -> Tensor:
    """(bytes,) bits of a row that is read from an empty state, those of a token at its first byte and 0 elsewhere."""
    tokenizer = tokenizer_of(model)
    widths = tokenizer.byte_lengths
    if widths is None:
        sys.exit("the model's tokens do not stand for bytes of a text, so that no position in bytes is known")
    length, ids = len(row.encode()), tokenizer.encode(row)
    sizes = torch.from_numpy(widths)[ids]
    if int(sizes.sum()) != length:
        sys.exit(
            f"the tokens of a row of {length} bytes stand for {int(sizes.sum())} bytes: the tokenizer changes the text"
        )
    with torch.no_grad():
        logits, _ = model(torch.tensor([ids[:-1]]))
    costs = torch.zeros(length, dtype=torch.float64)
    costs[sizes.cumsum(0)[:-1]] = token_losses(logits, torch.tensor([ids[1:]]))[0].double() / math.log(2)
    return costs


def written(gap: Gap) -> str:
    return f"{gap.value:+.4f} +- {gap.half:.4f}"


def opened(run: str | None) -> glissando.LanguageModel:
    if run is None:
        torch.manual_seed(0)
        return glissando.LanguageModel.from_preset("transformer-nano").eval()
    try:
        return glissando.load(run).eval()
    except RunError as error:
        sys.exit(str(error))


def read(path: Path | None) -> bytes:
    if path is None:
        from glissando.data.stories.stories import generate

        return "".join(generate(0, "valid", index).text for index in range(40)).encode()
    try:
        data = path.read_bytes()
        data.decode()
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"--text {path} cannot be read as UTF-8: {error}")
    return data


if __name__ == "__main__":
    main()
