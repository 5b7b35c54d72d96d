"""Activation addition, CAST and classifier-free guidance on the stories: success against fluency, as the grammar reads.

    python -m research.steering_fluency [RUN] --dial mood      RUN: by default the packaged model `dial`

Every way but the first gets four settings, tried on the same eight beginnings in both directions. The one with most
texts that are right, i.e. have the requested label and are derived by the grammar as far as they go, is reported on
other beginnings.

    none       the base as it is
    addition   s u v at one of two places of the depth, two strengths
    CAST       the same where a condition holds, two thresholds
    dial       guidance by the model's own dial, four weights; w = 1 is the dial

The base is RUN without a control, which training with neutral_kl ties to a model that has no dial.

    success    share of texts whose label has the sign of u; no evidence is no success
    grammar    share of texts that the grammar derives to their end
    reads      share of a text's bytes before it departs from the grammar, the mean over texts
    bits       bits per byte of what it reads, by the exact oracle: 0.290 is the mean of true stories
    right      share of texts that count as success and as grammar
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
import torch

import glissando
from glissando.data.corpora import StoriesOptions, build_corpus
from glissando.data.stories.parser import ParseError
from glissando.data.stories.stories import END, grammar
from glissando.evaluation.scoring import wilson
from glissando.evaluation.steering import Trial, trial
from glissando.generation import tokenizer_of
from research.runs import options_of
from research.steering.activation_addition import Addition, means, places
from research.steering.conditional import Conditional
from research.steering.guidance import Guidance
from research.steering.rows import labelled_texts
from research.stories.costs import CostReader

WAYS = ("none", "addition", "CAST", "dial")
Write = Callable[[Trial, float], list[str]]


class Reading(NamedTuple):
    """What the grammar reads of a text: whether all of it, the share of its bytes, and their bits."""

    whole: bool
    share: float
    bits: float


def read(text: str) -> Reading:
    """A text that stops early is read as far as it goes."""
    reader = CostReader(text + END)
    try:
        reader.read_all(grammar())
    except ParseError as error:
        at = min(error.position, len(text))
        return Reading(at == len(text), at / len(text), sum(reader.costs[:at]))
    return Reading(True, 1.0, sum(reader.costs))


def outcome(trial: Trial, write: Write, dial: str) -> dict[str, float]:
    """The figures of the module's docstring, over both directions."""
    right = success = whole = 0
    share = bits = size = 0.0
    for u in (-1.0, 1.0):
        texts = write(trial, u)
        for text, label in zip(texts, trial.judge(texts, dial), strict=True):
            reading = read(text)
            success += bool(label * u > 0)
            whole += reading.whole
            right += bool(label * u > 0) and reading.whole
            share, bits, size = share + reading.share, bits + reading.bits, size + reading.share * len(text)
    n = 2 * len(trial.prompts)
    low, high = wilson(right, n)
    figures = {
        "success": success / n,
        "grammar": whole / n,
        "reads": share / n,
        "bits": bits / size,
        "right": right / n,
    }
    return figures | {"low": low, "high": high}


def settings(
    way: str, model: glissando.LanguageModel, dial: str, texts: dict[int, list[list[int]]]
) -> dict[str, Write]:
    """Four settings of a way, by name."""
    if way == "dial":
        guided: list[Any] = [Guidance(model, w, dial) for w in (0.5, 1, 2, 3)]
        return {each.way: each.write for each in guided}
    plus, minus = means(model, texts[1]), means(model, texts[-1])
    names = [name for name in places(model) if not name.startswith("after")][-2:]  # the last before the flow, and it
    added: list[Addition] = []
    for name in names:
        v, middle = plus[name] - minus[name], (plus[name] + minus[name]) / 2
        if way == "addition":
            added += [Addition(model, name, v, s) for s in (4, 8)]
        else:
            added += [Conditional(model, name, v, middle, 8, theta) for theta in (0.0, 0.2)]
    return {each.way: each.write for each in added}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__)
    add = parser.add_argument
    add("run", nargs="?", default="dial", help="a run with dials, trained on the stories (default: dial)")
    add("--dial", default="mood", help="(default: mood)")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help=f"(default: {' '.join(WAYS)})")
    add("--prompts", type=int, default=48, help="beginnings of the report (default: 48)")
    add("--selection_prompts", type=int, default=8, help="other beginnings, to choose by (default: 8)")
    add("--quick", action="store_true", help="two beginnings, short texts, four labelled texts")
    o = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = glissando.load(o.run)
    report, selection, tokens, n = (2, 2, 3, 2) if o.quick else (o.prompts, o.selection_prompts, 150, 64)
    corpus = build_corpus(StoriesOptions(valid_rows=1, labelled=True), tokenizer_of(model))
    both = trial(corpus, prompts=report + selection, cost_rows=1, max_tokens=tokens)
    reported, chosen_by = replace(both, prompts=both.prompts[:report]), replace(both, prompts=both.prompts[report:])
    texts = labelled_texts(corpus, o.dial, n)
    rows: list[dict[str, Any]] = []
    if "none" in o.ways:
        rows.append({"way": "no steering"} | outcome(reported, lambda trial, u: trial.write(model), o.dial))
    for way in (way for way in o.ways if way != "none"):
        writes = settings(way, model, o.dial, texts)
        tried = {}
        for name, write in writes.items():
            tried[name] = outcome(chosen_by, write, o.dial)
            print(name, {key: round(value, 3) for key, value in tried[name].items()}, flush=True)
        best = max(tried, key=lambda name: (tried[name]["right"], tried[name]["success"], tried[name]["reads"]))
        rows.append({"way": best} | outcome(reported, writes[best], o.dial))
        print(pd.DataFrame(rows).round(3).to_string(index=False), flush=True)


if __name__ == "__main__":
    main()
