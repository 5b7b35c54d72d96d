"""What keys and values in bfloat16 cost trained models: bits per byte of held-out text, computed by the compiled step.

    python -m research.caches RUN ...

Each row of the runs' held-out text begins with an empty state, and each of its tokens attends to what was kept.
"""

from __future__ import annotations

from itertools import islice

import torch

from glissando.decoding.decoder import Decoder
from glissando.evaluation.scoring import Score
from glissando.loading import load
from research.runs import corpus_of, options_of

_BATCHES, _ROWS = 4, 8


@torch.no_grad()
def bits(run: str) -> dict[str, float]:
    """Bits per byte with caches in float32 and in bf16, on the same batches."""
    model = load(run).eval()
    batches = list(islice(corpus_of(run, model).batches("valid"), _BATCHES))
    found = {}
    for caches in ("float32", "bf16"):
        decoder, score = Decoder(model, caches=caches), Score()
        for batch in batches:
            parts = [decoder.step(ids, decoder.rows(model.init_state(len(ids))))[0] for ids in batch.ids.split(_ROWS)]
            score.add(batch, torch.cat(parts))
        found[caches] = score.bits_per_byte
    return found


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("runs", nargs="+", help="run directories")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.runs:
        whole, halved = bits(name).values()
        print(f"{name}: {whole:.6f} bits per byte, {halved:.6f} with caches in bf16, {halved - whole:+.1e}")


if __name__ == "__main__":
    main()
