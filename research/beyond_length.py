"""Bits per byte beyond the length of training, by position: how far do rotary positions carry?

    python -m research.beyond_length --out DIR     DIR gets the runs and beyond_length.csv

Models are trained on rows of exactly T = 512 bytes of the built-in stories and read rows of 8 T that they never saw.
Each token of a row is predicted twice: from all tokens before it in the row, and from the last T/2 to T - 1 of them
alone, at positions that occurred in training. Stories are independent and about 685 bytes long, so that an earlier
story says nothing about a later one: what the first costs above the second, beyond T, is due to the positions.

RoPE: Su et al. 2021, arXiv 2104.09864. That it does not extrapolate: Press et al. 2021, arXiv 2108.12409.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

import glissando
from glissando.data.stories.stories import END, generate
from glissando.evaluation.scoring import token_losses
from glissando.generation import tokenizer_of
from glissando.presets import load_preset
from glissando.training.config import RunConfig
from research.intervals import mean_of
from research.runs import configured, options_of, trained

MODELS = ("transformer-nano", "minimal-transformer-nano", "tauformer-nano")
FOLDS = (1, 2, 4, 8)


def configuration(name: str, seed: int, length: int, tokens: int) -> RunConfig:
    data = {"seq_len": length, "batch_size": 4, "cut": True, "valid_rows": 32, "seed": seed}
    training = {"tokens": tokens, "seed": seed, "sample_every": 10**6}
    return configured(load_preset(name), {"data": data, "training": training})


def held_out(model: glissando.LanguageModel, rows: int, length: int) -> Tensor:
    """Ids (rows, length + 1) of a stream of stories of the test split."""
    tokenizer, ids = tokenizer_of(model), [tokenizer_of(model).eos_id]
    stories = (generate(0, "test", index).text.removesuffix(END) for index in count())
    while len(ids) <= rows * length:
        ids += [*tokenizer.encode(next(stories)), tokenizer.eos_id]
    return torch.tensor(ids[: rows * length + 1]).unfold(0, length + 1, length)


@torch.no_grad()
def bits(model: glissando.LanguageModel, rows: Tensor) -> Tensor:
    """Bits (R, T) of the tokens of rows (R, T + 1), each row from an empty state."""
    parts = [token_losses(model(part[:, :-1])[0], part[:, 1:]) for part in rows.split(max(1, 4096 // rows.shape[1]))]
    return torch.cat(parts).double() / math.log(2)


def bits_within(model: glissando.LanguageModel, rows: Tensor, length: int) -> Tensor:
    """Bits (R, N) of the same tokens, each from the last length / 2 to length - 1 tokens of its row; the first
    `length` tokens of a row from all that are before them."""
    half = length // 2
    windows = rows.unfold(1, length + 1, half)  # (R, 1 + (N - length) / half, length + 1)
    costs = bits(model, windows.flatten(0, 1)).unflatten(0, windows.shape[:2])
    return torch.cat([costs[:, 0], costs[:, 1:, half:].flatten(1)], 1)


def table(name: str, seed: int, whole: Tensor, within: Tensor, length: int) -> pd.DataFrame:
    """A row for each stretch of positions: bits per byte (R rows, N positions) whole and within `length`, and their
    difference with half of its interval over rows."""
    lines, start = [], 0
    for fold in FOLDS:
        at, start = slice(start, fold * length), fold * length
        gap = mean_of((whole[:, at] - within[:, at]).mean(1))
        lines.append({
            "model": name, "seed": seed, "positions": f"{at.start + 1:,} to {at.stop:,}",
            "bits": float(whole[:, at].mean()), "within": float(within[:, at].mean()),
            "difference": gap.value, "half": gap.half,
        })  # fmt: skip
    return pd.DataFrame(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__)
    add = parser.add_argument
    add("--out", type=Path, help="runs; one that is there is gone on with, or read (default: a temporary directory)")
    add("--models", nargs="+", default=list(MODELS), metavar="PRESET", help=f"(default: {' '.join(MODELS)})")
    add("--seeds", nargs="+", type=int, default=[0, 1], metavar="SEED", help="(default: 0 1)")
    add("--tokens", type=int, default=2_000_000, help="bytes of training (default: 2000000)")
    add("--rows", type=int, default=16, help="held-out rows of eight times the length (default: 16)")
    add("--quick", action="store_true", help="a step on rows of 32 bytes, and two rows")
    o = parser.parse_args(arguments)
    length, tokens, rows = (32, 128, 2) if o.quick else (512, o.tokens, o.rows)
    out, tables = o.out or Path(tempfile.mkdtemp()), []
    torch.set_num_threads(1)
    for name in o.models:
        for seed in o.seeds:
            model = trained(configuration(name, seed, length, tokens), out / f"{name}-{seed}")
            ids = held_out(model, rows, length * FOLDS[-1])
            tables.append(table(name, seed, bits(model, ids), bits_within(model, ids, length), length))
            print(tables[-1].round(4).to_string(index=False), flush=True)
    pd.concat(tables).round(5).to_csv(out / "beyond_length.csv", index=False)


if __name__ == "__main__":
    main()
