"""`make demo`: three minutes in which a small model learns to tell stories, beside the limit of what can be learned."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

SECONDS = 150


def main() -> int:
    """Train, show what was written along the way, and name the run and its picture."""
    options = _options()
    from glissando.config import from_dict, merge
    from glissando.data.corpora import build_corpus
    from glissando.evaluation.plots import plot_loss
    from glissando.evaluation.scoring import score
    from glissando.loading import load
    from glissando.presets import load_preset
    from glissando.training.config import RunConfig
    from glissando.training.fit import train

    preset = load_preset(options.preset)
    preset.pop("about")
    settings = {
        "preset": options.preset,
        # Small steps, because their number is what counts so early; few held-out stories, because time is short.
        "data": {"corpus": "stories", "batch_size": 2, "stories": {"valid_stories": 24}},
        "training": {"seconds": options.seconds, "precision": _precision()},
    }
    config = from_dict(RunConfig, merge(preset, settings))
    print(f"glissando demo: {options.preset} learns the built-in stories for {options.seconds:.0f} s, from nothing.\n")
    run = train(config, options.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S"))
    model = load(run.path)
    config.data.stories.valid_stories = 128
    corpus = build_corpus(config.data)
    result = score(model, corpus.batches("valid"))
    picture = plot_loss(run.path, run.path / "loss.png", floor=corpus.entropy_floor)
    low, high = result.intervals()["bits_per_byte"]
    print(f"\nheld-out stories: {result.bits_per_byte:.3f} bits per byte (95 %: {low:.3f} to {high:.3f})")
    if result.floor is not None:
        print(f"entropy floor:    {result.floor:.3f} bits per byte for the same stories: no model can do better")
    print(f"\nrun:     {run.path}\npicture: {picture}")
    return 0


def _precision() -> str:
    """bfloat16 where the processor computes in it; elsewhere emulating it would be slower than float32."""
    import torch

    return "bf16-mixed" if torch.cpu.get_capabilities().get("avx512_bf16") else "32-true"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long to train")
    parser.add_argument("--preset", default="transformer-nano")
    parser.add_argument("--out", help="run directory; runs/demo-DATE by default")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
