"""Bits per byte of long rows by position: does a model use what it read thousands of bytes before?

    python -m research.by_position --text FILE RUN [RUN ...]     rows of 4,096 bytes, cut at 256, 1,024 and 2,048

A row is a piece of the text of `--length` bytes that is read from an empty state. With n_r(a, b) bits for the bytes
from a to b of row r, a cell is the sum of n_r(a, b) over rows divided by the number of these bytes. The last column is
the mean over rows of

    n_r(L / 2, L) / (L / 2) - n_r(0, L / 2) / (L / 2)

for rows of L bytes, with its 95 % interval by Student's t: negative where the second half is predicted better. The
bits of a token count at its first byte. The first token of a row is not scored: nothing precedes it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import glissando
from glissando.errors import RunError
from glissando.evaluation.scoring import token_losses
from glissando.generation import tokenizer_of
from research.intervals import Gap, t_quantile

CUTS = (256, 1024, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="trained runs; without any, a model that was not trained")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8, held out; by default the built-in stories")
    parser.add_argument("--rows", type=int, help="number of rows (default: all that the text has)")
    parser.add_argument("--length", type=int, default=4096, help="bytes of a row, an even number (default: 4096)")
    parser.add_argument("--quick", action="store_true", help="two rows of 512 bytes")
    options = parser.parse_args()
    length, count = (512, 2) if options.quick else (options.length, options.rows)
    if length < 2 or length % 2 or (count is not None and count < 2):
        parser.error(f"--length must be even and --rows at least 2, got {length} and {count}")
    rows = cut(read(options.text), length, count)
    bands = [0, *(at for at in CUTS if at < length), length]
    print(f"{len(rows)} rows of {length:,} bytes; bits per byte of the bytes from, to")
    print(f"{'':32}" + "".join(f"{f'{a:,} - {b:,}':>15}" for a, b in pairwise(bands)) + f"{'second - first half':>24}")
    for run in options.runs or [None]:
        costs = bits_by_byte(opened(run), rows, length)
        cells = [float(costs[:, a:b].sum()) / (len(rows) * (b - a)) for a, b in pairwise(bands)]
        print(
            f"{run or 'transformer-nano, untrained':32}"
            + "".join(f"{c:15.4f}" for c in cells)
            + f"{halves(costs)!s:>24}"
        )


def halves(costs: Tensor) -> Gap:
    """The second half of rows minus the first, bits per byte, for costs (rows, bytes); see the module's docstring."""
    half = costs.shape[1] // 2
    gaps = (costs[:, half:].mean(1) - costs[:, :half].mean(1)).tolist()
    deviation = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return Gap(statistics.fmean(gaps), t_quantile(len(gaps) - 1) * deviation)


def bits_by_byte(model: glissando.LanguageModel, rows: list[str], length: int) -> Tensor:
    """(rows, length) bits, those of a token at its first byte and 0 elsewhere."""
    tokenizer = tokenizer_of(model)
    widths = tokenizer.byte_lengths
    if widths is None:
        sys.exit("the model's tokens do not stand for bytes of a text, so that no position in bytes is known")
    costs = torch.zeros(len(rows), length, dtype=torch.float64)
    for row, text in enumerate(tqdm(rows, desc="read", leave=False, disable=None)):
        ids = tokenizer.encode(text)
        sizes = torch.from_numpy(widths)[ids]
        if int(sizes.sum()) != length:
            sys.exit(
                f"the tokens of a row of {length} bytes stand for {int(sizes.sum())} bytes: the tokenizer changes "
                "the text"
            )
        with torch.no_grad():
            logits, _ = model(torch.tensor([ids[:-1]]))
        nats = token_losses(logits, torch.tensor([ids[1:]]))[0].double()
        costs[row, sizes.cumsum(0)[:-1]] = nats / math.log(2)
    return costs


def cut(text: str, length: int, count: int | None) -> list[str]:
    """The first `count` rows of `length` bytes, all if None; one that would cut a character in two is left out."""
    data = text.encode()
    pieces = [data[at : at + length] for at in range(0, len(data) - length + 1, length)]
    rows = []
    for piece in pieces:
        try:
            rows.append(piece.decode())
        except UnicodeDecodeError:
            continue
    if len(rows) < max(count or 0, 2):
        sys.exit(
            f"the text has {len(rows)} rows of {length:,} bytes, {max(count or 0, 2)} are needed: lower --rows or "
            "--length"
        )
    return rows[:count]


def opened(run: str | None) -> glissando.LanguageModel:
    if run is None:
        torch.manual_seed(0)
        return glissando.LanguageModel.from_preset("transformer-nano").eval()
    try:
        return glissando.load(run).eval()
    except RunError as error:
        sys.exit(str(error))


def read(path: Path | None) -> str:
    if path is None:
        from glissando.data.stories.stories import generate

        return "".join(generate(0, "valid", index).text for index in range(8))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"--text {path} cannot be read as UTF-8: {error}")


if __name__ == "__main__":
    main()
