"""A spectral model streams for ever: a token costs the same, and the state stays the same size, at any context.

python examples/endless_stream.py
"""

from __future__ import annotations

import argparse
import time

import torch

import glissando
from glissando.state import state_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter contexts")
    longest = 512 if parser.parse_args().quick else 65_536
    models = {
        name: glissando.LanguageModel.from_preset(name) for name in ("continuous-transformer-nano", "transformer-nano")
    }
    print(f"{'context':>8}  " + "  ".join(f"{name:>28}" for name in models))
    context = 128
    while context <= longest:
        print(f"{context:8}  " + "  ".join(f"{report(model, context):>28}" for model in models.values()), flush=True)
        context *= 4


@torch.no_grad()
def report(model: glissando.LanguageModel, context: int, tokens: int = 32) -> str:
    """Milliseconds a token and bytes of state behind `context` tokens, read in pieces of 512."""
    ids = torch.randint(0, 256, (1, context), generator=torch.Generator().manual_seed(0))
    state = model.init_state(1)
    for piece in ids.split(512, 1):
        logits, state = model(piece, state, donate=True)
    latest = logits[:, -1:].argmax(-1)
    began = time.perf_counter()
    for _ in range(tokens):
        logits, state = model(latest, state, donate=True)
        latest = logits[:, -1:].argmax(-1)
    each = (time.perf_counter() - began) / tokens
    return f"{1e3 * each:.2f} ms, {state_bytes(state):,} bytes"


if __name__ == "__main__":
    main()
