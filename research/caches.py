"""What keys and values in bfloat16 cost trained models: bits per byte of held-out text, computed by the compiled step.

    python -m research.caches RUN ...

Each row of the runs' held-out text begins with an empty state, and each of its tokens attends to what was kept.
"""

from __future__ import annotations

import argparse

import torch

from glissando.config import from_dict
from glissando.data.corpora import CORPORA, build_corpus
from glissando.decoding.decoder import Decoder
from glissando.evaluation.scoring import Score
from glissando.loading import load
from glissando.runs import Run

_BATCHES, _ROWS = 4, 8


@torch.no_grad()
def bits(run: str) -> dict[str, float]:
    """Bits per byte with caches in float32 and in bf16, on the same batches."""
    model = load(run).eval()
    corpus = build_corpus(from_dict(CORPORA.section(), Run.open(run).read_config()["data"], "data"), model.tokenizer)
    batches = [batch for batch, _ in zip(corpus.batches("valid"), range(_BATCHES), strict=False)]
    found = {}
    for caches in ("float32", "bf16"):
        decoder, score = Decoder(model, caches=caches), Score()
        for batch in batches:
            parts = [decoder.step(ids, decoder.rows(model.init_state(len(ids))))[0] for ids in batch.ids.split(_ROWS)]
            score.add(batch, torch.cat(parts))
        found[caches] = score.bits_per_byte
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run directories")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.runs:
        whole, halved = bits(name).values()
        print(f"{name}: {whole:.6f} bits per byte, {halved:.6f} with caches in bf16, {halved - whole:+.1e}")


if __name__ == "__main__":
    main()
