"""Train on a text file from Python, look at what it learned, and go on from its state.

python examples/train_on_a_text.py my_book.txt --seconds 120
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import glissando
from glissando.config import from_dict, merge
from glissando.data.stories import sample_text
from glissando.presets import load_preset
from glissando.training.config import RunConfig
from glissando.training.fit import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", help="a UTF-8 text file; generated stories by default")
    parser.add_argument("--preset", default="transformer-nano")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--out", help="run directory; a temporary one by default")
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(options.text or Path(folder) / "stories.txt")
        if options.text is None:
            text.write_text(sample_text(400, seed=1))
        budget = {"steps": 4, "seconds": None} if options.quick else {"seconds": options.seconds}
        small = {"model": {"hidden_size": 32, "depth": {"layers": 1}}} if options.quick else {}
        preset = load_preset(options.preset)
        config = from_dict(
            RunConfig,
            merge(RunConfig, preset, small, {"data": {"kind": "text", "path": str(text)}, "training": budget}),
        )
        run = train(config, options.out or Path(folder) / "run")
        model = glissando.load(run.path)
        for piece in glissando.stream(model, "Once upon a time", max_tokens=120, temperature=0.7):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
