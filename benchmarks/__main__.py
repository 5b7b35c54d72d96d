"""Print one line a row: `python -m benchmarks [rows] --rounds N`. Three have a table and options of their own:
`gpu`, `llama` and `speedrun`, as `python -m benchmarks gpu --help`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

#: modules that print a table of their own
TABLES = ("gpu", "llama", "speedrun")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] and arguments[0] in TABLES:
        return importlib.import_module(f"benchmarks.{arguments[0]}").main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure speed against named peers.")
    parser.add_argument("rows", nargs="*", help="names, or how they begin (scan, spectral); all by default")
    parser.add_argument("--rounds", type=int, default=5, help="paired rounds; the median counts")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    import torch

    from benchmarks.rows import ROWS, select
    from glissando.allocator import keep_freed_memory
    from glissando.errors import GlissandoError

    try:
        rows = select(options.rows)
        keep_freed_memory()  # as `train` does; it serves both sides
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.rounds} rounds")
        for name in rows:
            print(ROWS[name](options.rounds).line(), flush=True)
    except GlissandoError as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
