"""glissando grow: a run's model made larger without changing what it computes, its optimizer along with it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from glissando.cli.help import documented
from glissando.cli.options import Parser, choose_threads, number, parse, require_out, whole
from glissando.growth import Growth

EXAMPLE = "glissando grow runs/first --width 2 --layers 2 --out runs/grown"


def main(arguments: Sequence[str]) -> None:
    """Grow, compare the logits of both, and print how to go on."""
    usage = "glissando grow RUN --out DIR [--width FACTOR] [--layers NUMBER] [options]"
    parser = Parser("grow", "Make a run's model larger without changing what it computes.", EXAMPLE, usage)
    parser.add_argument("run", "run directory, or one of its checkpoints")
    parser.add_argument("--out", "run directory to make", metavar="DIR")
    about = documented(Growth)
    about.pop("vocab")  # a run's is its tokenizer's
    for name, text in about.items():
        parser.add_argument(f"--{name}", text, number if name == "noise" else whole, getattr(Growth, name))
    parser.add_shared("import", "threads")
    options = parse(parser, arguments)
    require_out(options, "name the run directory to make, such as --out runs/grown")
    from glissando.flops import training_flops
    from glissando.growth.runs import difference, grow_run
    from glissando.loading import load

    growth = Growth(**{name: getattr(options, name) for name in about})
    small = load(options.run)  # whose weights may be damaged, before anything is written
    choose_threads(options, 256, small.config.hidden_size)
    run = grow_run(options.run, options.out, growth)
    large = load(run.path)
    length = large.config.max_length or 256
    costs = [training_flops(model, length) for model in (small, large)]
    print(f"parameters             {small.num_parameters():,} -> {large.num_parameters():,}")
    print(f"training FLOPs a token {costs[0]:.4g} -> {costs[1]:.4g}, at {length} tokens")
    print(f"logits                 differ by {difference(small, large):.1e}, of sizes up to {difference(small):.3g}")
    out = shlex.quote(str(run.path))
    print(f"train it further: glissando train --from {out} --training.tokens 1000000 --out {out}-trained")
