"""glissando compare: several models under one budget, and a report that traces every figure."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from glissando.cli.options import (
    Options,
    Parser,
    at_least,
    choose_threads,
    number,
    numbers,
    parse,
    refuse_idle,
    require_out,
    whole,
    words,
)
from glissando.errors import ConfigError

if TYPE_CHECKING:
    from glissando.compare.plan import Comparison

EXAMPLE = (
    "glissando compare transformer-nano transformer-plus-nano liquid-ssm-nano --budget tokens=2e6 --seeds 3 "
    "--learning_rates 1e-3,2e-3,4e-3 --probes recall,induction,tracking --out runs/compare"
)

_USAGE = "glissando compare MODEL [MODEL ...] --budget BUDGET --out DIR [options]"
#: rows and width of activations, at about a million parameters, for which threads are chosen
_USUAL = (1024, 128)


def main(arguments: Sequence[str]) -> None:
    """Train what is missing, measure, and write the report."""
    options = parse(_parser(), arguments)
    if options.models and options.budget and options.out:  # before the text is read, which takes some seconds
        trainings = f"{options.seeds} trainings" if options.seeds > 1 else "a training"
        begins = f"comparing {len(options.models)} models, {trainings} of each, --budget {options.budget}"
        print(f"{begins}; the report will be {options.out}/report.html", file=sys.stderr, flush=True)
    comparison, cluster = _comparison(options), None
    from glissando.allocator import prepare_to_train
    from glissando.compare.run import compare
    from glissando.threads import threads_of

    if options.on is not None:  # trainings run side by side
        from glissando.compare.cluster import Cluster, require_ray

        require_ray()
        cluster = Cluster(options.cpus, options.gpus)
    prepare_to_train()
    before = next((threads_of(file.parent) for file in sorted(comparison.out.rglob("environment.json"))), None)
    choose_threads(options, *_USUAL, before=before)  # what was interrupted goes on with as many
    try:
        report, _ = compare(comparison, cluster, options.within)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues from here", file=sys.stderr)
        raise
    print(f"report: {report}")


def _comparison(options: Options) -> Comparison:
    require_out(options, "name the directory of the comparison, such as --out runs/compare")
    if options.budget is None:
        raise ConfigError("--budget is missing, such as --budget tokens=2e6")
    if options.within is not None and not 0 < options.within < math.inf:
        raise ConfigError(f"--within must be a positive number of seconds, got {options.within:g}")
    refuse_idle(options, {"sweep_beyond": "learning_rates", "probe_budget": "probes", "cpus": "on", "gpus": "on"})
    from glissando.compare.plan import Amount, Comparison
    from glissando.compare.probes import select_probes

    return Comparison(
        list(options.models),
        options.out,
        Amount.parse(options.budget, "--budget"),
        seeds=options.seeds,
        learning_rates=options.learning_rates,
        sweep_beyond=options.sweep_beyond,
        probes=select_probes(words(options.probes)),
        probe_budget=Amount.parse(options.probe_budget, "--probe_budget"),
        contexts=[int(context) for context in options.contexts],
        allow_unequal=options.allow_unequal,
        **{name: options.sections.get(name, {}) for name in ("model", "data", "training")},
    )


def _parser() -> Parser:
    from glissando.cli.train import run_sections

    parser = Parser("compare", "Train several models under one budget and write a report.", EXAMPLE, _USAGE)
    add = parser.add_argument
    models = "presets, and YAML files of options as `train --config` reads them; the first is the reference"
    add("models", models, nargs="*", metavar="MODEL", default=[])
    add("--out", "directory of the comparison; a repeated command does only what is missing", metavar="DIR")
    add("--budget", "budget of each training: tokens=2e6, flops=1e14, seconds=300 or steps=1000")
    within = "where it would take longer: fewer models and a smaller budget; by default as requested"
    add("--within", within, number, metavar="SECONDS")
    add("--seeds", "number of trainings of each model", whole, 1)
    rates = "rates to try for each model, such as 1e-3,2e-3; by default that of each preset"
    add("--learning_rates", rates, numbers, [])
    beyond = "largest number of rates to try beyond the lowest or highest if it is the best"
    add("--sweep_beyond", beyond, whole, 3)
    add("--probes", "separated by commas: recall, mqar, copy, induction, selective_copy, parity, tracking")
    add("--probe_budget", "budget of each training on a probe", default="steps=500")
    add("--contexts", "numbers of tokens after which decoding is timed", numbers, [256, 1024, 4096])
    on = "ray: train side by side, as tasks of Ray on the cluster at $RAY_ADDRESS, whose machines all reach --out; "
    add("--on", f"{on}without that variable, on this machine", choices=["ray"])
    add("--cpus", "CPU cores of each training with --on ray, and its number of threads", at_least(1), 1)
    gpus = "GPUs of each training with --on ray, also a fraction; by default 1 if the cluster has any, or else 0"
    add("--gpus", gpus, number)
    add("--allow_unequal", "allow models of different size", action="store_true")
    parser.add_shared("threads", "import")
    parser.sections = run_sections()
    return parser
