"""A dial as a probability: if u = +1 is read as 80 %, how far off is it, and does a monotone map mend that?

    python -m research.dial_probability [RUN] --dial mood      RUN: by default the packaged model `dial`

Held-out beginnings are continued at u = -1, -0.5, ..., 1. A text shows the attribute if its label is above 0; of its
words, those written in one mood alone, the share of happy ones is taken. Read as a probability u stands for
t(u) = 0.5 + 0.3 u, and the calibration error is the mean of |share of texts at u - t(u)| over the five values.

The map: on the first half of the beginnings the share rises over u by isotonic regression, with straight lines between;
the dial for a probability is where that curve reaches it. Its error is measured on the other half, as is the plain
dial's. Shares of N texts vary by themselves: that noise alone gives the error in the column `noise`,
mean of sqrt(2 t (1 - t) / (pi N)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

import glissando
from glissando.data.corpora import StoriesOptions, build_corpus
from glissando.data.stories.oracle import word_mood
from glissando.evaluation.scoring import wilson
from glissando.evaluation.steering import Trial, isotonic, trial
from glissando.generation import tokenizer_of
from research.runs import options_of

VALUES = (-1.0, -0.5, 0.0, 0.5, 1.0)


class Shares(NamedTuple):
    """At one value of the dial: texts that show the attribute, of how many; the mean share of happy mood words."""

    showing: int
    texts: int
    words: float

    @property
    def share(self) -> float:
        return self.showing / self.texts


def target(u: float) -> float:
    return 0.5 + 0.3 * u


def shares(model: glissando.LanguageModel, trial: Trial, dial: str, u: float) -> Shares:
    texts = trial.write(model, {dial: u})
    labels = np.nan_to_num(trial.judge(texts, dial))
    moods = [mood for mood in map(word_mood, texts) if mood is not None]
    return Shares(int((labels > 0).sum()), len(texts), float(np.mean(moods) + 1) / 2 if moods else math.nan)


def inverse(values: Sequence[float], measured: Sequence[float], wanted: float) -> float:
    """u at which the isotonic curve through the shares measured at `values` reaches the share `wanted`; the nearest end
    where it does not; the middle of the values where it stays there for a while."""
    curve: NDArray[np.float64] = isotonic(np.asarray(measured))
    fine = np.linspace(values[0], values[-1], 2001)
    apart = np.abs(np.interp(fine, values, curve) - wanted)
    return float(fine[apart <= apart.min() + 1e-9].mean())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__)
    add = parser.add_argument
    add("run", nargs="?", default="dial", help="a run with dials, trained on the stories (default: dial)")
    add("--dial", default="mood", help="(default: mood)")
    add("--prompts", type=int, default=128, help="beginnings, half of them for the map (default: 128)")
    add("--temperature", type=float, default=0.8, help="of sampling (default: 0.8)")
    add("--quick", action="store_true", help="four beginnings, short texts")
    o = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = glissando.load(o.run)
    corpus = build_corpus(StoriesOptions(valid_rows=1), tokenizer_of(model))
    prompts, tokens = (4, 8) if o.quick else (o.prompts, 300)
    both = trial(corpus, prompts=prompts, cost_rows=1, max_tokens=tokens, temperature=o.temperature)
    fitted, tested = (replace(both, prompts=both.prompts[half::2]) for half in (0, 1))
    first = [shares(model, fitted, o.dial, u).share for u in VALUES]
    settings = [inverse(VALUES, first, target(u)) for u in VALUES]
    rows = []
    for u, mapped in zip(VALUES, settings, strict=True):
        plain, after = (shares(model, tested, o.dial, value) for value in (u, mapped))
        low, high = wilson(plain.showing, plain.texts)
        rows.append({
            "u": u, "read as": target(u), "texts": plain.share, "low": low, "high": high, "words": plain.words,
            "mapped to": mapped, "then texts": after.share, "then words": after.words,
            "noise": math.sqrt(2 * target(u) * (1 - target(u)) / math.pi / plain.texts),
        })  # fmt: skip
    table = pd.DataFrame(rows)
    print(table.round(3).to_string(index=False))
    for name in ("texts", "then texts"):
        error = (table[name] - table["read as"]).abs().mean()
        print(f"calibration error, {name}: {error:.3f} (noise alone: {table.noise.mean():.3f})")


if __name__ == "__main__":
    main()
