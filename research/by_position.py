"""Bits per byte of one text after more and more context: does a model use what it read thousands of bytes before?

    python -m research.by_position --text FILE RUN [RUN ...]     pieces of 1,024 bytes, up to 3,072 bytes before them

The text is cut into pieces of P bytes (`--piece`), at the next character if need be. Rows of n pieces (`--pieces`)
begin at every piece and are read from an empty state, so that each piece is read n times: as the first of a row, after
0 bytes, as the second, after P bytes, and so on. Tokens count in the piece in which they begin, and only those that are
the same and scored at all n places: the first token of a row, which nothing precedes, and words that the edge of a row
cuts are left out everywhere. So the columns of the first table, bits per byte, are of the same tokens and differ in the
context alone.

The second table has paired differences with 95 % intervals by Student's t over blocks of n neighbouring pieces: each
place minus the one before; the second half of the places minus the first half; and this run minus the first run, over
all places. A negative difference is a gain. Pieces left over behind the last whole block are left out.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

import glissando
from glissando.evaluation.scoring import token_losses
from glissando.generation import tokenizer_of
from research.intervals import Gap, mean_of
from research.runs import opened, options_of


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("runs", nargs="*", help="trained runs; without any, a model that was not trained")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8, held out; by default the built-in stories")
    parser.add_argument("--piece", type=int, default=1024, help="P, bytes of a piece (default: 1024)")
    parser.add_argument("--pieces", type=int, default=4, help="n, pieces of a row, an even number (default: 4)")
    parser.add_argument("--limit", type=int, metavar="BYTES", help="read only so much of the text (default: all)")
    parser.add_argument("--quick", action="store_true", help="eight pieces of 128 bytes, rows of four")
    options = parser.parse_args()
    piece, pieces, limit = (128, 4, 14 * 128) if options.quick else (options.piece, options.pieces, options.limit)
    if piece < 16 or pieces < 2 or pieces % 2 or (limit is not None and limit < 0):
        parser.error(
            f"--piece must be at least 16, --pieces even and --limit not negative; got {piece}, {pieces} and {limit}"
        )
    text, names = read(options.text)[:limit].decode(errors="ignore").encode(), options.runs or [None]
    found = [by_place(opened(name), text, piece, pieces) for name in names]
    titles = [name or "transformer-nano, untrained" for name in names]
    after = [f"after {place:,}" for place in range(0, piece * pieces, piece)]
    print(f"{len(found[0])} pieces of {piece:,} bytes, each read at {pieces} places of a row. Bits per byte:")
    print(pd.DataFrame([bits.mean(0).tolist() for bits in found], titles, after).round(4).to_string())
    print("\nDifferences: a place minus the one before, and as named; 95 % intervals")
    gaps = [[f"{gap.value:+.4f} +- {gap.half:.4f}" for gap in differences(bits, found[0])] for bits in found]
    print(pd.DataFrame(gaps, titles, [*after[1:], "second half - first", "run - first run"]).to_string())


def differences(found: Tensor, first: Tensor) -> list[Gap]:
    """Gaps of bits per byte (pieces, places): each place minus the one before, the second half of the places minus
    the first half, and the mean of all minus that of `first`, another run's of the same pieces."""
    places = found.shape[1]
    steps, half = found[:, 1:] - found[:, :-1], places // 2
    columns = [*steps.unbind(1), found[:, half:].mean(1) - found[:, :half].mean(1), (found - first).mean(1)]
    # Neighbouring pieces share their context, so that blocks of them count as one observation.
    return [mean_of(column.view(-1, places).mean(1)) for column in columns]


def by_place(model: glissando.LanguageModel, text: bytes, piece: int, pieces: int) -> Tensor:
    """Bits per byte (pieces, places) of the pieces that are read at every place, as many as make whole blocks."""
    edges = list(range(0, len(text) + 1, piece))
    for at, edge in enumerate(edges):
        while edge < len(text) and text[edge] & 0xC0 == 0x80:  # within a character
            edge += 1
        edges[at] = edge
    count = (len(edges) - pieces) - (pieces - 1)
    if count < 2 * pieces:
        sys.exit(
            f"{max(count, 0)} pieces of {piece:,} bytes of the text can be read at all {pieces} places; at least "
            f"{2 * pieces} are needed: lower --piece or --pieces, or give a longer text"
        )
    rows = [
        bits_and_sizes(model, text[begin:end].decode())
        for begin, end in tqdm([*zip(edges, edges[pieces:], strict=False)], desc="read", leave=False, disable=None)
    ]
    found = []
    for number in range(pieces - 1, pieces - 1 + count - count % pieces):
        begin, end = edges[number], edges[number + 1]
        read = [
            rows[number - place][:, begin - edges[number - place] : end - edges[number - place]]
            for place in range(pieces)
        ]
        bits, sizes = torch.stack(read, 1)
        same = (sizes == sizes[0]).all(0) & (sizes[0] > 0)
        if not same.any():
            sys.exit(f"a piece of {piece:,} bytes has no token that is the same at all places: raise --piece")
        found.append(bits[:, same].sum(1) / sizes[0, same].sum())
    return torch.stack(found)


def bits_and_sizes(model: glissando.LanguageModel, row: str) -> Tensor:
    """(2, bytes) of a row that is read from an empty state: at the first byte of each token its bits and its number of
    bytes, and 0 at the others and at the first token, which is not scored."""
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
    found = torch.zeros(2, length, dtype=torch.float64)
    if len(ids) > 1:
        with torch.no_grad():
            logits, _ = model(torch.tensor([ids[:-1]]))
        nats = token_losses(logits, torch.tensor([ids[1:]]))[0].double()
        found[:, sizes.cumsum(0)[:-1]] = torch.stack([nats / math.log(2), sizes[1:].double()])
    return found


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
