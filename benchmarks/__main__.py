"""glissando bench: speed against named peers, ratios in one run."""

from __future__ import annotations

from collections.abc import Sequence

from glissando.cli.options import parse, parser_for
from glissando.errors import ConfigError


def main(arguments: Sequence[str]) -> None:
    """Measure and print one line a figure."""
    parser = parser_for("bench", "Measure speed against named peers.", "glissando bench training decoding --rounds 7")
    parser.add_argument("rows", nargs="*", default=[], help="names, or how they begin (scan, spectral); all by default")
    parser.add_argument("--rounds", type=int, default=5, help="paired rounds; the median counts")
    options = parse(parser, arguments)
    if options.rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, got {options.rounds}")
    import torch

    from glissando.allocator import keep_freed_memory
    from benchmarks.rows import ROWS, select

    rows = select(options.rows)
    keep_freed_memory()  # as `train` does; it serves both sides
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.rounds} rounds")
    for name in rows:
        print(ROWS[name](options.rounds).line(), flush=True)
