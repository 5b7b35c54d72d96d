"""A law of forgetting: for how many tokens does a state of some bytes keep a fact, beside how many others?

    python -m research.forgetting --out DIR     DIR gets runs and forgetting.csv, which docs/comparison has

A stream is filler, uniform over its symbols, with facts `SET key value` and questions `GET key value`. k + 1 keys take
turns: each is set to a uniform value, asked for after a distance that is uniform in its logarithm, and soon set anew,
so that k other facts are always kept beside it. A question's value is certain for whoever remembers, and
log2(64) = 6 bits for whoever does not. It alone is scored, so that the floor of the loss is 0 bits, exactly.

Training reads rows of an endless stream in lanes whose states are carried and never emptied (`training.carry` 1), with
distances up to `longest`. Then one held-out stream for each k is read once, with distances from 100 to 10^6 tokens:

    bits       6 - the mean surprise of a value: what is remembered of a fact (below 0 where a model is surely wrong)
    bits held  that times the k + 1 facts
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import field
from heapq import heappop, heappush
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from tqdm import trange

import glissando
from glissando.config import options
from glissando.data.base import IGNORED, WHOLE, Batch, RowCorpus, Shard, shard_rows
from glissando.data.corpora import GeneratedOptions
from glissando.data.tokenizers import NumberTokenizer, Tokenizer
from glissando.decoding import computing
from glissando.evaluation.scoring import token_losses
from glissando.state import state_bytes
from glissando.training.config import RunConfig
from research.runs import configured, options_of, recorded, trained

SET, GET, KEYS, VALUES, FILLERS = 1, 2, 65, 64, 64
FIRST_KEY, FIRST_VALUE, FIRST_FILLER, VOCABULARY = np.cumsum([3, KEYS, VALUES, FILLERS]).tolist()
OTHERS = (4, 16, 64)  # k
LENGTH, SHORTEST, LONGEST, CHUNK = 2_000_000, 100, 10**6, 4096  # of a stream that is scored
DECADES = [10**power for power in range(2, 7)]


class Stream(NamedTuple):
    ids: np.ndarray  # (T,) int64
    asked: np.ndarray  # (A,) places of the keys of questions; the value is the next token
    distance: np.ndarray  # (A,) tokens from where the value was set to where it is asked for


def stream(length: int, others: int, shortest: int, longest: int, *seed: int) -> Stream:
    """T = `length` tokens with others + 1 keys; a pure function of its arguments."""
    random = np.random.default_rng(seed)
    ids = FIRST_FILLER + random.integers(FILLERS, size=length)
    keys = random.permutation(KEYS)[: others + 1].tolist()
    due = sorted((float(random.integers(shortest * len(keys))), key) for key in keys)  # a heap
    set_at, values, asked, distances, free = dict[int, int](), dict[int, int](), [], [], 0
    while due:
        time, key = heappop(due)
        place = max(math.ceil(time), free)
        if place + 3 > length:
            break
        if key in set_at:
            asked.append(place + 1)
            distances.append(place - set_at.pop(key))
            sign, wait = GET, float(shortest)
        else:
            set_at[key], values[key] = place, int(random.integers(VALUES))
            sign, wait = SET, math.exp(random.uniform(math.log(shortest), math.log(longest)))
        ids[place : place + 3] = sign, FIRST_KEY + key, FIRST_VALUE + values[key]
        free = place + 3
        heappush(due, (place + wait, key))
    return Stream(ids, np.array(asked, dtype=np.int64), np.array(distances, dtype=np.int64))


@options
class FactsOptions(GeneratedOptions):
    """Facts in a stream of filler, asked for later.

    others    k of the documents, in turn
    shortest  smallest distance between a fact and its question, in tokens
    longest   largest one
    rows      rows of a document of a lane: a fact is asked for in the document that sets it
    """

    others: list[int] = field(default_factory=lambda: list(OTHERS))
    shortest: int = 4
    longest: int = 20_000
    rows: int = 64


@glissando.register_corpus("facts", FactsOptions)
class FactsCorpus(RowCorpus):
    """Lanes of long documents; rows that are not in lanes are documents of `seq_len` tokens each."""

    entropy_floor = 0.0

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        self.options = o = FactsOptions(**options)
        self.tokenizer = NumberTokenizer(VOCABULARY)
        self.seq_len, self.batch_size = o.seq_len, o.batch_size
        self._valid = [self._document(o.seq_len, 1, number) for number in range(o.valid_rows)]

    def _document(self, length: int, *key: int) -> np.ndarray:
        """(2, L): ids and targets."""
        o = self.options
        text = stream(length, o.others[sum(key) % len(o.others)], o.shortest, o.longest, o.seed, *key)
        targets = np.full(length, IGNORED)
        targets[text.asked] = text.ids[text.asked + 1]
        return np.stack([text.ids, targets])

    def _training(self, rows: np.ndarray) -> list[np.ndarray]:
        return [self._document(self.seq_len, 0, int(row)) for row in rows]

    def _batch(self, group: Sequence[np.ndarray], mine: Sequence[int]) -> Batch:
        ids, targets = torch.from_numpy(np.stack([group[row] for row in mine])).unbind(1)
        return Batch(ids, targets, int((targets != IGNORED).sum()), floor_bits=0.0)

    def lanes(self, *, start: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        rows, lanes = self.options.rows, shard_rows(self.batch_size, shard)
        for number in count(start // rows):
            long = [self._document(rows * self.seq_len, 2, lane, number) for lane in lanes]
            for row in range(max(start - number * rows, 0), rows):
                part = slice(row * self.seq_len, (row + 1) * self.seq_len)
                yield self._batch([document[:, part] for document in long], range(len(long)))

    def _written(self, group: Sequence[np.ndarray]) -> list[str]:
        return [self.tokenizer.decode(ids) + "\n" for ids, _ in group]

    def prompts(self, n: int, *, seed: int = 0) -> list[str]:
        return [self.tokenizer.decode(self._valid[number % len(self._valid)][0][:16]) for number in range(n)]


DELTA = {"kind": "delta", "heads": 1, "key_size": 128, "keys": "previous", "horizons": [1e6, 1e7]}


#: a second training with longer rows and distances, which does not pull the gates towards 0
FAR = {
    "start_from": "delta",
    "data": {"seq_len": 2048, "batch_size": 2, "others": [64], "longest": 60_000, "valid_rows": 8},
    "training": {"steps": 600, "optimizer": {"learning_rate": 2e-3, "weight_decay": 0.0}},
}
WIDE = {"model": {"hidden_size": 128, "depth": {"layers": 1}}}
#: mixer; hidden units of the MLP, for so many parameters as the others, within 10 %; options of the run that differ
MODELS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "delta": (DELTA, 32, {}),
    "spectral-delta": (["spectral", DELTA], 48, {}),
    "spectral": ("spectral", 64, {}),
    "liquid": ({"kind": "liquid", "state_size": 128, "adaptation": 0.9, "coupled": True, "turns": "matched"}, 64, {}),
    "window": ({"kind": "attention", "heads": 2, "window": 256}, 96, {}),
    "delta-far": (DELTA, 32, FAR),
    "delta-wide": (DELTA, 16, WIDE),
    "delta-wide-far": (DELTA, 16, WIDE | FAR | {"start_from": "delta-wide"}),
}


def configuration(name: str, runs: Path, changes: dict[str, Any]) -> RunConfig:
    """The training of a model of MODELS, whose `start_from` is another one's run in `runs`."""
    mixer, hidden, own = MODELS[name]
    own = own | {"start_from": str(runs / start) if (start := own.get("start_from")) else None}
    values: dict[str, Any] = {
        "model": {"hidden_size": 64, "mixer": mixer, "depth": {"layers": 2, "shortcuts": True}},
        "data": {"kind": "facts", "seq_len": 512, "batch_size": 4, "valid_rows": 64},
        "training": {
            "steps": 1500, "carry": 1.0, "precision": "32-true", "sample_every": 1500,
            "optimizer": {"kind": "muon", "learning_rate": 4e-3, "beta2": 0.99},
            "schedule": {"warmup_steps": 100, "final_ratio": 0.02},
        },
    }  # fmt: skip
    values["model"]["block"] = {"conv_width": 4, "mlp": {"hidden": hidden}}
    return configured(values, own, changes)


@torch.no_grad()
def remembered(
    model: glissando.LanguageModel, length: int, longest: int = LONGEST, edges: Sequence[int] = DECADES
) -> list[dict[str, Any]]:
    """A row for each k and two edges of distances. A stream of each k is read once, side by side, carrying states."""
    texts = [stream(length, others, SHORTEST, longest, 0, 3, others) for others in OTHERS]
    ids = torch.from_numpy(np.stack([text.ids for text in texts]))
    state: Any = model.init_state(len(texts))
    scores = [np.empty((2, len(text.asked))) for text in texts]  # whether right, and nats
    with computing(model):
        for first in trange(0, length, CHUNK, desc="read", leave=False, disable=None):
            features, state = model(ids[:, first : first + CHUNK], state, head=False)
            for row, text in enumerate(texts):
                inside = (first <= text.asked) & (text.asked < first + CHUNK)
                asked = torch.from_numpy(text.asked[inside])
                logits, values = model.logits(features[row, asked - first].unsqueeze(0)), ids[row, asked + 1][None]
                scores[row][:, inside] = (logits.argmax(-1) == values)[0], token_losses(logits, values)[0]
    size, rows = state_bytes(state) // len(texts), []
    for others, text, (hits, nats) in zip(OTHERS, texts, scores, strict=True):
        for low, below in pairwise(edges):
            chosen = (low <= text.distance) & (text.distance < below)
            if chosen.any():
                bits = math.log2(VALUES) - nats[chosen].mean() / math.log(2)
                rows.append({
                    "others": others, "from": low, "below": below, "answers": int(chosen.sum()), "state_bytes": size,
                    "accuracy": round(float(hits[chosen].mean()), 4), "bits": round(float(bits), 4),
                    "bits_held": round(float(bits) * (others + 1), 2),
                })  # fmt: skip
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__)
    add = parser.add_argument
    add("--out", type=Path, help="runs; one that is there is gone on with, or read (default: a temporary directory)")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help=f"of {', '.join(MODELS)}")
    add("--edges", type=int, nargs="+", default=DECADES, metavar="TOKENS", help="of the distances (default: decades)")
    add("--quick", action="store_true", help="two steps of short rows, and streams of 6,000 tokens")
    o = parser.parse_args(arguments)
    out = o.out or Path(tempfile.mkdtemp())
    changes = {"training": {"steps": 2}, "data": {"seq_len": 64, "valid_rows": 4}} if o.quick else {}
    torch.set_num_threads(1)
    for model in o.models:
        made = trained(configuration(model, out, changes), out / model)
        about = {"model": model, "parameters": made.num_parameters()}
        length = 6_000 if o.quick else LENGTH
        new = pd.DataFrame([about | row for row in remembered(made, length, edges=o.edges)])
        print(new.to_string(index=False))
        recorded(out / "forgetting.csv", new, ["model"])


if __name__ == "__main__":
    main()
