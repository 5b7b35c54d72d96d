"""`make demo`: in five to seven minutes five systems and a Transformer learn stories, from as many tokens each."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glissando.compare.plan import Comparison
    from glissando.compare.results import ModelResult

#: of each model: five to seven minutes in all on two quiet cores
TOKENS = 200_000
_BEGINNING = "Once upon a time"
#: the baseline, then the five systems, all of about 1M parameters
PRESETS = (
    "transformer-nano",
    "continuous-transformer-nano",
    "minimal-transformer-nano",
    "hybrid-ode-nano",
    "tauformer-nano",
    "liquid-ssm-nano",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train each on as many tokens, show what they have learned, and name the report; returns the exit status."""
    options = _options(arguments)
    from glissando.threads import use_threads, wait_briefly

    wait_briefly()  # before torch is imported
    from glissando.compare.run import compare
    from glissando.errors import GlissandoError
    from glissando.process import prepare_to_train

    prepare_to_train()
    if line := use_threads(options.threads, 256, 128):
        print(line, file=sys.stderr, flush=True)
    out = Path(options.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S"))
    try:
        comparison = _comparison(options, out)
        report, results = compare(comparison, show_table=False)
    except GlissandoError as error:
        print(f"glissando demo: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print(f"\nstopped; continue with: {sys.executable} -m glissando.demo --out {out}", file=sys.stderr)
        return 130
    _print_results(results)
    print(f"report: {report}")
    return 0


def _comparison(options: argparse.Namespace, out: Path) -> Comparison:
    """What is compared; a demo that goes on keeps its own models and budget."""
    from glissando.compare.plan import PLAN, Amount, Comparison

    kept = json.loads((out / PLAN).read_bytes()) if (out / PLAN).is_file() else {}
    if kept:
        kept["tokens"] = int(kept["budget"].split()[0].replace(",", ""))
    presets = options.presets.split(",") if options.presets else kept.get("models", list(PRESETS))
    comparison = Comparison(
        presets,
        out,
        Amount("tokens", options.tokens or kept.get("tokens", TOKENS)),
        contexts=[256, 1024],
        allow_unequal=True,  # a head of its own costs minimal-transformer-nano 8 % more with this vocabulary
        # Small steps, because their number is what counts so early; few held-out stories, because time is short. AdamW,
        # because Muon takes twice as long for so small a step and learns no more from it.
        data={
            "kind": "stories", "labelled": False, "tokenizer": {"kind": "bpe", "vocab_size": 1024},
            "seq_len": 256, "batch_size": 1, "valid_rows": 32,
        },
        training={"optimizer": {"kind": "adamw", "beta2": 0.99}, "schedule": {"warmup_steps": 40}},
    )  # fmt: skip
    comparison.check()
    print(
        f"glissando demo: {len(comparison.names)} models learn the built-in stories, {comparison.budget} each",
        flush=True,
    )
    _show_trained()
    return comparison


def _show_trained() -> None:
    """What the packaged model `stories` writes, to read while the others learn."""
    import glissando

    model = glissando.load("stories")
    (text,) = glissando.generate(model, _BEGINNING, max_tokens=90, temperature=0.7, step="plain")  # compiles nothing
    shown = textwrap.shorten((_BEGINNING + text).split("\n")[0], 400, placeholder=" ...")
    print("What a trained model writes (`glissando generate stories`), while these learn:\n")
    print(textwrap.fill(shown, 80, initial_indent="   ", subsequent_indent="   ") + "\n", flush=True)


def _print_results(results: Sequence[ModelResult]) -> None:
    """The models, the best first, each with its figure and how it goes on from a prompt."""
    known = sorted((result for result in results if result.bits is not None), key=lambda result: result.bits or ())
    for place, result in enumerate(known, 1):
        assert result.bits is not None
        sample = result.good[0].figures["sample"]
        if place == 1:
            print(f"\nHeld-out stories in bits per byte, and how each continues: {sample['prompt']}\n")
        low, high = result.bits.low, result.bits.high
        print(f"{place}. {result.model:28} {result.bits.value:.3f} (95 %: {low:.3f} to {high:.3f})")
        story = textwrap.shorten(sample["text"].strip().split("\n")[0], 400, placeholder=" ...")
        print(textwrap.fill(story, 80, initial_indent="   ", subsequent_indent="   ") + "\n")
    for result in results:
        if result.bits is None:
            print(f"{result.model}: its training failed")
    floors = [result.floor for result in known if result.floor is not None]
    if floors:
        print(f"The entropy floor is {floors[0]:.3f}: no model can be below it, except by chance.")
    print("At this stage the order shows who learns fastest, not who learns most: `glissando compare` trains longer.")


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="glissando demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=_positive, help=f"that each model learns from; else {TOKENS:,}")
    parser.add_argument("--presets", help="with commas, the first is the baseline; else all six")
    parser.add_argument("--threads", type=_positive, help="to compute with; else as many as are fastest now")
    parser.add_argument("--out", help="directory of the comparison, or of one to continue; by default runs/demo-DATE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
