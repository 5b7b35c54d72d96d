"""`make demo`: five to seven minutes in which five systems and a Transformer learn stories, from as many tokens each.

A busy machine takes longer. Where the estimate, made from a few steps of every model, is above `LONGEST`, all models
learn from fewer tokens, as many each, but from no less than `LEAST` of those planned.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glissando.compare.plan import Comparison
    from glissando.compare.results import ModelResult

#: of each model: five to seven minutes in all on two quiet cores
TOKENS = 200_000
LONGEST, LEAST = 600.0, 0.5
#: seconds of a whole demo for one of bare training steps: validations, measurements, the report
_WHOLE = 2.0
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
    """What is compared, with a budget that this machine can afford; a demo that goes on keeps its own."""
    from glissando.compare.plan import PLAN, Amount, Comparison

    kept = json.loads((out / PLAN).read_bytes()) if (out / PLAN).is_file() else {}
    presets = options.presets.split(",") if options.presets else kept.get("models", list(PRESETS))
    comparison = Comparison(
        presets,
        out,
        Amount("tokens", options.tokens or TOKENS),
        contexts=[256, 1024],
        allow_unequal=True,  # a head of its own costs minimal-transformer-nano 8 % more with this vocabulary
        # Small steps, because their number is what counts so early; few held-out stories, because time is short. AdamW,
        # because Muon takes twice as long for so small a step and learns no more from it.
        data={
            "kind": "stories", "labelled": False, "tokenizer": {"kind": "bpe", "vocab_size": 1024},
            "seq_len": 256, "batch_size": 1, "valid_stories": 32,
        },
        training={"optimizer": {"kind": "adamw", "beta2": 0.99}, "schedule": {"warmup_steps": 40}},
    )  # fmt: skip
    comparison.check()
    print(f"glissando demo: {len(comparison.names)} models learn the built-in stories", flush=True)
    _show_trained()
    if kept and options.tokens is None:
        comparison.budget = Amount("tokens", float(kept["budget"].split()[0].replace(",", "")))
    elif options.tokens is None:
        print("the time is estimated from a few steps of each model", file=sys.stderr, flush=True)
        tokens, line = affordable(TOKENS, _rates(comparison))
        comparison.budget = Amount("tokens", tokens)
        print(line, flush=True)
    return comparison


def _show_trained() -> None:
    """What the packaged model `stories` writes, to read while the others learn."""
    import glissando

    model = glissando.load("stories")
    (text,) = glissando.generate(model, _BEGINNING, max_tokens=90, temperature=0.7, step="plain")  # compiles nothing
    shown = textwrap.shorten((_BEGINNING + text).split("\n")[0], 400, placeholder=" ...")
    print("What a trained model writes (`glissando generate stories`), while these learn:\n")
    print(textwrap.fill(shown, 80, initial_indent="   ", subsequent_indent="   ") + "\n", flush=True)


def affordable(planned: int, rates: Mapping[str, float]) -> tuple[int, str]:
    """The tokens of each model, and a line about them and the time; rates: tokens/s of each model's bare steps."""
    from glissando.progress import minutes

    seconds = _WHOLE * planned * sum(1 / rate for rate in rates.values())
    share = max(LEAST, LONGEST / seconds)
    tokens = planned if share > 0.98 else round(planned * share)  # the estimate is no better than that
    takes = f"each reads {tokens:,} tokens: about {minutes(seconds * tokens / planned)} minutes on this machine"
    if tokens == planned:
        return tokens, takes
    least = "" if seconds * tokens / planned <= 1.01 * LONGEST else "; from fewer they would learn too little to see"
    return tokens, f"slow or busy: {planned:,} tokens would take about {minutes(seconds)} minutes; {takes}{least}"


def _rates(comparison: Comparison) -> dict[str, float]:
    """Tokens/s of each model, measured in turn."""
    from glissando.compare.plan import Job
    from glissando.compare.speed import training_speed
    from glissando.training.config import fitted_vocabulary

    tokenizer, configs = comparison.tokenizer, {}
    for name in comparison.names:
        configs[name] = comparison.config(Job("run", name, 0, comparison.rates(name)[0]))
        model = configs[name].model
        model.vocab_size = fitted_vocabulary(model.vocab_size, tokenizer.vocab_size)
    return training_speed(configs, tokenizer, lambda text: None, rounds=3)


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
    parser.add_argument(
        "--tokens", type=_positive, help=f"that each model learns from; else {TOKENS:,}, or fewer on a slow machine"
    )
    parser.add_argument("--presets", help="with commas, the first is the baseline; else all six")
    parser.add_argument("--threads", type=_positive, help="to compute with; else as many as are fastest now")
    parser.add_argument("--out", help="directory of the comparison, or of one to continue; by default runs/demo-DATE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
