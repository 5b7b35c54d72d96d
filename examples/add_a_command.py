"""A command of your own, in a package outside the program: `glissando sums` trains the task of add_a_task.py.

A command is a function of its arguments that the entry points of an installed package name. pyproject.toml beside this
file makes the three examples such a package:

    pip install examples/
    glissando sums --model.mixer average --training.steps 1000 --out runs/sums
    glissando sums --resume runs/sums

`average` is the mixer of add_a_mixer.py, which the same pyproject.toml offers; a mistyped option, `--help` and Ctrl-C
are those of every command.
"""

from __future__ import annotations

from collections.abc import Sequence

from add_a_task import SumsConfig

from glissando.cli.options import Parser, parse, require_out
from glissando.config import from_dict, hints_of, merge, to_dict
from glissando.training.fit import resume, train


def main(arguments: Sequence[str]) -> None:
    """Train a model to add, or continue a run."""
    example = "glissando sums --model.mixer average --training.steps 1000 --out runs/sums"
    parser = Parser("sums", "Train a model of numbers to add.", example)
    parser.add_argument("--out", "run directory to create")
    parser.add_argument("--resume", "run to continue", metavar="RUN")
    parser.sections = {name: hints_of(SumsConfig)[name] for name in ("data", "model", "training")}
    options = parse(parser, arguments)
    if options.resume is not None:
        resume(options.resume, kind=SumsConfig)
        return
    require_out(options, f"name the run directory to create, such as {example}")
    train(from_dict(SumsConfig, merge(SumsConfig, to_dict(SumsConfig()), options.sections)), options.out)
