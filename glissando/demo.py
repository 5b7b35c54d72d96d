"""`make demo`: about five minutes in which the five systems and a Transformer learn to tell stories, each as long."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glissando.compare.plan import Comparison
    from glissando.compare.results import ModelResult

SECONDS = 32
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
    """Train each for as many seconds, show the table, and name the report; returns the program's exit status."""
    from glissando.allocator import keep_freed_memory
    from glissando.compare.run import compare
    from glissando.errors import GlissandoError

    comparison = _comparison(_options(arguments))
    each = f"{comparison.budget.value:g} s each"
    print(f"glissando demo: {len(comparison.given)} models learn the built-in stories, {each}.\n")
    keep_freed_memory()
    try:
        report, results = compare(comparison)
    except GlissandoError as error:
        print(f"glissando demo: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print(f"\nstopped; go on with: {sys.executable} -m glissando.demo --out {comparison.out}", file=sys.stderr)
        return 130
    _print_bits(results)
    print(f"report: {report}")
    return 0


def _comparison(options: argparse.Namespace) -> Comparison:
    from glissando.compare.plan import Amount, Comparison

    return Comparison(
        options.presets.split(","),
        Path(options.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")),
        Amount("seconds", options.seconds),
        contexts=[256, 1024],
        # Small steps, because their number is what counts so early; few held-out stories, because time is short.
        data={"kind": "stories", "batch_size": 2, "valid_stories": 32, "labelled": False},
        training={"precision": _precision(), "schedule": {"warmup_steps": 20}, "validate_every": 100},
    )


def _print_bits(results: Sequence[ModelResult]) -> None:
    for result in results:
        if result.bits is not None:
            low, high = result.bits.low, result.bits.high
            print(f"{result.model:28} {result.bits.value:.3f} bits per byte (95 %: {low:.3f} to {high:.3f})")
    floors = [result.floor for result in results if result.floor is not None]
    if floors:
        print(f"{'entropy floor':28} {floors[0]:.3f} bits per byte: the least that these stories cost")
    print("\nThis early the order is of speed of learning, not of what is learned: `glissando compare` trains longer.")


def _precision() -> str:
    """bfloat16 where the processor computes in it; elsewhere emulating it would be slower than float32."""
    import torch

    return "bf16-mixed" if torch.cpu.get_capabilities().get("avx512_bf16") else "32-true"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long each model trains")
    parser.add_argument("--presets", default=",".join(PRESETS), help="with commas; the first is the baseline")
    parser.add_argument("--out", help="directory of the comparison; runs/demo-DATE by default")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
